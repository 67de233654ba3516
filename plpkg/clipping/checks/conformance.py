"""Does a private training do what its ε claims? Anybody's training function, asked on models whose answer is known.

The function makes a model private with its library and runs the steps that it is given. What the optimizer gets is
seen through torch's own hooks on every optimizer's step, so that no library need be changed. Five checks:

* ``learns``: every parameter that learns is the optimizer's, and gets a gradient where the examples give it one;
* ``sums``: the update is the sum of the examples' clipped gradients, each computed alone by autograd;
* ``sensitivity``: nobody moves it by more than C (:func:`~plpkg.clipping.checks.sensitivity.check_sensitivity`);
* ``noise``: each parameter's has the standard deviation σ·C, also where no example reached it and for an empty sample,
  and another in each step and in each training; its numbers are normal ones, and no two of a step, and no two steps,
  are correlated;
* ``audit``: whether somebody took part is not told from the released numbers more surely than σ allows
  (:func:`~plpkg.clipping.checks.audit.gaussian_audit`).

What is done to noisy updates afterwards is no breach: what is added to each, and an exponential average of them, are
taken off before the checks look.

What conforms here need not conform on another model: bring your own as a :class:`~plpkg.clipping.checks.cases.Case`.

Left out: how samples are drawn, what the accountant says, several processes, models with dropout.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from scipy.stats import beta, chi2, kstest, norm, uniform

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
CHUNK = 1000  # rows at a time, where all pairs are compared
ZOO_EXAMPLES = 17  # with a last micro-batch of one
USERS_OWN = ("loss over the batch's tokens", "actual batch size")
"""Specimens whose mistake is in what a library is given, and not its own (plpkg refuses the first all the same)."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

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
        if self.breaches:
            return "breach"
        return "refuses" if "learns" in self.refusals else "conforms"

    @property
    def sentences(self) -> tuple[str, ...]:
        """Breaches and refusals, check by check."""
        wrong = [f"{check}: {sentence}" for check, sentence in self.breaches.items()]
        refused = [f"{check}: refuses: {said}" for check, said in self.refusals.items()]
        return (*wrong, *refused)


@dataclass(frozen=True)
class Report(Sentences):
    """The outcomes of all cases."""

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
    """The usual cases: ordinary models, and the zoo but for users' mistakes."""
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
    unknown = [check for check in chosen if check not in CHECKS]
    if unknown:
        raise ValueError(f"checks must be of {', '.join(CHECKS)}, got {unknown[0]!r}")
    one_of("clipping", clipping, CLIPPINGS)
    given = globals()["cases"]() if cases is None else cases
    return Report(tuple(examine(Trial(train, case, clipping), chosen) for case in given))


def examine(trial: Trial, checks: Iterable[str]) -> Outcome:
    """Try a training function on one case."""
    case = trial.case
    alone = ""
    try:
        _ = trial.gradients
    except Exception as error:
        alone = f"one example alone, as a Poisson sample may be, stops the model: {first_sentence(error)}"
        trial = replace(trial, case=replace(case, max_grad_norm=1.0))  # whatever C: it may still be refused
    try:
        _ = trial.update
    except RefusalError as refusal:
        return Outcome(case, {}, {"learns": str(refusal)})
    except MiscountError as error:
        return Outcome(case, {"sums": str(error)}, {})
    except (BrokenError, MissingError) as error:
        return Outcome(case, {"learns": str(error)}, {})
    if alone:
        return Outcome(case, {"learns": alone}, {})
    breaches: dict[str, str] = {}
    refusals: dict[str, str] = {}
    for check in checks:
        try:
            sentence = CHECKS[check](trial)
        except RefusalError as refusal:
            refusals[check] = str(refusal)
        except (BrokenError, MissingError, MiscountError, FloatingPointError, ValueError) as error:
            breaches[check] = str(error)
        else:
            if sentence:
                breaches[check] = sentence
    return Outcome(case, breaches, refusals)


def _learns(trial: Trial) -> str | None:
    still = {name for name, wanted in trial.wanted.items() if wanted.any() and not trial.update[name].any()}
    if still:
        far = max(trial.wanted[name].norm().item() for name in still) / trial.max_grad_norm
        return f"{names(still)} gets no gradient, and the examples' clipped ones add up to {far:.3g} C"
    return None


def _sums(trial: Trial) -> str | None:
    limit = trial.max_grad_norm
    again = distance(trial.update, trial.step(trial.case.sample)) / limit
    if not again <= ROUNDING:
        return f"the update of the same batch is another when it is run again without noise, {again:.3g} C away"
    far = distance(trial.update, trial.wanted) / limit
    if far <= ROUNDING:
        return None
    apart = {name: (trial.update[name] - wanted).norm().item() / limit for name, wanted in trial.wanted.items()}
    worst = max(apart, key=apart.__getitem__)
    sentence = (
        f"the update is {far:.3g} C from the sum of the clipped gradients, farthest in {worst} ({apart[worst]:.3g} C)"
    )
    return sentence + _multiple(trial) + _clues(trial)


def _multiple(trial: Trial) -> str:
    """How many times the sum an update is, if it is a multiple of it."""
    got = as_vector(trial.update)
    wanted = as_vector(trial.wanted)
    times = (got @ wanted / (wanted @ wanted)).item()
    if torch.linalg.vector_norm(got - times * wanted) <= ROUNDING * trial.max_grad_norm:
        return f": it is {times:.4g} times that sum"
    return ""


def _clues(trial: Trial) -> str:
    """Without what the update is right."""
    case = trial.case
    clues = {
        "micro_batch": f"; in one batch instead of micro-batches of {case.micro_batch} it is right",
        "before": "; without the step before it is right",
    }
    found = ""
    for field, clue in clues.items():
        if getattr(case, field) is None:
            continue
        easier = replace(trial, case=replace(case, max_grad_norm=trial.max_grad_norm, **{field: None}))
        with suppress(RefusalError, BrokenError):
            if distance(easier.update, trial.wanted) <= ROUNDING * trial.max_grad_norm:
                found += clue
    return found


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
    _, others, update_of_others = trial.without
    clean = (trial.update, update_of_others) * (NOISY_STEPS // 2)  # by turns, as the noisy ones
    noise = []
    for update, without in zip(trial.noisy, clean, strict=True):
        noise.append({name: update[name] - part for name, part in without.items()})
    vectors = torch.stack([as_vector(each) for each in noise]) / std  # (steps, parameters)
    shared = _shared(vectors[1:], vectors[:-1])
    if shared:
        return f"the noise of one step is correlated with that of the next, {shared:.3g}"
    sentence = _deviation(noise, std, "") or _irregular(vectors.double())
    if sentence:
        return sentence
    again = trial.run([trial.case.sample, others] * (STEPS_AGAIN // 2), NOISE_MULTIPLIER)
    noise_again = [as_vector(update) - as_vector(part) for update, part in zip(again, clean, strict=False)]
    if _shared(vectors[:STEPS_AGAIN], torch.stack(noise_again) / std):
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


def _shared(one: torch.Tensor, other: torch.Tensor) -> float:
    """The mean product of numbers of standard deviation 1; 0 if independent ones may have it by chance."""
    total = (one * other).sum().item()  # mean 0, and variance 1 of each product
    count = other.numel()
    return total / count if abs(total) > STANDARD_ERRORS * math.sqrt(count) else 0.0


def _irregular(vectors: torch.Tensor) -> str | None:
    """A sentence about noise ``(steps, numbers)`` of standard deviation 1 that is not of independent normal numbers.

    A sound training gets each of the five sentences with a chance of at most :data:`BY_CHANCE`.
    """
    steps, numbers = vectors.shape
    if kstest(vectors.flatten().numpy(), norm.cdf).pvalue < BY_CHANCE:
        return "the noise is not normal: its numbers have another distribution (Kolmogorov and Smirnov's test)"
    lengths = {"steps": (vectors.square().sum(1), numbers), "numbers": (vectors.square().sum(0), steps)}
    for what, (squares, count) in lengths.items():
        if kstest(chi2.cdf(squares.numpy(), count), uniform.cdf).pvalue < BY_CHANCE:
            return f"the noise of different {what} differs in size more, or less, than normal numbers do"
    shared = _correlated(vectors)
    if shared is not None:
        return f"the noise of two steps is correlated, {shared:.3g}: it is used again"
    shared = _correlated(vectors.T)
    if shared is not None:
        return f"two numbers of the noise are correlated in all steps, {shared:.3g}: one seed, or one row, for several?"
    return None


def _correlated(rows: torch.Tensor) -> float | None:
    """The largest correlation of two rows, if independent normal numbers have it with less than :data:`BY_CHANCE`.

    Of n such numbers in a row, the squared correlation is Beta(1/2, (n - 1)/2) distributed.
    """
    count, length = rows.shape
    if count < 2 or length < 3:
        return None
    pairs = count * (count - 1) / 2
    limit = math.sqrt(beta.isf(BY_CHANCE / pairs, 0.5, (length - 1) / 2))
    rows = torch.nn.functional.normalize(rows, dim=1)
    largest = 0.0
    for first, part in enumerate(rows.split(CHUNK)):
        products = part @ rows.T
        products.diagonal(first * CHUNK).zero_()  # each with itself
        largest = max(largest, products.abs().max().item())
    return largest if largest > limit else None


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
    if not pull.any():  # nobody is told by this update
        return None
    direction = pull / torch.linalg.vector_norm(pull) / trial.max_grad_norm
    scores = [(as_vector(update) @ direction).item() for update in trial.noisy]
    takes_part = [step % 2 == 0 for step in range(NOISY_STEPS)]
    audit = gaussian_audit(scores, takes_part, DELTA, confidence=1 - BY_CHANCE)
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
