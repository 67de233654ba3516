"""One run of anybody's training function on a case, and what its optimizer gets."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plpkg.clipping.batches import examples
from plpkg.clipping.checks.cases import Batch, Case, gradient, learning
from plpkg.clipping.checks.sensitivity import as_vector, members_of
from plpkg.clipping.clip import Clip, clip_dense

NOISE_MULTIPLIER = 1.0  # σ
NOISY_STEPS = 120  # every other one with the example that is looked for

Update = dict[str, torch.Tensor]

AVERAGED = 1e-4
"""How far what an average keeps of a sample may be from its share, relatively: rounding in float32."""
MOST_KEPT = 0.999
"""Who keeps more forgets nothing, which is a fault."""


@dataclass(frozen=True)
class Afterwards:
    """Changes that a training makes to its noisy updates before the optimizer gets them, which cost no privacy.

    Attributes
    ----------
    added
        To each update, such as the gradient of a regularisation.
    kept
        The share β of the update before, where an update is an exponential average: β times that and 1 − β times the
        new one, beginning with 0.
    """

    added: Update | None = None
    kept: float = 0.0

    def taken_off(self, updates: list[Update]) -> list[Update]:
        """The updates before that."""
        if self.added is None:
            return updates
        new = []
        last = {name: torch.zeros_like(part) for name, part in self.added.items()}
        for update in updates:
            plain = {name: part - self.added[name] for name, part in update.items()}
            new.append({name: (part - self.kept * last[name]) / (1 - self.kept) for name, part in plain.items()})
            last = plain
        return new


class RefusalError(Exception):
    """A training's sentence instead of a step."""


class BrokenError(Exception):
    """A training stopped without saying what it refuses."""


class MissingError(Exception):
    """A parameter learns that the optimizer does not have."""


class MiscountError(Exception):
    """Not one step of the optimizer for each sample."""


@dataclass(frozen=True)
class Trial:
    """A training function, and a case to try it on."""

    train: Callable
    case: Case
    clipping: str = "flat"

    def run(self, samples: list[Batch], noise_multiplier: float = 0.0) -> list[Update]:
        """The updates of some samples: by parameter, what the optimizer gets, times the expected batch size; what the
        training makes of them afterwards (:class:`Afterwards`) is taken off.
        """
        updates = self.afterwards.taken_off(self._run(samples, noise_multiplier))
        return updates[-len(samples) :]

    @cached_property
    def afterwards(self) -> "Afterwards":
        """Found without noise: what nobody moves is added, and what is left of a sample later is an average's."""
        nobody = examples(self.case.sample, slice(0, 0))
        alone = replace(self, case=replace(self.case, before=None, max_grad_norm=self.max_grad_norm))
        try:
            first, second = alone._run([nobody] * 2)
            after = alone._run([self.case.sample, nobody, nobody])
            added = first
            if any(not torch.equal(first[name], second[name]) for name in first):  # it is not the same each time
                added = {name: torch.zeros_like(part) for name, part in first.items()}
            once, twice, thrice = (as_vector({n: update[n] - added[n] for n in added}) for update in after)
        except (RefusalError, BrokenError, MissingError, MiscountError, FloatingPointError):
            return Afterwards()
        size = torch.linalg.vector_norm(once)
        kept = (twice @ once / size**2).item() if size else 0.0
        if not AVERAGED < kept < MOST_KEPT:
            return Afterwards(added)
        apart = torch.linalg.vector_norm(twice - kept * once), torch.linalg.vector_norm(thrice - kept**2 * once)
        is_average = max(apart) <= AVERAGED * size
        return Afterwards(added, kept if is_average else 0.0)

    def _run(self, samples: list[Batch], noise_multiplier: float = 0.0) -> list[Update]:
        """All updates as they are, with that of the step before."""
        case = self.case
        steps = [[case.before(samples[0])]] if case.before else []
        steps += [case.pieces(sample) for sample in samples]
        expected = max(1, case.size // 2)  # half of those that come: whoever divides by these is seen
        said = max(1, len(samples[0][1])) if case.expects_actual else expected
        model = case.build()
        criterion = case.loss_module()
        limit = self.max_grad_norm
        scale = expected if criterion.reduction == "mean" else 1.0
        optimizer = torch.optim.SGD(learning(model).values(), lr=0.0)
        given = {id(p) for p in learning(model).values()}
        updates: list[Update] = []
        missing: set[str] = set()  # parameters that no optimizer steps
        under_way: list[int] = []  # by step of an optimizer that has begun, how many updates were seen before it

        def before_step(stepped, args, kwargs) -> None:
            under_way.append(len(updates))

        def after_step(stepped, args, kwargs) -> None:
            if under_way.pop() < len(updates):
                return  # an optimizer around another one, whose step was seen
            theirs = {id(p): p for group in stepped.param_groups for p in group["params"]}
            now = learning(model)
            if not theirs.keys() & (given | {id(p) for p in now.values()}):
                return  # of another model
            missing.update(name for name, p in now.items() if id(p) not in theirs)
            if all(p.grad is None for p in theirs.values()):
                return  # a micro-batch that is not the last
            update = {}
            for name, p in now.items():
                if id(p) in theirs and p.grad is not None:
                    update[name] = p.grad.detach() * scale
                else:
                    update[name] = torch.zeros_like(p)
            updates.append(update)

        hooks = register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)
        try:
            self.train(
                model, optimizer, criterion, steps, max_grad_norm=limit,
                noise_multiplier=noise_multiplier, expected_batch_size=said,
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            raise RefusalError(first_sentence(error)) from error
        except Exception as error:
            what = f"{type(error).__name__}: {first_sentence(error)}"
            raise BrokenError(f"the training stops with {what}, which is no refusal") from error
        finally:
            for hook in hooks:
                hook.remove()
        if missing:
            raise MissingError(
                f"{names(missing)} learns, but is not among what the optimizer steps, so no update reaches it: it was "
                "replaced after the optimizer was made, or left out"
            )
        if len(updates) != len(steps):
            raise MiscountError(
                f"{len(steps)} samples were given, and {len(updates)} steps of an optimizer change this model by a "
                "gradient"
            )
        return updates

    def step(self, sample: Batch) -> Update:
        """The update of one sample, without noise."""
        return self.run([sample])[-1]

    @cached_property
    def update(self) -> Update:
        """That of the whole batch."""
        return self.step(self.case.sample)

    @cached_property
    def gradients(self) -> dict[str, torch.Tensor]:
        """By parameter, the gradient of each example (or user), ``(units, *shape)``, each example's computed alone."""
        case = self.case
        alone = [gradient(case, examples(case.batch, slice(i, i + 1))) for i in range(case.size)]
        rows = {name: torch.stack([each[name] for each in alone]).double() for name in alone[0]}
        found = {}
        for name, row in rows.items():
            found[name] = torch.stack([row[which].sum(0) for which in self.units.values()])
        return found

    @property
    def units(self) -> dict[object, torch.Tensor]:
        """By example (or user), which of the batch's examples it is made of."""
        case = self.case
        users = range(case.size) if case.users is None else case.users
        return members_of(users, case.size)

    @cached_property
    def max_grad_norm(self) -> float:
        """C."""
        if self.case.max_grad_norm is not None:
            return self.case.max_grad_norm
        _, norms = clip_dense(self.gradients, Clip(1.0))
        median = norms.median().item()
        if not math.isfinite(median):
            raise ValueError(f"the case {self.case.name!r} cannot be tried: its gradients are not finite")
        return median or 1.0

    @cached_property
    def wanted(self) -> Update:
        """The sum of the clipped gradients."""
        layers = {name: name.rpartition(".")[0] for name in self.gradients}
        sums, _ = clip_dense(self.gradients, Clip(self.max_grad_norm, self.clipping), layers)
        return sums

    @cached_property
    def without(self) -> tuple[str, Batch, Update]:
        """Who moves the update farthest by leaving, the batch of the others, and its update."""
        kind = "example" if self.case.users is None else "user"
        found = ("nobody", self.case.sample, self.update)
        farthest = -math.inf
        for name, which in self.units.items():
            rest = examples(self.case.sample, ~which)
            update = self.step(rest)
            far = distance(self.update, update)
            if far > farthest:
                farthest = far
                found = (f"{kind} {name}", rest, update)
        return found

    @cached_property
    def noisy(self) -> list[Update]:
        """Updates with noise: of the batch, and of it without somebody, by turns."""
        samples = [self.case.sample, self.without[1]] * (NOISY_STEPS // 2)
        return self.run(samples, NOISE_MULTIPLIER)


def distance(one: Update, other: Update) -> float:
    """Of two updates, an L2 norm."""
    return torch.linalg.vector_norm(as_vector(one) - as_vector(other)).item()


def names(names: set[str]) -> str:
    """The first, and how many more."""
    first, *others = sorted(names)
    return f"{first} (and {len(others)} more)" if others else first


def first_sentence(error: Exception) -> str:
    """The first sentence of an error; its type if it says nothing."""
    line, _, _ = str(error).strip().partition("\n")
    sentence, _, _ = line.partition(". ")
    return sentence or type(error).__name__
