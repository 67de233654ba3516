"""Does a private training do what its ε claims? Anybody's training function, asked on models whose answer is known.

The function makes a model private with its library and runs the steps that it is given. What the optimizer gets is
seen through torch's own hooks on every optimizer's step, so that no library need be changed. Five checks:

* ``learns``: every parameter that learns is the optimizer's, and gets a gradient where the examples give it one;
* ``sums``: the update is the sum of the examples' clipped gradients, each computed alone by autograd;
* ``sensitivity``: nobody moves it by more than C (:func:`~plpkg.clipping.checks.sensitivity.check_sensitivity`);
* ``noise``: each parameter's has the standard deviation σ·C, also where no example reached it and for an empty sample,
  and another in each step and in each training;
* ``audit``: whether somebody took part is not told from the released numbers more surely than σ allows
  (:func:`~plpkg.clipping.checks.audit.gaussian_audit`).

What conforms here need not conform on another model: bring your own as a :class:`~plpkg.clipping.checks.cases.Case`.

Left out: how samples are drawn, what the accountant says, several processes, models with dropout.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from scipy.stats import chi2, norm

from plpkg.clipping.batches import examples
from plpkg.clipping.checks.audit import gaussian_audit, gaussian_epsilon
from plpkg.clipping.checks.cases import Case
from plpkg.clipping.checks.ordinary import ordinary
from plpkg.clipping.checks.sensitivity import as_vector, check_sensitivity
from plpkg.clipping.checks.specimens import specimens
from plpkg.clipping.checks.trial import (
    NOISE_MULTIPLIER,
    NOISY_STEPS,
    BrokenError,
    MiscountError,
    MissingError,
    RefusalError,
    Trial,
    Update,
    distance,
    first_sentence,
    names,
)
from plpkg.clipping.clip import CLIPPINGS
from plpkg.results import Sentences
from plpkg.validation import one_of

DELTA = 1e-5  # δ
ROUNDING = 1e-3  # a deviation of so many C is put down to rounding; Opacus divides by the norm plus 1e-6
STANDARD_ERRORS = 5  # of a sound training one figure in 1.7 million is further away
STEPS_AGAIN = 8  # of a second training
BY_CHANCE = float(norm.sf(STANDARD_ERRORS))
ZOO_EXAMPLES = 17  # with a last micro-batch of one
USERS_OWN = ("loss over the batch's tokens", "actual batch size")
"""Specimens that no library can get right: the mistake is in what it is given."""


@dataclass(frozen=True)
class Outcome:
    """What came out of one case.

    Attributes
    ----------
    case
        The case.
    breaches
        By check, what is wrong, in a sentence.
    refusals
        By check, what the training said instead of training; of ``learns``: it does not train this at all.
    """

    case: Case
    breaches: dict[str, str]
    refusals: dict[str, str]

    @property
    def verdict(self) -> str:
        """``breach``, ``refuses`` or ``conforms``."""
        return "breach" if self.breaches else "refuses" if "learns" in self.refusals else "conforms"

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is wrong and what was refused, check by check."""
        wrong = [f"{check}: {sentence}" for check, sentence in self.breaches.items()]
        return (*wrong, *(f"{check}: refuses: {said}" for check, said in self.refusals.items()))


@dataclass(frozen=True)
class Report(Sentences):
    """What came out of every case."""

    outcomes: tuple[Outcome, ...]

    @property
    def breached(self) -> tuple[str, ...]:
        """The names of the cases with a breach."""
        return tuple(outcome.case.name for outcome in self.outcomes if outcome.verdict == "breach")

    @property
    def ok(self) -> bool:
        """Whether there is no breach, and not everything was refused."""
        return not self.breached and any(outcome.verdict == "conforms" for outcome in self.outcomes)

    def rows(self) -> list[dict]:
        return [
            {
                "case": outcome.case.name,
                "verdict": outcome.verdict,
                "found by": ", ".join(outcome.breaches) or "nothing",
                "what": "; ".join(outcome.sentences),
                "lesson": outcome.case.lesson,
            }
            for outcome in self.outcomes
        ]

    def __repr__(self) -> str:
        verdicts = [outcome.verdict for outcome in self.outcomes]
        names = f" ({'; '.join(self.breached)})" if self.breached else ""
        counts = f"{verdicts.count('conforms')} conform, {verdicts.count('refuses')} refused"
        return f"Report({len(verdicts)} cases: {counts}, {len(self.breached)} fail{names})"


def cases() -> tuple[Case, ...]:
    """What a training is tried on if nothing else is said: ordinary models, and the zoo but for users' mistakes."""
    zoo = [case for case in specimens(ZOO_EXAMPLES) if case.name not in USERS_OWN]
    return (*ordinary(), *zoo)


def conformance(
    train: Callable, cases: Iterable[Case] | None = None, *, clipping: str = "flat", checks: Iterable[str] | None = None
) -> Report:
    """Try a training function on cases.

    Parameters
    ----------
    train
        ``train(model, optimizer, criterion, steps, *, max_grad_norm, noise_multiplier, expected_batch_size)`` makes a
        new model private and trains it. The ``optimizer`` has its parameters that learn. The ``criterion`` is a loss
        module: its ``reduction`` is ``mean`` as a rule, and with ``none`` it gives one loss an example (or target).
        ``steps`` are Poisson samples, each a list of micro-batches ``(inputs, target)`` of a tuple of tensors and a
        tensor; of users ``(inputs, target, users)``. The function takes one step of the optimizer for each sample, and
        leaves the learning rate, 0, as it is.
    cases
        On what; without it on :func:`cases`.
    clipping
        By which rule of :class:`~plpkg.clipping.clip.Clip` it clips.
    checks
        Which of :data:`CHECKS`; without it all.

    Notes
    -----
    A ``ValueError`` or ``RuntimeError`` (a ``NotImplementedError`` is one) of ``train`` is a refusal, and no breach;
    any other exception is.

    Raises
    ------
    ValueError
        An unknown check or clipping.
    """
    chosen = tuple(CHECKS) if checks is None else tuple(checks)
    if unknown := [check for check in chosen if check not in CHECKS]:
        raise ValueError(f"checks must be of {', '.join(CHECKS)}, got {unknown[0]!r}")
    one_of("clipping", clipping, CLIPPINGS)
    given = globals()["cases"]() if cases is None else cases
    return Report(tuple(examine(Trial(train, case, clipping), chosen) for case in given))


def examine(trial: Trial, checks: Iterable[str]) -> Outcome:
    """Try a training function on one case."""
    case, breaches, refusals, alone = trial.case, {}, {}, ""
    try:
        _ = trial.gradients
    except Exception as error:
        alone = f"one example alone, as a Poisson sample may be, stops the model: {first_sentence(error)}"
        trial = replace(trial, case=replace(case, max_grad_norm=1.0))  # whatever C: it may still be refused
    try:
        _ = trial.update
    except RefusalError as refusal:
        return Outcome(case, {}, {"learns": str(refusal)})
    except (BrokenError, MissingError, MiscountError) as error:
        return Outcome(case, {"sums" if isinstance(error, MiscountError) else "learns": str(error)}, {})
    if alone:
        return Outcome(case, {"learns": alone}, {})
    for check in checks:
        try:
            if sentence := CHECKS[check](trial):
                breaches[check] = sentence
        except RefusalError as refusal:
            refusals[check] = str(refusal)
        except (BrokenError, MissingError, MiscountError, FloatingPointError, ValueError) as error:
            breaches[check] = str(error)
    return Outcome(case, breaches, refusals)


def _learns(trial: Trial) -> str | None:
    still = {name for name, wanted in trial.wanted.items() if wanted.any() and not trial.update[name].any()}
    if still:
        far = max(trial.wanted[name].norm().item() for name in still) / trial.max_grad_norm
        return f"{names(still)} gets no gradient, and the examples' clipped ones add up to {far:.3g} C"
    return None


def _sums(trial: Trial) -> str | None:
    limit, case = trial.max_grad_norm, trial.case
    again = distance(trial.update, trial.step(case.sample)) / limit
    if not again <= ROUNDING:
        return f"the update of the same batch is another when it is run again without noise, {again:.3g} C away"
    far = distance(trial.update, trial.wanted) / limit
    if far <= ROUNDING:
        return None
    apart = {name: (trial.update[name] - wanted).norm().item() / limit for name, wanted in trial.wanted.items()}
    worst = max(apart, key=apart.get)
    sentence = (
        f"the update is {far:.3g} C from the sum of the clipped gradients, farthest in {worst} ({apart[worst]:.3g} C)"
    )
    got, wanted = as_vector(trial.update), as_vector(trial.wanted)
    times = (got @ wanted / (wanted @ wanted)).item()
    if torch.linalg.vector_norm(got - times * wanted) <= ROUNDING * limit:
        sentence += f": it is {times:.4g} times that sum"
    clues = {
        "micro_batch": f"in one batch instead of micro-batches of {case.micro_batch} it is right",
        "before": "without the step before it is right",
    }
    for field, clue in clues.items():
        if getattr(case, field) is not None:
            easier = replace(trial, case=replace(case, max_grad_norm=limit, **{field: None}))
            with suppress(RefusalError, BrokenError):
                if distance(easier.update, trial.wanted) <= ROUNDING * limit:
                    sentence += f"; {clue}"
    return sentence


def _sensitivity(trial: Trial) -> str | None:
    found = check_sensitivity(
        trial.step, trial.case.sample, trial.max_grad_norm, users=trial.case.users, tolerance=ROUNDING
    )
    if found.ok:
        return None
    place = found.worst_example
    how = "when it is taken away" if found.removed[place] == found.worst else "alone"
    return f"{found.unit} {found.rows()[place][found.unit]} moves the update by {found.worst:.4g} C {how}"


def _noise(trial: Trial) -> str | None:
    std = NOISE_MULTIPLIER * trial.max_grad_norm
    clean = (trial.update, trial.without[2]) * (NOISY_STEPS // 2)
    noise = [
        {name: update[name] - part for name, part in without.items()}
        for update, without in zip(trial.noisy, clean, strict=True)
    ]
    vectors = torch.stack([as_vector(each) for each in noise]) / std  # (steps, parameters)
    shared = (vectors[1:] * vectors[:-1]).sum().item()  # mean 0, and variance 1 of each product
    if abs(shared) > STANDARD_ERRORS * math.sqrt(vectors[1:].numel()):
        return f"the noise of one step is correlated with that of the next, {shared / vectors[1:].numel():.3g}"
    if sentence := _deviation(noise, std, ""):
        return sentence
    again = trial.run([trial.case.sample, trial.without[1]] * (STEPS_AGAIN // 2), NOISE_MULTIPLIER)
    second = (
        torch.stack([as_vector(update) - as_vector(part) for update, part in zip(again, clean, strict=False)]) / std
    )
    shared = (vectors[:STEPS_AGAIN] * second).sum().item()
    if abs(shared) > STANDARD_ERRORS * math.sqrt(second.numel()):
        return (
            "a second training draws the noise of the first (a fixed seed?): the difference of their updates has none"
        )
    try:
        empty = trial.run([examples(trial.case.sample, slice(0, 0))] * NOISY_STEPS, NOISE_MULTIPLIER)
    except (RefusalError, BrokenError):
        return None
    except MiscountError:
        return "an empty sample gets no noise, which says that nobody was in it"
    return _deviation(empty, std, " of an empty sample")


def _deviation(noise: list[Update], std: float, where: str) -> str | None:
    """A sentence about the parameter whose noise is not of this standard deviation, by its sum of squares."""
    for name in noise[0]:
        squares = sum(each[name].double().square().sum().item() for each in noise) / std**2
        count = len(noise) * noise[0][name].numel()
        if not chi2.ppf(BY_CHANCE, count) <= squares <= chi2.isf(BY_CHANCE, count):
            found = math.sqrt(squares / count) if squares >= 0 else math.nan
            return f"the noise of {name}{where} has the standard deviation {found:.3g} σC instead of σC"
    return None


def _audit(trial: Trial) -> str | None:
    who, _, without = trial.without
    pull = as_vector(trial.update) - as_vector(without)
    if not pull.any():
        return None  # nobody is told by this update
    direction = pull / torch.linalg.vector_norm(pull) / trial.max_grad_norm
    scores = [(as_vector(update) @ direction).item() for update in trial.noisy]
    audit = gaussian_audit(scores, [step % 2 == 0 for step in range(NOISY_STEPS)], DELTA, confidence=1 - BY_CHANCE)
    claimed = gaussian_epsilon(NOISE_MULTIPLIER, DELTA)
    if audit.epsilon <= claimed:
        return None
    return f"whether {who} took part shows ε ≥ {audit.epsilon:.3g} in a step at δ={DELTA:g}, and σ claims {claimed:.3g}"


CHECKS: dict[str, Callable[[Trial], str | None]] = {
    "learns": _learns,
    "sums": _sums,
    "sensitivity": _sensitivity,
    "noise": _noise,
    "audit": _audit,
}
"""By name, what gives a sentence about a breach, or nothing."""
