"""The bug zoo: ways in which private training goes wrong without a word, kept alive, and what would have noticed.

Each specimen (:mod:`plpkg.clipping.checks.specimens`) runs under the parts that Opacus's
``PrivacyEngine(grad_sample_mode="ghost")`` puts together, and under :func:`~plpkg.clipping.make_private`; no noise is
added. Four checks look at the update that Opacus gives:

* parity with the definition, one example at a time (``execution="loop"``): how far the update is off, in C;
* :func:`~plpkg.clipping.checks.sensitivity.check_sensitivity`: how far one example moves it, in C;
* :func:`~plpkg.clipping.checks.audit.canary_audit`: the ε that is seen once noise of σ·C is added, beside the
  ε claimed; from guesses, and from the scores themselves (:func:`~plpkg.clipping.checks.audit.gaussian_audit`).

Of replayed noise (:func:`replayed`) the audits get two real releases, and the noise that these have.
"""

import warnings
from collections import Counter
from dataclasses import dataclass, replace

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.validators import ModuleValidator

from plpkg.clipping.batches import batch_size, examples
from plpkg.clipping.checks.audit import (
    Audit,
    GaussianAudit,
    canary_audit,
    gaussian_audit,
    gaussian_epsilon,
    one_run_audit,
)
from plpkg.clipping.checks.cases import Case, gradient, one_loss_each
from plpkg.clipping.checks.conformance import DELTA
from plpkg.clipping.checks.sensitivity import Sensitivity, as_vector, check_sensitivity
from plpkg.clipping.checks.specimens import MAX_GRAD_NORM, MICRO_BATCH, specimens
from plpkg.clipping.checks.trial import NOISE_MULTIPLIER, RefusalError, Trial
from plpkg.clipping.gradients import clipped_gradients
from plpkg.clipping.training.make import make_private
from plpkg.results import Sentences

TAKES_PART = 0.5  # the probability that an example is in a batch
PARITY = 1e-4  # a deviation of so many C is put down to rounding
CHECKED = 4 * MICRO_BATCH + 1  # examples of the first two checks, with a last micro-batch of one
CANARIES = 1_000  # of the audits


@dataclass(frozen=True)
class Finding(Sentences):
    """The update of a specimen, and which check notices that Opacus's update is wrong.

    Attributes
    ----------
    case
        The bug.
    opacus
        Its refusal; ``None`` if it runs. The checks look past a refusal at what would have happened.
    ours
        ``exact``, what plpkg refuses with, or how far it is off.
    parity
        ‖Opacus's update − the definition's‖ / C; ``None`` where the definition is refused, too.
    sensitivity, audit, gaussian
        These checks of Opacus's update; the last with normal scores.
    claimed
        The ε that σ, δ and C promise.
    """

    case: Case
    opacus: str | None
    ours: str
    parity: float | None
    sensitivity: Sensitivity
    audit: Audit
    gaussian: GaussianAudit
    claimed: float

    @property
    def caught_by(self) -> tuple[str, ...]:
        """The checks that notice that something is wrong."""
        noticed = {
            "parity": self.parity is not None and self.parity > PARITY,
            "sensitivity": not self.sensitivity.ok,
            "audit": self.audit.epsilon > self.claimed,
            "Gaussian audit": self.gaussian.epsilon > self.claimed,
        }
        return tuple(check for check in CHECKS if noticed[check])

    def rows(self) -> list[dict]:
        row = {
            "bug": self.case.name,
            "lesson": self.case.lesson,
            "Opacus": f"refuses: {self.opacus}" if self.opacus else "runs",
            "plpkg": self.ours,
            "parity (C)": "no reference" if self.parity is None else self.parity,
            "one example moves (C)": self.sensitivity.worst,
            f"audited ε (claimed {self.claimed:.2f})": self.audit.epsilon,
            "audited ε, normal scores": self.gaussian.epsilon,
            "caught by": ", ".join(self.caught_by) or "nothing",
        }
        return [row]

    def __repr__(self) -> str:
        return f"Finding({self.case.name}: caught by {', '.join(self.caught_by) or 'nothing'})"


CHECKS = ("parity", "sensitivity", "audit", "Gaussian audit")


@dataclass(frozen=True)
class Zoo(Sentences):
    """The findings about every specimen."""

    findings: tuple[Finding, ...]

    def rows(self) -> list[dict]:
        return [finding.rows()[0] for finding in self.findings]

    def __repr__(self) -> str:
        caught: Counter[str] = Counter()
        for finding in self.findings:
            caught.update(finding.caught_by)
        counts = ", ".join(f"{check} {caught[check]}" for check in CHECKS)
        return f"Zoo({len(self.findings)} bugs; caught by {counts})"


def zoo() -> Zoo:
    """Examine every specimen: 15 seconds on one core."""
    findings = []
    for case, canaries in zip(specimens(CHECKED), specimens(CANARIES), strict=True):
        findings.append(examine(case, canaries))
    findings.append(replayed(CHECKED, CANARIES))
    return Zoo(tuple(findings))


def examine(case: Case, canaries: Case, *, seed: int = 0) -> Finding:
    """Run a specimen under Opacus and under plpkg, and let the checks look at Opacus's update.

    Parameters
    ----------
    case, canaries
        The specimen, and the same with the examples that the audits get.
    seed
        The audits'.
    """
    step = Trial(opacus, case).step
    one_run, gaussian = canary_audit(
        Trial(opacus, canaries).step, canaries.batch, MAX_GRAD_NORM, NOISE_MULTIPLIER, DELTA, seed,
        direction=lambda batch: gradient(canaries, batch),
        bound=lambda *scores: (one_run_audit(*scores), gaussian_audit(*scores)),
    )  # fmt: skip
    return Finding(
        case,
        opacus_refusal(case),
        _verdict(case),
        _deviation(case, step(case.batch)),
        check_sensitivity(step, case.batch, MAX_GRAD_NORM),
        one_run,
        gaussian,
        gaussian_epsilon(NOISE_MULTIPLIER, DELTA),
    )


def replayed(checked: int, canaries: int, *, seed: int = 0) -> Finding:
    """A run goes back to an earlier state, and its script sets the seed again: what do two releases say together?

    The first is of a batch, the second of nobody. The audits see their difference.
    """

    def case(count: int) -> Case:
        return Case(
            "replayed noise",
            lambda: torch.nn.Linear(count, 1, bias=False),
            ((torch.eye(count),), torch.zeros(count)),
            lambda y, _: y[:, 0],
            max_grad_norm=MAX_GRAD_NORM,
            lesson="After going back the seed is set again: two releases share one noise; their difference has none.",
        )

    def difference(train, case: Case, batch) -> torch.Tensor:
        def release(sample) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                (update,) = Trial(train, case).run([sample], NOISE_MULTIPLIER)
            return as_vector(update)

        nobody = examples(case.batch, slice(0, 0))
        return release(batch) - release(nobody)

    few = case(checked)
    many = case(canaries)
    step = Trial(opacus, few).step
    one_run, gaussian = canary_audit(
        lambda batch: {"difference": difference(opacus, many, batch)}, many.batch, MAX_GRAD_NORM, 0.0, DELTA, seed,
        direction=lambda batch: gradient(many, batch),
        bound=lambda *scores: (one_run_audit(*scores), gaussian_audit(*scores)),
    )  # fmt: skip
    noise = difference(ours, few, few.batch) - as_vector(step(few.batch))
    return Finding(
        few,
        opacus_refusal(few),
        "exact" if noise.norm() > MAX_GRAD_NORM else "draws the same noise",
        _deviation(few, step(few.batch)),
        check_sensitivity(step, few.batch, MAX_GRAD_NORM),
        one_run,
        gaussian,
        gaussian_epsilon(NOISE_MULTIPLIER, DELTA),  # a release of nobody, with noise of its own, would add nothing
    )


def opacus_refusal(case: Case) -> str | None:
    """The first sentence of Opacus's refusal when it is asked whether the model will do, or ``None``."""
    model = case.build()
    errors = [*ModuleValidator.validate(model), *GradSampleModuleFastGradientClipping.validate(model)]
    return str(errors[0]).partition(". ")[0] if errors else None


def opacus(model, optimizer, criterion, steps, *, max_grad_norm, noise_multiplier, expected_batch_size) -> None:
    """A training function: Opacus's ghost clipping, past its refusals, and the loop without its BatchMemoryManager."""
    private = GradSampleModuleFastGradientClipping(model, max_grad_norm=max_grad_norm, strict=False)
    optimizer = DPOptimizerFastGradientClipping(
        optimizer,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=expected_batch_size,
    )
    criterion = DPLossFastGradientClipping(private, optimizer, criterion)
    with warnings.catch_warnings():  # the first layer's input needs no gradient
        warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
        loop(private, optimizer, criterion, steps)


def ours(model, optimizer, criterion, steps, *, max_grad_norm, noise_multiplier, expected_batch_size) -> None:
    """A training function: :func:`~plpkg.clipping.make_private`."""
    private = make_private(
        model,
        optimizer,
        None,
        one_loss_each(criterion),
        max_grad_norm=max_grad_norm,
        noise_multiplier=noise_multiplier,
        sample_rate=TAKES_PART,
        batch_size=1 if criterion.reduction == "sum" else expected_batch_size,
    )
    for step in steps:
        private.step(step)


def loop(model, optimizer, criterion, steps) -> None:
    """Gradient accumulation, as it is done without privacy."""
    for step in steps:
        for inputs, target in step:
            criterion(model(*inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()


def _deviation(case: Case, update) -> float | None:
    def loss(model, batch) -> torch.Tensor:
        inputs, target = batch
        return case.criterion(model(*inputs), target)

    try:
        wanted, _ = clipped_gradients(case.build(), loss, case.batch, MAX_GRAD_NORM, "loop")
    except ValueError:  # a layer that mixes examples has no per-example gradient to compare with
        return None
    return torch.linalg.vector_norm(as_vector(update) - as_vector(wanted)).item() / MAX_GRAD_NORM


def _verdict(case: Case) -> str:
    # The size is said once, not for each batch; and another size has come before, as in any training.
    before = case.before or (lambda batch: examples(batch, [0, *range(batch_size(batch))]))
    step = Trial(ours, replace(case, expects_actual=False, before=before)).step
    try:
        deviation = _deviation(case, step(case.batch))
        moved = check_sensitivity(step, case.batch, MAX_GRAD_NORM)
    except RefusalError as refusal:
        return f"refuses: {refusal}"
    if deviation is None:
        return "wrong: it takes a model that mixes examples"
    if deviation <= PARITY and moved.ok:
        return "exact"
    return f"wrong: {deviation:.3g} C off, one example moves {moved.worst:.3g} C"
