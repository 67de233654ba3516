"""The bug zoo: ways in which private training goes wrong without a word, kept alive, and what would have noticed.

Each specimen (:mod:`plpkg.clipping.checks.specimens`) runs under the parts that Opacus's
``PrivacyEngine(grad_sample_mode="ghost")`` puts together, and under :func:`~plpkg.clipping.make_private`; no noise is
added. Three checks look at the update that Opacus gives:

* parity with the definition, one example at a time (``execution="loop"``): how far the update is off, in C;
* :func:`~plpkg.clipping.checks.sensitivity.check_sensitivity`: how far one example moves it, in C;
* :func:`~plpkg.clipping.checks.audit.canary_audit`: the ε that is seen once noise of σ·C is added, beside the
  ε claimed.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.validators import ModuleValidator
from torch import nn

from plpkg.clipping.checks.audit import Audit, canary_audit, gaussian_epsilon
from plpkg.clipping.checks.sensitivity import Sensitivity, as_vector, check_sensitivity
from plpkg.clipping.checks.specimens import MICRO_BATCH, Specimen, specimens
from plpkg.clipping.gradients import clipped_gradients
from plpkg.clipping.training.private import make_private
from plpkg.results import Tabular
from plpkg.validation import whole_number

MAX_GRAD_NORM, NOISE_MULTIPLIER, DELTA = 0.1, 1.0, 1e-5  # C, σ and δ
PARITY = 1e-4  # a deviation of so many C is put down to rounding
CHECKED, CANARIES = 4 * MICRO_BATCH + 1, 1_000  # of the first two checks, with a last micro-batch of one; of the audit
TAKES_PART = 0.5  # the probability that a canary is in a batch


@dataclass(frozen=True)
class Finding(Tabular):
    """What a specimen did, and which check notices that Opacus's update is wrong.

    Attributes
    ----------
    specimen
        The bug.
    opacus
        What it refuses with; ``None`` if it runs. The checks look past a refusal at what would have happened.
    ours
        ``exact``, what plpkg refuses with, or what goes wrong because no library can know.
    parity
        ‖Opacus's update − the definition's‖ / C; ``None`` where the definition is refused, too.
    sensitivity, audit
        What these two checks say of Opacus's update.
    claimed
        The ε that σ, δ and C promise.
    """

    specimen: Specimen
    opacus: str | None
    ours: str
    parity: float | None
    sensitivity: Sensitivity
    audit: Audit
    claimed: float

    @property
    def caught_by(self) -> tuple[str, ...]:
        """The checks that notice that something is wrong."""
        noticed = {
            "parity": self.parity is not None and self.parity > PARITY,
            "sensitivity": not self.sensitivity.ok,
            "audit": self.audit.epsilon > self.claimed,
        }
        return tuple(check for check, yes in noticed.items() if yes)

    def rows(self) -> list[dict]:
        row = {
            "bug": self.specimen.bug,
            "Opacus": f"refuses: {self.opacus}" if self.opacus else "runs",
            "plpkg": self.ours,
            "parity (C)": "no reference" if self.parity is None else self.parity,
            "one example moves (C)": self.sensitivity.worst,
            f"audited ε (claimed {self.claimed:.2f})": self.audit.epsilon,
            "caught by": ", ".join(self.caught_by) or "nothing",
        }
        return [row]

    def __repr__(self) -> str:
        return f"Finding({self.specimen.bug}: caught by {', '.join(self.caught_by) or 'nothing'})"


@dataclass(frozen=True)
class Zoo(Tabular):
    """What was found out about every specimen."""

    findings: tuple[Finding, ...]

    def rows(self) -> list[dict]:
        return [finding.rows()[0] for finding in self.findings]

    def __repr__(self) -> str:
        caught = [check for finding in self.findings for check in finding.caught_by]
        counts = ", ".join(f"{check} {caught.count(check)}" for check in ("parity", "sensitivity", "audit"))
        return f"Zoo({len(self.findings)} bugs; caught by {counts})"


def zoo() -> Zoo:
    """Examine every specimen: 15 seconds on one core."""
    return Zoo(tuple(examine(specimen) for specimen in specimens()))


def examine(specimen: Specimen, *, checked: int = CHECKED, canaries: int = CANARIES, seed: int = 0) -> Finding:
    """Run a specimen under Opacus and under plpkg, and let the three checks look at Opacus's update.

    Parameters
    ----------
    checked, canaries, seed
        How many examples the first two checks get, and the audit, two at least; the audit's seed.
    """
    whole_number("checked", checked, 2)
    whole_number("canaries", canaries, 2)
    batch, update = specimen.batch(checked), partial(opacus_update, specimen, checked)
    return Finding(
        specimen,
        opacus_refusal(specimen, checked),
        _verdict(specimen, checked, batch),
        _deviation(specimen, checked, batch, update(batch)),
        check_sensitivity(update, batch, MAX_GRAD_NORM),
        canary_audit(
            partial(opacus_update, specimen, canaries),
            specimen.batch(canaries),
            MAX_GRAD_NORM,
            NOISE_MULTIPLIER,
            DELTA,
            seed,
            direction=partial(_gradient, specimen, canaries),
        ),
        gaussian_epsilon(NOISE_MULTIPLIER, DELTA),
    )


def opacus_refusal(specimen: Specimen, count: int) -> str | None:
    """What Opacus says when it is asked whether the model will do (its first sentence), or ``None``."""
    model = specimen.build(count)
    errors = [*ModuleValidator.validate(model), *GradSampleModuleFastGradientClipping.validate(model)]
    return str(errors[0]).partition(". ")[0] if errors else None


def opacus_update(specimen: Specimen, count: int, batch) -> dict[str, torch.Tensor]:
    """One run of a specimen's script under Opacus, without noise and past its refusals.

    Half of ``count`` examples are expected in a batch, and ``batch`` has those of this one. Returned is, by parameter,
    the sum of clipped gradients: what the optimizer gets, times the expected batch size.
    """
    model = specimen.build(count)
    private = GradSampleModuleFastGradientClipping(model, max_grad_norm=MAX_GRAD_NORM, strict=False)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(_learning(model).values(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        expected_batch_size=len(batch[0]) if specimen.expects_actual else count * TAKES_PART,
    )
    criterion = DPLossFastGradientClipping(private, optimizer, _Criterion(specimen.criterion))
    with warnings.catch_warnings():  # the first layer's input needs no gradient
        warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
        specimen.script(private, optimizer, criterion, batch)
    return _sums(model, count)


def our_update(specimen: Specimen, count: int, batch) -> dict[str, torch.Tensor]:
    """The same script under :func:`~plpkg.clipping.make_private`, which raises what it refuses."""
    model = specimen.build(count)
    made = make_private(
        model,
        torch.optim.SGD(_learning(model).values(), lr=0.0),
        None,
        _Criterion(specimen.criterion),
        max_grad_norm=MAX_GRAD_NORM,
        noise_multiplier=0.0,
        sample_rate=TAKES_PART,
        expected_batch_size=count * TAKES_PART,  # once, and not for each batch: expects_actual has no place
    )
    specimen.script(made.model, made.optimizer, made.criterion, batch)
    return _sums(model, count)


def _gradient(specimen: Specimen, count: int, batch) -> dict[str, torch.Tensor]:
    """The batch's gradient by autograd: where a canary pulls, in a tenth of the time that Opacus needs."""
    model = specimen.build(count)
    learning = _learning(model)
    loss = specimen.loss(model, batch).sum()
    return dict(zip(learning, torch.autograd.grad(loss, learning.values(), materialize_grads=True), strict=True))


def _deviation(specimen: Specimen, count: int, batch, update) -> float | None:
    try:
        wanted, _ = clipped_gradients(specimen.build(count), specimen.loss, batch, MAX_GRAD_NORM, "loop")
    except ValueError:  # a layer that mixes examples has no per-example gradient to compare with
        return None
    return torch.linalg.vector_norm(as_vector(update) - as_vector(wanted)).item() / MAX_GRAD_NORM


def _verdict(specimen: Specimen, count: int, batch) -> str:
    update = partial(our_update, specimen, count)
    try:
        deviation = _deviation(specimen, count, batch, update(batch))
    except (ValueError, RuntimeError) as error:
        return f"refuses: {error}"
    moved = check_sensitivity(update, batch, MAX_GRAD_NORM)
    if deviation <= PARITY and moved.ok:
        return "exact"
    return f"cannot know: {deviation:.3g} C off, one example moves {moved.worst:.3g} C"


@dataclass
class _Criterion:
    """A function of output and target in the shape of a loss module: both libraries set its ``reduction``."""

    losses: Callable
    reduction: str = "mean"

    def __call__(self, output, target) -> torch.Tensor:
        return self.losses(output, target)


def _learning(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _sums(model: nn.Module, count: int) -> dict[str, torch.Tensor]:
    return {name: p.grad * (count * TAKES_PART) for name, p in _learning(model).items()}
