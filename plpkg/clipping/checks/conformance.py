"""Does a private training do what its ε claims? Anybody's training function, asked on models whose answer is known.

The function makes a model private with its library and runs the steps that it is given. What the optimizer gets is
seen through torch's own hooks on every optimizer's step, so that no library need be changed. Five checks:

* ``learns``: every parameter that learns is the optimizer's, and gets a gradient where the examples give it one;
* ``sums``: the update is the sum of the examples' clipped gradients, each computed alone by autograd;
* ``sensitivity``: nobody moves it by more than C (:func:`~plpkg.clipping.checks.sensitivity.check_sensitivity`);
* ``noise``: each parameter's has the standard deviation σ·C, also where no example reached it and for an empty sample,
  and another in each step;
* ``audit``: whether somebody took part is not told from the released numbers more surely than σ allows
  (:func:`~plpkg.clipping.checks.audit.gaussian_audit`).

What conforms here need not conform on another model: bring your own as a :class:`~plpkg.clipping.checks.cases.Case`.

Left out: how samples are drawn, what the accountant says, several processes, models with dropout.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from scipy.stats import chi2, norm
from torch.optim.optimizer import register_optimizer_step_post_hook

from plpkg.clipping.batches import examples
from plpkg.clipping.checks.audit import gaussian_audit, gaussian_epsilon
from plpkg.clipping.checks.cases import Batch, Case, gradient, learning
from plpkg.clipping.checks.ordinary import ordinary
from plpkg.clipping.checks.sensitivity import as_vector, check_sensitivity, members_of
from plpkg.clipping.checks.specimens import specimens
from plpkg.clipping.clip import Clip, clip_dense
from plpkg.results import Sentences

MAX_GRAD_NORM, NOISE_MULTIPLIER, DELTA = 0.1, 1.0, 1e-5  # C, σ and δ
TAKES_PART = 0.5  # the probability that an example is in a batch: so many of a case's batch are expected
ROUNDING = 1e-3  # a deviation of so many C is put down to rounding; Opacus divides by the norm plus 1e-6
NOISY_STEPS = 80  # every other one with the example that is looked for
STANDARD_ERRORS = 5  # of a sound training one figure in 1.7 million is further away
BY_CHANCE = float(norm.sf(STANDARD_ERRORS))
ZOO_EXAMPLES = 17  # with a last micro-batch of one
USERS_OWN = ("loss over the batch's tokens", "actual batch size")
"""Specimens that no library can get right: the mistake is in what it is given."""

Update = dict[str, torch.Tensor]


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
    def sentences(self) -> str:
        """What is wrong and what was refused, check by check."""
        wrong = [f"{check}: {sentence}" for check, sentence in self.breaches.items()]
        return "; ".join(wrong + [f"{check}: refuses: {said}" for check, said in self.refusals.items()])


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
                "what": outcome.sentences,
                "lesson": outcome.case.lesson,
            }
            for outcome in self.outcomes
        ]

    def __repr__(self) -> str:
        verdicts = [outcome.verdict for outcome in self.outcomes]
        names = f" ({'; '.join(self.breached)})" if self.breached else ""
        counts = f"{verdicts.count('conforms')} conform, {verdicts.count('refuses')} refused"
        return f"Report({len(verdicts)} cases: {counts}, {len(self.breached)} breached{names})"


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
    given = globals()["cases"]() if cases is None else cases
    return Report(tuple(examine(train, case, Clip(MAX_GRAD_NORM, clipping), chosen) for case in given))


def examine(train: Callable, case: Case, clip: Clip, checks: Iterable[str]) -> Outcome:
    """Try a training function on one case."""
    trial, breaches, refusals = Trial(train, case, clip), {}, {}
    try:
        _ = trial.update
    except RefusalError as refusal:
        return Outcome(case, {}, {"learns": str(refusal)})
    except (BrokenError, _MissingError, _MiscountError) as error:
        return Outcome(case, {"sums" if isinstance(error, _MiscountError) else "learns": str(error)}, {})
    for check in checks:
        try:
            if sentence := CHECKS[check](trial):
                breaches[check] = sentence
        except RefusalError as refusal:
            refusals[check] = str(refusal)
        except (BrokenError, _MissingError, _MiscountError, FloatingPointError) as error:
            breaches[check] = str(error)
    return Outcome(case, breaches, refusals)


class RefusalError(Exception):
    """What a training said instead of a step."""


class BrokenError(Exception):
    """A training stopped without saying what it refuses."""


class _MissingError(Exception):
    """A parameter learns that the optimizer does not have."""


class _MiscountError(Exception):
    """Not one step of the optimizer for each sample."""


@dataclass(frozen=True)
class Trial:
    """A training function, and a case to try it on."""

    train: Callable
    case: Case
    clip: Clip

    def run(self, samples: list[Batch], noise_multiplier: float = 0.0) -> list[Update]:
        """The updates of some samples: by parameter, what the optimizer gets, times the expected batch size."""
        case = self.case
        steps = [[case.before(samples[0])]] if case.before else []
        steps += [case.pieces(sample) for sample in samples]
        expected = case.size * TAKES_PART
        said = max(1, len(samples[0][1])) if case.expects_actual else expected
        model, criterion = case.build(), case.loss_module()
        scale = expected if criterion.reduction == "mean" else 1.0
        optimizer = torch.optim.SGD(learning(model).values(), lr=0.0)
        given = {id(p) for p in learning(model).values()}
        updates, missing = [], set()

        def after_step(stepped, args, kwargs) -> None:
            theirs = {id(p): p for group in stepped.param_groups for p in group["params"]}
            now = learning(model)
            if not theirs.keys() & (given | {id(p) for p in now.values()}):
                return  # of another model
            missing.update(name for name, p in now.items() if id(p) not in theirs)
            if all(p.grad is None for p in theirs.values()):
                return  # a micro-batch that is not the last
            grads = {name: p.grad if id(p) in theirs else None for name, p in now.items()}
            updates.append({n: torch.zeros_like(now[n]) if g is None else g.detach() * scale for n, g in grads.items()})

        hook = register_optimizer_step_post_hook(after_step)
        try:
            self.train(
                model, optimizer, criterion, steps, max_grad_norm=self.clip.max_grad_norm,
                noise_multiplier=noise_multiplier, expected_batch_size=said,
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            raise RefusalError(_first_sentence(error)) from error
        except Exception as error:
            what = f"{type(error).__name__}: {_first_sentence(error)}"
            raise BrokenError(f"the training stops with {what}, which is no refusal") from error
        finally:
            hook.remove()
        if missing:
            raise _MissingError(
                f"{_names(missing)} learns, but is not among what the optimizer steps, so no update reaches it: it was "
                "replaced after the optimizer was made, or left out"
            )
        if len(updates) != len(steps):
            raise _MiscountError(f"{len(updates)} steps of the optimizer have a gradient, of {len(steps)} samples")
        return updates[-len(samples) :]

    def step(self, sample: Batch) -> Update:
        """The update of one sample, without noise."""
        return self.run([sample])[-1]

    @cached_property
    def update(self) -> Update:
        """That of the whole batch."""
        return self.step(self.case.sample)

    @cached_property
    def wanted(self) -> Update:
        """The sum of the clipped gradients, each computed alone."""
        case = self.case
        alone = [gradient(case, examples(case.batch, slice(i, i + 1))) for i in range(case.size)]
        users = range(case.size) if case.users is None else case.users
        rows = {name: torch.stack([g[name] for g in alone]).double() for name in alone[0]}
        units = members_of(users, case.size).values()
        sums = {name: torch.stack([row[which].sum(0) for which in units]) for name, row in rows.items()}
        return clip_dense(sums, self.clip, {name: name.rpartition(".")[0] for name in sums})[0]

    @cached_property
    def without(self) -> tuple[str, Batch, Update]:
        """Who moves the update farthest by leaving, the batch of the others, and its update."""
        case, best = self.case, None
        users = range(case.size) if case.users is None else case.users
        for name, which in members_of(users, case.size).items():
            rest = examples(case.sample, ~which)
            update = self.step(rest)
            far = _distance(self.update, update)
            if best is None or far > best[0]:
                best = far, f"{'example' if case.users is None else 'user'} {name}", rest, update
        return best[1:]

    @cached_property
    def noisy(self) -> list[Update]:
        """Updates with noise: of the batch, and of it without somebody, by turns."""
        samples = [self.case.sample, self.without[1]] * (NOISY_STEPS // 2)
        return self.run(samples, NOISE_MULTIPLIER)


def _learns(trial: Trial) -> str | None:
    still = {name for name, wanted in trial.wanted.items() if wanted.any() and not trial.update[name].any()}
    if still:
        far = max(trial.wanted[name].norm().item() for name in still) / trial.clip.max_grad_norm
        return f"{_names(still)} gets no gradient, and the examples' clipped ones add up to {far:.3g} C"
    return None


def _sums(trial: Trial) -> str | None:
    limit, case = trial.clip.max_grad_norm, trial.case
    again = _distance(trial.update, trial.step(case.sample)) / limit
    if not again <= ROUNDING:
        return f"the update of the same batch is another when it is run again without noise, {again:.3g} C away"
    far = _distance(trial.update, trial.wanted) / limit
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
            easier = Trial(trial.train, replace(case, **{field: None}), trial.clip)
            with suppress(RefusalError, BrokenError):
                if _distance(easier.update, trial.wanted) <= ROUNDING * limit:
                    sentence += f"; {clue}"
    return sentence


def _sensitivity(trial: Trial) -> str | None:
    found = check_sensitivity(
        trial.step, trial.case.sample, trial.clip.max_grad_norm, users=trial.case.users, tolerance=ROUNDING
    )
    if found.ok:
        return None
    place = found.worst_example
    how = "when it is taken away" if found.removed[place] == found.worst else "alone"
    return f"{found.unit} {found.rows()[place][found.unit]} moves the update by {found.worst:.4g} C {how}"


def _noise(trial: Trial) -> str | None:
    std = NOISE_MULTIPLIER * trial.clip.max_grad_norm
    clean = (trial.update, trial.without[2]) * (NOISY_STEPS // 2)
    noise = [
        {name: update[name] - part for name, part in without.items()}
        for update, without in zip(trial.noisy, clean, strict=True)
    ]
    if sentence := _deviation(noise, std, ""):
        return sentence
    vectors = torch.stack([as_vector(each) for each in noise]) / std  # (steps, parameters)
    shared = (vectors[1:] * vectors[:-1]).sum().item()  # mean 0, and variance 1 of each product
    if abs(shared) > STANDARD_ERRORS * math.sqrt(vectors[1:].numel()):
        return f"the noise of one step is correlated with that of the next, {shared / vectors[1:].numel():.3g}"
    try:
        empty = trial.run([examples(trial.case.sample, slice(0, 0))] * NOISY_STEPS, NOISE_MULTIPLIER)
    except (RefusalError, BrokenError):
        return None
    except _MiscountError:
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
    direction = pull / torch.linalg.vector_norm(pull) / trial.clip.max_grad_norm
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


def _distance(one: Update, other: Update) -> float:
    return torch.linalg.vector_norm(as_vector(one) - as_vector(other)).item()


def _names(names: set[str]) -> str:
    first = sorted(names)
    return first[0] + (f" (and {len(first) - 1} more)" if len(first) > 1 else "")


def _first_sentence(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0].partition(". ")[0]
    return said or type(error).__name__
