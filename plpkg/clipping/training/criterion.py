"""A criterion of a private training: it gives one loss an example, and their ``backward()`` clips."""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from plpkg.clipping.batches import behind, examples, leaves
from plpkg.clipping.dropout import RandomState, Without
from plpkg.validation import number, one_of


class PrivateCriterion:
    """A criterion whose losses clip when they go backward; ``private`` is the training that they belong to.

    Raises
    ------
    ValueError
        The criterion's mean mixes examples, or its reduction is unknown.
    """

    def __init__(self, criterion: Callable, private) -> None:
        self.averages = _averages(criterion)
        self._plain, self._private = criterion, private
        self._ignored = getattr(criterion, "ignore_index", None)
        if hasattr(criterion, "reduction"):
            criterion = copy.copy(criterion)
            criterion.reduction = "none"
        self._unreduced = criterion
        self._sizes: set[int] = set()  # of the batches so far
        self._everybodys: set[int] = set()  # the places of tensors whose length was not that of a batch

    def __call__(self, *args, **options) -> "PrivateLoss | torch.Tensor":
        """One loss an example, reduced for show; of outputs without a gradient, what the criterion gave before.

        Parameters
        ----------
        args, options
            What the criterion takes: an output and a target, an anchor and what is near and far.

        Raises
        ------
        ValueError
            The criterion has mixed the examples.
        """
        tensors = leaves([*args, options])
        if tensors and not any(tensor.requires_grad for tensor in tensors):
            return self._plain(*args, **options)
        replay = self._private.recorder.replay
        before = replay and RandomState()
        losses = self._losses(tensors, args, options)
        self._sizes.add(len(losses))
        self._everybodys |= {i for i, tensor in enumerate(tensors) if not tensor.ndim or len(tensor) != len(losses)}
        if replay and len(self._sizes) > 1:  # else a tensor for all examples may be as long as the batch by chance
            shared = [tensors[i] for i in self._everybodys if i < len(tensors)]

            def again(index: torch.Tensor) -> torch.Tensor:
                batch = (examples(each, index, len(losses), shared) for each in (args, options))
                return self._losses(tensors, *batch)

            replay.check_losses(losses, again, before)
        return PrivateLoss(losses, self._private)

    def _losses(self, tensors: Sequence[torch.Tensor], args: Sequence, options: Mapping) -> torch.Tensor:
        """One loss an example, ``(batch,)``."""
        parts = self._by_example(self._unreduced(*args, **options), tensors)
        return parts.sum(1) / self._counts(parts, args, options) if self.averages else parts.sum(1)

    def _counts(self, parts: torch.Tensor, args: Sequence, options: Mapping) -> torch.Tensor:
        """How many targets each example's mean is over, ``(batch,)``."""
        target = options.get("target", args[1] if len(args) == 2 else None)
        if isinstance(self._plain, nn.CTCLoss):  # whose mean is over a text's letters
            counts = torch.as_tensor(options.get("target_lengths", args[-1]))
        elif self._ignored is not None and isinstance(target, torch.Tensor) and target.numel() == parts.numel():
            counts = (target.reshape(parts.shape) != self._ignored).sum(1)
        else:
            counts = torch.full((len(parts),), parts.shape[1])
        return counts.clamp(min=1).to(parts)

    def _by_example(self, losses, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The losses as ``(batch, targets of an example)``."""
        batch = self._private.recorder.batch
        if not isinstance(losses, torch.Tensor) or losses.ndim == 0:
            given = "one number" if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(f"the criterion gave {given} for {batch} examples: it must not reduce (reduction='none')")
        if tensors and losses.numel() > max(x.numel() for x in tensors):
            shapes = " and ".join(str(tuple(x.shape)) for x in tensors)
            raise ValueError(
                f"the criterion made losses of shape {tuple(losses.shape)} from {shapes}: it broadcast them"
            )
        if len(losses) and not batch:
            raise ValueError(
                "the criterion was given what the model did not give: call the model, model(...), before, and neither "
                "model.forward nor a layer of it"
            )
        if len(losses) != batch:
            raise ValueError(
                f"the criterion gave losses of shape {tuple(losses.shape)} for {batch} examples: whose they are "
                "cannot be seen; keep an example's together, criterion(logits.transpose(1, 2), targets) for "
                "logits of (batch, seq, classes)"
            )
        return losses.reshape(batch, -1) if batch else losses.reshape(0, 1)


class OwnLoss:
    """The loss that a Hugging Face model computes itself from ``labels``, an example at a time.

    The model's own is the mean over the tokens of all examples, so that one example's weight depends on the others'
    lengths. Here each example's is the mean over its own tokens. A term beside that, such as a router's, is of the
    whole batch: it is kept where a batch is one example, and refused else.

    Raises
    ------
    ValueError
        The model has no such loss.
    """

    def __init__(self, model: nn.Module) -> None:
        if not callable(getattr(model, "loss_function", None)):
            raise ValueError(
                f"criterion=None takes the model's own loss, and {type(model).__name__} has none: give one"
            )
        self._compared = False

    def losses(self, model: nn.Module, output: Mapping, inputs: Mapping, batch: int) -> torch.Tensor:
        """One loss an example, ``(batch,)``, of what the model gave for ``inputs``.

        Raises
        ------
        ValueError
            There are no labels, or the model's loss is another one.
        """
        labels = inputs.get("labels")
        if not isinstance(labels, torch.Tensor) or "logits" not in output:
            raise ValueError("criterion=None takes the model's own loss: call the model with labels=…, by name")
        if _has_another_term(output["loss"], output["logits"]):
            if batch > 1:
                raise ValueError(
                    f"the loss of {type(model).__name__} has a term that does not come from logits and labels (a "
                    "router's?) and is of the whole batch: take max_physical_batch_size=1, which keeps it, or give a "
                    "criterion"
                )
            return output["loss"].reshape(1)
        if not self._compared:
            self._compare(model, inputs, batch)
            self._compared = True
        return torch.stack([_loss(model, output["logits"][i : i + 1], labels[i : i + 1]) for i in range(batch)])

    def _compare(self, model: nn.Module, inputs: Mapping, batch: int) -> None:
        with torch.random.fork_rng(), torch.no_grad(), Without():
            alone = examples(inputs, slice(0, 1), of=batch)
            output = model.forward(**alone | {"return_dict": True})
            own, ours = output["loss"].nan_to_num(), _loss(model, output["logits"], alone["labels"])
        if not torch.allclose(own, ours, rtol=1e-3, atol=1e-6):
            raise ValueError(
                f"the loss of {type(model).__name__} for one example is {own.item():.6g}, and not the "
                f"{ours.item():.6g} of its loss function for logits and labels: give a criterion"
            )


def _has_another_term(loss: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether a gradient leaves the loss on another way than through the logits, however small it is."""
    nodes = behind(loss.grad_fn, but=(logits.grad_fn,))
    return any(not node.next_functions or hasattr(node, "report") for node in nodes)  # a leaf, or a watched layer


def _loss(model: nn.Module, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A model's loss function of one example; 0 where no label counts, whose mean is 0/0."""
    sizes = dict(config=model.config, vocab_size=getattr(model.config, "vocab_size", None))
    loss = model.loss_function(logits=logits, pooled_logits=logits, labels=labels, **sizes)
    return 0 * logits.sum() if loss.isnan() else loss


class PrivateLoss(torch.Tensor):
    """The losses of a batch: ``backward()`` clips each example's gradient and adds them up for the next step.

    As a tensor it is their mean (or sum), a number to show; 0 for an empty batch. It is not private: do not publish it.

    Attributes
    ----------
    losses
        One an example, ``(batch,)``.
    scale
        What they are multiplied with on their way back.
    gradients
        The examples' gradients, where they are known; else autograd's.
    """

    @classmethod
    def __torch_function__(cls, function: Callable, types, args=(), kwargs=None):
        """What is computed of it is an ordinary number."""
        if function is torch.autograd.grad:
            raise TypeError(
                "a private loss gives no gradients of single tensors: call backward(), and take the clipped sums of "
                "plpkg.clipping.clipped_gradients where you want them yourself"
            )
        return torch._C._disabled_torch_function_impl(function, types, args, kwargs or {})

    @staticmethod
    def __new__(cls, losses: torch.Tensor, private, scale: float = 1.0, gradients=None) -> "PrivateLoss":
        total = losses.detach().sum()
        return (total / max(1, len(losses)) if private.criterion.averages else total).as_subclass(cls)

    def __init__(self, losses: torch.Tensor, private, scale: float = 1.0, gradients=None) -> None:
        self.losses, self.scale, self.gradients, self._private = losses, scale, gradients, private

    def backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None) -> None:
        """Clip and add up. Once for each forward pass, whether a graph is retained or not."""
        if gradient is not None or create_graph or inputs is not None:
            raise TypeError("a private loss goes backward as it is, to all that learns: call backward() without these")
        self._private.add(self.losses, self.scale, self.gradients)

    def mean(self, *_, **__) -> "PrivateLoss":
        """It is one number already; so is :meth:`sum`."""
        return self

    sum = mean

    def _refuse(self, *_) -> None:
        raise TypeError(
            "a private loss goes backward as it is: scale losses or add to them inside of the criterion, example by "
            "example; micro-batches need no division (gradient_accumulation_steps=1 in a Trainer, and "
            "max_physical_batch_size here), and float(loss) is a number to show"
        )

    def __truediv__(self, by: float) -> "PrivateLoss":
        """Divided by 1 it is what it was: accelerate divides by its gradient accumulation steps."""
        return self if isinstance(by, (int, float)) and by == 1 else self._refuse()

    def __mul__(self, scale: torch.Tensor) -> "PrivateLoss":
        """Multiplied with a tensor of one number, as ``GradScaler`` does: gradients are computed from losses so scaled,
        and the scale is taken off before they are clipped.
        """
        if not isinstance(scale, torch.Tensor) or scale.numel() != 1 or scale.requires_grad:
            self._refuse()
        scale = number("the scale of a private loss", self.scale * scale.item(), open_low=True)
        return PrivateLoss(self.losses, self._private, scale, self.gradients)

    __add__ = __radd__ = __sub__ = __rsub__ = __rmul__ = __neg__ = __pow__ = _refuse

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"PrivateLoss({self.item():.4f} over {len(self.losses)} examples)"


def _averages(criterion: Callable) -> bool:
    """Whether a loss module takes the mean; a function's losses are averaged over examples."""
    reduction = getattr(criterion, "reduction", "mean")
    if reduction == "mean" and isinstance(getattr(criterion, "weight", None), torch.Tensor):
        raise ValueError(
            f"the mean of {type(criterion).__name__} with weights divides by those of the whole batch, which mixes "
            "examples: take reduction='sum'"
        )
    return one_of("the criterion's reduction", reduction, ("mean", "sum", "none")) != "sum"
