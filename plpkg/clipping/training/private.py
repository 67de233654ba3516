"""A private training: ``for sample in private: private.step(sample)``.

DP-SGD (Abadi et al., arXiv 1607.00133): a Poisson sample, each example's gradient clipped to C, normal noise of
standard deviation σ·C on their sum, divided by the *expected* batch size. ε comes from Opacus's accountants.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import torch
from opacus.accountants import IAccountant

from plpkg.clipping.batches import numbered
from plpkg.clipping.clip import Clip, clip_dense, zeros_for
from plpkg.clipping.gradients import Watched
from plpkg.clipping.training.accounting import Mechanism, accountant_of, spent
from plpkg.clipping.training.budget import Budget
from plpkg.clipping.training.given import GivenGradients
from plpkg.clipping.training.ledger import Life, Spent, ledger_of
from plpkg.clipping.training.processes import Processes
from plpkg.clipping.training.randomness import Randomness
from plpkg.clipping.training.samples import LOOP, Part, Sample, Samples, own_parts
from plpkg.clipping.training.unchanged import check_identity, check_model, check_optimizer

UNCLIPPED = Clip(1e30)
"""For a part of what is one user's, which is clipped when the rest has come: in float32 still a number."""
OLD = ("criterion", "data_loader", "paced", "remove", "restart", "skip")
"""Names that a private training had when it was hooks in the user's loop."""


class Step(NamedTuple):
    """The losses that a step saw. They are not private: do not publish them.

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
    mechanism
        The noise, the sampling and the clipping of a step.
    expected_batch_size
        The number of examples, or users, that the noisy sum is divided by.
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
        self.model = model
        self.optimizer = optimizer
        self.mechanism = mechanism
        self.expected_batch_size = expected_batch_size
        self._gradients = gradients
        self._recorder = gradients.recorder
        self._samples = samples
        self._randomness = randomness
        self._processes = processes
        self._epochs = epochs
        self._learning = dict(self._recorder.parameters)
        self._by_users: bool | None = None  # where you sample yourself: as the first step had it
        self._busy = threading.Lock()
        self._ledger = ledger_of(model, self._learning.values())
        if spent_before:
            self._ledger.begin_with(spent_before)
        self._budget = Budget(mechanism, self._ledger, limit)
        life = self._ledger.life(0)
        self._enter(life, 0)
        self._ledger.record(life)  # so that another training of these parameters draws other noise

    def __iter__(self) -> Iterator[Sample]:
        if self._samples is None:
            raise RuntimeError("you sample yourself: call private.step(pieces) with a list of batches")
        steps_per_epoch = self._samples.steps
        begun = self.steps // steps_per_epoch + 1
        epochs = self._epochs or begun
        end = epochs * steps_per_epoch
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
        hint = f": a step is a call, {LOOP}" if name in OLD else ""
        raise AttributeError(f"a private training has no {name}{hint}")

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
        return self.now.sigma

    @property
    def now(self) -> Mechanism:
        """The mechanism of the next step. Functions of its number are asked once: clipping, noise and ε all use that
        first answer, whatever they would say later.
        """
        return self._budget.now

    @property
    def steps(self) -> int:
        """The number of the next step."""
        return self._budget.steps

    @property
    def max_steps(self) -> float:
        """The number of the first step that ``max_epsilon`` does not allow."""
        return self._budget.max_steps

    @property
    def done(self) -> bool:
        """Whether another step would spend more than ``max_epsilon``."""
        return self._budget.done

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
        """A state to save beside the model's and the optimizer's: what was spent, and which step comes next."""
        return {
            "lives": self._ledger.state(self._budget.life),
            "life": self._budget.life.name,
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
        steps = state["steps"]
        check_identity(state["identity"], asdict(self.mechanism.at(steps)))
        self._ledger.merge(state["lives"])
        self._by_users = state["by_users"]
        self._enter(self._ledger.life(steps, state["life"]), steps)
        if self._samples:
            self._samples.forget()

    def _enter(self, life: Life, steps: int) -> None:
        """Go on in a life, with the step of this number."""
        self._randomness.life = life.number
        self._budget.enter(life, steps)

    def _check(self) -> None:
        """Refuse a step of something else than what was seen in the beginning."""
        self._processes.check()
        if self._budget.life.steps != self.steps:
            raise RuntimeError(
                f"another training has gone on from step {self.steps} of this one's state, whose noise is out: go on "
                "with that one, or load its state_dict()"
            )
        if self.done:
            raise RuntimeError(f"a step beyond the {self.max_steps} that max_epsilon allows")
        if isinstance(self._gradients, Watched) and not self.model.training:
            raise RuntimeError("the model is in evaluation mode: call model.train() before private.step")
        check_model(self.model, self._learning)
        check_optimizer(self.optimizer, self.model, self._learning)

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
        clip = self.now.clip
        totals: dict[str, torch.Tensor] = {}
        of_one_user: dict[str, torch.Tensor] = {}  # unclipped, of a user with more examples than fit into one part
        losses = []
        for part in parts:
            is_split = part.goes_on or bool(of_one_user)
            sums, part_losses = self._sums_of(part, UNCLIPPED if is_split else clip)
            losses.append(part_losses)
            if is_split:
                of_one_user = _added(of_one_user, sums)
                if part.goes_on:
                    continue
                one = {name: total[None] for name, total in of_one_user.items()}  # a batch of this user
                sums, _ = clip_dense(one, clip, self._recorder.layers)
                of_one_user = {}
            totals = _added(totals, sums)
        if not totals:
            totals = {name: zeros_for(p) for name, p in self._learning.items()}
        return totals, torch.cat(losses) if losses else torch.zeros(0)

    def _sums_of(self, part: Part, clip: Clip) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The sums of a part's clipped gradients, and its losses."""
        owners = divisors = None
        if part.owners is not None:
            owners = numbered(part.owners, part.count)
            divisors = torch.tensor(self._sizes(part.owners))
        look = part.look
        if look is not None:
            look = replace(look, among=self._moved(look.among))
        batch = self._moved(part.batch)
        sums, _, losses = self._gradients.sums(batch, part.count, clip, owners, divisors, look)
        return sums, losses

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
        now = self.now
        std = now.sigma * now.clip.sensitivity
        if std and self._processes.rank == 0:
            self._randomness.add_noise(sums, std, self.steps)
        self._processes.sum(sums)

    def _spend(self, sample: Sample | list) -> None:
        """Write down the step that is about to be released."""
        self._budget.spend()
        if self._samples and isinstance(sample, Sample):
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
    """The totals, to which the sums are added in place; of no totals, the sums."""
    if not totals:
        return sums
    for name, part in sums.items():
        totals[name].add_(part)
    return totals
