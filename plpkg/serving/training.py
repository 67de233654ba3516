"""Many people in one step: each trains an adapter of their own on one backbone, or one that they share.

A person is a segment. In one pass over everybody's tokens, the gradient of a segment's factors sums over that
person's tokens alone (:mod:`plpkg.serving.segments`), so sixteen people cost the backbone's products once, at a batch
that a processor likes. It makes nothing private. Only where people *share* an adapter does clipping each person's
gradient bound what one of them moves: :func:`per_person_gradients`, then the clipping room's ``clip_dense``, noise,
and ``check_sensitivity``.

Left out: dropout of the adapters, whose draws would differ between one run and sixteen.
"""

import contextlib
import copy
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from plpkg.adapters import Adapter, Factors, base_fingerprint, targets
from plpkg.inputs import IGNORED, ids_and_labels
from plpkg.serving.segments import Segments
from plpkg.serving.slots import Group, Hooks
from plpkg.training_loop import endless, frozen, learn, logits_of
from plpkg.validation import number, shown, whole_number

Batch = torch.Tensor | Mapping[str, Any]

LOGITS = 2**22
"""Logits in memory at a time."""


def train_many(
    model: PreTrainedModel,
    configs: LoraConfig | Mapping[str, LoraConfig],
    batches: Mapping[str, Iterable[Batch] | Batch],
    *,
    steps: int,
    lr: float,
    max_grad_norm: float | None = None,
    max_tokens: int = 512,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Adapter]:
    """Train an adapter for each person, all of them in one batch; each as if alone.

    Parameters
    ----------
    model
        The backbone, which stays as it is.
    configs
        One for all, or one for each person, read as PEFT reads them; people whose adapters have another form are in
        another batch.
    batches
        By person, what each step learns from, begun anew when they end: each is ids ``(samples, seq)``, or a dictionary
        such as ``corpora.batch`` or a Hugging Face collator makes (:func:`plpkg.inputs.ids_and_labels`). One of them
        instead of several is each step's. The loss is the mean over the person's tokens.
    steps, lr
        Of AdamW without weight decay, whose state is each person's own.
    max_grad_norm
        The largest norm of a person's gradient; None leaves it.
    max_tokens
        Of a forward pass: more people than fit are taken in groups, with the same result.
    seed
        Of the first A, drawn for each name as PEFT draws it; B begins at zero.

    Raises
    ------
    ValueError
        A configuration that cannot be served, someone without a batch or a configuration, settings out of range.
    FloatingPointError
        A loss that is not finite; the message names the person.
    """
    whole_number("steps", steps, 1)
    number("lr", lr, open_low=True)
    if max_grad_norm is not None:
        number("max_grad_norm", max_grad_norm, open_low=True)
    configs = _checked(configs, batches)
    stacks, completed = _stacks(model, configs, seed)
    coming = {name: endless(f"the batches of {name!r}", _several(each)) for name, each in batches.items()}
    adapted = set(itertools.chain.from_iterable(stack.scales for stack in stacks))
    hooks = Hooks(model, adapted)

    def gradient(step: int) -> float:
        total = 0.0
        for stack in stacks:
            texts = [_text(name, next(coming[name]), model) for name in stack.names]
            for chosen in _groups(texts, max_tokens):
                with hooks.batch(stack.group(chosen, texts[chosen])):
                    losses, gradients = _gradients(model, texts[chosen], stack.leaves)
                for name, loss in zip(stack.names[chosen], losses.tolist(), strict=True):
                    if not math.isfinite(loss):
                        raise FloatingPointError(f"the loss of {name!r} in step {step + 1} is {loss}: take a lower lr")
                    total += loss
                stack.add(gradients)
            if max_grad_norm is not None:
                stack.clip(max_grad_norm)
        return total / len(configs)

    leaves = [*itertools.chain.from_iterable(stack.leaves for stack in stacks)]
    optimizer = torch.optim.AdamW(leaves, lr=lr, weight_decay=0, fused=True)
    bar = tqdm(range(steps), disable=not progress, desc=f"{len(configs)} adapters")
    with frozen(model), contextlib.closing(hooks):
        for _, loss in learn(bar, gradient, [optimizer], lambda step: lr):
            bar.set_postfix(loss=f"{loss:.3f}")
    trained: dict[str, dict[str, Factors]] = {}
    for stack in stacks:
        trained |= stack.factors()
    backbone = base_fingerprint(model)
    return {name: Adapter.of(config, trained[name], backbone=backbone) for name, config in completed.items()}


def _checked(configs: LoraConfig | Mapping[str, LoraConfig], batches: Mapping[str, object]) -> Mapping[str, LoraConfig]:
    """Each person's configuration."""
    if isinstance(configs, LoraConfig):
        configs = dict.fromkeys(batches, configs)
    if configs.keys() != batches.keys() or not configs:
        raise ValueError(f"configs are of {sorted(configs)}, batches of {sorted(batches)}: each person needs both")
    for name, config in configs.items():
        if not isinstance(config, LoraConfig):
            raise ValueError(f"the configuration of {name!r} must be a LoraConfig, got {shown(config)}")
    return configs


def _stacks(
    model: PreTrainedModel, configs: Mapping[str, LoraConfig], seed: int
) -> tuple[list["_Stack"], dict[str, LoraConfig]]:
    """A stack of people for each form of adapter; and by person the configuration as PEFT completes it."""
    forms: dict[str, _Form] = {}  # many people have few of them
    alike: dict[tuple, dict[str, dict[str, Factors]]] = {}
    completed = {}
    for name, config in configs.items():
        written = repr(config)
        if written not in forms:
            forms[written] = _form(model, config, name)
        completed[name] = forms[written].config
        factors = _first(model, forms[written], name, seed)
        shapes = tuple((module, each.down.shape, each.scale) for module, each in factors.items())
        alike.setdefault(shapes, {})[name] = factors
    return [_Stack(people) for people in alike.values()], completed


class _Stack:
    """The factors of people whose adapters have one form.

    Attributes
    ----------
    names
        Whose they are.
    scales
        By module.
    leaves
        In the modules' order A ``(people, rank, in)`` and B ``(people, out, rank)``, by turns.
    """

    def __init__(self, people: dict[str, dict[str, Factors]]) -> None:
        self.names = list(people)
        everybody = list(people.values())
        self.scales = {module: factors.scale for module, factors in everybody[0].items()}
        self.leaves: list[torch.Tensor] = []
        for module in self.scales:
            downs = torch.stack([factors[module].down for factors in everybody])
            ups = torch.stack([factors[module].up for factors in everybody])
            self.leaves += [downs.requires_grad_(), ups.requires_grad_()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Each module with its A and B."""
        return zip(self.scales, self.leaves[::2], self.leaves[1::2], strict=True)

    def group(self, chosen: slice, texts: list["_Text"]) -> Group:
        """The factors of the people chosen, each one's for the tokens of their own text, padded to the longest."""
        longest = max(text.ids.shape[1] for text in texts)
        segments = Segments()
        end = 0
        for k, text in enumerate(texts):
            begin = end
            end += len(text.ids) * longest
            segments.append((begin, end, k))
        factors = {}
        for module, downs, ups in self:
            scales = torch.full((len(texts),), self.scales[module], dtype=torch.float64)
            factors[module] = (downs[chosen], ups[chosen], scales)
        return Group(segments, factors)

    def add(self, gradients: Iterable[torch.Tensor]) -> None:
        """Add to the gradients of the leaves."""
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)

    def clip(self, max_grad_norm: float) -> None:
        """Shorten each person's gradient to this norm, if it is longer."""
        gradients = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        squares = functools.reduce(torch.add, (each.flatten(1).square().sum(1) for each in gradients))  # (people,)
        shortened = (max_grad_norm / squares.sqrt()).clamp(max=1)
        for each in gradients:
            each.mul_(shortened.view(-1, 1, 1))

    def factors(self) -> dict[str, dict[str, Factors]]:
        """By person and module, the factors as they are now."""
        found: dict[str, dict[str, Factors]] = {name: {} for name in self.names}
        for module, downs, ups in self:
            for name, down, up in zip(self.names, downs.detach(), ups.detach(), strict=True):
                found[name][module] = Factors(down, up, self.scales[module])
        return found


class _Form(NamedTuple):
    """A configuration as PEFT completes it; and by module that it adapts, its in and out, the rank and the scale."""

    config: LoraConfig
    modules: dict[str, tuple[int, int, int, float]]


def _form(model: PreTrainedModel, config: LoraConfig, name: str) -> _Form:
    """PEFT says what is adapted, of which rank and scale, on a copy of the model without values."""
    if config.lora_dropout or config.init_lora_weights is not True:
        given = f"lora_dropout={config.lora_dropout} and init_lora_weights={config.init_lora_weights!r}"
        raise ValueError(f"{name!r} has {given}: only 0 and True are trained here")
    shapes = targets(model)
    config = copy.deepcopy(config)  # PEFT writes into it
    empty = {id(p): torch.nn.Parameter(p.to("meta"), False) for p in model.parameters()}
    empty |= {id(b): b.to("meta") for b in model.buffers()}
    try:
        skeleton = inject_adapter_in_model(config, copy.deepcopy(model, empty), low_cpu_mem_usage=True)
    except Exception as error:  # a variant of LoRA can raise anything
        raise ValueError(f"PEFT refuses the configuration of {name!r}: {error}") from error
    layers: dict[str, Any] = {
        path: layer for path, layer in skeleton.named_modules() if isinstance(layer, BaseTunerLayer)
    }
    others = sorted(layers.keys() - shapes)
    if others:
        raise ValueError(f"{name!r} adapts {others[0]}, which is no linear module of this model's body")
    modules = {}
    for path, (n_in, n_out) in shapes.items():  # in the model's order
        if path in layers:
            modules[path] = (n_in, n_out, layers[path].r["default"], layers[path].scaling["default"])
    return _Form(config, modules)


def _first(model: PreTrainedModel, form: _Form, name: str, seed: int) -> dict[str, Factors]:
    """The factors that a person begins with, drawn as PEFT draws them: A uniform within 1/√in, B zero."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    like: dict[str, Any] = dict(device=model.device, dtype=torch.promote_types(model.dtype, torch.float32))
    factors = {}
    for module, (n_in, n_out, rank, scale) in form.modules.items():
        bound = n_in**-0.5
        down = torch.empty(rank, n_in).uniform_(-bound, bound, generator=generator)
        factors[module] = Factors(down.to(**like), torch.zeros(n_out, rank, **like), scale)
    Adapter.of(form.config, factors)  # what could not be served is not trained
    return factors


def per_person_gradients(
    model: PreTrainedModel | PeftModel, batches: Mapping[str, Batch], *, max_tokens: int = 512
) -> dict[str, torch.Tensor]:
    """Each person's gradient of an adapter that all of them share.

    Parameters
    ----------
    model
        With what is trained in ``nn.Linear`` layers without bias: PEFT's LoRA, or PrivateLoRA's M.
    batches
        By person, one batch as in :func:`train_many`; a person's loss is the mean over their tokens.
    max_tokens
        Of a forward pass.

    Returns
    -------
    dict
        By parameter, ``(people, *shape)`` in the order of ``batches``: what ``plpkg.clipping.clip_dense`` takes.

    Raises
    ------
    ValueError
        Something else is trained, or a trained weight is used in another way than by its layer's call.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layers = _linear_layers(model, trained)
    texts = [_text(name, batch, model) for name, batch in batches.items()]
    parts = {name: [p.new_zeros(0, *p.shape)] for name, p in trained.items()}
    for chosen in _groups(texts, max_tokens):
        calls: dict[str, list] = {name: [] for name in trained}
        with contextlib.ExitStack() as stack:
            for name, layer in layers.items():
                stack.callback(layer.register_forward_hook(_keep(calls[name])).remove)
            _, totals = _gradients(model, texts[chosen], list(trained.values()))
        rows = [len(text.ids) for text in texts[chosen]]
        for name, total in zip(trained, totals, strict=True):
            each = _by_person(calls[name], rows)
            rounding = torch.finfo(total.dtype).eps ** 0.5 * float(each.abs().sum(0).max())
            if not torch.allclose(each.sum(0), total, rtol=0, atol=rounding):
                raise ValueError(f"the gradients of {name!r} do not add up: it is used elsewhere than in its layer")
            parts[name].append(each)
    return {name: torch.cat(each) for name, each in parts.items()}


def _linear_layers(model: Any, trained: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Linear]:
    """By trained weight its layer, which must be an ``nn.Linear`` of the body."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not trained:
        raise ValueError(f"no weight of this {type(base).__name__} is trained: none requires a gradient")
    body = {module for module in base.base_model.modules() if isinstance(module, torch.nn.Linear)}
    layers = {f"{name}.weight": module for name, module in model.named_modules() if module in body}
    others = sorted(trained.keys() - layers)
    if others:
        raise ValueError(f"only weights of the body's nn.Linear may be trained here, and {others[0]!r} is")
    return {name: layers[name] for name in trained}


def _by_person(calls: list, rows: list[int]) -> torch.Tensor:
    """The gradient ``(people, out, in)`` of a layer's weight, of people who have so many rows of its calls.

    A call is the layer's input x ``(rows, seq, in)`` and the gradient g ``(rows, seq, out)`` of its output; a person's
    gradient is gᵀx, summed over their rows and the calls.
    """

    def of_call(inputs: torch.Tensor, output_gradients: torch.Tensor) -> torch.Tensor:
        people = zip(inputs.split(rows), output_gradients.split(rows), strict=True)
        return torch.stack([g.flatten(0, 1).T @ x.flatten(0, 1) for x, g in people])

    complete = (call for call in calls if call[1] is not None)  # a checkpoint's second call has no gradient
    return functools.reduce(torch.add, (of_call(*call) for call in complete))


def _keep(calls: list):
    """A hook that notes a layer's input and the gradient of its output."""

    def hook(_, arguments, output):
        call = [arguments[0].detach(), None]
        calls.append(call)
        output.register_hook(lambda g: call.__setitem__(1, g))

    return hook


def _several(batches) -> Iterable:
    """A person's batches, of which one may have come alone."""
    is_mapping = isinstance(batches, Mapping)
    is_ids = isinstance(batches, torch.Tensor) and batches.dim() < 3
    return [batches] if is_mapping or is_ids else batches


class _Text(NamedTuple):
    """A person's batch: ids and labels, both ``(samples, seq)``."""

    ids: torch.Tensor
    labels: torch.Tensor


def _text(name: str, batch, model: Any) -> _Text:
    ids, labels = ids_and_labels(batch, f"the batch of {name!r}")
    vocab = model.get_input_embeddings().weight.shape[0]
    for tokens in (ids, labels[labels != IGNORED]):
        if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab:
            raise ValueError(f"the batch of {name!r} has ids from {tokens.min()} to {tokens.max()}, vocab={vocab}")
    if not (labels[:, 1:] != IGNORED).any():  # the first token is never predicted
        raise ValueError(f"the batch of {name!r} leaves nothing to learn of {tuple(ids.shape)} ids")
    return _Text(ids.to(model.device), labels.to(model.device))


def _gradients(
    model: Any, texts: list[_Text], leaves: list[torch.Tensor]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The mean loss of each text ``(samples, seq)``, and the gradient of their sum."""
    if not torch.is_grad_enabled():
        raise ValueError("gradients are off: train outside torch.no_grad() and torch.inference_mode()")
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    ids, labels = _padded(texts)
    predicts = labels != IGNORED  # (rows, seq - 1)
    rows = torch.tensor([len(text.ids) for text in texts])
    owner = torch.arange(len(texts)).repeat_interleave(rows).to(ids.device)  # (rows,): whose text it is
    owner = owner[:, None].expand_as(labels)[predicts]  # (tokens,)
    labels = labels[predicts]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][predicts]  # (tokens, hidden)
    leaf = hidden.detach().requires_grad_()
    share = 1 / torch.bincount(owner).double()  # of a token in its text's mean
    losses = hidden.new_zeros(len(texts), dtype=torch.float64)
    size = max(1, LOGITS // model.get_output_embeddings().weight.shape[0])
    for h, label, k in zip(leaf.split(size), labels.split(size), owner.split(size), strict=True):
        loss = cross_entropy(logits_of(model, h), label, reduction="none") * share[k]
        losses.index_add_(0, k, loss.detach())
        loss.sum().backward()
    return losses, torch.autograd.grad(hidden, leaves, leaf.grad)


def _padded(texts: list[_Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows' ids ``(rows, seq)``, and what follows each but the last, ``(rows, seq - 1)``.

    Padding stands on the right, where causal attention never looks; it needs no attention mask.
    """
    ids: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    for text in texts:
        ids += text.ids
        labels += text.labels[:, 1:]
    return (
        pad_sequence(ids, batch_first=True).long(),
        pad_sequence(labels, batch_first=True, padding_value=IGNORED).long(),
    )


def _groups(texts: list[_Text], max_tokens: int) -> Iterator[slice]:
    """Runs of people whose texts, padded to the longest, have at most so many tokens; one person at least."""
    whole_number("max_tokens", max_tokens, 1)
    first = 0
    for k in range(len(texts)):
        group = [text.ids for text in texts[first : k + 1]]
        rows = sum(len(ids) for ids in group)
        longest = max(ids.shape[1] for ids in group)
        if k > first and rows * longest > max_tokens:
            yield slice(first, k)
            first = k
    if texts:
        yield slice(first, len(texts))
