"""A private training: ``for sample in private: private.step(sample)``.

DP-SGD (Abadi et al., arXiv 1607.00133): a Poisson sample, each example's gradient clipped to C, normal noise of
standard deviation σ·C on their sum, divided by the *expected* batch size. ε comes from Opacus's accountants.
"""

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import NamedTuple

import torch
from opacus.accountants import IAccountant

from plpkg.clipping.batches import numbered
from plpkg.clipping.clip import Clip, clip_dense, zeros_for
from plpkg.clipping.gradients import Watched
from plpkg.clipping.mixing import modules_of
from plpkg.clipping.training.accounting import Mechanism, accountant_of, spent
from plpkg.clipping.training.given import GivenGradients
from plpkg.clipping.training.ledger import Life, Spent, ledger_of
from plpkg.clipping.training.processes import Processes
from plpkg.clipping.training.randomness import Randomness
from plpkg.clipping.training.samples import LOOP, Part, Sample, Samples, own_parts
from plpkg.validation import shown

UNCLIPPED = Clip(1e30)
"""For a part of what is one user's, which is clipped when the rest has come: in float32 still a number."""
OLD = ("criterion", "data_loader", "paced", "remove", "restart", "skip")
"""What a private training had when it was hooks in the user's loop."""


class Step(NamedTuple):
    """What a step saw. It is not private: do not publish it.

    Attributes
    ----------
    losses
        Of each example, ``(count,)``; of a model elsewhere NaN where it did not tell.
    count
        How many examples were in the sample (of this process's share).
    """

    losses: torch.Tensor
    count: int


class Private:
    """A private training, as :func:`~plpkg.clipping.training.make.make_private` returns it.

    Iterating gives the samples of the steps that are left: to the end of all ``epochs``, or of the epoch that has begun
    where no number was given. A loop that is broken off loses nothing: the next goes on with the sample that was not
    used.

    Attributes
    ----------
    model, optimizer
        The same objects as before. Between two steps nothing of the training is on them.
    mechanism, steps, max_steps
        What is spent in a step, the number of the next one, and of the first that ``max_epsilon`` does not allow.
    expected_batch_size
        What the noisy sum is divided by: examples, or users.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: Watched | GivenGradients,
        mechanism: Mechanism,
        expected_batch_size: float,
        samples: Samples | None,
        randomness: Randomness,
        processes: Processes,
        epochs: int | None = None,
        limit: tuple[float, float] | None = None,
        spent_before: Sequence[Spent] = (),
    ) -> None:
        self.model, self.optimizer, self.mechanism = model, optimizer, mechanism
        self.expected_batch_size = expected_batch_size
        self._gradients, self._recorder, self._samples = gradients, gradients.recorder, samples
        self._randomness, self._processes, self._epochs, self._limit = randomness, processes, epochs, limit
        self._learning = dict(self._recorder.parameters)
        self._by_users: bool | None = None  # where you sample yourself: as the first step had it
        self._busy = threading.Lock()
        self._ledger = ledger_of(model, self._learning.values())
        if spent_before:
            self._ledger.begin_with(spent_before)
        life = self._ledger.life(0)
        self._enter(life, 0)
        self._ledger.record(life)  # so that another training of these parameters draws other noise

    def __iter__(self) -> Iterator[Sample]:
        if self._samples is None:
            raise RuntimeError("you sample yourself: call private.step(pieces) with a list of batches")
        epoch = self._samples.steps
        end = epoch * (self._epochs or self.steps // epoch + 1)
        try:
            while self.steps < end and not self.done:
                sample = self.sample()
                yield sample
                if self._samples.is_drawn(sample):
                    raise RuntimeError(f"the sample of step {sample.number} was not used: {LOOP}")
        finally:
            self._samples.stop()

    def __reduce_ex__(self, protocol: int):
        raise TypeError("a private training is not copied, whose noise would come twice: save its state_dict()")

    def __getattr__(self, name: str):
        what = f"a private training has no {name}"
        raise AttributeError(f"{what}: a step is a call, {LOOP}" if name in OLD else what)

    def step(self, sample: Sample | list, *, users: Iterable[Hashable] | torch.Tensor | None = None) -> Step:
        """One step: the clipped sum of a sample's gradients, noise, and ``optimizer.step()``.

        Parameters
        ----------
        sample
            The next one. Where you sample yourself (``sample_rate`` was given), a list of batches, ``[]`` if nobody was
            drawn; the first dimension of each tensor is the examples.
        users
            Where you sample yourself: whose each example is, over all batches. A user's gradient, which is clipped, is
            that of the mean of their losses. In all steps, or in none.

        Returns
        -------
        Step
            The examples' losses and their number, which are not private.

        Raises
        ------
        RuntimeError
            Not the next sample, a step beyond ``max_epsilon``, a step within a step, or what learns has changed.
        ValueError
            Examples are mixed, or the losses are not one an example.
        FloatingPointError
            An example's gradient is not finite.

        Notes
        -----
        After an exception before the optimizer's step nothing has been spent or changed, and the sample can be used
        again. Then the step counts, whatever becomes of the optimizer's.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("a step within a step, or of another thread: one at a time")
        try:
            self._check()
            parts = self._parts(sample, users)
            with self._gradients.attached():
                sums, losses = self._sums(parts)
            self._add_noise(sums)
            self._by_users = users is not None
            self._spend(sample)
            self._update(sums)
            return Step(losses, len(losses))
        finally:
            self._busy.release()

    def sample(self) -> Sample:
        """The next step's sample, the same until it is used."""
        if self._samples is None:
            raise RuntimeError("you sample yourself: call private.step(pieces) with a list of batches")
        return self._samples.sample(self.steps)

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier σ of the next step, in units of C."""
        return self.now.noise_multiplier

    @property
    def now(self) -> Mechanism:
        """What the next step is made with. Functions of its number are asked once: for it is clipped, drawn and spent
        what they said at first, whatever they would say later.
        """
        if self._now is None:
            self._now = self.mechanism.at(self.steps)
            if self._limit and self._now.noise_multiplier != self._planned.at(self.steps).noise_multiplier:
                self._plan()  # it does not say what it said before
        return self._now

    @property
    def accountant(self) -> IAccountant:
        """Opacus's accountant after all steps that were released from the model: those of other trainings, and those
        after a state that was gone back to, as well.
        """
        return accountant_of(self.mechanism.accountant, self._ledger.spent)

    @property
    def layers(self) -> list[str]:
        """The layers that learn, in the order of a ``max_grad_norm`` for each."""
        return list(dict.fromkeys(self._recorder.layers.values()))

    @property
    def steps_per_epoch(self) -> int | None:
        """How many samples an epoch has; ``None`` where you sample yourself."""
        return None if self._samples is None else self._samples.steps

    @property
    def done(self) -> bool:
        """Whether another step would spend more than ``max_epsilon``."""
        if self._limit and self._others() != self._planned_beside:
            self._plan()
        return self.steps >= self.max_steps

    def _others(self) -> int:
        """How many steps other trainings of these parameters have taken."""
        return sum(count for *_, count in self._ledger.spent) - sum(count for *_, count in self._life.spent)

    def epsilon(self, delta: float) -> float:
        """The ε spent so far, for a δ: adding or removing one example, or user, changes no probability by more.

        It is of all that private trainings in this process have released of the model's parameters. It does not follow
        what they were copied to: a deep copy, or a file that is loaded without :meth:`state_dict`. Give ``spent`` to
        ``make_private`` for what was released of such weights before.

        Raises
        ------
        ValueError
            ``delta`` is not between 0 and 1.
        """
        return spent(self.accountant, delta)

    def spending(self) -> Callable[[float], float]:
        """:meth:`epsilon` as it is now, whatever is spent later; it keeps nothing else of the training."""
        return partial(spent, self.accountant)

    def state_dict(self) -> dict:
        """What to save beside the model's and the optimizer's states: what was spent, and which step comes next."""
        return {
            "lives": self._ledger.state(self._life),
            "life": self._life.name,
            "steps": self.steps,
            "identity": asdict(self.now),
            "by_users": self._by_users,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on where :meth:`state_dict` was called: the same ε, and with the same seed the same samples and noise.

        Where steps that came after that state have been released from this model, they stay spent, and other samples
        and noise are drawn for what follows. Two processes that go on with one state do not know of each other: what
        both release is in nobody's ε.

        Raises
        ------
        ValueError
            The state is of another run.
        """
        if self._busy.locked():
            raise RuntimeError("a state is loaded between two steps")
        for name in self.state_dict():
            if name not in state:
                raise ValueError(f"not the state of a private training: {name!r} is missing")
        identity, steps = state["identity"], state["steps"]
        now = asdict(self.mechanism.at(steps))
        if identity != now:
            different = "; ".join(
                f"{k}={shown(identity.get(k))}, now {v!r}" for k, v in now.items() if identity.get(k) != v
            )
            raise ValueError(f"the state is of a training with {different}")
        self._ledger.merge(state["lives"])
        self._by_users = state["by_users"]
        self._enter(self._ledger.life(steps, state["life"]), steps)
        if self._samples:
            self._samples.forget()

    def _enter(self, life: Life, steps: int) -> None:
        """Go on in a life, with the step of this number."""
        self._life, self._randomness.life, self.steps, self._now = life, life.number, steps, None
        self._plan()

    def _plan(self) -> None:
        """How many steps ``max_epsilon`` allows, if functions go on as they say now."""
        sigma, now, first = self.mechanism.noise_multiplier, self._now, self.steps

        @cache
        def planned(step: int) -> float:
            return now.noise_multiplier if now and step == first else sigma(step)

        self._planned = replace(self.mechanism, noise_multiplier=planned) if callable(sigma) else self.mechanism
        before, self._planned_beside = self._ledger.spent, self._others()
        self.max_steps = self._planned.steps_within(*self._limit, self.steps, before) if self._limit else math.inf

    def _check(self) -> None:
        """Refuse a step of something else than what was seen in the beginning."""
        self._processes.check()
        if self._life.steps != self.steps:
            raise RuntimeError(
                f"another training has gone on from step {self.steps} of this one's state, whose noise is out: go on "
                "with that one, or load its state_dict()"
            )
        if self.done:
            raise RuntimeError(f"a step beyond the {self.max_steps} that max_epsilon allows")
        if isinstance(self._gradients, Watched) and not self.model.training:
            raise RuntimeError("the model is in evaluation mode: call model.train() before private.step")
        known = {id(p) for p in self._learning.values()}
        there = [p for module in modules_of(self.model) for p in module._parameters.values() if p is not None]
        if known != {id(p) for p in there if p.requires_grad}:
            now = {id(p): name for name, p in self.model.named_parameters() if p.requires_grad}
            new = [name for key, name in now.items() if key not in known]
            gone = [name for name, p in self._learning.items() if id(p) not in now]
            what = f"{new[0]} learns, which was not there" if new else f"{gone[0]} learns no more"
            raise RuntimeError(
                f"{what} when make_private was called: freeze, unfreeze and replace layers, and load with assign=True, "
                "before; or call make_private again, and go on with load_state_dict(state_dict())"
            )
        learning = learned(self.optimizer)
        if learning != known:
            raise RuntimeError(
                f"the optimizer has {len(learning)} parameters that learn, make_private saw {len(known)}: freeze "
                "and unfreeze before make_private"
            )
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            if p.grad is not None and p.grad.any():  # zero_grad(set_to_none=False) leaves zeros
                name = next((name for name, each in self.model.named_parameters() if each is p), "a parameter")
                raise RuntimeError(
                    f"{name} has a gradient that was not clipped: no backward() beside private.step, which gives the "
                    "optimizer its gradients; optimizer.zero_grad() drops this one"
                )

    def _parts(self, sample: Sample | list, users) -> Iterator[Part]:
        """The parts of the next step."""
        if self._samples is None:
            if self._by_users not in (None, users is not None):
                raise RuntimeError("users come with each step or with none: ε is about users, or about examples")
            return own_parts(sample, users)
        if users is not None or not isinstance(sample, Sample):
            given = "users" if users is not None else f"a {type(sample).__name__}"
            raise RuntimeError(
                f"step was given {given}, and takes the sample that was drawn: {LOOP}; to sample yourself, give "
                "make_private sample_rate, and no data set"
            )
        if not self._samples.is_drawn(sample) or sample.number != self.steps:
            raise RuntimeError(
                f"this sample is not the one of step {self.steps} (used before, of another run, or changed?): {LOOP}"
            )
        return self._samples.collated(sample)

    def _sums(self, parts: Iterable[Part]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The sums of the clipped gradients of examples, or of users; and the losses."""
        clip, layers, losses = self.now.clip, self._recorder.layers, []
        totals: dict[str, torch.Tensor] = {}
        unfinished: dict[str, torch.Tensor] = {}  # of a user with more examples than fit into one part
        for part in parts:
            owners = divisors = None
            if part.owners is not None:
                owners, divisors = numbered(part.owners, part.count), torch.tensor(self._sizes(part.owners))
            split = part.goes_on or bool(unfinished)
            batch, look = self._moved(part.batch), part.look
            look = look and replace(look, among=self._moved(look.among))
            bound = UNCLIPPED if split else clip
            sums, _, found = self._gradients.sums(batch, part.count, bound, owners, divisors, look)
            losses.append(found)
            if split:
                unfinished = _added(unfinished, sums)
                if part.goes_on:
                    continue
                sums, _ = clip_dense({name: part[None] for name, part in unfinished.items()}, clip, layers)
                unfinished = {}
            totals = _added(totals, sums)
        totals = totals or {name: zeros_for(p) for name, p in self._learning.items()}
        return totals, torch.cat(losses) if losses else torch.zeros(0)

    def _sizes(self, owners: Sequence[Hashable]) -> list[int]:
        """How many losses each example's user has the mean of."""
        if self._samples is None:
            return [list(owners).count(owner) for owner in owners]
        return [len(self._samples.members[owner]) for owner in owners]

    def _moved(self, batch):
        """The batch on the model's device."""
        device = next(iter(self._learning.values())).device
        if device.type in ("cpu", "meta"):
            return batch
        from accelerate.utils import send_to_device

        return send_to_device(batch, device)

    def _add_noise(self, sums: dict[str, torch.Tensor]) -> None:
        """Noise, once for all processes, and the sum over them."""
        std = self.now.noise_multiplier * self.now.clip.sensitivity
        if std and self._processes.rank == 0:
            self._randomness.add_noise(sums, std, self.steps)
        self._processes.sum(sums)

    def _spend(self, sample: Sample | list) -> None:
        """Write down the step that is about to be released."""
        self._life.spend(self.now.noise_multiplier, self.mechanism.sample_rate)
        self.steps = self._life.steps = self.steps + 1
        self._now = None
        self._ledger.record(self._life)
        if self._samples:
            self._samples.use(sample)

    def _update(self, sums: dict[str, torch.Tensor]) -> None:
        """The optimizer's step with the noisy mean."""
        try:
            for name, p in self._learning.items():
                # In the parameter's own layout, as autograd would give it: fused optimizers count on that.
                p.grad = torch.empty_like(p).copy_(sums[name] / self.expected_batch_size)
            self.optimizer.step()
        finally:
            for p in self._learning.values():
                p.grad = None


def _added(totals: dict[str, torch.Tensor], sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: totals[name].add_(part) if totals else part for name, part in sums.items()}


def learned(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the parameters that an optimizer changes."""
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
