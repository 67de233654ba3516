"""The state of a private training: what was clipped since the last step, and what has been spent."""

import copy

import torch
from opacus.accountants import IAccountant

from plpkg.clipping.clip import Clip
from plpkg.clipping.gradients import check_losses, leaves, zeros_for
from plpkg.clipping.recorder import Execution, Recorder
from plpkg.clipping.training.accounting import spent
from plpkg.clipping.training.loader import PoissonSampler
from plpkg.clipping.training.randomness import Randomness
from plpkg.validation import whole_number


class Session:
    """What the model, the loader, the criterion and the optimizer of one private training tell each other."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: Clip,
        execution: Execution,
        noise_multiplier: float,
        sample_rate: float,
        expected_batch_size: float,
        accountant: IAccountant,
        randomness: Randomness,
        *,
        averages: bool,
    ) -> None:
        self.clip, self.execution = clip, execution
        self.noise_multiplier, self.sample_rate = noise_multiplier, sample_rate
        self.expected_batch_size, self.accountant, self.randomness = expected_batch_size, accountant, randomness
        self.optimizer = optimizer
        self.recorder = Recorder(model)
        self.sampler: PoissonSampler | None = None
        self.averages = averages
        self.steps = 0
        self._released: dict[str, tuple[torch.Tensor, int]] = {}
        self.restart()
        # Before the recorder's own hooks, and after: the model may be a layer itself. Closures, so that a copy of the
        # model does not copy all this.
        self._hooks = [
            model.register_forward_pre_hook(
                lambda module, args, kwargs: self._before_forward(module, args, kwargs), with_kwargs=True, prepend=True
            ),
            model.register_forward_hook(lambda module, args, output: self._after_forward(module), always_call=True),
            optimizer.register_step_pre_hook(self.release),
        ]

    def remove(self) -> None:
        """Take all hooks away: the model and the optimizer are ordinary ones again."""
        self.recorder.remove()
        for hook in self._hooks:
            hook.remove()

    def restart(self) -> None:
        """Drop the pieces of a sample that was not finished: the next one may be the same again."""
        self._sums: dict[str, torch.Tensor] = {}
        self._draws = self._left = 0
        self._last, self._added = True, False

    def begin(self, examples: int, last: bool) -> None:
        """The loader gives a batch."""
        self._draws += self._last  # the piece before was the last of its sample: this one begins another
        self._last, self._left = last, examples

    def skip(self) -> None:
        """An empty sample: a step of noise alone."""
        if self._sums:
            raise RuntimeError("examples have gone backward since the last step: the sample is not empty")
        self._added = True
        self.optimizer.step()

    def add(self, losses: torch.Tensor) -> None:
        """Clip, and add to what is there."""
        if not self.recorder.recording:
            raise RuntimeError("backward() needs a forward pass of the model in training mode, once for each")
        batch = self.recorder.batch
        check_losses(losses, batch)
        if self.sampler is not None:
            if self._draws > 1:
                raise RuntimeError(
                    f"{self._draws} samples before one step(): an example may be in each, and would count "
                    f"{self._draws} times; step after each batch, or take max_physical_batch_size for smaller ones"
                )
            if batch > self._left:
                raise RuntimeError(
                    f"the model was given {batch} examples where the data_loader's batch has {self._left} left: an "
                    "example may come once in a step, and the batch must be the first dimension"
                )
        try:
            sums, _ = self.recorder.clipped_sums(losses, self.clip, self.execution)
        finally:
            self.recorder.recording = False
        for name, part in sums.items():
            if part is not None:
                self._sums[name] = self._sums[name].add_(part) if name in self._sums else part
        self._added = True
        self._left -= batch

    def release(self, optimizer, args, kwargs) -> None:
        """Before the optimizer's step: the noisy gradients, or none until the last piece of a sample."""
        if any(a is not None for a in (*args[1:], *kwargs.values())):
            raise RuntimeError("private training takes steps without a closure")
        parameters = self.recorder.parameters
        held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if held != {id(p) for p in parameters.values()}:
            raise RuntimeError(
                f"the optimizer has {len(held)} parameters that learn, make_private saw {len(parameters)}: freeze and "
                "unfreeze before make_private"
            )
        for name, p in parameters.items():
            ours = self._released.get(name)
            known = ours and p.grad is ours[0] and p.grad._version == ours[1]
            if p.grad is not None and not known and p.grad.any():  # zero_grad(set_to_none=False) leaves zeros
                raise RuntimeError(
                    f"{name} has a gradient that was not clipped: only criterion(output, target).backward() may give it"
                )
        if not self._added:
            raise RuntimeError("step() without criterion(output, target).backward() before it")
        if self.sampler is not None and self._draws == 0:
            raise RuntimeError("step() without a batch from the data_loader that make_private returned")
        if self.sampler is not None and self._left:
            raise RuntimeError(f"step() before {self._left} examples of the data_loader's batch have gone backward")
        for p in parameters.values():
            p.grad = None
        if not self._last:
            self._added = False
            return
        sums = {n: self._sums[n] if n in self._sums else zeros_for(p) for n, p in parameters.items()}
        std = self.noise_multiplier * self.clip.sensitivity
        if std:
            sums = {n: sums[n] + noise for n, noise in self.randomness.noise(sums, std, self.steps).items()}
        for n, p in parameters.items():
            p.grad = (sums[n] / self.expected_batch_size if self.averages else sums[n]).to(p.dtype)
            self._released[n] = p.grad, p.grad._version
        self.accountant.step(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate)
        self.steps += 1
        self._sums, self._draws, self._added = {}, 0, False
        self.recorder.forget()

    def epsilon(self, delta: float) -> float:
        return spent(self.accountant, delta)

    def state_dict(self) -> dict:
        if self._sums or self._added:
            raise RuntimeError("a sample is half done: save after step() and before the next batch's backward()")
        drawn = (self.sampler.drawn, self.sampler.left) if self.sampler else (0, 0)
        return {
            "accountant": copy.deepcopy(self.accountant.state_dict()),
            "steps": self.steps,
            "drawn": drawn[0],
            "left": drawn[1],
            "identity": self._identity(),
        }

    def load_state_dict(self, state: dict) -> None:
        try:
            there, accountant = state["identity"], state["accountant"]
            steps, drawn, left = (whole_number(key, state[key], 0) for key in ("steps", "drawn", "left"))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the state of a private training: {error} is missing") from error
        if there != self._identity():
            now = self._identity()
            different = "; ".join(f"{k}={there.get(k)!r}, now {v!r}" for k, v in now.items() if there.get(k) != v)
            raise ValueError(f"the state is of a training with {different}")
        self.accountant.load_state_dict(copy.deepcopy(accountant))
        self.steps = steps
        self.restart()
        self.recorder.forget()
        if self.sampler:
            self.sampler.drawn, self.sampler.left, self.sampler.resumes = drawn, left, True

    def _identity(self) -> dict:
        return {
            "accountant": self.accountant.mechanism(),
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
            "max_grad_norm": self.clip.max_grad_norm,
            "clipping": self.clip.kind,
        }

    def _before_forward(self, module, args, kwargs) -> None:
        recorder = self.recorder
        if module is not recorder.model:
            return
        self._was = recorder.recording
        if not module.training or not torch.is_grad_enabled():
            recorder.recording = False
            return
        counts = {leaf.shape[0] for leaf in leaves([*args, kwargs]) if leaf.ndim}
        if self._left in counts:
            batch = self._left
        elif len(counts - {1}) <= 1 and counts:
            batch = max(counts)
        else:
            raise ValueError(f"the model's tensors must have the batch first, got first dimensions {sorted(counts)}")
        if not recorder.recording or recorder.batch != batch:
            recorder.forget()
        recorder.recording, recorder.batch = True, batch

    def _after_forward(self, module) -> None:
        if module is self.recorder.model and not (module.training and torch.is_grad_enabled()):
            self.recorder.recording = self._was
