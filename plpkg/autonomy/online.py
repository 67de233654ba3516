"""Learning from each datum as it comes: predict, hear the answer, learn; the body's work is done once.

A prediction computes the head's input h. It is kept until the label comes, and 16 of them make a step: with the body
frozen, the gradient of the head W, b on the mean loss of a batch needs nothing else,

    dW = (softmax(W h + b) - onehot(y))^T h / batch,    db = sum(softmax(W h + b) - onehot(y)) / batch.

The AutLearn paper keeps predictions as well, which is exact only if none of the batch was made before the last step;
here the head's outputs are computed anew, so that labels may come late and in any order.

**The guard.** Learning may do harm: on a stream that changes, or from wrong labels. So public and personal head both
predict, and a prediction is the personal head's only while that one leads, and only if, were all its open predictions
wrong, those shown would have at most ``allowance`` errors more than the public model's. Whatever the stream, and
whenever its labels come, that bound holds. Left out: labels that never come are never forgotten.

**A kill.** :meth:`OnlineLearner.save` writes everything on which the next prediction and the next step depend, and a
learner that resumes goes on with the same bits. What came since the last save has to come again. If each prediction is
saved before it is shown, the bound holds over kills as well: what was shown is open until its label is saved.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from plpkg.autonomy.nets import HeadSplit, plain
from plpkg.autonomy.personal import Transfer
from plpkg.autonomy.scope import personal_copy
from plpkg.files import checkpoints
from plpkg.fingerprints import digest
from plpkg.results import Tabular
from plpkg.validation import number, whole_number

FILE = "online.safetensors"
JUDGED = ("shown", "public", "personal")
"""Whose predictions each label judges."""


class Prediction(NamedTuple):
    """The ``classes (batch,)`` that are shown, and ``ids`` by which to name each sample when its label comes."""

    ids: list[int]
    classes: torch.Tensor


class _Open(NamedTuple):
    """A prediction whose label has not come: the features (features,), both heads' classes, whether its own is shown.

    A file has it as a plain row, in this order.
    """

    features: torch.Tensor
    public: int
    personal: int
    trusted: bool


class OnlineLearner(Tabular):
    """Predicts with a model whose head learns from the labels, and counts how often it is right.

    Parameters
    ----------
    model
        The public model, which stays as it is. Of a sequence model, what follows a sample's last place is predicted.
    lr, batch
        Of a step of SGD on the head, made whenever so many labels have come.
    allowance
        How many errors more than the public model's may be shown; None shows the personal head's predictions always.

    Raises
    ------
    ValueError
        Dropout in a model that is not in evaluation mode; logits that are not the head's alone; a head whose weight is
        computed of others.
    """

    def __init__(self, model: nn.Module, *, lr: float = 0.5, batch: int = 16, allowance: int | None = 10) -> None:
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
                raise ValueError(f"{name!r} drops at random, and kept features would not be those of a prediction")
        self.lr = number("lr", lr, open_low=True)
        self.batch = whole_number("batch", batch, 1)
        self.allowance = allowance if allowance is None else whole_number("allowance", allowance, 0)
        self.model, _ = personal_copy(model, "head")
        self._digest = digest(plain(model))
        self._split = HeadSplit(self.model)
        self._verified = False  # until there is an x to look at
        self.head = self._split.head.requires_grad_(False)
        for name, _ in self.head.named_parameters():
            if name not in ("weight", "bias"):
                raise ValueError(f"{self._split.name!r} has {name} in place of a weight: remove the parametrisation")
        self._public = [p.clone() for p in self.head.parameters()]
        self._frozen = []
        for name, p in self.model.state_dict(keep_vars=True).items():
            if name.rpartition(".")[0] != self._split.name:
                self._frozen.append(p)
        self._versions = self._written()
        self._open: dict[int, _Open] = {}
        self._ready: list[tuple[torch.Tensor, int]] = []  # features and label of those that wait for a step
        self._next = 0  # the next prediction's id
        self.outcomes: list[dict[str, bool]] = []
        self._right = Counter()

    def _written(self) -> list[int]:
        """How often each of the body's tensors was written to."""
        return [p._version for p in self._frozen]

    @torch.no_grad()
    def predict(self, x: torch.Tensor) -> Prediction:
        """Classify samples ``(batch, ...)``.

        Raises
        ------
        ValueError
            The batch is missing or empty, or what the body makes of a sample is not finite: none of them is kept, and
            the head stays as it is.
        """
        if x.dim() < 2 or not len(x):
            raise ValueError(f"x must be (batch, ...), got {tuple(x.shape)}")
        self._check()
        features = self._split.features(x)
        if features.dim() == 3:  # (batch, seq, features), of which the last place counts
            features = features[:, -1]
        bad = (~features.isfinite().all(-1)).nonzero().flatten().tolist()
        if bad:
            raise ValueError(f"sample {bad[0]} of {len(features)} gives features that are not finite: leave it out")
        if not self._verified:
            self._split.verify(x, bare=True)
            self._verified = True
        public = nn.functional.linear(features, *self._public).argmax(-1).tolist()
        personal = self.head(features).argmax(-1).tolist()
        ids = list(range(self._next, self._next + len(x)))
        classes = []
        for i, h, theirs, own in zip(ids, features, public, personal, strict=True):
            trusted = theirs != own and self._trusted()
            prediction = _Open(h.to(self.head.weight.dtype, copy=True), theirs, own, trusted)
            self._open[i] = prediction
            classes.append(self._shown(prediction))
        self._next += len(ids)
        return Prediction(ids, torch.tensor(classes))

    def _shown(self, prediction: _Open) -> int:
        """The class that is shown: the personal head's if it was trusted, else the public one's."""
        return prediction.personal if prediction.trusted else prediction.public

    def _trusted(self) -> bool:
        """Whether the personal head's next prediction may be shown where it differs from the public one."""
        if self.allowance is None:
            return True
        right = self._right
        more_errors = right["public"] - right["shown"]  # than the public model's, so far
        open_shown = sum(prediction.trusted for prediction in self._open.values())  # each may turn out to be wrong
        return right["personal"] > right["public"] and more_errors + open_shown < self.allowance

    @torch.no_grad()
    def label(self, ids: list[int], y: torch.Tensor | Sequence[int]) -> None:
        """Hear the right classes ``(labels,)`` of earlier samples, in any order; learn when there are enough.

        Raises
        ------
        ValueError
            An id that is unknown or was labelled before, a class out of range: nothing is learnt from any of them.
        FloatingPointError
            A step would make the head other than finite: its samples are dropped, and the head stays as it is. All
            other labels count.
        RuntimeError
            The body has changed since the prediction.
        """
        self._check()
        ids = _plain(ids)
        classes = [whole_number("y", value, 0, self.head.out_features - 1, "classes - 1") for value in _plain(y)]
        if len(ids) != len(classes):
            raise ValueError(f"each id needs a label, got {len(ids)} ids and {len(classes)} labels")
        for i in ids:
            if i not in self._open:
                raise ValueError(f"no prediction {i!r} waits for a label")
            if ids.count(i) > 1:
                raise ValueError(f"prediction {i!r} is given {ids.count(i)} labels")
        failed = None
        for i, true_class in zip(ids, classes, strict=True):
            prediction = self._open.pop(i)
            outcome = dict(
                shown=self._shown(prediction) == true_class,
                public=prediction.public == true_class,
                personal=prediction.personal == true_class,
            )
            self.outcomes.append(outcome)
            self._right.update(outcome)
            self._ready.append((prediction.features, true_class))
            if len(self._ready) == self.batch:
                try:
                    self._step()
                except FloatingPointError as error:
                    failed = failed or error
        if failed:
            raise failed

    def _step(self) -> None:
        """A step of SGD on the head, with the samples that wait for one."""
        features = torch.stack([h for h, _ in self._ready])  # (batch, features)
        y = torch.tensor([label for _, label in self._ready])
        self._ready = []
        gradients = head_gradient(self.head, features, y)
        stepped = [p - self.lr * gradient for p, gradient in zip(self.head.parameters(), gradients, strict=False)]
        if not all(p.isfinite().all() for p in stepped):
            raise FloatingPointError(f"a step of {len(y)} labels makes the head not finite: take a lower lr")
        for p, moved in zip(self.head.parameters(), stepped, strict=False):
            p.copy_(moved)

    def _check(self) -> None:
        """RuntimeError if the body has changed, of which the features are kept."""
        if self._written() != self._versions:
            raise RuntimeError("a parameter of the body has changed: features of open predictions are stale")

    @property
    def open(self) -> list[int]:
        """The ids of predictions whose labels have not come."""
        return list(self._open)

    @property
    def _identity(self) -> dict:
        return {"public": self._digest, "lr": self.lr, "batch": self.batch, "allowance": self.allowance}

    def save(self, folder: str | Path) -> None:
        """Write all that :meth:`resume` needs, its owner's alone: the head, features and classes of open predictions,
        those that wait for a step, and who was right.

        Raises
        ------
        OSError
            The disk is full, or cannot be written: the last save is as it was.
        ValueError
            More predictions are open than a file has room for, hundreds of thousands.
        """
        outcomes = torch.tensor([[row[who] for who in JUDGED] for row in self.outcomes], dtype=torch.bool)
        state = {
            "head": list(self.head.parameters()),
            "open": {i: tuple(prediction) for i, prediction in self._open.items()},
            "ready": self._ready,
            "next": self._next,
            "outcomes": outcomes.reshape(-1, len(JUDGED)),  # (labels, 3)
        }
        checkpoints.save(Path(folder, FILE), {"identity": self._identity, "learner": state})

    @torch.no_grad()
    def resume(self, folder: str | Path) -> bool:
        """Go on from the last :meth:`save` in this folder, by a learner of the same arguments; whether there is one.

        Raises
        ------
        ValueError
            The file is damaged, or of another public model or other settings: nothing has changed.
        """
        saved = checkpoints.load(Path(folder, FILE), self._identity)
        if saved is None:
            return False
        state = saved["learner"]
        for p, value in zip(self.head.parameters(), state["head"], strict=True):
            p.copy_(value)
        device = self.head.weight.device
        self._next = state["next"]
        self._open = {}
        for i, (features, *rest) in state["open"].items():
            self._open[i] = _Open(features.to(device), *rest)
        self._ready = [(features.to(device), label) for features, label in state["ready"]]
        self.outcomes = [dict(zip(JUDGED, row, strict=True)) for row in state["outcomes"].tolist()]
        self._right = Counter({who: sum(row[who] for row in self.outcomes) for who in JUDGED})
        return True

    def result(self) -> Transfer:
        """The personal head as it is now, with the model that it makes: to save, and to load elsewhere."""
        model, head = personal_copy(self.model, "head")
        state = {name: p.detach() for name, p in head.items()}
        return Transfer(model, state, [], len(self.outcomes), scope="head", public=self._digest)

    @property
    def accuracy(self) -> float:
        """The share of labelled predictions that were right when they were shown (prequential accuracy)."""
        return self._right["shown"] / max(1, len(self.outcomes))

    def rows(self) -> list[dict]:
        """For each label in the order of arrival, who was right: the shown class, the public and the personal head."""
        return self.outcomes

    def __repr__(self) -> str:
        return f"OnlineLearner(accuracy {self.accuracy:.4f} of {len(self.outcomes):,}, {len(self._open):,} open)"


def _plain(numbers: Any) -> list[int]:
    """A list as it is, a tensor or an array as a list."""
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers


def head_gradient(head: nn.Linear, features: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the mean cross-entropy: of the weight ``(classes, features)`` and of the bias ``(classes,)``.

    ``features (batch, features)`` are the head's inputs, ``y (batch,)`` the right classes.
    """
    error = head(features).softmax(-1)  # (batch, classes)
    error[torch.arange(len(y)), y] -= 1
    error /= len(y)
    return error.T @ features, error.sum(0)
