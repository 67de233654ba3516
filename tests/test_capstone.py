"""One person's notes through all rooms, by public functions alone: what one room gives, the next one takes."""

import copy
import functools
import itertools
import math
import types

import pytest
import torch
from opacus.accountants import create_accountant
from peft import PeftModel, get_peft_model
from torch.optim import AdamW
from torch.utils.data import DataLoader

from plpkg import corpora, questions, retention
from plpkg.autonomy import Task, transfer
from plpkg.backbones import load_backbone, random_backbone
from plpkg.clipping import make_private
from plpkg.ngrams import Counts
from plpkg.residual import CloudServer, DeviceClient, LadderConfig, PrivateLoraConfig
from plpkg.retention import RetainingHeads, chunked_prefill, train_heads
from plpkg.retention.scorers import H2O
from plpkg.scoring import score, token_log_probs
from plpkg.serving import Adapter, Engine, InvalidAdapterError, Request, train_many

from rounding import relative

ENTRIES, NEW, BUDGET, CHUNK, SIGMA, DELTA = 6, 6, 32, 16, 0.8, 1e-2
NAMES, READ = (None, "wire", "private", "own", "together"), (False, True)
SERVED = list(itertools.product(NAMES, READ))
private_by = functools.partial(make_private, noise_multiplier=SIGMA, max_grad_norm=1.0, seed=0)


def nats(judged):
    """The mean of -ln p of a token."""
    return judged.bits * math.log(2) / judged.tokens


def life(folder):
    """The script; the tests look at its variables."""
    anna = corpora.notes(3, entries=ENTRIES)
    for entry in anna.entries:
        (folder / f"{entry.name}.txt").write_text(entry.text)
    (writer,) = corpora.text_folder(folder, shares=(1, 0, 0))
    wide = dict(initializer_range=0.2)  # sharp attention: what was read matters by more than rounding
    backbone = random_backbone("llama", vocab=8192, max_positions=1024, options=wide)
    _, tokenizer = load_backbone("plpkg-small")
    backbone.generation_config.eos_token_id = None
    text = "\n".join(document.text for document in writer.split("train"))
    documents, (prompt,) = corpora.encode(writer.split("train"), tokenizer), corpora.encode([text], tokenizer)
    batch = corpora.batch(documents)
    asked = [(text, each.question, each.answer) for each in anna.questions]
    question = tokenizer(questions.prompt("", anna.questions[0].question, tokenizer), return_tensors="pt").input_ids

    def adapted(config):
        return get_peft_model(copy.deepcopy(backbone), config)

    # Learnt over the wire, without privacy and with it; the cloud keeps a budget of units while an answer is written.
    mine, secret, cloudy = (adapted(PrivateLoraConfig(r_c2d=8, r_d2c=8)) for _ in range(3))
    with CloudServer(cloudy, precision="fp32", cache=retention.bounded(cloudy, H2O(), BUDGET)) as cloud:
        with DeviceClient(cloud.address, mine, precision="fp32") as device:
            optimizer = AdamW(device.trainable(), lr=3e-2)
            losses = [device.train_step(batch, optimizer=optimizer) for _ in range(3)]
            far = device.generate(prompt.ids, NEW, chunk_size=CHUNK)[0, len(prompt) :]
        with DeviceClient(cloud.address, secret, precision="fp32") as device:
            optimizer = AdamW(device.trainable(), lr=3e-2)
            loader = DataLoader(documents, batch_size=2, collate_fn=corpora.batch)
            wire = private_by(secret, optimizer, loader, per_example=device.per_example)
            for sample in wire:
                wire.step(sample)
    mine.save_pretrained(folder / "wire")
    # Learnt on the device, and beside others.
    own = transfer(backbone, batch, None, "lora", steps=4, lr=3e-2, batch=2, private=private_by)
    own.save(folder / "own")
    together = train_many(backbone, own.model.peft_config["default"], {"anna": batch}, steps=2, lr=3e-2, progress=False)
    # Read within a budget, and whole; served.
    read = functools.partial(chunked_prefill, input_ids=prompt.ids, scorer=H2O(), chunk_size=CHUNK)
    kept, whole = read(backbone, budget=BUDGET), read(backbone, budget=len(prompt))
    kept.save(folder / "read")
    engine = Engine(backbone, tokenizer)
    for name, adapter in {"wire": folder / "wire", "private": Adapter.from_peft(secret), "own": own.adapter()}.items():
        engine.load(name, adapter)
    engine.load("together", together["anna"])
    requests = [Request(question, name, NEW, reading=kept if after else None) for name, after in SERVED]
    served = dict(zip(SERVED, engine.generate(requests), strict=True))
    return types.SimpleNamespace(**locals())


@pytest.fixture(scope="module")
def anna(tmp_path_factory):
    return life(tmp_path_factory.mktemp("anna"))


@torch.no_grad()
def plain(model, ids, scored):
    """Log-probabilities ``(scored, vocab)`` before each token of a document that is scored, by one forward pass."""
    return model(ids[None]).logits[0, :-1][scored[1:]].double().log_softmax(-1)


def test_every_note_is_learnt_in_one_form_by_every_loop(anna):
    """From the same batch and the same model, each loop begins with the loss that Hugging Face's model has."""
    assert len(anna.documents) == len(anna.batch["input_ids"]) == ENTRIES
    with torch.no_grad():
        expected = anna.backbone(**anna.batch).loss.item()
    assert anna.losses[0] == pytest.approx(expected, rel=relative(int(anna.batch["attention_mask"].sum())))
    assert anna.losses == sorted(anna.losses, reverse=True)
    task = Task(anna.backbone, anna.batch, None, "lora", batch=ENTRIES)
    assert task.step() == pytest.approx(expected, rel=relative(int(anna.batch["attention_mask"].sum())))
    asked = questions.expected(anna.asked, anna.tokenizer)
    pairs = [(each.ids[~each.scored], each.ids[each.scored]) for each in asked]
    logs = [
        train_heads(anna.backbone, RetainingHeads.attach(anna.backbone), data, steps=2, progress=False)
        for data in (corpora.batch(asked), pairs)
    ]
    assert logs[0].rows() == logs[1].rows()


@pytest.mark.parametrize(("name", "after"), SERVED)
def test_served_as_the_model_writes_alone(anna, name, after):
    if name == "together":
        anna.engine.adapters[name].save(anna.folder / name)
    folders = {name: anna.folder / name for name in ("wire", "own", "together")}
    model = {None: anna.backbone, "private": anna.secret}.get(name)
    model = model or PeftModel.from_pretrained(copy.deepcopy(anna.backbone), folders[name])
    ask = functools.partial(anna.kept.ask, model) if after else functools.partial(model.generate)
    written = ask(anna.question, max_new_tokens=NEW, do_sample=False)[0, -NEW:].tolist()
    assert anna.served[name, after] == written
    assert list(anna.served.values()).count(written) == 1


def test_privacy_is_what_the_accountant_says_of_the_steps(anna):
    for epsilon, steps in ((anna.wire.epsilon, 3), (anna.own.epsilon, 4)):
        accountant = create_accountant("prv")
        accountant.history = [(SIGMA, 2 / ENTRIES, steps)]
        assert epsilon(DELTA) == pytest.approx(accountant.get_epsilon(DELTA))


def test_the_cloud_forgets_as_the_model_does_alone(anna):
    read = anna.read(anna.mine, budget=BUDGET, positions="original")
    with read.evicting():
        near = anna.mine.generate(**read.inputs(), max_new_tokens=NEW - 1, do_sample=False)[0]
    assert anna.far.tolist() == near.tolist()
    unbounded = anna.mine.generate(anna.prompt.ids[None], max_new_tokens=NEW, do_sample=False)[0, -NEW:]
    assert anna.far.tolist() != unbounded.tolist()


def test_answers_cost_what_one_forward_pass_says(anna):
    """With the text in the prompt, or read before; with counts of the notes, which know how they go on."""
    model, tokenizer, weight = anna.backbone, anna.tokenizer, 0.5
    asked, after = (questions.expected(anna.asked, tokenizer, read=read) for read in (False, True))
    rows = [plain(model, d.ids, d.scored) for d in asked]
    expected = -torch.cat([r.gather(1, d.ids[d.scored][:, None]) for r, d in zip(rows, asked, strict=True)]).mean()
    near = functools.partial(pytest.approx, rel=relative(len(asked[0])))
    assert nats(score(model, tokenizer, asked, seq=1024)) == near(expected.item())
    assert nats(score(model, tokenizer, after, reading=anna.whole)) == near(expected.item())
    assert nats(score(model, tokenizer, after, reading=anna.kept)) != near(expected.item())
    counts = Counts(d.ids for d in anna.documents)
    mixed = [
        counts.mix(d.ids[:place], row, weight)[d.ids[place]]
        for d, each in zip(asked, rows, strict=True)
        for place, row in zip(d.scored.nonzero()[:, 0].tolist(), each, strict=True)
    ]
    known = counts.score(asked, token_log_probs(model, tokenizer, asked, seq=1024), weight)
    assert nats(known) == near(-torch.stack(mixed).mean().item())
    assert nats(known) < expected


def test_a_reading_knows_when_its_adapter_has_learnt_on(anna):
    model = PeftModel.from_pretrained(copy.deepcopy(anna.backbone), anna.folder / "wire", is_trainable=True)
    read, again = anna.read(model, budget=BUDGET), retention.load(anna.folder / "read", anna.backbone)
    assert torch.equal(*(each.score(anna.backbone, anna.question) for each in (anna.kept, again)))
    read.score(model, anna.question)
    with (
        CloudServer(anna.cloudy, precision="fp32") as cloud,
        DeviceClient(cloud.address, model, precision="fp32") as device,
    ):
        device.train_step(anna.batch, optimizer=AdamW(device.trainable(), lr=1e-2))
    with pytest.warns(UserWarning, match="the adapter of PeftModel has changed since it read this"):
        read.score(model, anna.question)


def test_what_is_no_lora_is_refused_with_its_reason(anna):
    ladder = anna.adapted(LadderConfig(r=8))
    ladder.save_pretrained(anna.folder / "ladder")
    for load in (lambda: anna.engine.load("ladder", anna.folder / "ladder"), lambda: Adapter.from_peft(ladder)):
        with pytest.raises(InvalidAdapterError, match="a ladder"):
            load()
    assert "ladder" not in anna.engine.adapters
    head = transfer(anna.backbone, anna.batch, None, "head", steps=1)
    with pytest.raises(ValueError, match=r"lm_head\.weight is no LoRA adapter: keep state"):
        head.adapter()
