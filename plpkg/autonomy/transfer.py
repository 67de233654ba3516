"""Making a public model a person's own, on the device.

The AutLearn paper freezes all layers but the last. Then the last layer's input never changes: it is computed once,
however often the data are read. (The paper keeps it for online learning only.) A person has little data, and learning
too long does harm: what counts is the state that was best on the person's own later data, which may be the public
model itself. BatchNorm keeps the public statistics, and dropout rests.
"""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

from plpkg.autonomy.evaluation import evaluate_logits
from plpkg.autonomy.nets import HeadSplit, logits, plain
from plpkg.autonomy.personal import Transfer
from plpkg.autonomy.scope import personal_copy
from plpkg.corpora.examples import IGNORED, Examples
from plpkg.files import checkpoints
from plpkg.fingerprints import digest
from plpkg.training_loop import learn, rising_and_falling
from plpkg.validation import number, whole_number

BATCH_NORM = nn.modules.batchnorm._BatchNorm
WARMUP = 5
"""Steps in which the learning rate rises, at most a tenth of all; then it falls linearly to zero."""


class Task:
    """One person's learning, step by step, so that it can be spread over windows and go on after a kill.

    Parameters
    ----------
    model, train, validation
        The public model, and the person's own data; without validation the last state counts. Texts may be a batch as
        ``corpora.batch`` makes it.
    scope, lora
        The part that is trained, as for :func:`personal_copy`.
    steps, lr, batch
        Of AdamW without weight decay. The rate rises for :data:`WARMUP` steps, then falls linearly to zero. Gradients
        are clipped to norm 1.
    evaluate_every, patience
        Steps from one evaluation on the validation data to the next, and after how many without a better loss
        learning stops. ``patience=None``: never, and the last state counts, whatever the validation says. By default 5;
        in a private task it must be None: ε covers the training examples alone, so the validation
        data, which are the person's as well, decide nothing. The ``log`` reads them: do not publish it.
    seed
        Of the order of the samples, and of LoRA's first A.
    start
        Values with which what is trained begins, as for :func:`personal_copy`.
    cache
        For the head alone: compute each sample's features once, not in each step.
    batch_norm
        Let BatchNorm gather its statistics from the batches, as pre-training needs.
    private
        Learn with differential privacy: :func:`plpkg.clipping.make_private` with its settings,
        ``functools.partial(make_private, noise_multiplier=1.0, max_grad_norm=1.0)``, is called with ``(model,
        optimizer, data_loader, losses)``. A row of ``train`` is an example: its loss is the mean over its labels,
        and it is in each sample with probability ``1 / ceil(samples / batch)``. Each step counts, also one that samples
        nobody; with ``max_epsilon`` the task is done before it would spend more. The ε is this task's: another that
        learns from the same data, or the one that ``start`` is from, spends its own. With a ``seed`` in the settings,
        which no other task may have, noise and samples after a kill are those of a run without one; without a seed,
        which is safer, they are drawn anew.

    Raises
    ------
    ValueError
        Settings out of range, a model whose head cannot be trained alone, or one in float16.
    FloatingPointError
        In a step, a loss that is not finite, on training or on validation data; or such a state as the result.
    RuntimeError
        A step was interrupted (Ctrl-C) in the middle of its update; :meth:`load_state_dict` makes the task whole again.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Examples | Mapping,
        validation: Examples | Mapping | None,
        scope: str = "head",
        *,
        steps: int = 200,
        lr: float = 1e-3,
        batch: int = 16,
        evaluate_every: int = 20,
        patience: int | EllipsisType | None = ...,
        seed: int = 0,
        lora=None,
        start: Mapping[str, torch.Tensor] | None = None,
        cache: bool = True,
        batch_norm: bool = False,
        private: Callable | None = None,
    ) -> None:
        if private is not None and not callable(private):
            raise ValueError(f"private must be make_private with its settings (functools.partial), got {private!r}")
        if private and patience not in (..., None):
            raise ValueError(f"patience={patience!r} lets the validation data decide, which no ε covers: leave it out")
        if private and batch_norm:
            raise ValueError("batch_norm=True keeps statistics of the examples without noise: not in a private task")
        if patience is ...:
            patience = None if private else 5
        self._data = (_examples(train), None if validation is None else _examples(validation))
        self.steps = whole_number("steps", steps, 1)
        self._lr = number("lr", lr, open_low=True)
        self._batch = whole_number("batch", batch, 1)
        self._every = whole_number("evaluate_every", evaluate_every, 1)
        self._patience = patience if patience is None else whole_number("patience", patience, 1)
        self._generator = torch.Generator().manual_seed(whole_number("seed", seed, 0, 2**64 - 1))
        self.model, self.trained = personal_copy(model, scope, lora, seed, start)
        for name, p in self.trained.items():
            if p.dtype == torch.float16:
                raise ValueError(f"{name!r} is float16, in which AdamW divides by zero: take bfloat16 or float32")
        # With BatchNorm's statistics, scope and trained parameters are not all that has changed: no file holds that.
        self._made_of = dict(scope=None if batch_norm else scope, public=digest(plain(model)))
        self._norms = []
        self._kept = dict(self.trained)
        if batch_norm:
            self._norms = [m for m in self.model.modules() if isinstance(m, BATCH_NORM)]
            self._kept |= dict(self.model.named_buffers())
        self._split = HeadSplit(self.model) if cache and scope == "head" else None
        if self._split:
            self._split.verify(self._data[0].x[:1])
        self._check_labels()
        self._features: tuple[Examples, Examples | None] | None = None  # what the head reads, made when first needed
        self._optimizer = torch.optim.AdamW(self.trained.values(), lr=self._lr, weight_decay=0.0)
        self._torn = False  # whether an update was interrupted
        self._order: list[torch.Tensor] = []  # the batches that are left of an epoch, the next one last
        self.log: list[dict] = []
        self.identity = dict(
            scope=scope,
            steps=self.steps,
            lr=self._lr,
            batch=self._batch,
            evaluate_every=self._every,
            seed=seed,
            patience=self._patience,
            batch_norm=batch_norm,
            sha256=self._sha256(),
            # Sorted, since PEFT keeps names in sets, whose order is another one in each process.
            lora=json.dumps(lora and lora.to_dict(), default=sorted, sort_keys=True),
        )
        self._private = None
        if private:
            self.identity["private"] = True
            self._private = self._private_training(private)
        self._begin(0, self._copied())

    def _check_labels(self) -> None:
        """ValueError for labels that are no classes of the model, or validation data without any."""
        train, validation = self._data
        with torch.no_grad():
            classes = logits(self.model, train.x[:1]).shape[-1]
        for name, part in (("train", train), ("validation", validation)):
            if part is None:
                continue
            if not part.labels:
                if part is validation:
                    raise ValueError("validation has no label that counts: give None, and the last state counts")
                continue
            low, high = (int(bound) for bound in part.y[part.y != IGNORED].aminmax())
            if low < 0 or high >= classes:
                raise ValueError(f"{name} has labels from {low} to {high}, and the model has {classes} classes")

    def _begin(self, made: int, best: dict[str, torch.Tensor]) -> None:
        """Prepare the updates after ``made`` steps; ``best`` is the state that counts so far."""
        self.made = made
        self._best = best
        if self._private:
            self._updates = self._private_updates(self._private, made)
        else:
            bar = tqdm(range(made, self.steps), total=self.steps, disable=True)
            self._updates = learn(bar, self._gradient, [self._optimizer], self._rate)

    def _rate(self, step: int) -> float:
        warmup = min(WARMUP, self.steps // 10)
        return self._lr * rising_and_falling(step, warmup, self.steps)

    def _private_training(self, private: Callable):
        """The private training of a twin, which has the same parameters, and training mode of its own."""
        shared = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        twin = copy.deepcopy(self.model, shared)
        train, validation = self._data
        split = None
        if self._split:
            split = HeadSplit(twin)
            # Row by row, so that no row's features depend on the others, whatever the body does.
            train = features(twin, train, batch=1)
            self._features = (train, validation and features(self.model, validation))
        loader = DataLoader(TensorDataset(train.x, train.y), batch_size=self._batch)
        return private(_Classes(twin, split), self._optimizer, loader, mean_over_labels)

    def _private_updates(self, private, made: int) -> Iterator[tuple[int, float]]:
        """As :func:`learn`: after each private step its number, and the mean loss of the samples in it."""
        for step in range(made, self.steps):
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate(step)
            losses, count = private.step(private.sample())
            loss = losses.mean().item() if count else 0.0
            yield step + 1, loss

    def _sha256(self) -> str:
        """Of the model and of the data, so that no other task goes on from here."""
        tensors = list(self.model.state_dict().values())
        for part in self._data:
            if part is not None:
                tensors += [part.x, part.y]
        result = hashlib.sha256()
        for tensor in tensors:
            values = tensor.detach().cpu().contiguous().flatten()
            result.update(values.view(torch.uint8).numpy())
        return result.hexdigest()

    @property
    def best_step(self) -> int:
        """The step of the state that counts: the one with the lowest validation loss, or the last."""
        if self._patience is None or not self.log:
            return self.made
        return min(self.log, key=lambda row: row["loss"])["step"]

    @property
    def done(self) -> bool:
        """Whether all steps are made, the last ones have brought nothing, or ε allows no more."""
        if self.made == self.steps:
            return True
        if self._private is not None and self._private.done:
            return True
        if self._patience is None:
            return False
        evaluations_in_vain = sum(row["step"] > self.best_step for row in self.log)
        return evaluations_in_vain >= self._patience

    def _require_whole(self) -> None:
        if self._torn:
            raise RuntimeError(f"step {self.made + 1} was interrupted in its update: load a state, or begin a new task")

    def _versions(self) -> list[int]:
        """How often each trained parameter and each of AdamW's averages was written to: whether an update has begun."""
        tensors = list(self.trained.values())
        for averages in self._optimizer.state.values():
            tensors += averages.values()
        return [tensor._version for tensor in tensors]

    def step(self) -> float:
        """Make a step, evaluate if it is time, and return the step's loss in nats; ValueError if it is done."""
        self._require_whole()
        if self.done:
            raise ValueError(f"the task is done after {self.made} steps of {self.steps}")
        self._judge()
        versions = self._versions()
        try:
            self.made, loss = next(self._updates)
        except BaseException:  # a loss that is not finite, or Ctrl-C: a generator that has raised is at its end
            made = self.made
            if self._private:
                made = self._private.steps  # a private step that was released is not made again
            else:
                self._torn = self._versions() != versions
            self._optimizer.zero_grad()
            self._begin(made, self._best)
            raise
        del self._order[-1:]  # only now: an interrupted step reads its batch again
        self._judge()
        return loss

    def result(self) -> Transfer:
        """The state that counts, of the steps made so far."""
        self._require_whole()
        if self.made == self.steps:
            self._judge()
        best = self._copied() if self.best_step == self.made else self._best
        for name in self.trained:
            if not best[name].isfinite().all():
                raise FloatingPointError(f"{name!r} is not finite after step {self.best_step}: take a lower lr")
        shared = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        model = copy.deepcopy(self.model, shared)
        model.load_state_dict(best, strict=False)
        spent = self._private.spending() if self._private else None
        state = {name: best[name] for name in self.trained}
        return Transfer(model, state, list(self.log), self.best_step, spent, **self._made_of)

    @property
    def _inputs(self) -> tuple[Examples, Examples | None]:
        """Training and validation data; where the head alone is trained, what the body makes of them."""
        if self._split and not self._features:
            train, validation = self._data
            self._features = (features(self.model, train), validation and features(self.model, validation))
        return self._features or self._data

    def _logits(self, batch: Examples) -> torch.Tensor:
        """The logits of what has a label: ``(labels, classes)``."""
        chosen = batch.y != IGNORED
        if self._split:
            return self._split.logits(batch.x[chosen])
        return logits(self.model, batch.x)[chosen]

    def _gradient(self, step: int) -> float:
        """Leave the clipped gradient of the next batch in the parameters, and return its loss, as :func:`learn` asks.

        If the gradient's norm is not finite, the norm stands in place of the loss, and :func:`learn` raises.
        """
        train = self._inputs[0]
        if not self._order:
            self._order = train.order(self._batch, self._generator)
        batch = train[self._order[-1]]
        for norm in self._norms:
            norm.train()
        labels = batch.y[batch.y != IGNORED]
        # The sum over the labels' number: torch's own mean of no label is NaN.
        loss = cross_entropy(self._logits(batch), labels, reduction="sum") / max(1, len(labels))
        loss.backward()
        gradient_norm = nn.utils.clip_grad_norm_(self.trained.values(), 1.0).item()
        self.model.eval()
        if not math.isfinite(gradient_norm):
            return gradient_norm
        return loss.item()

    @torch.no_grad()
    def _judge(self) -> None:
        """Evaluate if it is time, unless that was done: an interrupted evaluation is made again."""
        due = self.made % self._every == 0 or self.made == self.steps
        was_done = self.log and self.log[-1]["step"] >= self.made
        if not due or was_done:
            return
        validation = self._inputs[1]
        if not validation:
            return
        judged = evaluate_logits(self._logits, validation)
        self.log.append({"step": self.made, "loss": judged.loss, "accuracy": judged.accuracy})
        if self.best_step == self.made:
            self._best = self._copied()

    def _copied(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self._kept.items()}

    def state_dict(self) -> dict:
        """Everything on which the next step depends."""
        self._require_whole()
        nothing = torch.zeros(0, dtype=torch.long)
        state = dict(
            made=self.made,
            kept=self._copied(),
            best=self._best,
            log=list(self.log),
            left=torch.cat([nothing, *self._order]),  # of the epoch, batch after batch
            sizes=[len(batch) for batch in self._order],
        )
        if self._private:
            state["private"] = self._private.state_dict()
        state["optimizer"] = copy.deepcopy(self._optimizer.state_dict())
        state["generator"] = self._generator.get_state()
        return state

    def load_state_dict(self, state: dict) -> None:
        """Go on from there: what :meth:`state_dict` gave, of a task with the same arguments.

        Raises
        ------
        ValueError
            The private training was another one.
        """
        if self._private:
            self._private.load_state_dict(state["private"])
        checkpoints.restore({"optimizer": self._optimizer}, {"optimizer": copy.deepcopy(state["optimizer"])})
        self._generator.set_state(state["generator"])
        with torch.no_grad():
            for name, value in state["kept"].items():
                self._kept[name].copy_(value)
        self._order = list(state["left"].split(state["sizes"])) if state["sizes"] else []
        self.log = list(state["log"])
        self._torn = False
        self._begin(state["made"], state["best"])


def _examples(data: Examples | Mapping) -> Examples:
    """Data as examples; a batch of texts is made into some."""
    if isinstance(data, Examples):
        return data
    return Examples.of(data)


class _Classes(nn.Module):
    """A model's logits, or those of its features where there is a ``split``: ``(batch, classes, ...)``.

    It is in training mode, as private training asks, and what is within stays in evaluation mode.
    """

    def __init__(self, model: nn.Module, split: HeadSplit | None) -> None:
        super().__init__()
        self.model = model
        self._split = split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self._split.logits(x) if self._split else logits(self.model, x)
        return made.movedim(-1, 1)  # where cross_entropy wants the classes


def mean_over_labels(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of each row of ``(x, y)`` the mean cross-entropy over its labels, ``(rows,)``; 0 where it has none."""
    x, y = batch
    losses = cross_entropy(model(x), y, reduction="none", ignore_index=IGNORED)  # (rows,) or (rows, seq)
    labels = (y.reshape(len(x), -1) != IGNORED).sum(1)
    return losses.reshape(len(x), -1).sum(1) / labels.clamp(min=1)


@torch.no_grad()
def features(model: nn.Module, examples: Examples, batch: int = 64) -> Examples:
    """The head's input for each sample, ``batch`` of them at a time, with its labels: ``(samples, ..., features)``."""
    split = HeadSplit(model)
    return Examples.joined(Examples(split.features(part.x), part.y) for part in examples.chunks(batch))


def transfer(
    model: nn.Module,
    train: Examples | Mapping[str, Any],
    validation: Examples | Mapping[str, Any] | None,
    scope: str = "head",
    **settings: Any,
) -> Transfer:
    """Make a public model a person's own, in one go; the parameters are those of :class:`Task`."""
    task = Task(model, train, validation, scope, **settings)
    while not task.done:
        task.step()
    return task.result()
