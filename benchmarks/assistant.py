"""One person's notes through all rooms: what each way of answering brings, costs, and gives away.

plpkg-reader, an invented person's 60 notes, and 60 more of somebody else's in the same manner, which nobody learns.
Each note ends with the person's own words; above some stands a question with its answer, as on a flash card. A section
is a person and a way of answering; its rows:

* card, one, two: questions answered right, of those on a card, of others whose answer stands in one note, and of those
  that need two;
* style: of ten unfinished notes by somebody else, how many the assistant ends with the person's words;
* after: the questions, cards apart, that an adapter answers with the best three notes in the prompt;
* cpu_s: seconds of one thread to read or to learn, the cloud's included; up_mb, down_mb: what crossed meanwhile;
* text_training, m_training: the share of the notes' tokens that the cloud reads in a training step, and the relative
  error of the M that it solves for; text_later, m_later: the same of ten texts that are finished over the wire;
* auc: whether a note was learnt, told from how much likelier the adapter makes it (who has the adapter);
  auc_words: from how many of its tokens would be written next (who sees words alone); "half": 30 notes of the person
  were learnt, and are told from the other 30;
* completed: of 20 values, how many the adapter writes after the note's beginning;
* gained, lost: with fewer notes than three in the prompt, the questions answered right only so, and only with three;
* right, unsaid, planted, of: what becomes of questions with three notes in the prompt, if the notes leave them "open",
  the cards' notes are "deleted", or a mail with a wrong answer is "planted" for each card; with "one note" also if
  one holds the answer ("asked"). ", asked": cpu_s an answer.

The unit of privacy is a note with its card. The four designs learn the notes' text, nothing else.

Run: ``python -m benchmarks.assistant`` (a minute of one idle core a section), or some sections. Not in ``make bench``.
"""

import copy
import functools
import time
from collections.abc import Callable, Iterator

import bm25s
import torch
from peft import LoraConfig, get_peft_model
from sklearn.metrics import roc_auc_score

from benchmarks import record
from benchmarks.notes import generator
from plpkg import corpora, questions, retention
from plpkg.autonomy import Transfer, transfer
from plpkg.backbones import load_backbone
from plpkg.clipping import make_private
from plpkg.counts import Counts
from plpkg.learning import rising_and_falling
from plpkg.residual import CloudServer, DeviceClient, PrivateLoraConfig, attacks, matrices
from plpkg.retention.scorers import H2O
from plpkg.serving import Adapter

PERSONS = (0, 2, 4)
ENTRIES, QUESTIONS, UNFINISHED, VALUES = 60, 60, 10, 20
ENDS = ("Enough for today.", "And so to bed.", "More of this tomorrow.")
"""How each person ends a note."""
POSITIONS = 8192
"""All notes are 5,000 tokens: more than the 3,072 that the reader is meant for."""
BUDGETS, CHUNK = (1024, 256), 256
STEPS, BATCH = 90, 10
PRIVATE_STEPS, PRIVATE_BATCH, SIGMA, MAX_GRAD_NORM, DELTA = 32, 15, 1.0, 1.0, 1e-3
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FEW = ["o_proj", "down_proj"]
"""Where a private training learns: noise grows with what is trained. "small" is the same without clipping and noise."""
LORA = {False: dict(r=16, lora_alpha=32, target_modules="all-linear"),
        True: dict(r=1, lora_alpha=2, target_modules=FEW, layers_to_transform=[3, 4])}  # fmt: skip
WIRE = {False: dict(r_c2d=64, r_d2c=64, target_modules=LINEAR), True: dict(r_c2d=8, r_d2c=8, target_modules=FEW)}
LR = {"device": {False: 1e-2, True: 3e-2}, "wire": {False: 2e-2, True: 2e-2}}
WEIGHT = 0.3
"""Of counts."""


def searched(notes: list[str]) -> Callable[..., str]:
    """A function that gives the k notes that are nearest to a text, joined."""

    def words(texts: list[str]):
        return bm25s.tokenize(texts, stopwords=None, show_progress=False)

    index = bm25s.BM25()
    index.index(words(notes), show_progress=False)

    def best(text: str, k: int = 3) -> str:
        found, _ = index.retrieve(words([text]), k=k, show_progress=False)
        return "\n".join(notes[i] for i in sorted(found[0]))

    return best


class Person:
    """Somebody's notes and questions, and the public model that is to answer them."""

    def __init__(self, seed: int, half: bool = False) -> None:
        self.model, self.tokenizer = load_backbone("plpkg-reader")
        self.model.requires_grad_(False)
        self.model.config.max_position_embeddings = POSITIONS
        own, strange = (generator.notes(n, entries=ENTRIES, questions=QUESTIONS) for n in (seed, 1000 + seed))
        self.end = ENDS[PERSONS.index(seed)]
        self.texts = {entry.name: entry.text for entry in own.entries}
        self.cards, self.notes = self.written_up(own)
        self.others = [f"{entry.text}\n" for entry in strange.entries]
        self.asked = [each for each in own.questions if each.kind != "absent"]
        self.open = [each for each in own.questions if each.kind == "absent"]
        self.learnt = corpora.encode(self.notes.values(), self.tokenizer)
        self.held = corpora.encode(self.written_up(strange)[1].values(), self.tokenizer)
        if half:  # every other note is held out
            self.learnt, self.held = self.learnt[::2], self.learnt[1::2]
        self.batch = corpora.batch(self.learnt)
        self.best = searched(list(self.notes.values()))
        self.public = self.evidence(self.model)

    def written_up(self, own: corpora.Notes) -> tuple[set[str], dict[str, str]]:
        """The questions on cards, and the notes with their ends. Two of three notes that can have a card have one."""
        first = {each.notes[0]: each for each in reversed(own.questions) if each.kind not in ("absent", "bridge")}
        cards = {name: each for i, (name, each) in enumerate(sorted(first.items())) if i % 3}
        notes = {}
        for entry in own.entries:
            card = cards.get(entry.name)
            above = f"{questions.prompt('', card.question, self.tokenizer)} {card.answer}\n\n" if card else ""
            notes[entry.name] = f"{above}{entry.text}\n{self.end}\n"
        return {each.question for each in cards.values()}, notes

    def ids(self, text: str, special: bool = True) -> torch.Tensor:
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=special).input_ids

    def written(self, model, prompt: str, tokens: int = 16) -> str:
        """The line that a model writes after a prompt."""
        ids = self.ids(prompt)
        new = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        return self.line(new)

    def line(self, ids: torch.Tensor) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip(" ").partition("\n")[0].strip()

    def counted(self, given: list[str]) -> dict:
        """Right answers to the questions, by kind."""
        right = {"card": [], "one": [], "two": []}
        for each, answer in zip(self.asked, given, strict=True):
            kind = "two" if each.kind == "bridge" else "card" if each.question in self.cards else "one"
            right[kind].append(questions.same(answer, each.answer))
        return {kind: sum(values) for kind, values in right.items()} | {f"{k}_of": len(v) for k, v in right.items()}

    def styled(self, lines: list[str]) -> dict:
        return {"style": sum(questions.same(line, self.end) for line in lines), "style_of": len(lines)}

    @torch.no_grad()
    def evidence(self, model) -> torch.Tensor:
        """For each note that was learnt, then each that was not: nats a token, and the share that is likeliest."""
        rows = []
        for ids in (each.ids for each in (*self.learnt, *self.held)):
            logits = model(input_ids=ids[None]).logits[0, :-1].float()
            nats = torch.nn.functional.cross_entropy(logits, ids[1:])
            rows.append([nats.item(), (logits.argmax(1) == ids[1:]).double().mean().item()])
        return torch.tensor(rows)

    def membership(self, model) -> dict:
        """What somebody with the adapter, and somebody with words, tell of who was learnt."""
        gain = self.evidence(model) - self.public
        learnt = [1] * len(self.learnt) + [0] * len(self.held)
        auc, words = roc_auc_score(learnt, -gain[:, 0]), roc_auc_score(learnt, gain[:, 1])
        return dict(auc=round(auc, 3), auc_words=round(words, 3))

    def values(self) -> list[tuple[str, str]]:
        """Beginnings of notes, up to a value that somebody asks for, and the value."""
        pairs = []
        for each in self.asked:
            text = self.texts[each.notes[0]]
            if each.kind != "bridge" and text.find(each.answer) > 10:
                pairs.append((text[: text.find(each.answer)].rstrip(), each.answer))
        return pairs[:VALUES]

    def completed(self, model) -> dict:
        pairs = self.values()
        right = [self.written(model, begun).lower().startswith(value.lower()) for begun, value in pairs]
        return dict(completed=sum(right), completed_of=len(pairs))

    def with_notes(self, model, k: int = 3) -> list[str]:
        return questions.answers(model, self.tokenizer, [(self.best(q.question, k), q.question) for q in self.asked])

    def adapter(self, model) -> dict:
        """All that is asked of a model that has learnt."""
        alone = questions.answers(model, self.tokenizer, [("", q.question) for q in self.asked])
        ends = [self.written(model, text) for text in self.others[:UNFINISHED]]
        after = self.counted(self.with_notes(model))
        row = self.counted(alone) | self.styled(ends) | {"after": after["one"] + after["two"]}
        return row | self.membership(model) | self.completed(model)


def baselines(person: Person) -> Iterator[dict]:
    """Nothing; all notes, read whole and within budgets; three notes; counts."""
    model, tokenizer = person.model, person.tokenizer
    nobody = questions.answers(model, tokenizer, [("", q.question) for q in person.asked])
    ends = [person.written(model, text) for text in person.others[:UNFINISHED]]
    yield dict(case="nothing") | person.counted(nobody) | person.styled(ends) | person.completed(model)
    ids = person.ids("\n".join(person.notes.values()))
    for budget in (ids.shape[1], *BUDGETS):
        began = time.process_time()
        reading = retention.chunked_prefill(model, ids, H2O(), budget=budget, chunk_size=CHUNK)
        seconds = time.process_time() - began
        tell = dict(do_sample=False, pad_token_id=0)
        ask = [person.ids(questions.prompt("", q.question, person.tokenizer), special=False) for q in person.asked]
        given = [person.line(reading.ask(model, each, max_new_tokens=20, **tell)[0]) for each in ask]
        texts = [person.ids("\n" + text, special=False) for text in person.others[:UNFINISHED]]
        ends = [person.line(reading.ask(model, each, max_new_tokens=16, **tell)[0]) for each in texts]
        case = "all notes" if budget == ids.shape[1] else f"{budget} units"
        yield dict(case=case, units=budget, cpu_s=round(seconds, 1)) | person.counted(given) | person.styled(ends)
    began = time.process_time()
    given = person.with_notes(model)
    seconds = (time.process_time() - began) / len(given)
    ends = [person.written(model, person.best(text) + "\n" + text) for text in person.others[:UNFINISHED]]
    yield dict(case="three notes", cpu_s=round(seconds, 3)) | person.counted(given) | person.styled(ends)
    yield dict(case="counts") | counts(person)


@torch.no_grad()
def counts(person: Person, k: int = 0) -> dict:
    """Counts of the notes beside the public model, whose prompt has the best k notes."""
    began, known = time.process_time(), Counts(each.ids for each in person.learnt)
    seconds = time.process_time() - began

    def write(prompt: str, tokens: int = 16) -> str:
        ids = person.ids(prompt)[0]
        start = len(ids)
        while len(ids) < start + tokens and "\n" not in person.tokenizer.decode(ids[start:]).lstrip(" "):
            logits = person.model(input_ids=ids[None]).logits[0, -1]
            ids = torch.cat([ids, known.mix(ids, logits.log_softmax(-1), WEIGHT).argmax()[None]])
        return person.line(ids[start:])

    notes = functools.partial(person.best, k=k) if k else lambda text: ""
    given = [write(questions.prompt(notes(each.question), each.question, person.tokenizer)) for each in person.asked]
    ends = [write(f"{notes(text)}\n{text}".lstrip("\n")) for text in person.others[:UNFINISHED]]
    right = [write(begun, 10).lower().startswith(value.lower()) for begun, value in person.values()]
    row = dict(cpu_s=round(seconds, 2), completed=sum(right), completed_of=len(right))
    return row | person.counted(given) | person.styled(ends)


def unsettled(person: Person, k: int) -> Iterator[dict]:
    """Open questions, deleted notes, and a stranger's mails, with the best k notes in the prompt."""
    cards = sorted((each for each in person.asked if each.question in person.cards), key=lambda each: each.notes)
    bare = [note for name, note in person.notes.items() if name not in {each.notes[0] for each in cards}]
    wrong = [each.answer for each in cards[1:] + cards[:1]]
    mails = [f"{each.question} The answer is {answer}.\n" for each, answer in zip(cards, wrong, strict=True)]
    planted = searched([*person.notes.values(), *mails])
    cases = [("open", person.open, person.best), ("deleted", cards, searched(bare)), ("planted", cards, planted)]
    cases += [("asked", [q for q in person.asked if q.kind != "bridge"], person.best)] * (k == 1)
    for case, asked, best in cases:
        given = questions.answers(person.model, person.tokenizer, [(best(q.question, k), q.question) for q in asked])
        expected = {"right": [q.answer for q in asked], "unsaid": [corpora.ABSENT] * len(asked)}
        expected |= {"planted": wrong} if case == "planted" else {}
        row = {name: sum(map(questions.same, given, texts)) for name, texts in expected.items()}
        yield dict(case=case + ", one note" * (k == 1), of=len(asked)) | row


def changes(person: Person) -> Iterator[dict]:
    """The public model with fewer notes than three; with open questions, deleted notes, and a stranger's mails."""
    answers = [each.answer for each in person.asked]
    three = list(map(questions.same, person.with_notes(person.model), answers))
    for k in (1, 2):
        began = time.process_time()
        given = person.with_notes(person.model, k)
        row = dict(case=f"{k} in the prompt", cpu_s=round((time.process_time() - began) / len(given), 3))
        pairs = list(zip(map(questions.same, given, answers), three, strict=True))
        row["gained"] = sum(now and not then for now, then in pairs)
        row["lost"] = sum(then and not now for now, then in pairs)
        yield row | person.counted(given)
    yield from unsettled(person, 3)
    ids = person.ids("\n".join(person.notes.values()))
    reading = retention.chunked_prefill(person.model, ids, H2O(), budget=ids.shape[1], chunk_size=CHUNK)
    prompts = [person.ids(questions.prompt("", q.question, person.tokenizer), special=False) for q in person.asked]
    began = time.process_time()
    for prompt in prompts:
        reading.ask(person.model, prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    yield dict(case="all notes, asked", cpu_s=round((time.process_time() - began) / len(prompts), 3))
    own = learnt_on_the_device(person, private=False, small=False)
    began = time.process_time()
    given = questions.answers(own.model, person.tokenizer, [("", q.question) for q in person.asked])
    yield dict(case="device, asked", cpu_s=round((time.process_time() - began) / len(given), 3)) | person.counted(given)


def learnt_on_the_device(person: Person, private: bool, small: bool) -> Transfer:
    """Plain LoRA, learnt where the notes are: each in as many steps, however many there are."""
    settings = dict(steps=PRIVATE_STEPS, batch=PRIVATE_BATCH) if small else dict(steps=STEPS, batch=BATCH)
    settings["batch"] = settings["batch"] * len(person.learnt) // ENTRIES
    settings |= dict(lr=LR["device"][small], lora=LoraConfig(**LORA[small]))
    if private:
        guard = dict(noise_multiplier=SIGMA, max_grad_norm=MAX_GRAD_NORM, seed=0)
        settings["private"] = functools.partial(make_private, **guard)
    return transfer(person.model, person.batch, None, "lora", **settings)


def on_the_device(person: Person, case: str) -> dict:
    began = time.process_time()
    private = case == "device, ε"
    own = learnt_on_the_device(person, private, case != "device")
    row = dict(case=case, cpu_s=round(time.process_time() - began, 1), up_mb=0.0, down_mb=0.0)
    row |= dict(epsilon=round(own.epsilon(DELTA), 2)) if private else {}
    row |= dict(
        values=sum(each.numel() for each in own.state.values()), adapter_kb=round(own.adapter().num_bytes / 1e3)
    )
    return row | person.adapter(own.model)


def half(seed: int) -> Iterator[dict]:
    """Half of a person's notes against the other half: names and habits tell nothing of who was learnt."""
    person = Person(seed, half=True)
    for private in (False, True):
        own = learnt_on_the_device(person, private, private)
        yield dict(person=seed, case=f"device{', ε' * private}, half") | person.membership(own.model)


def over_the_wire(person: Person, private: bool) -> dict:
    """PrivateLoRA's M, learnt with the layers in a cloud that keeps what it sees."""
    model = get_peft_model(copy.deepcopy(person.model), PrivateLoraConfig(**WIRE[private]))
    first = next(iter(matrices(model).values()))
    with CloudServer(model) as cloud:
        heard = attacks.listen(cloud.part)
        with DeviceClient(cloud.address, model) as client:
            began = time.process_time()
            parameters, rate = client.trainable(), LR["wire"][private]
            optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
            steps, epsilon, order = PRIVATE_STEPS if private else STEPS, {}, []
            generator = torch.Generator().manual_seed(0)
            if private:
                rows = [{key: value[i] for key, value in person.batch.items()} for i in range(len(person.learnt))]
                guard = dict(noise_multiplier=SIGMA, max_grad_norm=MAX_GRAD_NORM, seed=0)
                guard |= dict(batch_size=PRIVATE_BATCH, per_example=client.per_example)
                ready = make_private(model, optimizer, rows, **guard)
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = rate * rising_and_falling(step, min(5, steps // 10), steps)
                for kept in (heard.hidden, heard.u, heard.v):
                    kept.clear()
                before = first.weight.detach().clone()
                if private:
                    sample = ready.sample()
                    (part,) = sample.batches()
                    ready.step(sample)
                else:
                    order = order or list(torch.randperm(len(person.learnt), generator=generator).split(BATCH))
                    at = order.pop()
                    part = {key: value[at] for key, value in person.batch.items()}
                    client.train_step(part, optimizer=optimizer)
            seconds, traffic = time.process_time() - began, client.traffic
            if private:
                epsilon = dict(epsilon=round(ready.epsilon(DELTA), 2))
            training = read(person, heard, before, part["input_ids"], part["attention_mask"])
            for kept in (heard.hidden, heard.u, heard.v):
                kept.clear()
            model.eval()
            prompts = [person.ids(text) for text in person.others[:UNFINISHED]]
            for ids in prompts:
                client.generate(ids, 1)
            flat = torch.cat(prompts, 1)
            later = read(person, heard, first.weight, flat, torch.ones_like(flat))
    row = dict(case=f"wire{', ε' * private}", cpu_s=round(seconds, 1)) | epsilon
    row |= dict(up_mb=round(traffic.sent_bytes / 1e6, 1), down_mb=round(traffic.received_bytes / 1e6, 1))
    row |= dict(values=sum(each.numel() for each in parameters))
    row |= dict(adapter_kb=round(Adapter.from_peft(model).num_bytes / 1e3))
    row |= {f"{key}_training": value for key, value in training.items()}
    row |= {f"{key}_later": value for key, value in later.items()}
    return row | person.adapter(model)


def read(person: Person, heard: attacks.Heard, m: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> dict:
    """What a cloud reads of what it heard: the share of the tokens, and the error of the first M."""
    hidden = torch.cat([each.flatten(0, 1) for each in heard.hidden]).half().float()
    tokens = attacks.recover_tokens(hidden, attacks.public_table(person.model)).view(ids.shape)
    u, v = (torch.cat([each[0].flatten(0, 1) for each in kept[0]]).half().float() for kept in (heard.u, heard.v))
    error = attacks.relative_error(attacks.recover_m(u, v), m.detach())
    chosen = mask.bool()
    return dict(text=attacks.token_accuracy(tokens[chosen], ids[chosen]), m=round(error, 4))


WAYS = {
    "baselines": baselines,
    "changes": changes,
    "one note": lambda person: [
        *unsettled(person, 1),
        dict(case="one note, counts") | counts(person, 1),
        dict(case="10 in the prompt") | person.counted(person.with_notes(person.model, 10)),
    ],
    "device": lambda person: [on_the_device(person, "device")],
    "wire": lambda person: [over_the_wire(person, False)],
    "device small": lambda person: [on_the_device(person, "device, small")],
    "device private": lambda person: [on_the_device(person, "device, ε")],
    "wire private": lambda person: [over_the_wire(person, True)],
}


def rows(seed: int, way: str) -> Iterator[dict]:
    for row in WAYS[way](Person(seed)):
        yield {"person": seed} | row


SECTIONS = {f"{seed} {way}": functools.partial(rows, seed, way) for seed in PERSONS for way in WAYS}
SECTIONS |= {f"{seed} half": functools.partial(half, seed) for seed in PERSONS}


if __name__ == "__main__":
    torch.set_num_threads(1)
    record.sections("assistant", SECTIONS, __doc__)
