"""Private training with the loop that it had: ``criterion(output, y).backward(); optimizer.step()``.

The model and the optimizer stay the objects that they were. The criterion gives one loss an example; its ``backward``
clips and adds up, as often as there are micro-batches; ``step`` adds the noise once.

Coming from Opacus:

====================================================  ==============================================================
Opacus                                                here
====================================================  ==============================================================
``PrivacyEngine().make_private(module=…, …)``         ``make_private(model, optimizer, data_loader, criterion, …)``
``make_private_with_epsilon(target_epsilon=…)``       ``make_private(target_epsilon=…, target_delta=…, epochs=…)``
``privacy_engine.get_epsilon(delta)``                 ``private.epsilon(delta)``
``grad_sample_mode="hooks"``, ``"ghost"``             ``execution="per_sample"``, ``"ghost"``, ``"book_keeping"``
``BatchMemoryManager``                                ``max_physical_batch_size=…``; a scheduler: ``private.paced``
``poisson_sampling=False``                            the same; its ε: if who is absent leaves an empty place
``clipping="per_layer"``, a list of norms             ``clipping="per_layer"``, ``max_grad_norm=[…]``
``ExponentialNoise``, ``StepNoise``, ``LambdaNoise``  ``noise_multiplier=lambda step: …``
``StepGradClip``, ``LambdaGradClip``                  ``max_grad_norm=lambda step: …``
``ModuleValidator.fix(model)``                        the same, of Opacus's, before ``make_private``
``secure_mode=True``                                  ``secure=True``
``model.remove_hooks()``                              ``private.remove()``
users instead of examples (issue 366)                 ``users=…``
====================================================  ==============================================================

``transformers.Trainer``: ``private = make_private(model, optimizer, DataLoader(…, collate_fn=…), None, …)``, then a
``Trainer(model, args, optimizers=(optimizer, private.paced(scheduler)))`` whose ``get_train_dataloader`` gives
``private.data_loader``, with ``max_grad_norm=0`` in ``args``; it counts batches, so leave out
``max_physical_batch_size``.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict

import torch
from torch.utils.data import DataLoader

from plpkg.clipping.batches import numbered
from plpkg.clipping.clip import Clip
from plpkg.clipping.execution import EXECUTIONS, LOOP
from plpkg.clipping.training.accounting import ACCOUNTANTS, Mechanism, noise_for
from plpkg.clipping.training.ledger import entries_of
from plpkg.clipping.training.loader import PrivateLoader, PrivateSampler, check_loader
from plpkg.clipping.training.private import Private, learned
from plpkg.clipping.training.processes import Processes, check_whole
from plpkg.clipping.training.randomness import Randomness
from plpkg.validation import flag, number, one_of, whole_number


def make_private(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader | None,
    criterion: Callable | None = None,
    *,
    per_example: Callable | None = None,
    max_grad_norm: float | Sequence[float] | Callable[[int], float],
    noise_multiplier: float | Callable[[int], float] | None = None,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    epochs: int | None = None,
    max_epsilon: float | None = None,
    users: Sequence[Hashable] | torch.Tensor | None = None,
    poisson_sampling: bool = True,
    execution: str = "book_keeping",
    clipping: str = "flat",
    accountant: str = "prv",
    max_physical_batch_size: int | None = None,
    sample_rate: float | None = None,
    expected_batch_size: float | None = None,
    seed: int | None = None,
    secure: bool = False,
    spent: Sequence[tuple[float, float, int]] = (),
) -> Private:
    """Make a training loop private.

    Parameters
    ----------
    model
        In training mode. Every parameter with ``requires_grad`` belongs to the optimizer, and is clipped.
    optimizer
        Any ``torch.optim`` optimizer that steps without a closure.
    data_loader
        Its number of batches becomes that of steps in an epoch, and a step expects the examples over that number.
        After a ``break`` the next loop is a new epoch. ``None``: you sample yourself, each example with probability
        ``sample_rate``, give ``expected_batch_size``, and call :meth:`Private.skip` where nobody was chosen.
    criterion
        A loss module (``reduction`` ``mean`` or ``sum``, ``ignore_index`` as it is), or a function that returns one
        loss an example, or ``(batch, targets)``; of as many arguments as it takes. The loss of an example with several
        targets is their mean (or sum). On outputs without a gradient, as in validation, the criterion that comes back
        does what this one did. ``None``: the own loss of a Hugging Face model, ``model(**batch).loss``.
    per_example
        Instead of a criterion: ``per_example(batch)`` gives each example's gradient of its own mean loss, by name
        ``(batch, *shape)``, or a pair of these and the losses ``(batch,)``. The loop is then
        ``criterion(batch).backward(); optimizer.step()``. If it takes ``look``, that is true for the batches that are
        given again to see whether it mixes examples.
    max_grad_norm
        C; for ``per_layer`` also one for each of :attr:`Private.layers`. Or a function of the step's number, counted
        from 0, which must not look at the data.
    noise_multiplier
        σ, in units of C, or such a function. Or ``target_epsilon``, ``target_delta`` and ``epochs``: the smallest σ for
        these.
    max_epsilon
        With ``target_delta``: the data loader gives no more batches once another step would spend more. See
        :attr:`Private.done`.
    users
        Whose each example of the data set is. Then users are sampled with all that is theirs, and a user's gradient,
        that of the mean of their losses, is clipped: ε is about a user who is there or not.
    poisson_sampling
        ``False``: shuffled batches. ε is then far above what an accountant says that takes them for Poisson samples. It
        holds for any order if an absent example, or user, leaves an empty place; not if the others move up, and for one
        who is replaced only with σ/2 (:mod:`plpkg.clipping.training.accounting`).
    execution
        ``per_sample``, ``fast``, ``ghost``, ``book_keeping``; or ``loop``, the slow road that is always there: the
        data loader gives one example at a time, and autograd its gradient.
        See the table below.
    clipping
        ``flat``, ``automatic`` or ``per_layer``.
    accountant
        ``prv`` (tight) or ``rdp``.
    max_physical_batch_size
        Gradient accumulation: samples larger than that come in pieces (micro-batches); ``step`` does nothing until
        the last. You may also take a batch apart yourself, but not put two of them in a step.
    seed, secure
        Where samples and noise come from: see :mod:`plpkg.clipping.training.randomness`.
    spent
        What these weights have released where this process cannot know it: σ, the sampling rate, and the number of
        steps that had them. What trainings of this process released of the same parameters is counted without it.

    Returns
    -------
    Private
        It unpacks into ``model, optimizer, criterion, data_loader``.

    Raises
    ------
    TypeError
        A model, optimizer or criterion that is none.
    ValueError
        Bad arguments, a model in evaluation mode, layers that mix examples.

    Notes
    -----
    What each kind of layer needs:

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
    fused kernels (RNN, GRU, LSTM), LoRA on
    nn.MultiheadAttention and with ``target_parameters``,
    prompts that PEFT repeats
    BatchNorm and what else keeps something of examples,         none: replace them
    ``max_norm`` of embeddings, sparse gradients
    ===========================================================  ====================================================

    What this model released in trainings before, in this process or in a loaded state, stays in its ε: for other
    people's data take another model.

    The model carries hooks until :meth:`Private.remove`: save its ``state_dict()``, not the object. In each forward
    pass a guard (:mod:`plpkg.clipping.mixing`) sees that nothing has changed under the training that would breach it.
    The first steps, and then one in a hundred, are made again with others around one example
    (:mod:`plpkg.clipping.replay`), and the data loader does the same with its ``collate_fn``. What they cannot see:

    * what your own loop does with a batch before the model, or between the model and the criterion (advantages that are
      normalised over the batch): that is for :mod:`plpkg.clipping.checks`;
    * mixing that no example of these steps shows, and a model that draws from a generator of its own.

    Several processes (``torchrun``, ``accelerate launch``): give each the model itself and the whole data set. Each
    takes its share of every sample, and all have the sum of all and the same parameters.
    """
    _check(model, optimizer, criterion if per_example is None else per_example, mode=per_example is None)
    check_whole(model)
    if per_example is not None and (criterion is not None or execution != "book_keeping"):
        raise ValueError("per_example gives the gradients: leave criterion and execution out")
    one_of("execution", execution, ("loop", *EXECUTIONS))
    executed = EXECUTIONS.get(execution, LOOP)
    one_of("accountant", accountant, ACCOUNTANTS)
    flag("poisson_sampling", poisson_sampling)
    if callable(noise_multiplier) and not poisson_sampling:
        raise ValueError("poisson_sampling=False takes one noise_multiplier for all steps, got a function")
    if max_physical_batch_size is not None:
        whole_number("max_physical_batch_size", max_physical_batch_size, 1)
    if executed is LOOP and max_physical_batch_size not in (None, 1):
        raise ValueError(
            f"execution='loop' takes one example at a time, got max_physical_batch_size={max_physical_batch_size}"
        )
    if data_loader is None:
        if sample_rate is None or expected_batch_size is None:
            raise ValueError("without a data_loader, sample_rate and expected_batch_size must be given")
        if users is not None or not poisson_sampling:
            raise ValueError("users and poisson_sampling=False need a data_loader, whose examples they are about")
        number("sample_rate", sample_rate, 0, 1, open_low=True)
        number("expected_batch_size", expected_batch_size, open_low=True)
        steps, epoch, members = math.ceil(1 / sample_rate), None, []
    else:
        if sample_rate is not None or expected_batch_size is not None:
            raise ValueError("sample_rate and expected_batch_size follow from the data_loader: leave them out")
        check_loader(data_loader)
        members = _members(len(data_loader.dataset), users)
        steps = len(data_loader)
        sample_rate = 1 / steps
        expected_batch_size = len(members) * sample_rate
        epoch = None if poisson_sampling else steps
        if epoch:
            expected_batch_size = data_loader.batch_size if users is None else math.ceil(expected_batch_size)
    spending = (sample_rate, steps) if epoch is None else (1.0, 1)  # the rate of a step that counts, and how many do
    sigma = _sigma(noise_multiplier, target_epsilon, target_delta, epochs, *spending, accountant)
    number_of_users = None if users is None else len(members)
    mechanism = Mechanism(accountant, sigma, sample_rate, max_grad_norm, clipping, number_of_users, epoch)
    first = mechanism.at(0)
    Clip(first.max_grad_norm, clipping)  # refuses what it cannot clip to
    if max_epsilon is not None and target_delta is None:
        raise ValueError(f"max_epsilon={max_epsilon!r} needs a target_delta")
    before = entries_of(spent)
    processes = Processes()
    told = {"number of examples": len(members), "batch size": expected_batch_size}
    processes.agree(model, asdict(first) | told)
    private = Private(
        model,
        optimizer,
        criterion,
        mechanism,
        expected_batch_size,
        executed,
        Randomness(seed, secure=secure),
        processes,
        None if max_epsilon is None else (max_epsilon, target_delta),
        per_example,
        before,
    )
    try:
        first.clip.limits(private.layers)
        if private.done:
            beside = f", beside ε={private.epsilon(target_delta):.4g} before" if private.accountant.history else ""
            raise ValueError(f"max_epsilon={max_epsilon!r} is less than the first step spends{beside}")
    except ValueError:
        private.remove()
        raise
    if data_loader is not None:
        shuffled = None if epoch is None else expected_batch_size
        limit = 1 if executed is LOOP else max_physical_batch_size or len(data_loader.dataset)
        samples = sample_rate, steps, private.randomness, processes, limit, shuffled
        private.data_loader = PrivateLoader(data_loader, private, PrivateSampler(members, *samples))
    return private


def _members(count: int, users) -> list[list[int]]:
    """The indices of each user's examples, in the order of the first ones; without users each example is alone."""
    if users is None:
        return [[index] for index in range(count)]
    members: dict[int, list[int]] = {}
    for index, user in enumerate(numbered(users, count).tolist()):
        members.setdefault(user, []).append(index)
    return list(members.values())


def _check(model: torch.nn.Module, optimizer: torch.optim.Optimizer, criterion: Callable, *, mode: bool) -> None:
    for name, value, kind in (("model", model, torch.nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # accelerate's wraps one
        name = type(optimizer).__name__
        raise TypeError(f"{name} wraps an optimizer: give make_private the optimizer itself, and prepare it afterwards")
    if criterion is not None and not callable(criterion):
        raise TypeError(f"criterion must be callable, got {type(criterion).__name__}")
    if mode and not model.training:
        raise ValueError("the model is in evaluation mode: call model.train() first")
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    learning = learned(optimizer)
    if missing := [name for key, name in names.items() if key not in learning]:
        raise ValueError(f"the optimizer lacks {', '.join(missing[:3])}: give it these, or set requires_grad=False")
    if foreign := learning - set(names):
        raise ValueError(f"the optimizer has {len(foreign)} parameters that are not the model's")


def _sigma(noise_multiplier, target_epsilon, target_delta, epochs, sample_rate, steps, accountant) -> float:
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
    whole_number("epochs", epochs, 1)
    return noise_for(target_epsilon, target_delta, sample_rate, epochs * steps, accountant=accountant)
