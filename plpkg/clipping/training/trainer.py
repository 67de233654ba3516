"""``transformers.Trainer`` with private steps."""

import copy
import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from plpkg.clipping.training.losses import OwnLosses, Within
from plpkg.clipping.training.private import Private
from plpkg.clipping.training.samples import Sample
from plpkg.files import checkpoints

FILE = "private.safetensors"
"""The file in a checkpoint with the private training's state."""


class PrivateTrainer(Trainer):
    """A Trainer whose step is a private one: ``PrivateTrainer(model, args, private=partial(make_private, …), …)``.

    An epoch has as many Poisson samples as the Trainer's batches would be. Its own clipping, its optimizer's step and
    its normalisation of losses have nothing to do, and it wraps no model. A checkpoint has the private state as well,
    and a run that resumes goes on with the same samples and noise where there is a ``seed``. The logged loss is the
    mean of the examples' losses: it is not private.

    Parameters
    ----------
    private
        :func:`~plpkg.clipping.make_private` with its settings.
    losses
        As for ``make_private``: ``losses(model, batch)`` gives one loss an example. By default the mean over its
        labels.

    Attributes
    ----------
    private
        The :class:`~plpkg.clipping.training.private.Private` training, once ``train`` was called.

    Raises
    ------
    ValueError
        Arguments that have no meaning here.
    """

    private: Private  # once train was called

    def __init__(
        self,
        model=None,
        args: TrainingArguments | None = None,
        *,
        private: Callable,
        losses: Callable | None = None,
        **more,
    ) -> None:
        args = copy.copy(args or TrainingArguments())
        _check(args, more)
        args.ignore_data_skip = True  # the samples go on by themselves
        super().__init__(model, args, **more)
        self._make_private = private
        self._losses = losses
        self.private = None  # pyright: ignore[reportAttributeAccessIssue] (until training begins)

    def get_train_dataloader(self) -> "Epochs":
        """The samples, an epoch at a time."""
        if self.train_dataset is None:
            raise ValueError("a training needs a train_dataset")
        args = self.args
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        workers: dict[str, Any] = {}
        if args.dataloader_num_workers:
            workers["prefetch_factor"] = args.dataloader_prefetch_factor
        loader = DataLoader(
            self.train_dataset,
            batch_size=self.get_total_train_batch_size(args),
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            drop_last=args.dataloader_drop_last,
            **workers,
        )
        return Epochs(self, loader)

    def training_step(self, model, inputs: Sample, num_items_in_batch=None) -> torch.Tensor:
        """A private step; gives the mean of the examples' losses, 0 of none."""
        model.train()
        losses, count = self.private.step(inputs)
        return losses.mean().to(self.args.device) if count else torch.zeros((), device=self.args.device)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device):
        """One sample at a time, which is not looked into."""
        return list(islice(epoch_iterator, num_batches)), None

    def floating_point_ops(self, inputs: Sample) -> int:
        """Not counted."""
        return 0

    def _clip_grad_norm(self, model) -> None:
        """Nothing is left to clip."""

    def _get_grad_norm(self, model, grad_norm=None) -> None:
        """Nor to log."""

    def _prepare_for_training(self, max_steps: int, train_dataloader: "Epochs", resume_from_checkpoint):
        """An optimizer and a scheduler; and the private training in the place of accelerate's wrappers."""
        if self._created_lr_scheduler:
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        if isinstance(self.optimizer, Stepped):  # of a call of train before
            self.optimizer = self.optimizer._optimizer
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        model: Any = self.model
        losses = Within(self._losses or OwnLosses(model), self.accelerator.autocast)  # of bf16=True
        epochs = max(1, math.ceil(max_steps / len(train_dataloader)))
        model.train()
        self.private = self._make_private(model, self.optimizer, train_dataloader.loader, losses, epochs=epochs)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self.optimizer = Stepped(self.optimizer)
        handler: Any = self.callback_handler
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(handler, name, getattr(self, name))
        handler.train_dataloader = train_dataloader
        return model, train_dataloader

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            checkpoints.save(Path(output_dir, FILE), self.private.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            file = Path(checkpoint, FILE)
            if not file.exists():
                raise ValueError(f"{checkpoint} has no {FILE}: what its weights have released is not known")
            self.private.load_state_dict(checkpoints.read(file))


class Stepped:
    """An optimizer that a private step has stepped already: the Trainer's own call does nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        """Nothing."""

    def __getattr__(self, name: str):
        return getattr(self._optimizer, name)


class Epochs:
    """The samples of a Trainer's private training: each loop gives those that the epoch still has."""

    def __init__(self, trainer: PrivateTrainer, loader: DataLoader) -> None:
        self._trainer = trainer
        self.loader = loader
        self.dataset = loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Sample]:
        private = self._trainer.private
        taken = private.steps % len(self)
        return islice(private, len(self) - taken)


def _check(args: TrainingArguments, more: dict) -> None:
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: a private step takes a whole sample; "
            "make_private's max_physical_batch_size cuts it into pieces that fit"
        )
    for name, value in (("fp16", args.fp16), ("fsdp", args.fsdp), ("deepspeed", args.deepspeed)):
        if value:
            raise ValueError(f"{name}={value!r} is not for private steps (bf16=True is)")
    own = dict(label_smoothing_factor=args.label_smoothing_factor, compute_loss_func=more.get("compute_loss_func"))
    for name, value in own.items():
        if value:
            raise ValueError(f"{name}={value!r} makes one loss of a batch: give losses, one an example")
    if args.include_num_input_tokens_seen not in (False, "no"):
        raise ValueError("include_num_input_tokens_seen looks into samples, which are not collated yet")
    if args.save_only_model:
        raise ValueError("save_only_model=True leaves out of a checkpoint what its weights have released")
