"""Training functions for the conformance checks: Opacus's, plpkg's, one by hand with faults, transformers.Trainer's."""

import itertools
import math
import tempfile
import warnings
from contextlib import contextmanager

import torch
from opacus import PrivacyEngine
from torch import func, nn

from plpkg.clipping import make_private
from plpkg.clipping.checks.cases import one_loss_each

CALLS = itertools.count()


def opacus(mode: str, clipping: str = "flat"):
    """A training with Opacus's engine; samples in pieces as its BatchMemoryManager has them."""

    def train(model, optimizer, criterion, steps, *, max_grad_norm, noise_multiplier, expected_batch_size):
        learning = sum(p.requires_grad for p in model.parameters())
        limit = max_grad_norm if clipping == "flat" else [max_grad_norm / math.sqrt(learning)] * learning
        with quiet():
            made = PrivacyEngine(accountant="rdp").make_private(
                module=model, optimizer=optimizer, criterion=criterion, data_loader=torch.utils.data.DataLoader([0]),
                poisson_sampling=False, noise_multiplier=noise_multiplier, max_grad_norm=limit, clipping=clipping,
                grad_sample_mode=mode,
            )  # fmt: skip
            model, optimizer = made[:2]
            criterion = made[2] if mode == "ghost" else criterion
            optimizer.expected_batch_size = expected_batch_size
            for step in steps:
                for inputs, target in step:
                    optimizer.signal_skip_step(do_skip=inputs is not step[-1][0])
                    criterion(model(*inputs), target).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    return train


def private_of(model, optimizer, criterion, max_grad_norm, noise_multiplier, expected_batch_size, **options):
    """A private training whose samples are the caller's."""
    expected = 1 if criterion.reduction == "sum" else expected_batch_size
    return make_private(
        model, optimizer, None, one_loss_each(criterion), max_grad_norm=max_grad_norm,
        noise_multiplier=noise_multiplier, sample_rate=0.5, batch_size=expected, **options,
    )  # fmt: skip


def ours(**options):
    """A training with make_private."""

    def train(model, optimizer, criterion, steps, *, max_grad_norm, noise_multiplier, expected_batch_size):
        how = max_grad_norm, noise_multiplier, expected_batch_size
        private = private_of(model, optimizer, criterion, *how, **options)
        for step in steps:
            private.step(step)

    return train


def trainer(model, optimizer, criterion, steps, *, max_grad_norm, noise_multiplier, expected_batch_size):
    """transformers.Trainer with private steps, of the samples that it is given."""
    from transformers import TrainingArguments

    from plpkg.clipping import PrivateTrainer

    class GivenSamples(PrivateTrainer):
        def get_train_dataloader(self):
            return steps

        def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
            self.create_optimizer_and_scheduler(max_steps)
            how = max_grad_norm, noise_multiplier, expected_batch_size
            self.private = private_of(self.model, optimizer, criterion, *how)
            return self.model, train_dataloader

    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    with tempfile.TemporaryDirectory() as folder:  # it makes one, though nothing is saved
        arguments = TrainingArguments(
            folder, max_steps=len(steps), use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        made = GivenSamples(model, arguments, private=None, train_dataset=steps, optimizers=(optimizer, schedule))
        made.train()


def one_length(noise):
    return noise / noise.norm() * math.sqrt(noise.numel())


NOISES = {
    "uniform noise": lambda noise, step: (2 * torch.rand_like(noise) - 1) * math.sqrt(3),
    "noise of two values": lambda noise, step: noise.sign(),
    "one row of noise": lambda noise, step: noise[:1].expand_as(noise),
    "noise of one length": lambda noise, step: one_length(noise) if noise.ndim > 1 else noise,
    "noise that comes and goes": lambda noise, step: noise * (0.5 if step % 3 else math.sqrt(2.5)),
}
"""Of standard deviation 1 in all steps together, but not independent normal numbers."""


def by_hand(fault: str = ""):
    """DP-SGD with torch.func; or with a fault."""

    def train(model, optimizer, criterion, steps, *, max_grad_norm, noise_multiplier, expected_batch_size):
        if fault == "replaced":
            model[2] = nn.Linear(8, 3)
        if fault == "forgotten":
            optimizer.param_groups[0]["params"].pop()
        if fault == "refuses":
            raise NotImplementedError("this is not for you. Go away")
        if fault == "crashes":
            raise KeyError("a slip")
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        generator = torch.Generator().manual_seed(0 if fault == "a fixed seed" else len(steps))

        def loss(parameters, inputs, target):
            output = func.functional_call(model, parameters, tuple(x[None] for x in inputs))
            return criterion(output, target[None])

        sums, earlier, averages = {}, [], {}
        for number, step in enumerate(steps):
            if not sums or fault != "never forgets":
                sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
            for inputs, target, *users in step[-1:] if fault == "drops micro-batches" else step:
                if len(target):
                    rows = func.vmap(func.grad(loss), (None, 0, 0))({**parameters}, inputs, target)
                    if users and fault != "clips examples":
                        whose = (users[0].unique()[:, None] == users[0]).to(target.device, torch.float32)
                        rows = {name: torch.tensordot(whose, row, 1) for name, row in rows.items()}
                    norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows.values()]).norm(dim=0)
                    factors = (max_grad_norm / norms).clamp(max=1)
                    for name, row in rows.items():
                        sums[name] += torch.tensordot(factors, row, 1)
                if fault == "actual batch size":
                    expected_batch_size = max(1, len(target))
            if fault == "same noise":
                generator.manual_seed(0)
            earlier.append({})
            for name, p in parameters.items():
                if fault == "one seed for all parameters":
                    generator.manual_seed(number + 1000 * len(steps))
                std = max_grad_norm * noise_multiplier * (0.8 if fault == "little noise" else 1)
                quiet = fault == "quiet bias" and name.endswith("bias")
                quiet |= fault == "none for nobody" and not len(step[0][1])
                noise = torch.randn(p.shape, generator=generator)
                if fault in NOISES:
                    noise = NOISES[fault](noise, number)
                if fault == "noise of the step before last" and number % 4 > 1:
                    noise = earlier[number - 2][name]
                earlier[-1][name] = noise
                noise = std * noise * (not quiet)
                p.grad = (sums[name] * (5 if fault == "five times" else 1) + noise) / expected_batch_size
                if fault == "a penalty after the noise":
                    p.grad += 0.1 * p.detach()
                if fault == "an average of noisy gradients":
                    averages[name] = p.grad = 0.9 * averages.get(name, 0) + 0.1 * p.grad
                if fault == "never ready":
                    p.grad = None
                if fault == "restless":
                    p.grad += next(CALLS)
                if fault == "not a number":
                    p.grad *= math.nan
            if fault == "unlearnt":
                parameters["0.weight"].grad = None
            optimizer.step()

    return train


@contextmanager
def quiet():
    """Without Opacus's warnings: no secure generator, and a first layer whose input needs no gradient."""
    with warnings.catch_warnings():
        for message in ("Secure RNG turned off", "Full backward hook is firing", "In CPU autocast"):
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        yield
