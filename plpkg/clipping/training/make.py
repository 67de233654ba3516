"""Private training as a call: ``for sample in private: private.step(sample)``.

Coming from Opacus:

====================================================  ==============================================================
Opacus                                                here
====================================================  ==============================================================
``PrivacyEngine().make_private(module=…, …)``         ``make_private(model, optimizer, data_loader, losses, …)``
``make_private_with_epsilon(target_epsilon=…)``       ``make_private(target_epsilon=…, target_delta=…, epochs=…)``
forward, ``backward``, ``optimizer.step``             ``private.step(sample)``
``privacy_engine.get_epsilon(delta)``                 ``private.epsilon(delta)``
``grad_sample_mode="hooks"``, ``"ghost"``             ``execution="per_sample"``, ``"ghost"``, ``"book_keeping"``
``BatchMemoryManager``                                ``max_physical_batch_size=…``
``clipping="per_layer"``, a list of norms             ``clipping="per_layer"``, ``max_grad_norm=[…]``
``ExponentialNoise``, ``StepNoise``, ``LambdaNoise``  ``noise_multiplier=lambda step: …``
``StepGradClip``, ``LambdaGradClip``                  ``max_grad_norm=lambda step: …``
``ModuleValidator.fix(model)``                        the same, of Opacus's, before ``make_private``
``secure_mode=True``                                  ``secure=True``
``poisson_sampling=False``                            not here (:mod:`plpkg.clipping.training.accounting`)
users instead of examples (issue 366)                 ``users=…``
====================================================  ==============================================================

``transformers.Trainer``: :class:`~plpkg.clipping.training.trainer.PrivateTrainer`.
"""

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from plpkg.clipping.execution import EXECUTIONS, LOOP
from plpkg.clipping.gradients import Watched
from plpkg.clipping.hooks.recorder import Recorder
from plpkg.clipping.training import samples as sampling
from plpkg.clipping.training.accounting import ACCOUNTANTS, Mechanism, noise_for
from plpkg.clipping.training.given import GivenGradients
from plpkg.clipping.training.ledger import entries_of
from plpkg.clipping.training.losses import OwnLosses
from plpkg.clipping.training.private import Private
from plpkg.clipping.training.processes import Processes, check_whole
from plpkg.clipping.training.randomness import Randomness
from plpkg.clipping.training.unchanged import learned
from plpkg.validation import number, one_of, whole_number


def make_private(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Sequence[Any] | torch.utils.data.Dataset[Any] | torch.utils.data.DataLoader[Any] | None,
    losses: Callable[..., torch.Tensor] | None = None,
    *,
    per_example: Callable[..., Any] | None = None,
    batch_size: float | None = None,
    max_grad_norm: float | Sequence[float] | Callable[[int], float],
    noise_multiplier: float | Callable[[int], float] | None = None,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    epochs: int | None = None,
    max_epsilon: float | None = None,
    users: Sequence[Hashable] | torch.Tensor | None = None,
    execution: str = "book_keeping",
    clipping: str = "flat",
    accountant: str = "prv",
    max_physical_batch_size: int | None = None,
    sample_rate: float | None = None,
    seed: int | None = None,
    secure: bool = False,
    spent: Sequence[tuple[float, float, int]] = (),
) -> Private:
    """Train with differential privacy: ``for sample in private: private.step(sample)``.

    Parameters
    ----------
    model
        In training mode. Every parameter with ``requires_grad`` belongs to the optimizer, and is clipped.
    optimizer
        Any ``torch.optim`` optimizer that steps without a closure.
    dataset
        Examples by number; or a data loader, of which the data set, batch size, collate function and workers are
        taken, and not the order. ``None``: you sample yourself, each example with probability ``sample_rate``, and
        call ``private.step`` with a list of batches.
    losses
        ``losses(model, batch)`` calls the model, and gives one loss an example, ``(batch,)``, which depends on that
        example alone. Autocast, terms beside the loss and several forward passes are its business. ``None``: for a
        Hugging Face model, the mean over an example's ``labels``.
    per_example
        Instead of losses: ``per_example(batch)`` gives each example's gradient of its own mean loss, by name
        ``(batch, *shape)``, or a pair of these and the losses ``(batch,)``. If it takes ``look``, that is true for the
        batches that are given again to see whether it mixes examples.
    batch_size
        The expected number of examples in a step. An epoch has ``ceil(len(dataset) / batch_size)`` steps, q is one over
        that, and a step expects the examples (or users) times q. Where you sample yourself, what is expected.
    max_grad_norm
        C; for ``per_layer`` also one for each of :attr:`Private.layers`. Or a function of the step's number, counted
        from 0, which must not look at the data.
    noise_multiplier
        σ, in units of C, or such a function. Or ``target_epsilon``, ``target_delta`` and ``epochs``: the smallest σ for
        these.
    epochs
        How many the samples go on for. Without it a loop over them ends with the epoch that has begun.
    max_epsilon
        With ``target_delta``: there are no more samples once another step would spend more. See :attr:`Private.done`.
    users
        Whose each example of the data set is. Then users are sampled with all that is theirs, and a user's gradient,
        that of the mean of their losses, is clipped: ε is about a user who is there or not.
    execution
        ``per_sample``, ``fast``, ``ghost``, ``book_keeping``; or ``loop``, the slow road that is always there: one
        example at a time, by autograd. See the table below.
    clipping
        ``flat``, ``automatic`` or ``per_layer``.
    accountant
        ``prv`` (tight) or ``rdp``.
    max_physical_batch_size
        Larger samples go through the model in pieces of so many examples.
    sample_rate
        q, where you sample yourself.
    seed, secure
        Where samples and noise come from: see :mod:`plpkg.clipping.training.randomness`. A seed is for one training
        alone: two of one seed have the same noise.
    spent
        The releases of these weights where this process cannot know it: σ, the sampling rate, and the number of
        steps that had them. What trainings of this process released of the same parameters is counted without it.

    Raises
    ------
    TypeError
        A model, optimizer or function that is none.
    ValueError
        Bad arguments, a model in evaluation mode, layers that mix examples.

    Notes
    -----
    Executions for each kind of layer:

    ===========================================================  ====================================================
    layers with parameters that learn                            executions
    ===========================================================  ====================================================
    Linear, GPT-2's Conv1D, Embedding, Conv1d, Conv2d,           all, by a rule of their own
    LayerNorm, RMSNorm, GroupNorm, the families' RMSNorms
    any other module that can be run again for one example:      all, by ``torch.func.vmap``; where that does not know
    Conv3d, ConvTranspose, InstanceNorm, PReLU, LSTMCell,        a kernel, this module alone goes one example after
    MultiheadAttention, experts, parameters of its own, also in  the other
    a ParameterList or a parametrization: IA3, VeRA, AdaLoRA,
    DoRA, weight norm. What it draws with ``dropout``, ``rand``
    and the like (drop path) is kept
    used past their module (``F.linear(h, other.weight)``),      ``loop`` alone
    without the examples first (tables of relative positions),
    fused kernels (RNN, GRU, LSTM), nn.MultiheadAttention
    with dropout, or LoRA on it; ``target_parameters``;
    prompts that PEFT repeats
    BatchNorm and what else keeps something of examples,         none: replace them
    ``max_norm`` of embeddings, sparse gradients
    ===========================================================  ====================================================

    Earlier releases of this model by other trainings, in this process or in a loaded state, stay in its ε: for other
    people's data take another model.

    In each step a guard (:mod:`plpkg.clipping.guard.mixing`) sees that nothing has changed under the training that
    would breach it. The first steps, and then one in a hundred, are made again with others around one example
    (:mod:`plpkg.clipping.guard.replay`), from the collate function on. What they cannot see:

    * mixing that no example of these steps shows, and a model that draws from a generator of its own or keeps a tensor
      of one batch for the next; a data set that makes one example of several;
    * what you do between two steps: ε counts what ``step`` releases. A ``backward`` and an ``optimizer.step`` of your
      own release what nobody clips; of the first ``step`` refuses the gradients that it finds.

    Several processes (``torchrun``, ``accelerate launch``): give each the model itself and the whole data set. Each
    takes its share of every sample, and all have the sum of all and the same parameters.
    """
    _check(model, optimizer, losses, per_example)
    if per_example is not None and (losses is not None or execution != "book_keeping"):
        raise ValueError("per_example gives the gradients: leave losses and execution out")
    one_of("execution", execution, ("loop", *EXECUTIONS))
    executed = EXECUTIONS.get(execution, LOOP)
    one_of("accountant", accountant, ACCOUNTANTS)
    if max_physical_batch_size is not None:
        whole_number("max_physical_batch_size", max_physical_batch_size, 1)
    if executed is LOOP and max_physical_batch_size not in (None, 1):
        raise ValueError(
            f"execution='loop' takes one example at a time, got max_physical_batch_size={max_physical_batch_size}"
        )
    if epochs is not None:
        whole_number("epochs", epochs, 1)
    limit = None
    if max_epsilon is not None:
        if target_delta is None:
            raise ValueError(f"max_epsilon={max_epsilon!r} needs a target_delta")
        limit = (max_epsilon, target_delta)
    before = entries_of(spent)
    randomness = Randomness(seed, secure=secure)
    processes = Processes()
    if dataset is None:
        if sample_rate is None or batch_size is None:
            raise ValueError("without a dataset, sample_rate and batch_size, the expected one, must be given")
        if users is not None or max_physical_batch_size is not None:
            raise ValueError("users and max_physical_batch_size are about a dataset: step takes yours, and the pieces")
        sampled = _own_sampling(sample_rate, batch_size)
    else:
        if sample_rate is not None:
            raise ValueError("sample_rate follows from the dataset and batch_size: leave it out")
        most = 1 if executed is LOOP else max_physical_batch_size
        sampled = _sampling_of(dataset, batch_size, users, most, randomness, processes)
    samples = sampled.samples
    sigma = _sigma(
        noise_multiplier, target_epsilon, target_delta, epochs, sampled.rate, sampled.steps_per_epoch, accountant
    )
    number_of_users = None if users is None or samples is None else len(samples.members)
    mechanism = Mechanism(accountant, sigma, sampled.rate, max_grad_norm, clipping, number_of_users)
    first = mechanism.at(0)
    clip = first.clip  # refuses what it cannot clip to
    recorder = Recorder(model, alone=executed is LOOP or per_example is not None)
    clip.limits(list(dict.fromkeys(recorder.layers.values())))
    settings = asdict(first)
    settings["number of examples"] = samples and len(samples.members)
    settings["batch"] = sampled.expected
    processes.agree(model, settings)
    if per_example is None:
        gradients = Watched(recorder, losses or OwnLosses(model), executed)
    else:
        gradients = GivenGradients(per_example, recorder)
    private = Private(
        model,
        optimizer,
        gradients,
        mechanism,
        sampled.expected,
        samples,
        randomness,
        processes,
        epochs,
        limit,
        before,
    )
    if limit and private.done:
        beside = f", beside ε={private.epsilon(limit[1]):.4g} before" if private.accountant.history else ""
        raise ValueError(f"max_epsilon={max_epsilon!r} is less than the first step spends{beside}")
    return private


class _Sampling(NamedTuple):
    """How the examples of a step are drawn; ``samples`` is ``None`` where the user draws them."""

    samples: sampling.Samples | None
    rate: float
    steps_per_epoch: int
    expected: float


def _own_sampling(sample_rate: float, batch_size: float) -> _Sampling:
    number("sample_rate", sample_rate, 0, 1, open_low=True)
    expected = number("batch_size", batch_size, open_low=True)
    return _Sampling(None, sample_rate, math.ceil(1 / sample_rate), expected)


def _sampling_of(dataset, batch_size, users, most: int | None, randomness, processes) -> _Sampling:
    loader = sampling.loader_of(dataset, batch_size)
    samples = sampling.Samples(loader, users, most, randomness, processes)
    expected = len(samples.members) * samples.rate
    return _Sampling(samples, samples.rate, samples.steps, expected)


def _check(model, optimizer, losses: Callable | None, per_example: Callable | None) -> None:
    for name, value, kind in (("model", model, torch.nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # accelerate's wraps one
        name = type(optimizer).__name__
        raise TypeError(f"{name} wraps an optimizer: give make_private the optimizer itself")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.SparseAdam) or (closure and closure.default is inspect.Parameter.empty):
        kind = type(optimizer).__name__
        raise ValueError(
            f"{kind} asks for a closure, or sparse gradients; a step gives it one dense gradient with noise"
        )
    for name, value in (("losses", losses), ("per_example", per_example)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be callable, got {type(value).__name__}")
    if isinstance(losses, torch.nn.Module) and hasattr(losses, "reduction"):
        raise TypeError(
            f"losses must be a function of (model, batch) that gives one loss an example, got the criterion "
            f"{type(losses).__name__}: lambda model, batch: criterion(model(batch[0]), batch[1]), with "
            f"reduction='none'; and then {sampling.LOOP}"
        )
    check_whole(model)
    if per_example is None and not model.training:
        raise ValueError("the model is in evaluation mode: call model.train() first")
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    learning = learned(optimizer)
    missing = [name for key, name in names.items() if key not in learning]
    if missing:
        raise ValueError(f"the optimizer lacks {', '.join(missing[:3])}: give it these, or set requires_grad=False")
    foreign = learning - set(names)
    if foreign:
        raise ValueError(f"the optimizer has {len(foreign)} parameters that are not the model's")


def _sigma(noise_multiplier, target_epsilon, target_delta, epochs, sample_rate, steps, accountant) -> float | Callable:
    if (noise_multiplier is None) == (target_epsilon is None):
        raise ValueError(
            f"give noise_multiplier or target_epsilon, got noise_multiplier={noise_multiplier!r} and "
            f"target_epsilon={target_epsilon!r}"
        )
    if noise_multiplier is not None:
        return noise_multiplier if callable(noise_multiplier) else number("noise_multiplier", noise_multiplier)
    number("target_epsilon", target_epsilon, open_low=True)
    if target_delta is None or epochs is None:
        raise ValueError(f"target_epsilon needs target_delta and epochs, got {target_delta!r} and {epochs!r}")
    return noise_for(target_epsilon, target_delta, sample_rate, epochs * steps, accountant=accountant)
