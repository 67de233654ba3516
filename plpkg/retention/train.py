"""Training of retaining heads: they regress the labels, the backbone stays as it is (arXiv 2410.01805, appendix A.1).

The loss of an example is ``SmoothL1(CIS, label)``, the mean over layers, heads and units, plus ``alpha`` times the
mean squared difference of neighbouring units' CIS. The published code takes that difference's mean within a layer
and adds the layers up, so that its weight grows with the depth: 0.08 for 32 layers, where the text says 0.0025. So it
is here.

Published: AdamW with betas (0.9, 0.95), one example a step, 3,000 steps, learning rate 5e-4 with 2,000 steps of
linear warm-up and a linear fall, gradients clipped by value at 0.5. Heads learn in float32 here, whatever the
backbone's precision; prompts are not cut at 10,240 tokens.

Several processes (``accelerate launch``) share the examples of a step.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from plpkg import training_loop
from plpkg.inputs import IGNORED, ids_and_labels, token_ids
from plpkg.results import Tabular
from plpkg.retention.head import RetainingHeads
from plpkg.retention.labels import labels_and_states
from plpkg.validation import number, shown, whole_number

PARTS = ("loss", "regression", "smoothing", "overlap")
"""What the log has of each step."""

CLIP_VALUE = 0.5
"""Where each number of a gradient is clipped, as published."""

Example = tuple[torch.Tensor | str | list, torch.Tensor | str | list] | Mapping | Sequence[Mapping]


class TrainingLog(Tabular):
    """What each step came to: ``loss``, its parts ``regression`` and ``smoothing``, and the :func:`overlap`."""

    def __init__(self, rows: list[dict]) -> None:
        self._rows = rows

    def rows(self) -> list[dict]:
        return self._rows

    def __repr__(self) -> str:
        tail = self._rows[-max(1, len(self._rows) // 10) :]
        mean = {name: sum(row[name] for row in tail) / len(tail) for name in ("loss", "overlap")}
        return (
            f"TrainingLog: {len(self._rows)} steps, loss {mean['loss']:.3f}, overlap {mean['overlap']:.2f} at the end"
        )


def overlap(predicted: torch.Tensor, labels: torch.Tensor, share: float = 0.1) -> float:
    """The publication's metric: which part of the top tenth by label is in the top tenth by prediction.

    Parameters
    ----------
    predicted, labels
        ``(…, seq)``.
    share
        The share of the units that are the best, at least one unit.
    """
    k = max(1, int(share * labels.shape[-1]))
    best = torch.zeros_like(labels, dtype=torch.bool).scatter(-1, labels.topk(k).indices, True)
    return best.gather(-1, predicted.topk(k).indices).float().mean().item()


def losses(predicted: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The regression and the smoothing term, before ``alpha``.

    Parameters
    ----------
    predicted, labels
        ``(layers, batch, num_kv_heads, seq)``.
    """
    regression = functional.smooth_l1_loss(predicted, labels)
    between = (predicted[..., 1:] - predicted[..., :-1]).square()
    by_layer = between.mean(dim=(1, 2, 3)) if between.numel() else between.sum(dim=(1, 2, 3))
    return regression, by_layer.sum()


def train_heads(
    model: nn.Module,
    heads: RetainingHeads,
    data: Iterable[Example] | Callable[[], Iterable[Example]] | Mapping,
    *,
    steps: int = 3000,
    examples_per_step: int = 1,
    lr: float = 5e-4,
    warmup: int | None = None,
    alpha: float = 2.5e-3,
    rows: str = "answer",
    chunk_size: int = 4096,
    tokenizer=None,
    out: str | Path | None = None,
    checkpoint_every: int = 100,
    progress: bool = True,
) -> TrainingLog:
    """Train heads in place, or go on where the last run into the same folder stopped.

    Parameters
    ----------
    model, heads
        A backbone and heads attached to it.
    data
        Examples: pairs ``(prompt, answer)``; dictionaries with ``prompt`` and ``answer`` or ``completion``, or with
        ``input_ids`` and ``labels`` (-100 for the prompt), as a ``datasets.Dataset`` yields them; or chat messages, the
        last of which is the answer. Prompts and answers are token ids, a list, ``(seq,)`` or ``(batch, seq)``, or
        texts, with ``tokenizer`` and without the special tokens that it might add. To go on after a stop, the data must
        begin anew with the same examples: those that were used are skipped. Or a batch as ``corpora.batch`` makes it:
        its rows are the examples, as often as there are steps.
    steps, lr, warmup, alpha
        The settings above; ``warmup`` is two thirds of the steps by default, as published.
    examples_per_step
        For several processes, which need one each.
    rows, chunk_size
        The arguments of :func:`plpkg.retention.cis_labels`.
    out
        A folder for ``checkpoint.safetensors`` and, at the end, the heads.
    checkpoint_every
        Steps between two checkpoints.
    progress
        Show a bar.

    Raises
    ------
    ValueError
        The heads belong to another backbone, an example has none of these forms, the data end too soon, an argument is
        out of range, or ``out`` holds another run.
    FloatingPointError
        The loss is not finite any more. The last checkpoint is from before.
    """
    whole_number("steps", steps, 1)
    warmup = steps * 2 // 3 if warmup is None else whole_number("warmup", warmup, 0, steps, "steps")
    number("lr", lr, open_low=True)
    number("alpha", alpha)
    whole_number("checkpoint_every", checkpoint_every, 1)
    heads.check(model)
    accelerator = training_loop.accelerator(cpu=model.device.type == "cpu")
    processes, process = accelerator.num_processes, accelerator.process_index
    if whole_number("examples_per_step", examples_per_step, 1) % processes:
        raise ValueError(f"examples_per_step={examples_per_step} must be a multiple of the processes={processes}")
    share = examples_per_step // processes

    identity = {"heads": vars(heads.config), "steps": steps, "examples_per_step": examples_per_step, "lr": lr}
    identity |= {"warmup": warmup, "alpha": alpha, "rows": rows}
    folder, main = None if out is None else Path(out), accelerator.is_main_process
    run = training_loop.TrainingRun(steps, folder, identity, checkpoint_every=checkpoint_every, writes=main)

    def gradient(step: int) -> float:
        taken = list(itertools.islice(examples, examples_per_step))
        if len(taken) < examples_per_step:
            raise ValueError(f"the data end after {step * examples_per_step + len(taken)} examples, in step {step + 1}")
        sums = torch.zeros(len(PARTS), device=model.device)
        for i, example in enumerate(taken[process::processes]):
            ids, prompt_len = _tokens(example, tokenizer, model.device)
            labels, states = labels_and_states(model, ids, prompt_len, rows=rows, chunk_size=chunk_size)
            with contextlib.nullcontext() if i == share - 1 else accelerator.no_sync(wrapped):
                predicted = wrapped([s.float() for s in states])
                regression, smooth = losses(predicted, labels)
                loss = regression + alpha * smooth
                accelerator.backward(loss / share)
            parts = [loss.item(), regression.item(), smooth.item(), overlap(predicted, labels)]
            sums += torch.tensor(parts, device=model.device) / share
        accelerator.clip_grad_value_(heads.parameters(), CLIP_VALUE)
        run.log.append({"step": step + 1} | dict(zip(PARTS, accelerator.reduce(sums, "mean").tolist(), strict=True)))
        return run.log[-1]["loss"]

    def rate(step: int) -> float:
        return lr * training_loop.rising_and_falling(step, warmup, steps)

    with training_loop.evaluating(model), _learning(heads):
        optimizer = torch.optim.AdamW(heads.parameters(), lr=lr, betas=(0.9, 0.95))
        wrapped, optimizer = accelerator.prepare(heads, optimizer)
        run.begin("retaining heads", progress, heads=heads, optimizer=optimizer)
        data = data() if callable(data) else data
        data = training_loop.endless("the rows of the batch", _rows(data)) if isinstance(data, Mapping) else data
        examples = itertools.islice(data, run.done * examples_per_step, None)
        for _, loss in run.learn(gradient, [optimizer], rate):
            run.bar.set_postfix(loss=f"{loss:.3f}", overlap=f"{run.log[-1]['overlap']:.2f}")
    if folder and main:
        heads.save_pretrained(folder)
    accelerator.wait_for_everyone()
    return TrainingLog(run.log)


@contextlib.contextmanager
def _learning(heads: RetainingHeads) -> Iterator[None]:
    """Within it all heads learn, in float32; then they are in their precision, and those frozen that were."""
    precision = heads.layers[0][0].weight.dtype
    frozen = [parameter for parameter in heads.parameters() if not parameter.requires_grad]
    heads.float().requires_grad_(True)
    try:
        yield
    finally:
        heads.to(precision)
        for parameter in frozen:
            parameter.requires_grad_(False)


def _rows(batch: Mapping) -> list[Example]:
    """The texts of a batch as examples, without what stands behind their last label."""
    ids, labels = ids_and_labels(batch)
    ends = ((labels != IGNORED) * torch.arange(1, labels.shape[1] + 1, device=labels.device)).amax(1).tolist()
    rows = zip(ids, labels, ends, strict=True)
    return [{"input_ids": row[:end], "labels": label[:end]} for row, label, end in rows if end]


def _tokens(example: Example, tokenizer, device) -> tuple[torch.Tensor, int]:
    """Prompt and answer as ids ``(batch, seq)``, and the prompt's length."""
    prompt, answer = (_ids(part, tokenizer) for part in _parts(example, tokenizer))
    if not prompt.shape[-1] or not answer.shape[-1]:
        raise ValueError(f"an example has {prompt.shape[-1]} tokens of prompt and {answer.shape[-1]} of answer")
    return torch.cat([prompt, answer], dim=-1).to(device), prompt.shape[-1]


READ_BY_MODELS = {"tools", "documents", "images", "videos", "audios", "pixel_values"}
"""Columns of a data set that a chat template or a model would read. Other columns (an id, a source) are left alone."""
FORMS = "(prompt, answer), {'prompt': …, 'answer' or 'completion': …}, {'input_ids': …, 'labels': …}, or chat messages"


def _parts(example: Example, tokenizer) -> tuple:
    """Prompt and answer of an example, in whichever form it is."""
    refused = ValueError(f"an example must be {FORMS}, got {shown(example)}")
    if isinstance(example, Mapping):
        others = sorted(READ_BY_MODELS & example.keys())
        if others:
            raise ValueError(f"an example has {others[0]!r}, which is not read here: texts and token ids are")
        if "messages" in example:
            return _parts(example["messages"], tokenizer)
        if {"input_ids", "labels"} <= example.keys():
            ids, labels = ids_and_labels(example, "an example")
            counted = labels != IGNORED
            start = int((~counted[0]).sum())
            if counted[:, :start].any() or not counted[:, start:].all():
                raise ValueError(f"labels must be -100 for the prompt, the first tokens, alone, got {shown(labels)}")
            return ids[:, :start], ids[:, start:]
        names = [name for name in ("answer", "completion") if name in example]
        if "prompt" not in example or len(names) != 1:
            raise refused
        prompt, answer = example["prompt"], example[names[0]]
        return _parts([*prompt, *answer], tokenizer) if _is_chat(prompt) and _is_chat(answer) else (prompt, answer)
    if _is_chat(example):
        if tokenizer is None or not tokenizer.chat_template:
            raise ValueError("chat messages need a tokenizer that has a chat template")
        if len(example) < 2 or example[-1]["role"] != "assistant":
            raise ValueError(f"the last message must be the assistant's answer, got {shown(example[-1])}")
        whole = tokenizer.apply_chat_template(example, tokenize=False)
        prompt = tokenizer.apply_chat_template(example[:-1], tokenize=False, add_generation_prompt=True)
        if not whole.startswith(prompt):
            raise ValueError("the chat template writes the messages before an answer in another way once it is there")
        return prompt, whole[len(prompt) :]
    if not isinstance(example, (tuple, list)) or len(example) != 2:
        raise refused
    return tuple(example)


def _is_chat(value: object) -> bool:
    messages = value if isinstance(value, (tuple, list)) else []
    return bool(messages) and all(isinstance(message, Mapping) and "role" in message for message in messages)


def _ids(part: object, tokenizer) -> torch.Tensor:
    """Token ids ``(batch, n)`` of a text, a list or a tensor."""
    if isinstance(part, str):
        if tokenizer is None:
            raise ValueError(f"text needs a tokenizer, got {part[:40]!r} without one")
        part = tokenizer(part, add_special_tokens=False)["input_ids"]
    return token_ids(part, "a prompt or answer that is no text", least=0)
