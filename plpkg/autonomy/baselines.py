"""Schemes that learning on the device is compared with, also those that the AutLearn paper left out.

All begin with the same public model, except who has none. Of each person as many batches are learnt from in every
scheme: ``steps``. Pooled learning makes a step of that batch for each person's; what has two stages gives half to each.

* ``public_only``: nobody learns. ``local_only``: there is no public model. Both were left out.
* ``cloud_train``: all people's data in one place, one model. ``cloud_customize``: then each their own; the paper's
  upper bound.
* ``fed_avg`` (McMahan et al. 2017): each round, people train a copy and upload it, and the server averages.
  ``fed_avg_tuned``: then each their own, the baseline that personalised federated learning finds hard to beat.
* ``counts``: no gradient at all. Back-off counts of a person's own text, mixed with the public model; left out.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from plpkg.autonomy.evaluation import evaluate
from plpkg.autonomy.nets import logits, untrained
from plpkg.autonomy.scope import personal_copy
from plpkg.autonomy.transfer import transfer
from plpkg.corpora.examples import IGNORED, Examples, Person
from plpkg.ngrams import Counts
from plpkg.validation import whole_number

People = Mapping[str, Person]
Models = dict[str, nn.Module]
WEIGHTS = (5.0, 20.0, 80.0)
"""Of the public model beside the counts, from which the validation data choose."""


def public_only(model: nn.Module, people: People) -> Models:
    """The public model, for everybody."""
    return dict.fromkeys(people, model)


def personal(model: nn.Module, people: People, scope: str = "head", **settings) -> Models:
    """Each learns alone from the public model: AutLearn; settings are those of :class:`plpkg.autonomy.Task`."""
    models = {}
    for name, person in people.items():
        models[name] = transfer(model, person.train, person.validation, scope, **settings).model
    return models


def local_only(model: nn.Module, people: People, *, seed: int = 0, **settings) -> Models:
    """Each learns alone, all of a model of the same form, from nothing."""
    return personal(untrained(model, seed), people, "all", seed=seed, **settings)


def cloud_train(model: nn.Module, people: People, *, steps: int = 200, batch: int = 16, **settings) -> Models:
    """One model for all, of everybody's data, which the cloud then has."""
    train, validation = _pooled(people)
    pooled = transfer(model, train, validation, "all", steps=steps, batch=batch * len(people), **settings)
    return dict.fromkeys(people, pooled.model)


def cloud_customize(model: nn.Module, people: People, *, steps: int = 200, **settings) -> Models:
    """As :func:`cloud_train`, then each person's own, all of it."""
    pooled = cloud_train(model, people, steps=steps - steps // 2, **settings)
    return _each_own(pooled, people, steps=steps // 2, **settings)


def fed_avg(
    model: nn.Module,
    people: People,
    *,
    rounds: int = 5,
    steps: int = 200,
    patience: int | None = 5,
    seed: int = 0,
    **settings,
) -> Models:
    """One model for all: the mean, weighted by labels, of what each trains (all layers) in a round from the last mean.

    Unless ``patience`` is None, the mean counts that was best on everybody's validation data. BatchNorm's statistics
    stay the public model's.
    """
    whole_number("rounds", rounds, 1, steps, "steps")
    labels = {name: person.train.labels for name, person in people.items()}
    total = sum(labels.values())
    if not total:
        raise ValueError(f"nobody of {len(people)} people has a label that counts")
    shares = {name: count / total for name, count in labels.items()}
    state: dict[str, torch.Tensor] | None = None  # the last mean; before the first round the public model's
    copied, _ = personal_copy(model, "all")
    models = [copied]
    for k in range(rounds):
        of_round = dict(steps=steps * (k + 1) // rounds - steps * k // rounds, seed=seed * rounds + k)
        states = {}
        for name, person in people.items():
            states[name] = transfer(model, person.train, None, "all", start=state, **of_round, **settings).state
        parameters = next(iter(states.values()))
        state = {}
        for key in parameters:
            state[key] = sum((shares[name] * states[name][key] for name in people), torch.zeros(()))
        averaged, _ = personal_copy(model, "all", state=state)
        models.append(averaged)
    validation = [person.validation for person in people.values() if person.validation]
    if patience is None or not validation:
        return dict.fromkeys(people, models[-1])
    losses = [sum(evaluate(candidate, each).loss for each in validation) for candidate in models]
    best = models[losses.index(min(losses))]
    return dict.fromkeys(people, best)


def fed_avg_tuned(model: nn.Module, people: People, *, steps: int = 200, **settings) -> Models:
    """As :func:`fed_avg`, then each person's own, all of it."""
    averaged = fed_avg(model, people, steps=steps - steps // 2, **settings)
    own = {key: value for key, value in settings.items() if key != "rounds"}
    return _each_own(averaged, people, steps=steps // 2, **own)


class WithCounts(nn.Module):
    """A language model mixed with back-off counts: ``x (batch, seq)`` to log-probabilities ``(batch, seq, vocab)``."""

    def __init__(self, model: nn.Module, counts: Counts, weight: float) -> None:
        super().__init__()
        self.model = model
        self.counts = counts
        self.weight = weight

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = logits(self.model, x).log_softmax(-1)
        for row, ids in zip(mixed, x, strict=True):
            for place in range(len(ids)):
                row[place] = self.counts.mix(ids[: place + 1], row[place], self.weight)
        return mixed


def counts(model: nn.Module, people: People) -> Models:
    """The public model, mixed with counts of each person's own text at the weight that suits the validation data.

    ValueError: somebody without validation data.
    """
    validations: dict[str, Examples] = {}
    for name, person in people.items():
        if person.validation is None:
            raise ValueError(f"{name!r} has no validation data, which decide the weight of counts")
        validations[name] = person.validation
    mixed = {}
    for name, person in people.items():
        table = Counts(_sequences(person.train))
        choices = [WithCounts(model, table, weight) for weight in WEIGHTS]
        mixed[name] = min(choices, key=lambda choice: evaluate(choice, validations[name]).loss)
    return mixed


def _sequences(examples: Examples) -> Iterator[torch.Tensor]:
    """The ids of each sample, its last label included."""
    for x, y in zip(examples.x, examples.y, strict=True):
        labelled = (y != IGNORED).nonzero()
        if not len(labelled):
            yield x[:0]
            continue
        length = int(labelled.max()) + 1
        yield torch.cat([x[:length], y[length - 1 : length]])


def _pooled(people: People) -> tuple[Examples, Examples | None]:
    """Everybody's training data, and everybody's validation data if there are any."""
    train = Examples.joined(person.train for person in people.values())
    validation = [person.validation for person in people.values() if person.validation]
    return train, Examples.joined(validation) if validation else None


def _each_own(models: Models, people: People, **settings) -> Models:
    """Each learns on from their model, all of it."""
    learnt = {}
    for name, person in people.items():
        learnt |= personal(models[name], {name: person}, "all", **settings)
    return learnt
