"""``plpkg ask``, measured: which passage is found, what is answered from it, and whether it is known that none answers.

The notes and questions are those of ``benchmarks.backbones.hands``: two hands choose (weights, thresholds), two report.
Beside each figure stand baselines without a model: the note that shares most words, and the note that search puts
first, each repeated as the answer. *Right* is ``questions.right``: the expected words, and at most five others;
*contains* leaves the length out, which is no measure, since whoever repeats the note is then always right.

Sections (each replaces its rows in ``data/measured/backbones_asking.csv``):

``search``
    The right note first, and among the first three: by shared words, BM25, meaning, both by rank, and ``ask``'s way.
``rerank``
    The first ten passages ordered anew by how likely the question is after each, or how likely its answer is.
``real``
    The same on real notes: a clone of github.com/jbranchaud/til (MIT), named by ``TIL=FOLDER``. Questions in
    ``data/notes/til_choose.json`` and ``til_report.json`` were written for commit 453e9ed.
``prose``
    A diary (``data/diary``): a passage that says the answer first, and among three, by whole passages, by their pieces,
    and by both. Pieces and weights were chosen by this section.
``folders``
    ``ask`` itself on two small folders (``data/notes/folders``), one of short notes and one of long texts, whose
    questions were written before it was tried: the file, and the answer.
``untrained``
    Answers of SmolLM2 from the right note and in ``ask``'s way, and the baselines without a model.
``read``
    Answers of smollm2-reader from the right note, from search's first, from its first three as one text, and in
    ``ask``'s way: from each of the three alone, of which the surest is taken.
``handwritten``
    Thirty older notes by another writer, alone and among four others.
``order``
    The same on the hands that choose, with other weights of search.
``spans``
    From the right note, when only spans of the text may be written, and freely.
``absent``
    What tells that no note answers: AUC against right answers, and two error rates at a threshold that the choosing
    hands chose; and the error rates of what ``ask`` does.
``folder``
    Time and bytes of the first question to a folder of 2,000 files, of the second, and after an edit.

Run: ``python -m benchmarks.backbones.asking [SECTION …]``. Not part of ``make bench``: the sections take an hour.
"""

import functools
import itertools
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import torch

from benchmarks import record
from benchmarks.backbones import hands
from benchmarks.backbones.hands import Collection, Question
from plpkg import ask, catalog, passages, questions, search
from plpkg.backbones import load_backbone

SETS = {"choosing": hands.CHOOSING, "plain": ("plain",), "misleading": ("misleading",)}
MODELS = ("smollm2", "smollm2-reader")
RERANKED = 10
EACH_ALONE = "search's first three, each alone"


@functools.cache
def embed() -> search.Embedder:
    return search.Embedder()


@functools.cache
def model(name: str):
    return load_backbone(name)


def share(right: int, total: int) -> dict:
    """A share with Wilson's 95 % interval."""
    low, high = questions.interval(right, total)
    return {"right": right, "of": total, "share": round(right / total, 3), "low": round(low, 3), "high": round(high, 3)}


@dataclass(frozen=True)
class Case:
    """A question with its collection, and all its notes in the order of each method."""

    collection: Collection
    question: Question
    orders: dict[str, list[int]]
    scores: list[float]
    """Of the notes in ``ask``'s order."""

    def notes(self, method: str, count: int) -> list[str]:
        return [self.collection.notes[i] for i in self.orders[method][:count]]


def ranked(scores: np.ndarray) -> list[int]:
    return np.argsort(-scores, kind="stable").tolist()


def shared_words(notes: tuple[str, ...], question: str) -> np.ndarray:
    asked = set(questions.words(question))
    return np.array([len(asked & set(questions.words(note))) for note in notes], dtype=float)


def by_rank(*scores: np.ndarray) -> np.ndarray:
    """Reciprocal rank fusion (Cormack et al. 2009), for so few notes with 10 instead of 60."""
    return sum(1 / (10 + np.argsort(np.argsort(-each, kind="stable"))) for each in scores)


@functools.cache
def cases(name: str) -> list[Case]:
    """All questions of a set."""
    found = []
    for hand in SETS[name]:
        for some in hands.collections(hand):
            index = search.Index([passages.Passage(Path(), 1, "", note) for note in some.notes], embed())
            asked = embed()([each.question for each in some.questions])
            for question, vector in zip(some.questions, asked, strict=True):
                meaning = index.meaning(vector)
                bm25 = index.words(question.question)
                both = meaning + search.WORDS * bm25
                scores = {
                    "shared words": shared_words(some.notes, question.question),
                    "BM25": bm25,
                    "meaning": meaning,
                    "both by rank": by_rank(meaning, bm25),
                    "ask": both,
                }
                orders = {method: ranked(values) for method, values in scores.items()}
                found.append(Case(some, question, orders, both[orders["ask"]].tolist()))
    return found


def answerable(name: str) -> list[Case]:
    return [case for case in cases(name) if case.question.note is not None]


def search_rows() -> Iterator[dict]:
    for name in SETS:
        some = answerable(name)
        for method in some[0].orders:
            for count in (1, 3):
                hits = sum(case.question.note in case.orders[method][:count] for case in some)
                yield {"set": name, "method": method, "among": count} | share(hits, len(some))


@torch.inference_mode()
def question_likelihood(note: str, question: str) -> float:
    """The mean log-probability of the question's tokens after the note, by SmolLM2."""
    causal, tokenizer = model("smollm2")
    turn = [{"role": "user", "content": f"Write a question about this note.\n{note}"}]
    before = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    head = tokenizer(before)["input_ids"]
    asked = tokenizer(question)["input_ids"]
    logits = causal(torch.tensor([head + asked])).logits[0, len(head) - 1 : -1]  # (tokens, vocabulary)
    return float(logits.log_softmax(-1)[torch.arange(len(asked)), torch.tensor(asked)].mean())


def reranked(first: list, question: str, read: Callable) -> dict[str, list]:
    """The first passages in the order of each way of ranking them anew, alone and by rank with the first order."""
    ranks = -np.arange(len(first), dtype=float)
    asked = np.array([question_likelihood(read(each), question) for each in first])
    given = questions.readings(*model("smollm2-reader"), [(read(each), question) for each in first])
    answered = np.array([reading.log_prob for reading in given])
    known = -np.array([reading.unknown for reading in given])
    scores = {
        "ask": ranks,
        "question after passage": asked,
        "question after passage, and ask, by rank": by_rank(asked, ranks),
        "answer after passage": answered,
        "answer after passage, and ask, by rank": by_rank(answered, ranks),
        "not unknown after passage": known,
        "not unknown after passage, and ask, by rank": by_rank(known, ranks),
    }
    return {way: [first[i] for i in ranked(values)] for way, values in scores.items()}


def rerank_rows(questions_a_set: int = 40) -> Iterator[dict]:
    """Of each reporting set the first forty questions: ten passages are read for each."""
    for name in hands.REPORTING:
        some = answerable(name)[:questions_a_set]
        hits: dict[tuple, int] = {}
        for case in some:
            first = case.orders["ask"][:RERANKED]
            orders = reranked(first, case.question.question, lambda i, case=case: case.collection.notes[i])
            for way, order in orders.items():
                for count in (1, 3):
                    hits[way, count] = hits.get((way, count), 0) + (case.question.note in order[:count])
        for (way, count), right in hits.items():
            yield {"set": name, "method": way, "among": count} | share(right, len(some))


def untrained_rows() -> Iterator[dict]:
    for name in hands.REPORTING:
        some = answerable(name)
        accepted = [case.question.answers for case in some]
        repeated = {
            "note with most shared words, repeated": [case.notes("shared words", 1)[0] for case in some],
            "search's first note, repeated": [case.notes("ask", 1)[0] for case in some],
        }
        for method, given in repeated.items():
            yield {"set": name, "method": method, "reads": "-"} | judged(given, accepted)
        yield answered_from("right note", "smollm2", name)
        yield asked_of("smollm2", name)


def read_rows() -> Iterator[dict]:
    for name in hands.REPORTING:
        for reads in ("right note", "search's first", "search's first three"):
            yield answered_from(reads, "smollm2-reader", name)
        yield asked_of("smollm2-reader", name)


def order_rows() -> Iterator[dict]:
    """Which notes to read, how, and whom to believe: on the hands that choose."""
    for reads in READINGS:
        yield answered_from(reads, "smollm2-reader", "choosing")
    for weight in (0, 2, 4, 8, 12, 16, 100):
        yield asked_of("smollm2-reader", "choosing", weight)


READINGS: dict[str, Callable[[Case], list[str]]] = {
    "right note": lambda case: [case.collection.notes[case.question.note]],
    "search's first": lambda case: case.notes("ask", 1),
    "search's first three": lambda case: case.notes("ask", 3),
}
"""What is read for an answer, as one text."""


def answered_from(reads: str, which: str, name: str) -> dict:
    some = answerable(name)
    pairs = [("\n\n".join(READINGS[reads](case)), case.question.question) for case in some]
    given = questions.answers(*model(which), pairs)
    accepted = [case.question.answers for case in some]
    return {"set": name, "method": which, "reads": reads} | judged(given, accepted)


@functools.cache
def each_alone(which: str, name: str) -> list[list[questions.Reading]]:
    """For each question of a set, what is read from search's first three notes."""
    some = cases(name)
    pairs = [(note, case.question.question) for case in some for note in case.notes("ask", ask.NUM_PASSAGES)]
    given = iter(questions.readings(*model(which), pairs))
    return [list(itertools.islice(given, ask.NUM_PASSAGES)) for _ in some]


def believed(
    case: Case, readings: list[questions.Reading], weight: float = ask.SEARCH
) -> tuple[str, questions.Reading]:
    """The note whose answer is shown, and the answer."""
    best = ask.surest(case.scores[: len(readings)], readings, weight)
    return case.notes("ask", len(readings))[best], readings[best]


def asked_of(which: str, name: str, weight: float = ask.SEARCH) -> dict:
    """``ask``'s way: search's first three, each alone, and the surest of three answers."""
    pairs = zip(cases(name), each_alone(which, name), strict=True)
    some = [(case, *believed(case, readings, weight)) for case, readings in pairs if case.question.note is not None]
    given = [reading.answer for _, _, reading in some]
    accepted = [case.question.answers for case, _, _ in some]
    reads = EACH_ALONE if weight == ask.SEARCH else f"{EACH_ALONE}, search counts {weight:g}"
    return {"set": name, "method": which, "reads": reads} | judged(given, accepted)


def judged(given: list[str], accepted: list[tuple[str, ...]]) -> dict:
    pairs = list(zip(given, accepted, strict=True))
    contains = sum(any(questions.contains(said, each) for each in answers) for said, answers in pairs)
    return share(sum(questions.right(*pair) for pair in pairs), len(pairs)) | {"contains": contains}


def among(notes: Sequence[str], count: int) -> list[str]:
    """Each note at a random place among others, ``count`` of them altogether."""
    rng, result = random.Random(3), []
    for note in notes:
        others = rng.sample(sorted(set(notes) - {note}), count - 1)
        result.append("\n\n".join(rng.sample([*others, note], count)))
    return result


def handwritten_rows() -> Iterator[dict]:
    """Thirty older notes by another writer, alone and among four others."""
    notes, asked, answers = zip(*hands.handwritten(), strict=True)
    accepted = [(answer,) for answer in answers]
    for reads, texts in {"right note": notes, "five notes": among(notes, 5)}.items():
        yield {"set": "handwritten", "method": "the text, repeated", "reads": reads} | judged(list(texts), accepted)
        for which in MODELS:
            given = questions.answers(*model(which), list(zip(texts, asked, strict=True)))
            yield {"set": "handwritten", "method": which, "reads": reads} | judged(given, accepted)


class Spans:
    """Lets a model write only what stands in the text, from the beginning of a word to the end of one."""

    def __init__(self, text: str, tokenizer, prompt_length: int) -> None:
        self.begin, self.end, self.tokenizer = prompt_length, tokenizer.eos_token_id, tokenizer
        starts = [found.start() for found in re.finditer(r"(?<!\w)[\w£$€#@-]", text)]
        self.paths = [tokenizer(text[start : start + 90])["input_ids"][:16] for start in starts]

    def __call__(self, _, ids: torch.Tensor) -> list[int]:
        written = ids[self.begin :].tolist()
        if self.end in written:
            return [self.end]
        count = len(written)
        following = {path[count] for path in self.paths if len(path) > count and path[:count] == written}
        at_an_end = any(not self.tokenizer.decode([token])[:1].isalnum() for token in following)
        if written and (at_an_end or not following):
            following.add(self.end)
        return list(following) or [self.end]


@torch.inference_mode()
def span(which: str, text: str, question: str) -> str:
    causal, tokenizer = model(which)
    ids = questions.token_ids(questions.prompt(text, question, tokenizer), tokenizer)
    made = causal.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=16,
        do_sample=False,
        prefix_allowed_tokens_fn=Spans(text, tokenizer, len(ids)),
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True).strip()


def span_rows(questions_a_set: int = 60) -> Iterator[dict]:
    """Of each reporting set the first sixty questions, with spans and freely."""
    for name in hands.REPORTING:
        some = answerable(name)[:questions_a_set]
        accepted = [case.question.answers for case in some]
        pairs = [(case.collection.notes[case.question.note], case.question.question) for case in some]
        freely = questions.answers(*model("smollm2-reader"), pairs)
        spans = [span("smollm2-reader", *pair) for pair in pairs]
        for method, given in (("freely", freely), ("spans", spans)):
            yield {"set": name, "method": method, "reads": "right note"} | judged(given, accepted)


@dataclass(frozen=True)
class Signals:
    """What may tell whether a note answers, for one question."""

    kind: str
    """``right``, ``wrong``, or ``absent``: no note answers."""
    values: dict[str, float]
    doubted: bool
    """As ``ask`` does it."""


def signals(name: str) -> list[Signals]:
    found = []
    for case, readings in zip(cases(name), each_alone("smollm2-reader", name), strict=True):
        note, reading = believed(case, readings)
        kind = "absent"
        if case.question.note is not None:
            kind = "right" if questions.right(reading.answer, case.question.answers) else "wrong"
        without = likelihood_of(reading.answer, "", case.question.question)
        values = {
            "search's score": case.scores[0],
            "answer's likelihood": reading.log_prob,
            "likelihood with the note less without": reading.log_prob - without,
            "not unknown": -reading.unknown,
            "not unknown, of all three": -min(each.unknown for each in readings),
        }
        found.append(Signals(kind, values, ask.doubted(reading, note)))
    return found


@torch.inference_mode()
def likelihood_of(answer: str, text: str, question: str) -> float:
    """The log-probability of an answer and its end, by smollm2-reader."""
    causal, tokenizer = model("smollm2-reader")
    head = questions.token_ids(questions.prompt(text, question, tokenizer), tokenizer)
    said = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    logits = causal(torch.tensor([head + said])).logits[0, len(head) - 1 : -1]
    return float(logits.log_softmax(-1)[torch.arange(len(said)), torch.tensor(said)].sum())


def absent_rows() -> Iterator[dict]:
    """Thresholds are the choosing hands': at each, a tenth of their right answers is doubted."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    chosen = signals("choosing")
    names = list(chosen[0].values)

    def matrix(some: list[Signals]) -> np.ndarray:
        return np.array([[each.values[name] for name in names] for each in some])

    kept = [each for each in chosen if each.kind != "wrong"]
    together = LogisticRegression().fit(matrix(kept), [each.kind == "right" for each in kept])
    scored = {name: lambda some, name=name: np.array([each.values[name] for each in some]) for name in names}
    scored["all together"] = lambda some: together.decision_function(matrix(some))
    sets = {"choosing": chosen} | {name: signals(name) for name in hands.REPORTING}
    for signal, values in scored.items():
        threshold = float(np.quantile(values([each for each in chosen if each.kind == "right"]), 0.1))
        for name, some in sets.items():
            both = [each for each in some if each.kind != "wrong"]
            auc = roc_auc_score([each.kind == "right" for each in both], values(both))
            measured = {"auc": round(auc, 3), "threshold": round(threshold, 4)}
            yield {"set": name, "method": signal} | measured | doubts(some, values(some) < threshold)
    for name, some in sets.items():
        yield {"set": name, "method": "as ask doubts"} | doubts(some, np.array([each.doubted for each in some]))


def doubts(some: list[Signals], doubted: np.ndarray) -> dict:
    """The share of right, wrong and absent answers that are doubted, and how many there are."""
    kinds = np.array([each.kind for each in some])
    shares = {
        f"{kind}_doubted": round(float(doubted[kinds == kind].mean()), 3) for kind in ("right", "wrong", "absent")
    }
    right, wrong, absent = (int((kinds == kind).sum()) for kind in ("right", "wrong", "absent"))
    return shares | {"right": right, "of": right + wrong, "absent": absent}


def real_rows() -> Iterator[dict]:
    """Files, not passages, are found; answers are read from the first three passages."""
    folder = Path(os.environ.get("TIL", ""))
    if not (folder / "git").is_dir():
        raise FileNotFoundError("TIL must name a clone of github.com/jbranchaud/til")
    found, _ = passages.read_folder(folder)
    inside = [passage for passage in found if len(passage.file.parts) > 1]  # not README and the like
    texts = [passage.read for passage in inside]
    began = time.process_time()
    index = search.Index(inside, partial(search.Vectors(folder).of, embed=embed()))
    print(f"embedded {len(texts)} passages in {time.process_time() - began:.0f} CPU s", flush=True)
    for name in ("til_choose", "til_report"):
        whole = json.loads(catalog.data_path("notes", f"{name}.json").read_text(encoding="utf-8"))
        asked = [each for each in whole if each["file"] is not None]
        hits: dict[tuple, int] = {}
        read, weights, repeated = [], [], []
        for each, vector in zip(asked, embed()([each["q"] for each in asked]), strict=True):
            meaning, bm25 = index.meaning(vector), index.words(each["q"])
            scores = {
                "BM25": bm25,
                "meaning": meaning,
                "both by rank": by_rank(meaning, bm25),
                "ask": meaning + search.WORDS * bm25,
            }
            for method, values in scores.items():
                order = ranked(values)
                files = list(dict.fromkeys(str(inside[i].file) for i in order))
                for count in (1, 3, 10):
                    hits[method, count] = hits.get((method, count), 0) + (each["file"] in files[:count])
            first = ranked(scores["ask"])[: ask.NUM_PASSAGES]
            read += [(texts[i], each["q"]) for i in first]
            weights.append([scores["ask"][i] for i in first])
            repeated.append(texts[first[0]])
        for (method, count), right in hits.items():
            yield {"set": name, "method": method, "among": count} | share(right, len(asked))
        accepted = [tuple(each["a"]) for each in asked]
        method = "search's first passage, repeated"
        yield {"set": name, "method": method, "reads": "-"} | judged(repeated, accepted)
        for which in MODELS:
            readings = iter(questions.readings(*model(which), read, batch=4))
            given = []
            for some in weights:
                three = list(itertools.islice(readings, len(some)))
                given.append(three[ask.surest(some, three)].answer)
            yield {"set": name, "method": which, "reads": EACH_ALONE} | judged(given, accepted)


def prose_rows() -> Iterator[dict]:
    folder = catalog.data_path("diary")
    some = passages.passages(Path("entries.md"), (folder / "entries.md").read_text(encoding="utf-8"))
    asked = pd.read_csv(folder / "questions.csv")
    index = search.Index(some, embed())
    hits: dict[tuple, int] = {}
    for each, vector in zip(asked.itertuples(), embed()(list(asked["question"])), strict=True):
        words = search.WORDS * index.words(each.question)
        meaning = index.meaning(vector)
        whole = index.whole @ vector
        scores = {
            "BM25": words,
            "whole passages": whole + words,
            "pieces": 2 * meaning - whole + words,  # meaning is the mean of the whole and the nearest piece
            "both, without words": meaning,
            "ask": meaning + words,
        }
        for method, values in scores.items():
            for count in (1, 3):
                first = [some[i].read for i in ranked(values)[:count]]
                says = any(questions.contains(text, each.answer) for text in first)
                hits[method, count] = hits.get((method, count), 0) + says
    for (method, count), right in hits.items():
        yield {"set": "diary", "method": method, "among": count} | share(right, len(asked))


def folders_rows() -> Iterator[dict]:
    read = ask.Reader("smollm2-reader")
    for name in ("twelve", "long"):
        folder = catalog.data_path("notes", "folders", name)
        asked = json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))
        asked = [each for each in asked if each["file"] is not None]
        finder = search.Search(folder, embed(), progress=False)
        given = [ask.answered(each["q"], finder, read) for each in asked]
        files = [[str(found.passage.file) for found in finder.find(each["q"], 3)] for each in asked]
        for count in (1, 3):
            right = sum(each["file"] in some[:count] for each, some in zip(asked, files, strict=True))
            yield {"set": name, "method": "ask", "among": count} | share(right, len(asked))
        accepted = [tuple(each["a"]) for each in asked]
        first = [finder.find(each["q"], 1)[0].passage.text for each in asked]
        yield {"set": name, "method": "search's first passage, repeated", "reads": "-"} | judged(first, accepted)
        answers = [each.answer for each in given]
        yield {"set": name, "method": "ask", "reads": "as ask does"} | judged(answers, accepted)
        for each, said in zip(asked, given, strict=True):
            right = questions.right(said.answer, tuple(each["a"]))
            print("right" if right else "wrong", each["q"], "|", said.answer, "|", each["a"][0], flush=True)


def folder_rows() -> Iterator[dict]:
    """2,000 files of the training hands' notes; times are of this process, on one thread."""
    notes = [note for hand in hands.training_hands() for some in hands.collections(hand) for note in some.notes][:2000]
    embedder = embed()
    with tempfile.TemporaryDirectory() as place, mock.patch.dict(os.environ, {"PLPKG_CACHE": place}):
        folder = Path(place, "notes")
        for number, note in enumerate(notes):
            file = folder / f"{number % 20}" / f"{number}.md"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(note, encoding="utf-8")

        def timed(what: str, action: Callable[[], object]) -> dict:
            began = time.process_time()
            action()
            seconds = time.process_time() - began
            kept = sum(file.stat().st_size for file in Path(place, "vectors").iterdir())
            return {"set": f"{len(notes)} files", "method": what, "cpu_s": round(seconds, 2), "kept_bytes": kept}

        yield timed("first time", lambda: search.Search(folder, embedder, progress=False))
        yield timed("again", lambda: search.Search(folder, embedder, progress=False))
        finder = search.Search(folder, embedder, progress=False)
        yield timed("a question", lambda: finder.find("Where is the spare key?"))
        (folder / "0" / "0.md").write_text("The spare key is with Lou.", encoding="utf-8")
        yield timed("a question after an edit", lambda: finder.find("Where is the spare key?"))
        shutil.rmtree(folder / "1")
        yield timed("a question after a folder was deleted", lambda: finder.find("Where is the spare key?"))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    record.sections(
        "backbones.asking",
        {
            "search": search_rows,
            "rerank": rerank_rows,
            "real": real_rows,
            "prose": prose_rows,
            "folders": folders_rows,
            "untrained": untrained_rows,
            "read": read_rows,
            "handwritten": handwritten_rows,
            "order": order_rows,
            "spans": span_rows,
            "absent": absent_rows,
            "folder": folder_rows,
        },
        __doc__,
    )
