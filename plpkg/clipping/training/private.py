"""The steps of a private training: what is clipped and added up, when the noise comes, and what is refused.

DP-SGD (Abadi et al., arXiv 1607.00133): a Poisson sample, each example's gradient clipped to C, normal noise of
standard deviation σ·C on their sum, divided by the *expected* batch size. ε comes from Opacus's accountants.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial

import torch
from opacus.accountants import IAccountant
from torch.optim.optimizer import register_optimizer_step_pre_hook

from plpkg.clipping.batches import check_losses, leaves, numbered
from plpkg.clipping.clip import Clip, clip_dense, zeros_for
from plpkg.clipping.execution import LOOP, Execution
from plpkg.clipping.mixing import modules_of
from plpkg.clipping.recorder import Recorder, has_hooks
from plpkg.clipping.training.accounting import Mechanism, accountant_of, spent
from plpkg.clipping.training.criterion import OwnLoss, PrivateCriterion, PrivateLoss
from plpkg.clipping.training.given import GivenGradients, clip_given
from plpkg.clipping.training.ledger import Life, Spent, ledger_of
from plpkg.clipping.training.loader import Piece, PrivateLoader, PrivateSampler
from plpkg.clipping.training.processes import Processes
from plpkg.clipping.training.randomness import Randomness
from plpkg.validation import shown, whole_number

UNCLIPPED = Clip(1e30)
"""For a part of what is one user's, which is clipped when the rest has come: in float32 still a number."""


@dataclass
class Progress:
    """How far the sample of the next step has come, which may be given in several batches."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # by parameter, the clipped gradients
    part: dict[str, torch.Tensor] = field(default_factory=dict)  # of a user whose examples are split across batches
    samples: int = 0  # that the data loader has begun to give
    piece: Piece | None = None  # the latest batch
    left: int = 0  # examples of it that have not gone backward
    last: bool = True  # whether it is the sample's last
    added: bool = False  # whether anything has gone backward since step() was called


class Private:
    """A private training, as :func:`~plpkg.clipping.training.make.make_private` returns it; unpacks into four.

    Attributes
    ----------
    model, optimizer
        The same objects as before, with hooks.
    criterion
        Its losses clip when they go backward; with ``per_example`` it takes a batch.
    data_loader
        Gives Poisson samples; ``None`` where you sample yourself.
    mechanism, steps, max_steps
        What is spent in a step, the number of the next one, and of the first that is not allowed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Callable | None,
        mechanism: Mechanism,
        expected_batch_size: float,
        execution: Execution,
        randomness: Randomness,
        processes: Processes,
        limit: tuple[float, float] | None = None,
        per_example: Callable | None = None,
        spent_before: Sequence[Spent] = (),
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._elsewhere = per_example is not None
        self._own = OwnLoss(model) if criterion is None and not self._elsewhere else None
        self.criterion = GivenGradients(per_example, self) if self._elsewhere else PrivateCriterion(criterion, self)
        self.data_loader: PrivateLoader | None = None
        self.mechanism, self.expected_batch_size = mechanism, expected_batch_size
        self.execution, self.randomness, self.processes = execution, randomness, processes
        self.progress = Progress()
        self._limit = limit
        self._offered: list[Piece] = []
        self._loop: object = None  # over the data loader, whose batches are trained on
        self.recorder = Recorder(model, alone=execution is LOOP or self._elsewhere)
        self._ledger = ledger_of(model, self.recorder.parameters.values())
        if spent_before:
            self._ledger.begin_with(spent_before)
        self._released = self._ledger.gradients  # which may still be there from a training before
        try:
            self._enter(self._ledger.life(0), 0)
        except Exception:  # max_epsilon, or a function of the step, makes no sense
            self.recorder.remove()
            raise
        self._hooks = [
            optimizer.register_step_pre_hook(self._release),
            register_optimizer_step_pre_hook(_not_by_others(weakref.ref(self))),
        ]
        weakref.finalize(self, self._hooks[-1].remove)
        if self._elsewhere:
            return
        # Before the recorder's own hooks, and after: the model may be a layer itself. Closures, so that a copy of the
        # model does not copy all this.
        self._hooks += [
            model.register_forward_pre_hook(
                lambda module, args, kwargs: self._before_forward(module, args, kwargs), with_kwargs=True, prepend=True
            ),
            model.register_forward_hook(
                lambda module, args, kwargs, output: self._after_forward(module, kwargs, output),
                with_kwargs=True,
                always_call=True,
            ),
        ]

    def __iter__(self) -> Iterator:
        return iter((self.model, self.optimizer, self._own or self.criterion, self.data_loader))

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

    def _enter(self, life: Life, steps: int) -> None:
        """Go on in a life, with the step of this number."""
        self._life, self.randomness.life, self.steps, self._now = life, life.number, steps, None
        self._plan()

    def _plan(self) -> None:
        """How many steps ``max_epsilon`` allows, if functions go on as they say now."""
        sigma, now, first = self.mechanism.noise_multiplier, self._now, self.steps

        @cache
        def planned(step: int) -> float:
            return now.noise_multiplier if now and step == first else sigma(step)

        self._planned = replace(self.mechanism, noise_multiplier=planned) if callable(sigma) else self.mechanism
        before = self._ledger.spent
        self.max_steps = self._planned.steps_within(*self._limit, self.steps, before) if self._limit else math.inf

    @property
    def accountant(self) -> IAccountant:
        """Opacus's accountant after all steps that were released from the model: those before ``make_private`` was
        called again, and those after a state that was gone back to, as well.
        """
        return accountant_of(self.mechanism.accountant, self._ledger.spent)

    @property
    def learning(self) -> bool:
        """Whether the model is in training mode, with gradients: else it is being evaluated."""
        return (self._elsewhere or self.model.training) and torch.is_grad_enabled()

    @property
    def layers(self) -> list[str]:
        """The layers that learn, in the order of a ``max_grad_norm`` for each."""
        return list(dict.fromkeys(self.recorder.layers.values()))

    @property
    def done(self) -> bool:
        """Whether another step would spend more than ``max_epsilon``."""
        return self.steps >= self.max_steps

    @property
    def sampler(self) -> PrivateSampler | None:
        """What the data loader samples with."""
        return None if self.data_loader is None else self.data_loader.batch_sampler

    def paced(self, scheduler) -> "Paced":
        """A learning-rate scheduler whose ``step()`` goes as far as the training has: not at all after a piece of a
        sample, and further where samples were empty.
        """
        return Paced(scheduler, self)

    def epsilon(self, delta: float) -> float:
        """The ε spent so far, for a δ: adding or removing one example, or user, changes no probability by more.

        With shuffled batches that is about one who leaves an empty place, and not about one who is removed so that the
        others move up, nor replaced (:mod:`plpkg.clipping.training.accounting`).

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

    def sample(self) -> Iterator:
        """The data loader's batches for one step alone, where a loop over all of it takes more. A sample of nobody is a
        step of noise without a batch.
        """
        self.sampler.resume(self.sampler.drawn, 1, anew=False)
        return iter(self.data_loader)

    def skip(self) -> None:
        """Where you sample yourself and nobody was chosen: a step of noise alone, which counts like any other.

        Raises
        ------
        RuntimeError
            Examples have gone backward since the last step, or a data loader samples (and does this by itself).
        """
        if self.progress.sums:
            raise RuntimeError("examples have gone backward since the last step: the sample is not empty")
        self.progress.added = True
        self.optimizer.step()

    def remove(self) -> None:
        """Make the model and the optimizer ordinary again; what has been spent stays spent."""
        self.recorder.remove()
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict:
        """What to save beside the model's and the optimizer's states: what was spent, and which sample comes next.

        Raises
        ------
        RuntimeError
            A sample is half done: call it after ``step`` and before the next batch.
        """
        if self.progress.sums or self.progress.added:
            raise RuntimeError("a sample is half done: save after step() and before the next batch's backward()")
        return {
            "lives": self._ledger.state(self._life),
            "life": self._life.name,
            "steps": self.steps,
            "drawn": self.sampler.drawn if self.sampler else 0,
            "left": self.sampler.left if self.sampler else 0,
            "shuffling": self.randomness.shuffling,
            "identity": asdict(self.now),
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
        try:
            identity, lives, shuffling = dict(state["identity"]), state["lives"], state["shuffling"]
            name, steps, drawn, left = (state[key] for key in ("life", "steps", "drawn", "left"))
        except KeyError as error:
            raise ValueError(f"not the state of a private training: {error} is missing") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"not the state of a private training: {shown(state)}") from error
        for key, value in (("steps", steps), ("drawn", drawn), ("left", left), ("shuffling", shuffling)):
            whole_number(key, value, 0)
        if self.sampler:
            whole_number("left", left, 0, len(self.sampler), "steps")
        now = asdict(self.mechanism.at(steps))
        if identity != now:
            different = "; ".join(
                f"{k}={shown(identity.get(k))}, now {v!r}" for k, v in now.items() if identity.get(k) != v
            )
            raise ValueError(f"the state is of a training with {different}")
        self._ledger.merge(lives, name, steps)
        life = self._ledger.life(steps, name)
        self._enter(life, steps)
        self.randomness.shuffling = shuffling
        self.restart()
        self.recorder.forget()
        if self.sampler:
            self.sampler.resume(drawn, left, anew=life.name != name)

    def restart(self) -> None:
        """Drop a sample that was not finished: an epoch begins, whose first sample may be the same again."""
        self.progress = Progress()

    def offer(self, pieces: list[Piece]) -> None:
        """The data loader gives a batch, the last of these; those before are empty samples. Until :meth:`begin` it may
        be for an evaluation.
        """
        self._offered = pieces

    def begin(self) -> bool:
        """What the data loader has offered is trained on: each empty sample is a step of noise. False if it may not."""
        pieces, self._offered = self._offered, []
        for piece in pieces:
            if piece.loop is not self._loop:  # another loop over the data loader: an epoch begins
                self._loop = piece.loop
                self.restart()
            if self._overspends(piece):
                self.max_steps = self.steps
                return False
            self.progress.samples += self.progress.last
            self.progress.piece, self.progress.left, self.progress.last = piece, len(piece.indices), piece.last
            self.sampler.trained(piece)
            if not piece.indices:
                self.skip()
        return True

    def _overspends(self, piece: Piece) -> bool:
        """Whether a batch begins a shuffled epoch that ``max_epsilon`` does not allow.

        It is asked at each epoch, since a loop that is left early, or an evaluation, begins more of them than planned.
        """
        epoch = self.mechanism.epoch
        if not (self._limit and epoch) or piece.draw // epoch in self._life.epochs:
            return False
        after = [*self._ledger.spent, (self.now.noise_multiplier, 1.0, 1)]
        most, delta = self._limit
        return spent(accountant_of(self.mechanism.accountant, after), delta) > most

    def check(self) -> None:
        """See that what learns is what was seen in the beginning.

        Raises
        ------
        RuntimeError
            A parameter learns that was not there, or one is gone; or processes are.
        """
        self.processes.check()
        known = {id(p) for p in self.recorder.parameters.values()}
        there = [p for module in modules_of(self.model) for p in module._parameters.values() if p is not None]
        if known != {id(p) for p in there if p.requires_grad}:
            now = {id(p): name for name, p in self.model.named_parameters() if p.requires_grad}
            new = [name for key, name in now.items() if key not in known]
            gone = [name for name, p in self.recorder.parameters.items() if id(p) not in now]
            what = f"{new[0]} learns, which was not there" if new else f"{gone[0]} learns no more"
            raise RuntimeError(
                f"{what} when make_private was called: freeze, unfreeze and replace layers, and load with assign=True, "
                "before; or remove(), call make_private again, and go on with load_state_dict(state_dict())"
            )
        if hooked := [name for name, p in self.recorder.parameters.items() if has_hooks(p)]:
            raise RuntimeError(f"{hooked[0]} has a gradient hook, which would see what is not clipped: remove it")

    def expect(self) -> None:
        """A forward pass begins: what learns is what was seen, and the data loader's batch is trained on."""
        self.check()
        # A batch may have been fetched in evaluation mode, as transformers' Trainer does.
        if self._offered and not self.progress.left and not self.begin():
            raise RuntimeError(f"a step beyond the {self.max_steps} that max_epsilon allows")

    def record(self, batch: int) -> None:
        """So many examples get their losses."""
        if not self.recorder.recording or self.recorder.batch != batch:
            self.recorder.forget()
        self.recorder.recording, self.recorder.batch = True, batch

    def add(self, losses: torch.Tensor, loss_scale: float = 1.0, gradients: Mapping | None = None) -> None:
        """Clip the gradients of one loss an example, and add them to the sample's.

        ``loss_scale`` is what the losses are multiplied with on their way back; it is taken off again. ``gradients``,
        by name ``(batch, *shape)``, need no backward pass.

        Raises
        ------
        RuntimeError
            There was no forward pass for these losses, or the examples are not those of one batch of the data loader.
        """
        recorder, progress = self.recorder, self.progress
        if not recorder.recording:
            raise RuntimeError("backward() needs a forward pass of the model in training mode, once for each")
        if gradients is None:
            check_losses(losses, recorder.batch)
        if self.execution is LOOP and recorder.batch != 1:
            raise RuntimeError(
                f"execution='loop' takes one example at a time, got {recorder.batch}: iterate over the data_loader "
                "that make_private returned, or call model and backward() for each"
            )
        if self.sampler and progress.samples > 1:
            raise RuntimeError(
                f"{progress.samples} samples before one step(): an example may be in each, and would count "
                f"{progress.samples} times; step after each batch, or take max_physical_batch_size for smaller ones"
            )
        if self.sampler and recorder.batch > progress.left:
            raise RuntimeError(
                f"the model was given {recorder.batch} examples where the data_loader's batch has {progress.left} "
                "left: an example may come once in a step, the batch must be the first dimension, and nothing may read "
                "ahead of the loop (accelerate's prepare(data_loader) does: iterate over the data_loader itself)"
            )
        try:
            sums = self._clipped(losses, loss_scale, gradients)
        except FloatingPointError as error:
            raise FloatingPointError(
                f"{error}: give it a finite loss, or call restart(), which drops the sample of this step"
            ) from error
        finally:
            recorder.recording = False
        for name, part in sums.items():
            progress.sums[name] = progress.sums[name].add_(part) if name in progress.sums else part
        progress.added = True
        progress.left -= recorder.batch
        if loss_scale != 1:  # GradScaler looks for a gradient, and finds no overflow: none is left
            p = next(iter(recorder.parameters.values()))
            p.grad = torch.zeros_like(p)

    def _clipped(self, losses: torch.Tensor, loss_scale: float, gradients: Mapping | None) -> dict[str, torch.Tensor]:
        """The sums of the clipped gradients of examples; or of users, as far as all that is theirs has come."""

        def sums(clip: Clip, owners: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            if gradients is not None:
                return clip_given(gradients, clip, self.recorder.layers, owners)
            how = dict(owners=owners, loss_scale=loss_scale)
            sums, _ = self.recorder.clipped_sums(losses, clip, self.execution, **how)
            return {name: part for name, part in sums.items() if part is not None}

        clip, progress, piece = self.now.clip, self.progress, self.progress.piece
        if self.mechanism.users is None:
            return sums(clip)
        if len(losses) != len(piece.owners):
            raise RuntimeError(
                f"backward() of {len(losses)} examples where the data_loader gave {len(piece.owners)}: with users take "
                "its batches whole, and max_physical_batch_size for smaller ones"
            )
        owners = numbered(piece.owners, len(losses))
        if self.criterion.averages:  # a user's loss is the mean over all that is theirs
            counts = losses.new_tensor([len(self.sampler.members[user]) for user in piece.owners])
            losses = losses / counts
            gradients = gradients and {n: torch.einsum("n...,n->n...", g, 1 / counts) for n, g in gradients.items()}
        if not (piece.goes_on or progress.part):
            return sums(clip, owners)
        progress.part = progress.part or {name: zeros_for(p) for name, p in self.recorder.parameters.items()}
        for name, part in sums(UNCLIPPED, owners).items():
            progress.part[name] += part
        if piece.goes_on:
            return {}
        whole, progress.part = {name: part[None] for name, part in progress.part.items()}, {}
        return clip_dense(whole, clip, self.recorder.layers)[0]

    def _release(self, optimizer, args, kwargs) -> None:
        """Before the optimizer's step: the noisy gradients, or none until the last batch of a sample."""
        if any(a is not None for a in (*args[1:], *kwargs.values())):
            raise RuntimeError("private training takes steps without a closure")
        self._check_step()
        if self.done:
            raise RuntimeError(f"a step beyond the {self.max_steps} that max_epsilon allows")
        for p in self.recorder.parameters.values():
            p.grad = None
        if not self.progress.last:
            self.progress.added = False
            return
        noisy = self._noisy_sums()
        self._spend()  # before anybody sees a gradient
        for name, total in noisy.items():
            p = self.recorder.parameters[name]
            p.grad = (total / self.expected_batch_size if self.criterion.averages else total).to(p.dtype)
            self._released[name] = p.grad, p.grad._version
        self.progress = Progress()
        self.recorder.forget()

    def _spend(self) -> None:
        """Write down the step that is about to be released."""
        life, epoch = self._life, self.mechanism.epoch
        if epoch is None:
            life.spend(self.now.noise_multiplier, self.mechanism.sample_rate)
        elif (number := self.progress.piece.draw // epoch) not in life.epochs:  # its first step counts for all
            life.spend(self.now.noise_multiplier, 1.0)
            life.epochs.append(number)
        self.steps = life.steps = self.steps + 1
        self._now = None
        self._ledger.record(life)

    def _check_step(self) -> None:
        """Refuse a step with gradients or parameters that were not clipped, or of less than a batch."""
        parameters, progress = self.recorder.parameters, self.progress
        learning = learned(self.optimizer)
        if learning != {id(p) for p in parameters.values()}:
            raise RuntimeError(
                f"the optimizer has {len(learning)} parameters that learn, make_private saw {len(parameters)}: freeze "
                "and unfreeze before make_private"
            )
        for name, p in parameters.items():
            gradient, version = self._released.get(name, (None, None))
            known = p.grad is None or (p.grad is gradient and p.grad._version == version)
            if not known and p.grad.any():  # zero_grad(set_to_none=False) leaves zeros
                raise RuntimeError(
                    f"{name} has a gradient that was not clipped: only criterion(output, target).backward() may give it"
                )
        if not progress.added:
            raise RuntimeError("step() without criterion(output, target).backward() before it")
        if self.sampler and progress.samples == 0:
            raise RuntimeError("step() without a batch from the data_loader that make_private returned")
        if self.sampler and progress.left:
            raise RuntimeError(
                f"step() before {progress.left} examples of the data_loader's batch have gone backward (a collate "
                "function that leaves some out? keep them, and give them a loss of 0)"
            )

    def _noisy_sums(self) -> dict[str, torch.Tensor]:
        clipped = self.progress.sums
        sums = {n: clipped[n] if n in clipped else zeros_for(p) for n, p in self.recorder.parameters.items()}
        std = self.now.noise_multiplier * self.now.clip.sensitivity
        if std and self.processes.rank == 0:
            self.randomness.add_noise(sums, std, self.steps)
        return self.processes.sum(sums)

    def _before_forward(self, module, args, kwargs) -> tuple | None:
        """Record a forward pass in training mode, and see how many examples it has; let others pass."""
        recorder = self.recorder
        if module is not recorder.model or recorder.busy:
            return None
        self._recorded = recorder.recording
        if not module.training or not torch.is_grad_enabled():
            recorder.recording = False
            if not module.training:
                recorder.guard.flip()
            return None
        self.expect()
        counts = [leaf.shape[0] for leaf in leaves([*args, kwargs]) if leaf.ndim]
        if not counts:
            raise ValueError("the model's tensors must have the batch first, got none with a first dimension")
        others = set(counts) - {1}
        # Else the first argument tells: what examples share, a mask say, may come after it. The losses must agree.
        batch = self.progress.left if self.progress.left in counts else max(counts) if len(others) <= 1 else counts[0]
        if self.execution is LOOP and 1 in counts:  # beside the words of a bag, say
            batch = 1
        self.record(batch)
        if self._own:  # the number of all examples' tokens, by which the model's own loss would divide
            return args, {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
        return None

    def _after_forward(self, module, kwargs, output):
        """After a pass that is not recorded the recorder does what it did; with ``criterion=None`` the output of one
        that is gets its loss.
        """
        if module is not self.recorder.model or self.recorder.busy:
            return None
        if not (module.training and torch.is_grad_enabled()):
            self.recorder.recording = self._recorded
        elif self._own and output is not None:
            self.recorder.recording = False
            losses = self._own.losses(module, output, kwargs, self.recorder.batch)
            self.recorder.recording = True
            output["loss"] = PrivateLoss(losses, self)
        return output


class Paced:
    """A learning-rate scheduler that goes as far as a private training has; else what it was."""

    def __init__(self, scheduler, private: Private) -> None:
        self._scheduler, self._private, self._steps = scheduler, private, private.steps

    def step(self, *args) -> None:
        """Take as many steps as the training has since the last call."""
        for _ in range(self._private.steps - self._steps):
            self._scheduler.step(*args)
        self._steps = self._private.steps

    def __getattr__(self, name: str):
        return getattr(self._scheduler, name)


def _not_by_others(private: weakref.ref) -> Callable:
    """Before any optimizer's step: refuse one that is not the private training's, but has its parameters."""

    def hook(optimizer, args, kwargs) -> None:
        training = private()
        if training is None or optimizer is training.optimizer:
            return
        recorder = training.recorder
        given = [p for group in optimizer.param_groups for p in group["params"] if recorder.reached(p)]
        if given:
            raise RuntimeError(
                f"a step of another {type(optimizer).__name__} with a tensor of shape {tuple(given[0].shape)} that the "
                "private losses gave a gradient to, which nobody clips: make it a parameter of the model"
            )
        if learned(optimizer) & {id(p) for p in recorder.parameters.values()}:
            raise RuntimeError(
                f"a step of another {type(optimizer).__name__} with parameters of a private training, whose gradients "
                "are for the optimizer that make_private was given: remove(), and make_private again with this one"
            )

    return hook


def learned(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the parameters that an optimizer changes."""
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
