"""Personalising over the wire: the device holds the text, the labels, the loss and every M.

What crosses tells of them nonetheless: the rows of the embedding, off which the text can be read; what each M answers,
from which M can be solved for (:mod:`plpkg.residual.attacks`); and the gradients of both.

The publication's settings: AdamW, a short warm-up and then a constant rate, gradients clipped at 1. The batch of a
step depends on the seed and the step alone, so that a run that was stopped goes on with the same batches.
"""

import functools
import hashlib
import itertools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

from plpkg import corpora
from plpkg.corpora import Document, Writer
from plpkg.corpora.folder import read_utf8
from plpkg.corpora.tokens import Tokens
from plpkg.files import checkpoints
from plpkg.residual.wire.connection import RefusedError
from plpkg.residual.wire.device import DeviceClient
from plpkg.residual.wire.tensors import pack
from plpkg.results import Tabular
from plpkg.scoring import Score, score
from plpkg.training_loop import CHECKPOINT, TrainingRun, rising
from plpkg.validation import number, one_of, whole_number

REMEDY = "take another folder and a lower lr"
HELD_OUT_TOKENS = 2**15
"""At most so many tokens are scored: they cross the network as well."""
STOPS = (ConnectionError, RefusedError, KeyboardInterrupt)
"""Errors that end a run that can go on later."""


@dataclass(frozen=True)
class Training(Tabular):
    """Losses and scores of a run.

    Attributes
    ----------
    losses
        The loss of each step, in nats per token.
    before, after
        Bits per byte of what was held out, before the first step and after the last; ``None`` without such text.
    """

    losses: tuple[float, ...]
    before: float | None = None
    after: float | None = None

    def rows(self) -> list[dict]:
        return [{"step": i + 1, "loss": loss} for i, loss in enumerate(self.losses)]

    def __repr__(self) -> str:
        if self.after is None:
            learnt = f"loss {self.losses[0]:.3f} to {self.losses[-1]:.3f} nats per token"
        else:
            learnt = f"held out {self.before:.3f} to {self.after:.3f} bits per byte"
        return f"Training({len(self.losses)} steps, {learnt})"


def texts(source: str, split: str = "train") -> list[Document]:
    """The text to learn of a writer (``writer:numpy``), of a folder of text files, or one file.

    With ``"validation"`` as ``split`` what is held out: of one file the last tenth, from a paragraph's, a line's, or a
    word's beginning on; of too short a one nothing.

    Raises
    ------
    ValueError, OSError
        No such writer, or nothing that can be read: a file that is not UTF-8, say.
    """
    kind, _, name = source.partition(":")
    if kind == "writer":
        return corpora.writer(name).split(split)
    path = Path(source)
    if path.is_dir():
        documents: list[Document] = []
        for writer in corpora.text_folder(path):
            documents += writer.split(split)
        return documents
    text = read_utf8(path)
    one_of("split", split, ("train", "validation"))
    cut = _last_tenth(text)
    part = text[:cut] if split == "train" else text[cut:]
    return [Document(path.name, part)] if part else []


def _last_tenth(text: str) -> int:
    """Where the last tenth of a text begins: with a paragraph, a line or a word; else its end."""
    for end in ("\n\n", "\n", " "):
        place = text.rfind(end, len(text) // 2, len(text) * 9 // 10)
        if place >= 0:
            return place
    return len(text)


def score_of(client: DeviceClient, config, documents: Sequence[Tokens], *, batch: int = 4, seq: int = 256) -> Score:
    """The score of a text over the wire, every M as it is now.

    Parameters
    ----------
    client, config
        A connected device, and its model's configuration.
    documents
        The text: its first :data:`HELD_OUT_TOKENS`.
    batch, seq
        Windows in a pass, and tokens in a window.

    Raises
    ------
    ValueError
        There is nothing to score.
    ConnectionError, RefusedError
        As in :meth:`DeviceClient.logits`.
    """
    left = HELD_OUT_TOKENS
    firsts: list[Tokens] = []
    for tokens in documents:
        firsts.append(Tokens(**{name: values[:left] for name, values in vars(tokens).items()}))
        left -= len(firsts[-1])
    return score(_OverTheWire(client, config), None, firsts, batch=batch, seq=seq, stride=seq)


class _OverTheWire(torch.nn.Module):
    """A client as the model that :func:`plpkg.scoring.score` asks."""

    def __init__(self, client: DeviceClient, config) -> None:
        super().__init__()
        self.client = client
        self.config = config
        self.device = "cpu"

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> types.SimpleNamespace:
        return types.SimpleNamespace(logits=self.client.logits(input_ids))


def train(
    client: DeviceClient,
    model: PeftModel,
    tokenizer,
    documents: Sequence[Document | str],
    out: str | Path,
    *,
    held_out: Sequence[Document] = (),
    steps: int = 200,
    batch: int = 4,
    seq: int = 256,
    accumulate: int = 1,
    lr: float = 5e-3,
    warmup: int = 20,
    seed: int = 0,
    checkpoint_every: int = 20,
    progress: bool = True,
) -> Training:
    """Train every M of the device, or go on where the last run into the same folder stopped.

    Parameters
    ----------
    client
        Connected with ``model``.
    model
        Whose M are trained; with layers on the device, the M in them as well.
    tokenizer
        Its tokenizer.
    documents
        The text to learn. It is not sent as such; the rows of the embedding are, off which it can be read.
    out
        A folder: gets ``checkpoint.safetensors``, and at the end the adapter as ``save_pretrained`` writes it. The
        files are their owner's alone, and so is the folder if it is new.
    held_out
        A text that is not learnt, but scored before and after: it crosses the network as well.
    steps, batch, seq, accumulate
        Updates; windows in a pass, and tokens in a window; passes in an update.
    lr, warmup
        The learning rate, and the steps in which it is reached.
    seed
        The seed of the order in which windows are read.
    checkpoint_every
        In steps.
    progress
        Show a bar.

    Raises
    ------
    ValueError
        The folder holds another run, or there is too little text.
    FloatingPointError
        A loss or a gradient is not finite: nothing is learnt from it, or saved.
    OSError
        The disk is full: the files are as they were.
    ConnectionError, RefusedError
        The cloud cannot be reached, or does not want to. As after a KeyboardInterrupt, the checkpoint has every step
        that was done, and a note of the exception says where it is.
    """
    for name, value in dict(steps=steps, accumulate=accumulate, checkpoint_every=checkpoint_every).items():
        whole_number(name, value, 1)
    whole_number("warmup", warmup, 0)
    number("lr", lr, open_low=True)
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is not a folder")
    if isinstance(documents, str):
        raise ValueError(f"documents must be a list of texts, got one of {len(documents)} characters")
    documents = tuple(
        each if isinstance(each, Document) else Document(str(i), each) for i, each in enumerate(documents)
    )
    learnt = functools.partial(  # PEFT would ask the hub whether the vocabulary has grown
        get_peft_model_state_dict, model, adapter_name=client.adapter_name, save_embedding_layers=False
    )
    put_back = functools.partial(set_peft_model_state_dict, model, adapter_name=client.adapter_name)
    adapter = types.SimpleNamespace(state_dict=learnt, load_state_dict=put_back)
    text = Writer("device", {"train": documents, "validation": tuple(held_out)})
    settings = dict(steps=steps, batch=batch, seq=seq, accumulate=accumulate, lr=lr, warmup=warmup, seed=seed)
    identity = _identity(client, learnt(), text) | settings
    run = TrainingRun(steps, out, identity, checkpoint_every=checkpoint_every)
    scored = [tokens for tokens in corpora.encode(held_out, tokenizer) if tokens.scored[1:].any()]
    encoded = corpora.encode(documents, tokenizer)
    stream = corpora.batches(encoded, batch=batch, seq=seq, seed=seed, start=run.done * accumulate)
    learning = {id(parameter) for parameter in client.trainable()}
    parameters = [parameter for parameter in model.parameters() if id(parameter) in learning]  # in the model's order
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.mkdir(mode=0o700, exist_ok=True)
    items = accumulate * batch * (seq - 1)  # labels of an update
    run.begin("personalising", progress, adapter=adapter, optimizer=optimizer)

    def gradient(step: int) -> float:
        loss = 0.0
        try:
            for ids in itertools.islice(stream, accumulate):
                loss += client.train_step(ids, ids, num_items=items)
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            if not norm.isfinite():
                raise FloatingPointError(f"the gradient's norm is {norm.item()}")
        except FloatingPointError as error:
            raise FloatingPointError(f"in step {step + 1}, {error}: {REMEDY}") from error
        return loss

    optimizer.zero_grad()
    bits = functools.partial(score_of, client, model.config, scored, batch=batch, seq=seq)
    say_before = client.on_silence
    client.on_silence = run.bar.set_postfix_str
    after = None
    try:
        if scored and not run.done:
            run.facts["before"] = bits().bits_per_byte
        for _, loss in run.learn(gradient, [optimizer], lambda step: lr * rising(step, warmup), remedy=f": {REMEDY}"):
            run.log.append(loss)
            run.bar.set_postfix(loss=f"{loss:.3f}")
        saving: dict[str, Any] = dict(selected_adapters=[client.adapter_name], save_embedding_layers=False)
        checkpoints.replace_files(out, lambda folder: model.save_pretrained(folder, **saving), private=True)
        if "before" in run.facts:
            after = bits().bits_per_byte
    except STOPS as stop:
        if run.done > run.saved and run.settled:
            run.save()
        if run.saved:
            note = f"{out / CHECKPOINT} has {run.saved} of {steps} steps: the same command goes on from there"
        else:
            note = f"no step is kept: {out} has no checkpoint"
        stop.add_note(note)
        raise
    finally:
        client.on_silence = say_before
        run.bar.close()
    return Training(tuple(run.log), run.facts.get("before"), after)


def _identity(client: DeviceClient, start: dict[str, torch.Tensor], text: Writer) -> dict:
    """Facts that tell one run from another besides its settings: the terms, the adapter at the start, and the text."""
    identity = {field.name: value for field, value in client.terms.ListFields() if not field.is_repeated}
    values = b"".join(pack(start[name], torch.float32) for name in sorted(start))
    identity["start"] = hashlib.sha256(values).hexdigest()
    identity["text"] = text.fingerprint("train")
    if text.split("validation"):
        identity["held_out"] = text.fingerprint("validation")
    return identity
