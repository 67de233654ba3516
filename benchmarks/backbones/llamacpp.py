"""Does smollm2 read and write as llama.cpp does, from the GGUF file that it was converted from?

``tokens``: 10,000 texts of 20 kinds, from notes to any code points, as ids; names of control tokens are taken as text.
A text that differs is shortened as long as it still differs. ``same_without_lost`` counts, of those that differ, the
ones that are the same once the characters are taken out that have a byte without a token.

``greedy``: 50 questions about notes, answered by both up to 24 tokens. llama.cpp multiplies the file's 4-bit blocks
with activations of 8 bits, smollm2 in float32 what was unpacked and rounded to bfloat16: where two tokens are nearly as
likely, the texts part. How much that does is also measured here: the same questions, with what comes into each linear
layer rounded to 8 bits as llama.cpp rounds it. Distances are of log-probabilities, of the tokens that both wrote.

Run: ``python -m benchmarks.backbones.llamacpp`` (about 4 minutes on one core). It makes a temporary environment for
llama.cpp and downloads the file; ``--python`` and ``--gguf`` name them where they are there. Not part of
``make bench``.
"""

import argparse
import random
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch

from benchmarks import record
from benchmarks.backbones import hands
from benchmarks.backbones.llama_server import LONGEST, LlamaCpp, asked, llama_cpp, parse, without_end
from plpkg import corpora
from plpkg.backbones import load_backbone
from plpkg.corpora.docstrings import sources

TEXTS_OF_A_KIND = 500
QUESTIONS = 50

LOST = (
    "the vocabulary has no token for a byte of this text; both leave it out, here before neighbours are merged, "
    "in llama.cpp after"
)

Draw = Callable[[random.Random], str]


def characters(*ranges: str) -> list[str]:
    """The assigned characters of ranges such as ``"0E01-0E5B"``."""
    found = []
    for each in ranges:
        first, _, last = each.partition("-")
        codes = range(int(first, 16), int(last or first, 16) + 1)
        found += [chr(code) for code in codes if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
    return found


def joined(*lists: list[str], most: int = 40) -> Draw:
    """Up to ``most`` pieces, each out of one of several lists."""

    def draw(rng: random.Random) -> str:
        return "".join(rng.choice(rng.choice(lists)) for _ in range(rng.randint(1, most)))

    return draw


def pieces(text: str) -> list[str]:
    """What stands between spaces."""
    return text.split()


SPACES = [" "]
WORDS = pieces("the ferry leaves at noon from Pier Nothing was ever said about it I they WE naïve x")
WHITE = [" ", "  ", "   ", "        ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", "\v", "\f"]
WHITE += characters("0085", "00A0", "1680", "180E", "2000-200D", "2028-2029", "202F", "205F", "2060", "3000", "FEFF")
DIGITS = characters("0030-0039")
NUMBERS = {
    "Arabic-Indic": characters("0660-0669", "06F0-06F9"),
    "Devanagari and Bengali": characters("0966-096F", "09E6-09EF"),
    "full width": characters("FF10-FF19"),
    "superscripts and subscripts": characters("00B2-00B3", "00B9", "2070-209C"),
    "fractions and Roman numerals": characters("00BC-00BE", "2150-218B"),
    "circled": characters("2460-249B", "24EA-24FF", "2776-2793"),
    "ideographic": [*pieces("〇 一 二 三 十 百"), *characters("3021-3029")],
    "mathematical": characters("1D7CE-1D7FF"),
}
BETWEEN_DIGITS = [*pieces(". , : - / % e x ° € kg"), " ", "\N{NO-BREAK SPACE}"]
PEOPLE = pieces("👩 👨 🧑 👧 🤦 👋 👍 🏃 🤝 💁")
SKIN = characters("1F3FB-1F3FF")
EMOJI_PARTS = ["\N{ZERO WIDTH JOINER}", "\N{VARIATION SELECTOR-16}", "\N{COMBINING ENCLOSING KEYCAP}", "♀", "♂", "❤"]
EMOJI = characters("2600-27BF", "1F300-1FAFF")
SEQUENCES = pieces("🇬🇧 🇩🇰 🇯🇵 🏳️‍🌈 🏴󠁧󠁢󠁳󠁣󠁴󠁿 👩‍👩‍👧‍👦 👨🏽‍🚀 🤦🏿‍♀️ 1️⃣ ❤️‍🔥 👩🏻‍🤝‍👩🏿")
LATIN = characters("00C0-024F", "1E00-1EFF")
MARKS = characters("0300-036F", "1AB0-1ACE", "20D0-20F0")
GREEK_CYRILLIC_GEORGIAN = characters("0370-052F", "10A0-10FF", "1F00-1FFF")
EAST_ASIAN = characters("3000-30FF", "4E00-9FFF", "AC00-D7A3", "FF01-FFEF")
SOUTH_EAST_ASIAN = characters("0E01-0EDF", "1000-109F", "1780-17F9")
RIGHT_TO_LEFT = characters("0590-06FF", "0750-077F", "200E-200F", "202A-202E", "2066-2069")
INDIC = characters("0900-0D7F")
DEVANAGARI = characters("0900-097F")
JOINERS = characters("200C-200D")
CONTROL = characters("0000-001F", "007F-009F")
PUNCTUATION = characters("0021-002F", "003A-0040", "005B-0060", "007B-007E", "00A1-00BF", "2010-2027", "2030-205E")
RUNS = pieces("... --- ``` == !! | // ** ][")
APOSTROPHES = [*pieces("'s 't 're 've 'm 'll 'd 'S 'LL 'RE ’s ’ll ' '' ʼs"), " '", "' "]
ADDRESS_PARTS = pieces("https:// www. example .org / ?q= & # %20 %C3%A9 @ ~ _ - :8080 a1b2 2024 index.html C:\\ \\ ..")
ADDRESS_PARTS += pieces("xn-- münchen [::1] mailto:")
SYLLABLES = pieces("a be con der ung schaft ti on al anti dis ment isch tsch qu zz XY é ß œ")
BROKEN_NAMES = pieces("<| |> <|im_start im_end|> <repo < >")


@cache
def note_lines() -> list[str]:
    """The lines of all notes, and the questions."""
    lines = []
    for hand in hands.training_hands():
        for some in hands.collections(hand):
            for note in some.notes:
                lines += note.splitlines()
            lines += [each.question for each in some.questions]
    return lines


@cache
def documentation() -> list[str]:
    return [document.text for document in corpora.public("test")]


@cache
def code_files() -> list:
    """The files of the standard library."""
    return [path for path, _ in sources("stdlib")]


def notes(rng: random.Random) -> str:
    return "\n".join(rng.choices(note_lines(), k=rng.randint(1, 3)))


def documented(rng: random.Random) -> str:
    """A piece of documentation; it may begin and end within a word."""
    text = rng.choice(documentation())
    begin = rng.randrange(len(text))
    return text[begin : begin + rng.randint(1, 600)]


def code(rng: random.Random) -> str:
    lines = rng.choice(code_files()).read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) or ["\n"]
    begin = rng.randrange(len(lines))
    return "".join(lines[begin : begin + rng.randint(1, 12)])


def accents(rng: random.Random) -> str:
    """Latin letters with accents, precomposed, taken apart, and piled up."""
    text = joined(LATIN, WORDS, SPACES, MARKS)(rng)
    return unicodedata.normalize(rng.choice(["NFC", "NFD", "NFKC", "NFKD"]), text)


def long_word(rng: random.Random) -> str:
    """One word of up to some thousand letters."""
    if rng.random() < 0.3:
        return rng.choice(["a", "ha", "=", "é", "語"]) * rng.randint(50, 1000)
    return "".join(rng.choices(SYLLABLES, k=rng.randint(50, 1000)))


def any_characters(rng: random.Random) -> str:
    """Code points of all of Unicode, assigned or not, among spaces, letters and digits."""
    planes = [range(0x80, 0x3000), range(0x3000, 0xD800), range(0xE000, 0x10000), range(0x10000, 0x20000)]
    planes.append(range(0x20000, 0x110000))
    drawn = [chr(rng.choice(rng.choice(planes))) for _ in range(30)]
    return joined(drawn, drawn, SPACES, WORDS, DIGITS)(rng)


def kinds(tokenizer) -> dict[str, Draw]:
    """How the texts of each kind are drawn."""
    names = [*tokenizer.all_special_tokens, "<repo_name>", "<file_sep>"]
    some = {
        "notes": notes,
        "documentation": documented,
        "code": code,
        "numbers": joined(*NUMBERS.values(), DIGITS, DIGITS, BETWEEN_DIGITS, WORDS),
        "white space": joined(WHITE, WHITE, WORDS, DIGITS, [".", "'s", "é"]),
        "emoji": joined(PEOPLE, SKIN, EMOJI_PARTS, SEQUENCES, EMOJI, SPACES),
        "accents": accents,
        "Greek, Cyrillic, Georgian": joined(GREEK_CYRILLIC_GEORGIAN, SPACES, PUNCTUATION),
        "Chinese, Japanese, Korean": joined(EAST_ASIAN, SPACES, WORDS),
        "Thai and its neighbours": joined(SOUTH_EAST_ASIAN, SPACES, DIGITS),
        "right to left": joined(RIGHT_TO_LEFT, SPACES, WORDS),
        "Indic": joined(INDIC, DEVANAGARI, SPACES, JOINERS),
        "control characters": joined(CONTROL, WORDS, SPACES, PUNCTUATION),
        "addresses": joined(ADDRESS_PARTS, ADDRESS_PARTS, WORDS, DIGITS, most=20),
        "long words": long_word,
        "apostrophes": joined(APOSTROPHES, WORDS, SPACES, DIGITS),
        "punctuation": joined(PUNCTUATION, PUNCTUATION, SPACES, WORDS, RUNS),
        "names of control tokens": joined(names, BROKEN_NAMES, WORDS, WHITE, most=12),
        "any characters": any_characters,
    }

    def mixed(rng: random.Random) -> str:
        """Pieces of texts of the other kinds, end to end."""
        pieces = []
        for _ in range(rng.randint(2, 5)):
            text = rng.choice(list(some.values()))(rng)
            begin = rng.randrange(len(text)) if text else 0
            pieces.append(text[begin : begin + 40])
        return "".join(pieces)

    return some | {"mixed": mixed}


def shortened(text: str, differs: Callable[[str], bool]) -> str:
    """A text that differs, and does not any more when any one character is taken out of it."""
    length = len(text)
    while length:
        begin = 0
        while begin < len(text):
            shorter = text[:begin] + text[begin + length :]
            if differs(shorter):
                text = shorter
            else:
                begin += length
        length //= 2
    return text


def tokens(tokenizer, llama: LlamaCpp) -> Iterator[dict]:
    def ours(text: str) -> list[int]:
        return tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]

    def differs(text: str) -> bool:
        return ours(text) != llama.tokens(text)

    @cache
    def has_lost_bytes(character: str) -> bool:
        """Whether the vocabulary lacks a byte of it."""
        return tokenizer.decode(ours(character)) != character

    def without_lost(text: str) -> str:
        return "".join(character for character in text if not has_lost_bytes(character))

    counted = dict(texts=0, characters=0, tokens=0, different=0, same_without_lost=0)
    whole = dict(counted)
    smallest = set()
    for kind, draw in kinds(tokenizer).items():
        of_kind = dict(counted)
        for number in range(TEXTS_OF_A_KIND):
            text = draw(random.Random(f"{kind} {number}"))
            of_kind["texts"] += 1
            of_kind["characters"] += len(text)
            of_kind["tokens"] += len(ours(text))
            if differs(text):
                of_kind["different"] += 1
                of_kind["same_without_lost"] += not differs(without_lost(text))
                smallest.add(shortened(text, differs))
        yield {"kind": kind} | of_kind
        whole = {name: whole[name] + of_kind[name] for name in whole}
    yield {"kind": "all", "llama_cpp": llama.about} | whole
    for explained in (True, False):  # one text of either sort, where there are any
        some = [text for text in smallest if differs(without_lost(text)) != explained]
        if some:
            text = min(some, key=lambda each: (len(each), each))
            yield {
                "kind": "smallest",
                "text": ascii(text),
                "ours": " ".join(tokenizer.convert_ids_to_tokens(ours(text))),
                "theirs": " ".join(tokenizer.convert_ids_to_tokens(llama.tokens(text))),
                "reason": LOST if explained else "not known",
            }


def in_common(one: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with together."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def written(model, tokenizer, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """What a model writes greedily after a prompt, without the end; and the logits of each, ``(tokens, vocab)``."""
    ids = torch.tensor([prompt])
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=LONGEST,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return without_end(made.sequences[0, len(prompt) :].tolist()), torch.cat(made.logits)


def of_tokens(logits: torch.Tensor, ids: list[int]) -> list[float]:
    """The log-probabilities of the first tokens of a text."""
    places = torch.arange(len(ids))
    return logits.log_softmax(-1)[places, torch.tensor(ids, dtype=torch.long)].tolist()


@contextmanager
def rounded_activations(model) -> Iterator[None]:
    """Within it, what comes into a linear layer is rounded as llama.cpp's Q8_1 is: 32 numbers are whole multiples of
    a step in half precision, at most 127 of it.
    """

    def rounded(module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        blocks = arguments[0].unflatten(-1, (-1, 32))
        step = blocks.abs().amax(-1, keepdim=True) / 127
        whole = (blocks / step.clamp(min=torch.finfo(step.dtype).tiny)).round()
        return ((whole * step.half().float()).flatten(-2),)

    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_pre_hook(rounded) for module in linear]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def distances(log_probs: list[float], others: list[float]) -> dict:
    """How far the log-probabilities of the tokens that both wrote lie apart, in nats."""
    apart = [abs(one - other) for one, other in zip(log_probs, others, strict=True)]
    return {"tokens": len(apart), "mean_distance": round(sum(apart) / len(apart), 4), "largest": round(max(apart), 4)}


@torch.inference_mode()
def greedy(model, tokenizer, llama: LlamaCpp) -> Iterator[dict]:
    same_prompts = 0
    different = []
    ours_said, theirs_said = [], []  # log-probabilities
    all_ours = []
    for each in asked(tokenizer, QUESTIONS):
        same_prompts += each.ids == llama.tokens(each.prompt, control_tokens=True)
        ours, logits = written(model, tokenizer, each.ids)
        all_ours.append((each, ours, logits))
        answer = llama.written(each.ids, LONGEST)
        theirs = without_end(answer["tokens"])
        places = answer["completion_probabilities"]
        common = in_common(ours, theirs)
        ours_said += of_tokens(logits, ours[:common])
        theirs_said += [place["logprob"] for place in places[:common]]
        if ours != theirs:
            likeliest, tokens = logits[common].topk(2)
            their_choice = theirs[common] if common < len(theirs) else tokenizer.eos_token_id
            near = places[common]["top_logprobs"] if common < len(places) else None
            different.append(
                {
                    "kind": "different",
                    "text": each.question,
                    "ours": tokenizer.decode(ours),
                    "theirs": tokenizer.decode(theirs),
                    "tokens": common,
                    "two_likeliest": " ".join(ascii(tokenizer.decode(token)) for token in tokens),
                    "theirs_is_second": int(tokens[1]) == their_choice,
                    "gap": round(float(likeliest[0] - likeliest[1]), 3),
                    "gap_theirs": round(near[0]["logprob"] - near[1]["logprob"], 3) if near else None,
                }
            )
    apart = distances(ours_said, theirs_said)
    total = {"texts": QUESTIONS, "different": len(different), "same_prompts": same_prompts}
    yield {"kind": "llama.cpp", "llama_cpp": llama.about} | total | apart

    count = 0
    ours_said, rounded_said = [], []
    for each, ours, logits in all_ours:
        with rounded_activations(model):
            others, other_logits = written(model, tokenizer, each.ids)
        count += ours != others
        common = in_common(ours, others)
        ours_said += of_tokens(logits, ours[:common])
        rounded_said += of_tokens(other_logits, ours[:common])
    apart = distances(ours_said, rounded_said)
    yield {"kind": "activations of 8 bits here", "texts": QUESTIONS, "different": count} | apart
    yield from different


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = parse(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    model, tokenizer = load_backbone("smollm2")
    with llama_cpp(options.python, options.gguf) as llama:
        sections = {"tokens": partial(tokens, tokenizer, llama), "greedy": partial(greedy, model, tokenizer, llama)}
        record.sections("backbones.llamacpp", sections, __doc__)
