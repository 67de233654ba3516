"""Personalising over the wire: the device holds the text, the labels, the loss and every M.

What crosses tells of them nonetheless: the rows of the embedding, off which the text can be read; what each M answers,
from which M can be solved for (:mod:`plpkg.residual.attacks`); and the gradients of both.

The publication's settings: AdamW, a short warm-up and then a constant rate, gradients clipped at 1. The batch of a
step depends on the seed and the step alone, so that a run that was stopped goes on with the same batches.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from tqdm.auto import tqdm

from plpkg import checkpoints, corpora
from plpkg.corpora import Document, Writer
from plpkg.corpora.folder import read_utf8
from plpkg.learning import learn, rising
from plpkg.residual.wire.device import DeviceClient
from plpkg.residual.wire.tensors import pack
from plpkg.results import Tabular
from plpkg.validation import number, whole_number

CHECKPOINT, REMEDY = "checkpoint.pt", "take another folder and a lower lr"


@dataclass(frozen=True)
class Training(Tabular):
    """What a run did.

    Attributes
    ----------
    losses
        The loss of each step, in nats per token.
    """

    losses: tuple[float, ...]

    def rows(self) -> list[dict]:
        return [{"step": i + 1, "loss": loss} for i, loss in enumerate(self.losses)]

    def __repr__(self) -> str:
        return f"Training({len(self.losses)} steps, loss {self.losses[0]:.3f} to {self.losses[-1]:.3f} nats per token)"


def texts(source: str) -> list[Document]:
    """The training text of a writer (``writer:numpy``), of a folder of text files, or one file.

    Raises
    ------
    ValueError, OSError
        No such writer, or nothing that can be read: a file that is not UTF-8, say.
    """
    kind, _, name = source.partition(":")
    if kind == "writer":
        return corpora.writer(name).split("train")
    path = Path(source)
    if path.is_dir():
        return [document for writer in corpora.text_folder(path) for document in writer.split("train")]
    return [Document(path.name, read_utf8(path))]


def train(
    client: DeviceClient,
    model: PeftModel,
    tokenizer,
    documents: Sequence[Document | str],
    out: str | Path,
    *,
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
        What to learn. It is not sent as such; the rows of the embedding are, off which it can be read.
    out
        A folder: gets ``checkpoint.pt``, and at the end the adapter as ``save_pretrained`` writes it. The files are
        their owner's alone, and so is the folder if it is new.
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
    ConnectionError
        The cloud cannot be reached; the last checkpoint is there.
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
    documents = tuple(d if isinstance(d, Document) else Document(str(i), d) for i, d in enumerate(documents))
    start = get_peft_model_state_dict(model, adapter_name=client.adapter_name)
    terms = {field.name: value for field, value in client.terms.ListFields() if not field.is_repeated}
    identity = terms | {
        "start": hashlib.sha256(b"".join(pack(start[name], torch.float32) for name in sorted(start))).hexdigest(),
        "text": Writer("device", {"train": documents}).fingerprint("train"),
        "steps": steps, "batch": batch, "seq": seq, "accumulate": accumulate, "lr": lr, "warmup": warmup, "seed": seed,
    }  # fmt: skip
    state = checkpoints.load(out / CHECKPOINT, identity)
    losses = state["losses"] if state else []
    encoded = corpora.encode(documents, tokenizer)
    stream = corpora.batches(encoded, batch=batch, seq=seq, seed=seed, start=len(losses) * accumulate)
    here = {id(p) for p in client.trainable()}
    parameters = [p for p in model.parameters() if id(p) in here]  # in the model's order
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    if state:
        set_peft_model_state_dict(model, state["adapter"], adapter_name=client.adapter_name)
        optimizer.load_state_dict(state["optimizer"])

    out.parent.mkdir(parents=True, exist_ok=True)
    out.mkdir(mode=0o700, exist_ok=True)
    items = accumulate * batch * (seq - 1)
    bar = tqdm(range(len(losses), steps), "personalising", initial=len(losses), total=steps, disable=not progress)

    def gradient(step: int) -> float:
        loss = 0.0
        try:
            for ids in itertools.islice(stream, accumulate):
                loss += client.train_step(ids, ids, num_items=items)
            if not (norm := torch.nn.utils.clip_grad_norm_(parameters, 1.0)).isfinite():
                raise FloatingPointError(f"the gradient's norm is {norm.item()}")
        except FloatingPointError as error:
            raise FloatingPointError(f"in step {step + 1}, {error}: {REMEDY}") from error
        return loss

    def save(done: int) -> None:
        learnt = get_peft_model_state_dict(model, adapter_name=client.adapter_name)
        state = {"identity": identity, "losses": losses, "optimizer": optimizer.state_dict(), "adapter": learnt}
        checkpoints.save(out / CHECKPOINT, state)

    optimizer.zero_grad()
    for _, loss in learn(
        bar, gradient, [optimizer], lambda step: lr * rising(step, warmup), save=save,
        checkpoint_every=checkpoint_every, remedy=f": {REMEDY}",
    ):  # fmt: skip
        losses.append(loss)
        bar.set_postfix(loss=f"{loss:.3f}")
    adapter = dict(selected_adapters=[client.adapter_name])
    checkpoints.replace_files(out, lambda folder: model.save_pretrained(folder, **adapter), private=True)
    return Training(tuple(losses))
