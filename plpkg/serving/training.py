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
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from plpkg.adapters import Adapter, Factors, base_fingerprint, targets
from plpkg.batch import IGNORED, ids_and_labels
from plpkg.learning import endless, frozen, learn, logits_of
from plpkg.serving.segments import Segments
from plpkg.serving.slots import Group, Hooks
from plpkg.validation import number, shown, whole_number

LOGITS = 2**22
"""Logits in memory at a time."""


def train_many(
    model: PreTrainedModel,
    configs: LoraConfig | Mapping[str, LoraConfig],
    batches: Mapping[str, Iterable[torch.Tensor | Mapping] | torch.Tensor | Mapping],
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
        such as ``corpora.batch`` or a Hugging Face collator makes (:func:`plpkg.batch.ids_and_labels`). One of them
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
    if isinstance(configs, LoraConfig):
        configs = dict.fromkeys(batches, configs)
    if configs.keys() != batches.keys() or not configs:
        raise ValueError(f"configs are of {sorted(configs)}, batches of {sorted(batches)}: each person needs both")
    if others := [name for name, each in configs.items() if not isinstance(each, LoraConfig)]:
        raise ValueError(f"the configuration of {others[0]!r} must be a LoraConfig, got {shown(configs[others[0]])}")
    forms: dict[tuple, dict[str, dict[str, Factors]]] = {}
    kinds: dict[str, _Form] = {}  # of many people, who have few of them
    for name, config in configs.items():
        if repr(config) not in kinds:
            kinds[repr(config)] = _form(model, config, name)
        factors = _first(model, kinds[repr(config)], name, seed)
        forms.setdefault(tuple((m, f.down.shape, f.scale) for m, f in factors.items()), {})[name] = factors
    stacks = [_Stack(people) for people in forms.values()]
    coming = {name: endless(f"the batches of {name!r}", _several(each)) for name, each in batches.items()}
    hooks = Hooks(model, {module for stack in stacks for module in stack.scales})

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
                for leaf, g in zip(stack.leaves, gradients, strict=True):
                    leaf.grad = g if leaf.grad is None else leaf.grad.add_(g)
            if max_grad_norm is not None:
                stack.clip(max_grad_norm)
        return total / len(configs)

    leaves = [leaf for stack in stacks for leaf in stack.leaves]
    optimizer = torch.optim.AdamW(leaves, lr=lr, weight_decay=0, fused=True)
    bar = tqdm(range(steps), disable=not progress, desc=f"{len(configs)} adapters")
    with frozen(model), contextlib.closing(hooks):
        for _, loss in learn(bar, gradient, [optimizer], lambda step: lr):
            bar.set_postfix(loss=f"{loss:.3f}")
    trained = {name: factors for stack in stacks for name, factors in stack.factors().items()}
    completed, backbone = {name: kinds[repr(each)].config for name, each in configs.items()}, base_fingerprint(model)
    return {name: Adapter.of(each, trained[name], backbone=backbone) for name, each in completed.items()}


class _Stack:
    """The factors of people whose adapters have one form; ``leaves`` are A ``(people, rank, in)`` and B in turn."""

    def __init__(self, people: dict[str, dict[str, Factors]]) -> None:
        self.names, each = list(people), list(people.values())
        self.scales = {module: factors.scale for module, factors in each[0].items()}
        sides = [[getattr(p[m], side) for p in each] for m in self.scales for side in ("down", "up")]
        self.leaves = [torch.stack(side).requires_grad_() for side in sides]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        return zip(self.scales, self.leaves[::2], self.leaves[1::2], strict=True)

    def group(self, chosen: slice, texts: list["_Text"]) -> Group:
        longest = max(text.ids.shape[1] for text in texts)
        ends = [0, *itertools.accumulate(len(text.ids) * longest for text in texts)]
        segments = Segments((start, stop, k) for k, (start, stop) in enumerate(itertools.pairwise(ends)))
        return Group(segments, {m: (a[chosen], b[chosen], [self.scales[m]] * len(texts)) for m, a, b in self})

    def clip(self, max_grad_norm: float) -> None:
        norms = sum(leaf.grad.flatten(1).square().sum(1) for leaf in self.leaves).sqrt()  # (people,)
        for leaf in self.leaves:
            leaf.grad.mul_((max_grad_norm / norms).clamp(max=1).view(-1, 1, 1))

    def factors(self) -> dict[str, dict[str, Factors]]:
        return {
            name: {m: Factors(a[k].detach(), b[k].detach(), self.scales[m]) for m, a, b in self}
            for k, name in enumerate(self.names)
        }


class _Form(NamedTuple):
    """What a configuration, as PEFT completes it, adapts: by module, its in and out, the rank and the scale."""

    config: LoraConfig
    modules: dict[str, tuple[int, int, int, float]]


def _form(model: PreTrainedModel, config: LoraConfig, name: str) -> _Form:
    """PEFT says what is adapted, of which rank and scale, on a copy of the model without values."""
    if config.lora_dropout or config.init_lora_weights is not True:
        given = f"lora_dropout={config.lora_dropout} and init_lora_weights={config.init_lora_weights!r}"
        raise ValueError(f"{name!r} has {given}: only 0 and True are trained here")
    shapes, config = targets(model), copy.deepcopy(config)
    empty = {id(p): torch.nn.Parameter(p.to("meta"), False) for p in model.parameters()}
    empty |= {id(b): b.to("meta") for b in model.buffers()}
    try:
        skeleton = inject_adapter_in_model(config, copy.deepcopy(model, empty), low_cpu_mem_usage=True)
    except Exception as error:  # a variant of LoRA can raise anything
        raise ValueError(f"PEFT refuses the configuration of {name!r}: {error}") from error
    layers = {path: layer for path, layer in skeleton.named_modules() if isinstance(layer, BaseTunerLayer)}
    if others := sorted(layers.keys() - shapes):
        raise ValueError(f"{name!r} adapts {others[0]}, which is no linear module of this model's body")
    found = {path: (layer.r["default"], layer.scaling["default"]) for path, layer in layers.items()}
    return _Form(config, {path: (*shapes[path], *found[path]) for path in shapes if path in found})


def _first(model: PreTrainedModel, form: _Form, name: str, seed: int) -> dict[str, Factors]:
    """The factors that a person begins with, drawn as PEFT draws them: A uniform within 1/√in, B zero."""
    own = hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]
    generator, factors = torch.Generator().manual_seed(int.from_bytes(own)), {}
    like = dict(device=model.device, dtype=torch.promote_types(model.dtype, torch.float32))
    for module, (n_in, n_out, rank, scale) in form.modules.items():
        down = torch.empty(rank, n_in).uniform_(-(n_in**-0.5), n_in**-0.5, generator=generator)
        factors[module] = Factors(down.to(**like), torch.zeros(n_out, rank, **like), scale)
    Adapter.of(form.config, factors)  # what could not be served is not trained
    return factors


def per_person_gradients(
    model: PreTrainedModel, batches: Mapping[str, torch.Tensor | Mapping], *, max_tokens: int = 512
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
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    body = {m for m in base.base_model.modules() if isinstance(m, torch.nn.Linear)}
    layers = {f"{n}.weight": m for n, m in model.named_modules() if m in body}
    if not trained:
        raise ValueError(f"no weight of this {type(base).__name__} is trained: none requires a gradient")
    if others := sorted(trained.keys() - layers):
        raise ValueError(f"only weights of the body's nn.Linear may be trained here, and {others[0]!r} is")
    parts = {name: [p.new_zeros(0, *p.shape)] for name, p in trained.items()}
    texts = [_text(name, batch, model) for name, batch in batches.items()]
    for chosen in _groups(texts, max_tokens):
        calls: dict[str, list] = {name: [] for name in trained}
        with contextlib.ExitStack() as stack:
            for name in trained:
                stack.callback(layers[name].register_forward_hook(_keep(calls[name])).remove)
            _, whole = _gradients(model, texts[chosen], list(trained.values()))
        rows = [len(text.ids) for text in texts[chosen]]
        for (name, seen), total in zip(calls.items(), whole, strict=True):
            seen = [call for call in seen if call[1] is not None]  # a checkpoint's second call has no gradient
            people = [zip(x.split(rows), g.split(rows), strict=True) for x, g in seen]  # of each call of the layer
            products = [torch.stack([g.flatten(0, 1).T @ x.flatten(0, 1) for x, g in call]) for call in people]
            parts[name].append(sum(products))  # (people, out, in)
            rounding = torch.finfo(total.dtype).eps ** 0.5 * float(parts[name][-1].abs().sum(0).max())
            if not torch.allclose(parts[name][-1].sum(0), total, rtol=0, atol=rounding):
                raise ValueError(f"the gradients of {name!r} do not add up: it is used elsewhere than in its layer")
    return {name: torch.cat(each) for name, each in parts.items()}


def _keep(calls: list):
    """A hook that notes a layer's input and the gradient of its output."""

    def hook(_, arguments, output):
        call = [arguments[0].detach(), None]
        calls.append(call)
        output.register_hook(lambda g: call.__setitem__(1, g))

    return hook


def _several(batches) -> Iterable:
    one = isinstance(batches, Mapping) or (isinstance(batches, torch.Tensor) and batches.dim() < 3)
    return [batches] if one else batches


class _Text(NamedTuple):
    """A person's batch: ids and labels, both ``(samples, seq)``."""

    ids: torch.Tensor
    labels: torch.Tensor


def _text(name: str, batch, model: PreTrainedModel) -> _Text:
    ids, labels = ids_and_labels(batch, f"the batch of {name!r}")
    vocab, learnt = model.get_input_embeddings().weight.shape[0], labels[labels != IGNORED]
    for each in filter(torch.Tensor.numel, (ids, learnt)):
        if not 0 <= each.min() <= each.max() < vocab:
            raise ValueError(f"the batch of {name!r} has ids from {each.min()} to {each.max()}, vocab={vocab}")
    if not (labels[:, 1:] != IGNORED).any():  # the first token is never predicted
        raise ValueError(f"the batch of {name!r} leaves nothing to learn of {tuple(ids.shape)} ids")
    return _Text(ids.to(model.device), labels.to(model.device))


def _gradients(
    model: PreTrainedModel, texts: list[_Text], leaves: list[torch.Tensor]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The mean loss of each text ``(samples, seq)``, and the gradient of their sum."""
    if not torch.is_grad_enabled():
        raise ValueError("gradients are off: train outside torch.no_grad() and torch.inference_mode()")
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    # Padding stands on the right, where causal attention never looks; it needs no attention mask.
    ids = pad_sequence([row for text in texts for row in text.ids], batch_first=True).long()  # (rows, seq)
    labels = [row[1:] for text in texts for row in text.labels]
    labels = pad_sequence(labels, batch_first=True, padding_value=IGNORED).long()  # (rows, seq - 1)
    predicts = labels != IGNORED
    owner = torch.arange(len(texts)).repeat_interleave(torch.tensor([len(text.ids) for text in texts]))  # (rows,)
    owner, labels = owner.to(ids.device)[:, None].expand_as(labels)[predicts], labels[predicts]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][predicts]  # (tokens, hidden)
    leaf, losses = hidden.detach().requires_grad_(), hidden.new_zeros(len(texts), dtype=torch.float64)
    share, size = 1 / torch.bincount(owner).double(), max(1, LOGITS // model.get_output_embeddings().weight.shape[0])
    for h, label, k in zip(*(t.split(size) for t in (leaf, labels, owner)), strict=True):
        loss = cross_entropy(logits_of(model, h), label, reduction="none") * share[k]
        losses.index_add_(0, k, loss.detach())
        loss.sum().backward()
    return losses, torch.autograd.grad(hidden, leaves, leaf.grad)


def _groups(texts: list[_Text], max_tokens: int) -> Iterator[slice]:
    """Runs of people whose texts, padded to the longest, have at most so many tokens; one person at least."""
    first, max_tokens = 0, whole_number("max_tokens", max_tokens, 1)
    for k in range(len(texts)):
        group = [text.ids for text in texts[first : k + 1]]
        if k > first and sum(map(len, group)) * max(each.shape[1] for each in group) > max_tokens:
            yield slice(first, k)
            first = k
    if texts:
        yield slice(first, len(texts))
