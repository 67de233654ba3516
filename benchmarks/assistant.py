"""One person's notes, learnt in six designs: what the adapter answers, and what it tells whoever has its file.

The persons are three invented ones with 60 notes each (``corpora.notes``) and the writer of the diary with 48 entries.
Above some notes stands a question with its answer, as on a flash card. The unit of privacy is a note with its card. All
designs learn the same text, each note 15 times, or in 32 steps of a quarter of the notes each:

* device: LoRA at all linear layers; small: LoRA of rank 1 at o and down of two layers; ε: small by ``make_private``;
* wire: PrivateLoRA's M at all linear layers (what the cloud reads meanwhile is in ``residual_attacks.csv``); and M at o
  and down with ε. δ is 0.001.

Sections:

* MODEL PERSON DESIGN: every other note is learnt, and the rest is held out. ``card`` and ``other``: questions about
  learnt notes that are answered right (``questions.right``), of those on a learnt card and of the others.
  ``completed``: of values that somebody asks for, how many the adapter writes after its note's beginning.
  ``came_out``: a card's question and answer are given, and the adapter writes on behind the line's end: notes that it
  writes word for word, and the mean share of a note's tokens until the first other one. Then a row for each attack on
  the file. An attack gives each note a score, and learnt notes are told from held out ones of the same person: ``auc``
  with DeLong's standard error ``se``, and ``found``, the learnt notes above all that are held out. ``bound`` is the
  AUC that no attack exceeds in the mean, by all (ε, δ) of the accountant's curve together.

  * difference: how much likelier the adapter makes the note, in nats a token;
  * ratio: the public model's nats over the adapter's, since a note that was hard has more to gain;
  * end: minus the gradient of the note's loss at the finished adapter, along what was learnt (LoRA's B and
    PrivateLoRA's M began at zero), over its length;
  * start: the same at the public start, where B and M are zero and A is drawn from a known seed.

* MODEL PERSON halves: how far scores that need no adapter tell the halves: the public model's nats, and the length.
* PERSON shadows DESIGN: who knows the settings learns eight random halves of the notes (each note is in four of them)
  and compares. LiRA (Carlini et al. 2022, arXiv 2112.03570): a note's statistic as a draw from the adapters that learnt
  it or from those that did not, two normal distributions with one deviation for all notes; by difference and end.
  RMIA (Zarifzadeh et al. 2024, arXiv 2312.03262): how many notes of a stranger have risen less, against the mean of
  the eight.
* PERSON search: the published models. ``plpkg.search`` finds among the notes without cards, and smollm2-reader answers
  from the first, or from the surest of three. The kinds of questions are those of an adapter that learnt all cards.

Run: ``python -m benchmarks.assistant --missing`` (some four hours of one core), or some sections. Not in ``make
bench``.
"""

import functools
import math
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig
from torch.nn.functional import cross_entropy

from benchmarks import record
from plpkg import ask, corpora, questions
from plpkg.autonomy import Transfer, transfer
from plpkg.autonomy.scope import personal_copy
from plpkg.backbones import load_backbone
from plpkg.clipping import make_private
from plpkg.residual import PrivateLoraConfig
from plpkg.search import Embedder, Search

PERSONS = ("0", "2", "4", "diary")
SIGMAS = {"device, ε=7": 1.0, "device, ε=1": 3.875, "wire, ε=7": 1.0}
DESIGNS = ("device", "wire", "device, small", *SIGMAS)
ON_SMOLLM2 = ("device", "wire", "device, ε=7")
ATTACKS = ("difference", "ratio", "end", "start")
SHADOWS, SHADOWED = 8, "0"
EPOCHS, STEPS_AN_EPOCH = 15, 6
PRIVATE_STEPS, MAX_GRAD_NORM, DELTA = 32, 1.0, 1e-3
DELTAS = (*np.geomspace(1e-5, 0.05, 12), *np.linspace(0.1, 0.9, 9))
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FEW = ["o_proj", "down_proj"]
RATES = {
    "plpkg-small": {"device": 1e-2, "wire": 2e-2, "wire, ε=7": 2e-2},
    "smollm2": {"device": 1e-3, "wire": 1e-2, "device, ε=7": 3e-3},
}
OTHER_RATE = 3e-2
"""Of the small designs on plpkg-small."""
VALUES = 20


@dataclass(frozen=True)
class Note:
    """A note, its name, and the question on its card, if it has one."""

    name: str
    text: str
    card: corpora.Asked | corpora.Question | None


class Person:
    """Somebody's notes and questions."""

    def __init__(self, name: str) -> None:
        if name == "diary":
            diary = corpora.diary()
            entries, self.asked = diary.entries, [q for q in diary.questions if q.kind == "fact"]
            self.needed = {q.question: (q.date,) for q in self.asked}
        else:
            own = corpora.notes(int(name))
            entries, self.asked = own.entries, [q for q in own.questions if q.kind != "absent"]
            self.needed = {q.question: q.notes for q in self.asked}
        first = {self.needed[q.question][0]: q for q in reversed(self.asked) if len(self.needed[q.question]) == 1}
        cards = {note: q for i, (note, q) in enumerate(sorted(first.items())) if i % 3}
        self.notes = [Note(entry.name, entry.text, cards.get(entry.name)) for entry in entries]

    def kinds(self, notes: list[Note]) -> dict[str, list]:
        """The questions that these notes answer: those on their cards, and the others."""
        names = {note.name for note in notes}
        about = [q for q in self.asked if set(self.needed[q.question]) <= names]
        on_cards = {note.card.question for note in notes if note.card}
        return {
            "card": [q for q in about if q.question in on_cards],
            "other": [q for q in about if q.question not in on_cards],
        }


class Learner:
    """A public model that learns notes, and is asked and attacked afterwards."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model, self.tokenizer = load_backbone(name)
        self.model.requires_grad_(False)

    def card(self, note: Note) -> str:
        """A card as the model learns it: its question as it will be asked, the answer, and what ends an answer."""
        if note.card is None:
            return ""
        asked = questions.prompt("", note.card.question, self.tokenizer)
        chat = self.tokenizer.chat_template is not None
        return f"{asked}{note.card.answer}{self.tokenizer.eos_token}\n" if chat else f"{asked} {note.card.answer}\n\n"

    def encoded(self, notes: list[Note]) -> list[corpora.Tokens]:
        texts = [f"{self.card(note)}{note.text}\n" for note in notes]
        return corpora.encode(texts, self.tokenizer, control_tokens=self.tokenizer.chat_template is not None)

    def ids(self, text: str) -> torch.Tensor:
        return torch.tensor([questions.token_ids(text, self.tokenizer)])

    def config(self, design: str) -> LoraConfig:
        last = self.model.config.num_hidden_layers
        small = dict(target_modules=FEW, layers_to_transform=[last - 2, last - 1])
        if design == "wire":
            return PrivateLoraConfig(r_c2d=64, r_d2c=64, target_modules=LINEAR)
        if design.startswith("wire"):
            return PrivateLoraConfig(r_c2d=8, r_d2c=8, target_modules=FEW)
        if design == "device":
            return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        return LoraConfig(r=1, lora_alpha=2, **small)

    def learn(self, design: str, notes: list[Note], seed: int = 0) -> Transfer:
        """``seed`` is that of the order of the notes and of the noise; the adapter begins at the same A."""
        settings = dict(steps=PRIVATE_STEPS, batch=math.ceil(len(notes) / 4), seed=seed)
        if design in ("device", "wire"):
            settings |= dict(steps=EPOCHS * STEPS_AN_EPOCH, batch=math.ceil(len(notes) / STEPS_AN_EPOCH))
        if design in SIGMAS:
            guard = dict(noise_multiplier=SIGMAS[design], max_grad_norm=MAX_GRAD_NORM, seed=seed)
            settings["private"] = functools.partial(make_private, **guard)
        _, start = personal_copy(self.model, "lora", self.config(design))
        settings |= dict(lr=RATES[self.name].get(design, OTHER_RATE), lora=self.config(design), start=start)
        return transfer(self.model, corpora.batch(self.encoded(notes)), None, "lora", **settings)

    def nats(self, model, ids: torch.Tensor) -> torch.Tensor:
        """The mean loss of a note's tokens."""
        logits = model(input_ids=ids[None]).logits[0, :-1].float()
        return cross_entropy(logits, ids[1:])

    def evidence(self, own: Transfer, notes: list[Note], gradients=("end", "start")) -> dict[str, np.ndarray]:
        """Each attack's score of each note; also the bare loss, ``nats``."""
        config = own.model.peft_config["default"]
        began, begin = personal_copy(self.model, "lora", config)
        zero = [name for name, value in begin.items() if not value.any()]  # LoRA's B, PrivateLoRA's M
        learnt = {name: own.state[name] for name in zero}
        models = {"end": own.model, "start": began}
        found = {case: [] for case in ("nats", "difference", "ratio", *gradients)}
        for ids in (each.ids for each in self.encoded(notes)):
            with torch.no_grad():
                found["nats"].append(self.nats(own.model, ids).item())
                public = self.nats(self.model, ids).item()
            found["difference"].append(public - found["nats"][-1])
            found["ratio"].append(public / found["nats"][-1])
            for case in gradients:
                model = models[case]
                weights = dict(model.named_parameters())
                loss = self.nats(model, ids)
                gradient = torch.autograd.grad(loss, [weights[name] for name in zero])
                along = sum((g * learnt[name]).sum().item() for g, name in zip(gradient, zero, strict=True))
                length = math.sqrt(sum(g.square().sum().item() for g in gradient))
                found[case].append(-along / length)
        return {case: np.array(scores) for case, scores in found.items()}

    def right(self, model, person: Person, notes: list[Note]) -> dict:
        """Questions about notes that are answered right, without a note in the prompt."""
        row = {}
        for kind, asked in person.kinds(notes).items():
            given = questions.answers(model, self.tokenizer, [("", q.question) for q in asked])
            row[kind] = sum(questions.right(said, q.answer) for said, q in zip(given, asked, strict=True))
            row[f"{kind}_of"] = len(asked)
        return row

    def written(self, model, ids: torch.Tensor, tokens: int) -> torch.Tensor:
        """What the model writes behind a prompt of shape ``(1, seq)``, whatever ends a text."""
        no_end = self.model.config.vocab_size  # an id that no token has
        options = dict(do_sample=False, pad_token_id=0, eos_token_id=no_end)
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **options)[0, ids.shape[1] :]

    def completed(self, model, person: Person, notes: list[Note]) -> dict:
        """Values that the model writes after their note's beginning."""
        texts, hits = {note.name: note.text for note in notes}, []
        for q in person.asked:
            name = person.needed[q.question][0]
            text = texts.get(name, "")
            place = text.find(q.answer)
            if len(person.needed[q.question]) == 1 and place > 10:
                made = self.written(model, self.ids(text[:place].rstrip()), 16)
                said = self.tokenizer.decode(made, skip_special_tokens=True)
                hits.append(said.strip().lower().startswith(q.answer.lower()))
        return dict(completed=sum(hits[:VALUES]), completed_of=len(hits[:VALUES]))

    def came_out(self, model, notes: list[Note]) -> dict:
        """Notes that follow their card, when the model writes on behind it."""
        shares = []
        for note in notes:
            if note.card:
                card, whole = (self.encoded_text(text) for text in (self.card(note), f"{self.card(note)}{note.text}\n"))
                wanted = whole[len(card) :]
                made = self.written(model, whole[None, : len(card)], len(wanted))
                same = (made == wanted).long()
                shares.append(same.cumprod(0).float().mean().item())
        whole = sum(share == 1 for share in shares)
        return dict(came_out=whole, came_out_of=len(shares), share_out=round(float(np.mean(shares)), 3))

    def encoded_text(self, text: str) -> torch.Tensor:
        (one,) = corpora.encode([text], self.tokenizer, control_tokens=self.tokenizer.chat_template is not None)
        return one.ids

    def asked(self, own: Transfer, person: Person, notes: list[Note]) -> dict:
        """All that is asked of an adapter."""
        values = sum(value.numel() for value in own.state.values())
        row = dict(notes=len(notes), values=values) | self.right(own.model, person, notes)
        if own.epsilon:
            row |= dict(epsilon=round(own.epsilon(DELTA), 2), bound=round(auc_bound(own.epsilon), 3))
        return row | self.completed(own.model, person, notes) | self.came_out(own.model, notes)


def told(inside: np.ndarray, outside: np.ndarray) -> dict:
    """The AUC with which scores tell learnt notes from others, its standard error (DeLong 1988), and who is found."""
    above = (inside[:, None] > outside) + (inside[:, None] == outside) / 2  # (learnt, others)
    variance = above.mean(1).var(ddof=1) / len(inside) + above.mean(0).var(ddof=1) / len(outside)
    found = int((inside > outside.max()).sum())
    return dict(auc=round(float(above.mean()), 3), se=round(math.sqrt(variance), 3), found=found, found_of=len(inside))


def auc_bound(epsilon) -> float:
    """The area under what (ε, δ) allows a test: its hits are at most e^ε times its false alarms plus δ, both ways."""
    alarms = np.linspace(0, 1, 20_001)
    most = np.ones_like(alarms)
    for delta in DELTAS:
        factor = math.exp(epsilon(float(delta)))
        hits = factor * alarms + delta
        no_hits = np.maximum(0, 1 - delta - alarms) / factor  # the same of who was not learnt
        most = np.minimum(most, np.minimum(hits, 1 - no_hits))
    return float(np.trapezoid(most, alarms))


def half(name: str, person_name: str, design: str) -> Iterator[dict]:
    learner, person = Learner(name), Person(person_name)
    inside, outside = person.notes[::2], person.notes[1::2]
    began = time.process_time()
    own = learner.learn(design, inside)
    row = dict(model=name, person=person_name, design=design)
    yield row | dict(cpu_s=round(time.process_time() - began, 1)) | learner.asked(own, person, inside)
    scores = learner.evidence(own, inside + outside)
    for attack in ATTACKS:
        told_by = told(scores[attack][: len(inside)], scores[attack][len(inside) :])
        yield row | dict(attack=attack) | told_by


@torch.no_grad()
def halves(name: str, person_name: str) -> Iterator[dict]:
    learner, person = Learner(name), Person(person_name)
    inside = person.notes[::2]
    encoded = [each.ids for each in learner.encoded(inside + person.notes[1::2])]
    scores = {
        "public nats": [learner.nats(learner.model, ids).item() for ids in encoded],
        "length": [float(len(ids)) for ids in encoded],
    }
    for attack, values in scores.items():
        row = dict(model=name, person=person_name, design="no adapter", attack=attack)
        yield row | told(np.array(values[: len(inside)]), np.array(values[len(inside) :]))


def shadows(person_name: str, design: str) -> Iterator[dict]:
    learner, person = Learner("plpkg-small"), Person(person_name)
    notes, is_learnt = person.notes, np.arange(len(person.notes)) % 2 == 0
    strangers = Person("2" if person_name != "2" else "0").notes
    target = learner.evidence(learner.learn(design, notes[::2]), notes + strangers, ("end",))
    choose, inside, scores = random.Random(0), [], []
    for pair in range(SHADOWS // 2):
        order = choose.sample(range(len(notes)), len(notes))
        for places in (order[: len(order) // 2], order[len(order) // 2 :]):
            inside.append(np.isin(np.arange(len(notes)), places))
            own = learner.learn(design, [notes[i] for i in sorted(places)], seed=1 + 2 * pair + len(inside) % 2)
            scores.append(learner.evidence(own, notes + strangers, ("end",)))
    inside = np.array(inside)  # (shadows, notes)
    row = dict(model="plpkg-small", person=person_name, design=design)
    for attack in ("difference", "end"):
        told_by = lira(target[attack][: len(notes)], np.array([s[attack][: len(notes)] for s in scores]), inside)
        yield row | dict(attack=f"LiRA, {attack}") | told(told_by[is_learnt], told_by[~is_learnt])
    told_by = rmia(target["nats"], np.array([s["nats"] for s in scores]), len(notes))
    yield row | dict(attack="RMIA") | told(told_by[is_learnt], told_by[~is_learnt])


def lira(target: np.ndarray, shadow: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """The log-likelihood ratio of each note's statistic ``(notes,)``, by shadows ``(shadows, notes)``."""
    mean_in = np.where(inside, shadow, np.nan)
    mean_out = np.where(inside, np.nan, shadow)
    left = np.concatenate([mean_in - np.nanmean(mean_in, 0), mean_out - np.nanmean(mean_out, 0)])
    in_, out = np.nanmean(mean_in, 0), np.nanmean(mean_out, 0)
    freedom = np.isfinite(left).sum() - 2 * shadow.shape[1]
    variance = np.nansum(left**2) / freedom
    return ((target - out) ** 2 - (target - in_) ** 2) / (2 * variance)


def rmia(target: np.ndarray, shadow: np.ndarray, count: int) -> np.ndarray:
    """The share of the strangers' notes, those after the first ``count``, whose likelihood has risen less."""
    mean = np.log(np.exp(-shadow).mean(0))  # of a token's likelihood, over the shadows
    risen = -target - mean
    return (risen[:count, None] > risen[count:]).mean(1) + 1e-6 * risen[:count]  # ties by the note's own


def search(person_name: str) -> Iterator[dict]:
    person, read = Person(person_name), ask.Reader("smollm2-reader")
    row = dict(model="smollm2-reader", person=person_name)
    with tempfile.TemporaryDirectory() as folder:
        for note in person.notes:
            Path(folder, f"{note.name}.txt").write_text(note.text, encoding="utf-8")
        found = Search(folder, Embedder(), progress=False)
        for most, design in ((1, "one note"), (3, "surest of three notes")):
            counts, began, asked = {}, time.process_time(), 0
            for kind, some in person.kinds(person.notes).items():
                good = [answered(found, read, q.question, most) for q in some]
                counts[kind] = sum(questions.right(said, q.answer) for said, q in zip(good, some, strict=True))
                counts[f"{kind}_of"] = len(some)
                asked += len(some)
            seconds = (time.process_time() - began) / asked
            yield row | dict(design=design, notes=len(person.notes), answer_s=round(seconds, 2)) | counts


def answered(found: Search, read: ask.Reader, question: str, most: int) -> str:
    """What is read from the best passages, as ``plpkg ask`` does."""
    best = found.find(question, most)
    readings = read([each.passage.read for each in best], question)
    return readings[ask.surest([each.score for each in best], readings)].answer


SECTIONS = {
    f"plpkg-small {who} {d}": functools.partial(half, "plpkg-small", who, d) for who in PERSONS for d in DESIGNS
}
SECTIONS |= {f"plpkg-small {who} halves": functools.partial(halves, "plpkg-small", who) for who in PERSONS}
SECTIONS |= {"smollm2 diary halves": functools.partial(halves, "smollm2", "diary")}
SECTIONS |= {f"{SHADOWED} shadows {d}": functools.partial(shadows, SHADOWED, d) for d in DESIGNS}
SECTIONS |= {f"smollm2 diary {d}": functools.partial(half, "smollm2", "diary", d) for d in ON_SMOLLM2}
SECTIONS |= {f"{who} search": functools.partial(search, who) for who in PERSONS}


if __name__ == "__main__":
    torch.set_num_threads(1)
    record.sections("assistant", SECTIONS, __doc__)
