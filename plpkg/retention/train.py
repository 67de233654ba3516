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
from typing import Any, TypeGuard, cast

import torch
from torch.nn import functional

from plpkg import training_loop
from plpkg.inputs import IGNORED, ids_and_labels, token_ids
from plpkg.results import Tabular
from plpkg.retention.head import RetainingHeads
from plpkg.retention.labels import labels_and_states
from plpkg.validation import number, shown, whole_number

PARTS = ("loss", "regression", "smoothing", "overlap")
"""The numbers that the log has of each step."""

CLIP_VALUE = 0.5
"""The bound at which each number of a gradient is clipped, as published."""

Fields = Mapping[str, Any]
Part = torch.Tensor | str | list[int]
Example = tuple[Part, Part] | Fields | Sequence[Fields]


class TrainingLog(Tabular):
    """The numbers of each step: ``loss``, its parts ``regression`` and ``smoothing``, and the :func:`overlap`."""

    def __init__(self, rows: list[dict]) -> None:
        self._rows = rows

    def rows(self) -> list[dict]:
        return self._rows

    def __repr__(self) -> str:
        last_tenth = self._rows[-max(1, len(self._rows) // 10) :]
        loss = sum(row["loss"] for row in last_tenth) / len(last_tenth)
        shared = sum(row["overlap"] for row in last_tenth) / len(last_tenth)
        return f"TrainingLog: {len(self._rows)} steps, loss {loss:.3f}, overlap {shared:.2f} at the end"


def overlap(predicted: torch.Tensor, labels: torch.Tensor, share: float = 0.1) -> float:
    """The publication's metric: the part of the top tenth by label that is in the top tenth by prediction.

    Parameters
    ----------
    predicted, labels
        ``(…, seq)``.
    share
        The share of the units that are the best, at least one unit.
    """
    k = max(1, int(share * labels.shape[-1]))
    best_by_label = torch.zeros_like(labels, dtype=torch.bool).scatter(-1, labels.topk(k).indices, True)
    found = best_by_label.gather(-1, predicted.topk(k).indices)  # (…, k)
    return found.float().mean().item()


def losses(predicted: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The regression and the smoothing term, before ``alpha``.

    Parameters
    ----------
    predicted, labels
        ``(layers, batch, num_kv_heads, seq)``.
    """
    regression = functional.smooth_l1_loss(predicted, labels)
    between = (predicted[..., 1:] - predicted[..., :-1]).square()  # (layers, batch, num_kv_heads, seq - 1)
    if not between.numel():  # a prompt of one unit has no neighbours, and nothing has no mean
        return regression, between.sum()
    return regression, between.mean(dim=(1, 2, 3)).sum()


def train_heads(
    model: Any,
    heads: RetainingHeads,
    data: Iterable[Example] | Callable[[], Iterable[Example]] | Fields,
    *,
    steps: int = 3000,
    examples_per_step: int = 1,
    lr: float = 5e-4,
    warmup: int | None = None,
    alpha: float = 2.5e-3,
    rows: str = "answer",
    chunk_size: int = 4096,
    tokenizer: Any = None,
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
        The settings above, by default the publication's; ``warmup`` is two thirds of the steps, as published.
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
    processes = accelerator.num_processes
    if whole_number("examples_per_step", examples_per_step, 1) % processes:
        raise ValueError(f"examples_per_step={examples_per_step} must be a multiple of the processes={processes}")
    share = examples_per_step // processes  # the examples of a step that this process takes

    identity = {
        "heads": vars(heads.config),
        "steps": steps,
        "examples_per_step": examples_per_step,
        "lr": lr,
        "warmup": warmup,
        "alpha": alpha,
        "rows": rows,
    }
    folder = None if out is None else Path(out)
    main = accelerator.is_main_process
    run = training_loop.TrainingRun(steps, folder, identity, checkpoint_every=checkpoint_every, writes=main)

    def learn_from(example: Example) -> list[float]:
        """Add an example's gradient, and return its :data:`PARTS`."""
        ids, prompt_len = _tokens(example, tokenizer, model.device)
        labels, states = labels_and_states(model, ids, prompt_len, rows=rows, chunk_size=chunk_size)
        predicted = wrapped([layer.float() for layer in states])
        regression, smoothing = losses(predicted, labels)
        loss = regression + alpha * smoothing
        accelerator.backward(loss / share)
        return [loss.item(), regression.item(), smoothing.item(), overlap(predicted, labels)]

    def gradient(step: int) -> float:
        taken = list(itertools.islice(examples, examples_per_step))
        if len(taken) < examples_per_step:
            raise ValueError(f"the data end after {step * examples_per_step + len(taken)} examples, in step {step + 1}")
        means = torch.zeros(len(PARTS), device=model.device)
        for i, example in enumerate(taken[accelerator.process_index :: processes]):
            last = i == share - 1  # with it the processes exchange their gradients, once a step
            with contextlib.nullcontext() if last else accelerator.no_sync(wrapped):
                parts = learn_from(example)
            means += torch.tensor(parts, device=model.device) / share
        accelerator.clip_grad_value_(heads.parameters(), CLIP_VALUE)
        of_all_processes: Any = accelerator.reduce(means, "mean")
        run.log.append({"step": step + 1} | dict(zip(PARTS, of_all_processes.tolist(), strict=True)))
        return run.log[-1]["loss"]

    def rate(step: int) -> float:
        return lr * training_loop.rising_and_falling(step, warmup, steps)

    with training_loop.evaluating(model), _learning(heads):
        optimizer = torch.optim.AdamW(heads.parameters(), lr=lr, betas=(0.9, 0.95))  # betas as published
        wrapped, optimizer = accelerator.prepare(heads, optimizer)
        run.begin("retaining heads", progress, heads=heads, optimizer=optimizer)
        examples = itertools.islice(_examples(data), run.done * examples_per_step, None)  # without those used already
        for _, loss in run.learn(gradient, [optimizer], rate):
            run.bar.set_postfix(loss=f"{loss:.3f}", overlap=f"{run.log[-1]['overlap']:.2f}")
    if folder and main:
        heads.save_pretrained(folder)
    accelerator.wait_for_everyone()
    return TrainingLog(run.log)


@contextlib.contextmanager
def _learning(heads: RetainingHeads) -> Iterator[None]:
    """Within it all heads learn, in float32; then they are in their precision, and those frozen that were."""
    precision = next(heads.parameters()).dtype
    frozen = [parameter for parameter in heads.parameters() if not parameter.requires_grad]
    heads.float().requires_grad_(True)
    try:
        yield
    finally:
        heads.to(precision)
        for parameter in frozen:
            parameter.requires_grad_(False)


def _examples(data: Iterable[Example] | Callable[[], Iterable[Example]] | Fields) -> Iterable[Example]:
    """The examples of what :func:`train_heads` was given: a batch's rows, again and again, or those of a data set."""
    if callable(data):
        data = data()
    if isinstance(data, Mapping):
        return training_loop.endless("the rows of the batch", _rows(cast(Fields, data)))
    return data


def _rows(batch: Fields) -> list[Example]:
    """The texts of a batch as examples, without what stands behind their last label."""
    ids, labels = ids_and_labels(batch)
    place = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    ends = ((labels != IGNORED) * place).amax(1).tolist()  # of each row the place of the last label, or 0
    examples = []
    for row_ids, row_labels, end in zip(ids, labels, ends, strict=True):
        if end:
            examples.append({"input_ids": row_ids[:end], "labels": row_labels[:end]})
    return examples


def _tokens(example: Example, tokenizer, device) -> tuple[torch.Tensor, int]:
    """Prompt and answer as ids ``(batch, seq)``, and the prompt's length."""
    prompt, answer = (_ids(part, tokenizer) for part in _parts(example, tokenizer))
    prompt_len = prompt.shape[-1]
    answer_len = answer.shape[-1]
    if not prompt_len or not answer_len:
        raise ValueError(f"an example has {prompt_len} tokens of prompt and {answer_len} of answer")
    return torch.cat([prompt, answer], dim=-1).to(device), prompt_len


READ_BY_MODELS = {"tools", "documents", "images", "videos", "audios", "pixel_values"}
"""Columns of a data set that a chat template or a model would read. Other columns (an id, a source) are left alone."""
FORMS = "(prompt, answer), {'prompt': …, 'answer' or 'completion': …}, {'input_ids': …, 'labels': …}, or chat messages"
"""The forms of an example, as an error names them."""


def _parts(example: Example, tokenizer) -> tuple:
    """Prompt and answer of an example, in whichever form it is."""
    if isinstance(example, Mapping):
        return _parts_of_columns(example, tokenizer)
    if _is_chat(example):
        return _parts_of_chat(example, tokenizer)
    if not isinstance(example, (tuple, list)) or len(example) != 2:
        raise _refused(example)
    return tuple(example)


def _refused(example: object) -> ValueError:
    return ValueError(f"an example must be {FORMS}, got {shown(example)}")


def _parts_of_columns(example: Fields, tokenizer) -> tuple:
    """Prompt and answer of a row of a data set."""
    others = sorted(READ_BY_MODELS & example.keys())
    if others:
        raise ValueError(f"an example has {others[0]!r}, which is not read here: texts and token ids are")
    if "messages" in example:
        return _parts(example["messages"], tokenizer)
    if {"input_ids", "labels"} <= example.keys():
        return _parts_of_labelled(example)
    names = [name for name in ("answer", "completion") if name in example]
    if "prompt" not in example or len(names) != 1:
        raise _refused(example)
    prompt = example["prompt"]
    answer = example[names[0]]
    if _is_chat(prompt) and _is_chat(answer):
        return _parts([*prompt, *answer], tokenizer)
    return prompt, answer


def _parts_of_labelled(example: Fields) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and answer ``(batch, n)`` each of ids whose labels are -100 for the prompt."""
    ids, labels = ids_and_labels(example, "an example")
    in_answer = labels != IGNORED
    prompt_len = int((~in_answer[0]).sum())
    if in_answer[:, :prompt_len].any() or not in_answer[:, prompt_len:].all():
        raise ValueError(f"labels must be -100 for the prompt, the first tokens, alone, got {shown(labels)}")
    return ids[:, :prompt_len], ids[:, prompt_len:]


def _parts_of_chat(messages: Sequence[Fields], tokenizer) -> tuple[str, str]:
    """The text of the messages up to the assistant's answer, which is the last, and the text of the answer."""
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError("chat messages need a tokenizer that has a chat template")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(f"the last message must be the assistant's answer, got {shown(messages[-1])}")
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    if not whole.startswith(prompt):
        raise ValueError("the chat template writes the messages before an answer in another way once it is there")
    return prompt, whole[len(prompt) :]


def _is_chat(value: object) -> TypeGuard[Sequence[Fields]]:
    """Whether it is a list of chat messages, one at least."""
    if not isinstance(value, (tuple, list)) or not value:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in value)


def _ids(part: Any, tokenizer) -> torch.Tensor:
    """Token ids ``(batch, n)`` of a text, a list or a tensor."""
    if isinstance(part, str):
        if tokenizer is None:
            raise ValueError(f"text needs a tokenizer, got {part[:40]!r} without one")
        part = tokenizer(part, add_special_tokens=False)["input_ids"]
    return token_ids(part, "a prompt or answer that is no text", least=0)
