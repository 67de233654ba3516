"""One model cut in two: the device keeps embedding, LM head and every M, the cloud the decoder layers, A and B.

The device may also keep the first and the last decoder layers whole. What the parts do is in
:mod:`plpkg.residual.cut.cloud_part` and :mod:`plpkg.residual.cut.device_part`. Two things make fewer round trips of a
pass: a ladder's M is behind all layers; and the last layer's A·x can travel with the final hidden state (``fold``), for
what its projection adds, it adds to that state. A model with ordinary LoRA can be cut as well, for comparison: then all
of LoRA is on the device, and activations cross at full width.

Left out: layers whose input is not one hidden state (encoder-decoders).
"""

import copy

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, get_peft_model_state_dict
from torch import nn

from plpkg.learning import logits_of
from plpkg.projections import PROJECTIONS
from plpkg.residual.adapter import PrivateLoraLayer
from plpkg.residual.cut.cloud_part import CloudPart, OwnInEachThread, run_layers
from plpkg.residual.cut.device_part import DevicePart, Folded, LoraBranches, Tail
from plpkg.residual.cut.exchange import FullActivations, Here, LowRank, Projection, Rider
from plpkg.residual.ladder import NORMS, LadderTap, decoder_of, named
from plpkg.residual.methods import LadderConfig, PrivateLoraConfig
from plpkg.validation import flag, whole_number

MULTIPLIER = "embedding_multiplier"
"""What Granite's decoder multiplies its input with, before the first layer."""

PLAIN_LORA = {"use_dora": False, "lora_dropout": 0, "bias": "none", "lora_bias": False, "alora_invocation_tokens": None}

LAYERS = ("layers", "h")
"""What Hugging Face's decoders call their list of layers."""

POSITIONS = ("wpe", "embed_positions")
"""What GPT-2's and OPT's decoders call the embedding of positions that they add to their input."""


def split(
    model: PeftModel, first_k: int = 0, last_k: int = 0, *, fold: bool = False, adapter_name: str = "default"
) -> tuple[DevicePart, CloudPart]:
    """Cut a model with an adapter of this room into the device's part and the cloud's.

    The parts share the model's tensors; the model itself stays usable, unless :func:`release` is called.

    Parameters
    ----------
    model
        What ``get_peft_model(model, PrivateLoraConfig(...))`` gave, or a ``LadderConfig``; or a ``LoraConfig`` without
        dropout.
    first_k, last_k
        How many decoder layers the device keeps at either end. Adapters in them stay whole on the device.
    fold
        Let the last layer's A·x travel with the final hidden state: the same function, one round trip less. The device
        then holds that layer's B, and the norm.
    adapter_name
        Which adapter.

    Returns
    -------
    device, cloud
        ``device.logits(cloud(device.embed(ids)))`` are the model's logits, once the cloud is connected.

    Raises
    ------
    ValueError
        No such adapter, one merged into the weights or beside one of another method, trained weights or nothing left
        for the cloud, a last layer that cannot be folded, or an architecture that has not the parts of a Hugging Face
        decoder, or more than them.
    """
    config = getattr(model, "peft_config", {}).get(adapter_name)
    if not isinstance(config, PrivateLoraConfig | LadderConfig | LoraConfig):
        raise ValueError(f"{type(model).__name__} has no PrivateLoRA adapter {adapter_name!r}")
    if isinstance(config, LoraConfig):
        for field, plain in PLAIN_LORA.items():
            if (value := getattr(config, field, plain)) != plain:
                raise ValueError(f"{field}={value!r}: only plain LoRA can be cut, with {field}={plain!r}")
    if isinstance(config, LadderConfig) and (first_k, last_k) != (0, 0):
        raise ValueError(f"a ladder needs every layer in the cloud, got first_k={first_k}, last_k={last_k}")
    if flag("fold", fold) and (not isinstance(config, PrivateLoraConfig) or last_k):
        raise ValueError(
            f"fold=True needs a PrivateLoRA adapter and last_k=0, got {config.peft_type.value}, last_k={last_k}"
        )
    tuned = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model's weights are not in memory: cut it before it is offloaded")
    if any(layer.merged for layer in tuned.values()):
        raise ValueError("an adapter is merged into the weights: unmerge it first")
    if foreign := [name for name, each in tuned.items() if not isinstance(each, model.base_model.tuner_layer_cls)]:
        raise ValueError(f"{foreign[0]} has an adapter of another method, which would be lost: merge that first")
    if variants := [each for each in tuned.values() if adapter_name in getattr(each, "lora_variant", {})]:
        variant = type(variants[0].lora_variant[adapter_name]).__name__
        raise ValueError(f"{adapter_name!r} is LoRA's {variant}: only plain LoRA can be cut")
    whole = model.get_base_model()
    if whole.get_output_embeddings() is None:
        raise ValueError(f"{type(whole).__name__} has no LM head")
    decoder = decoder_of(whole)
    layers_name, norm_name = (named(decoder, names) for names in (LAYERS, NORMS))
    count = len(getattr(decoder, layers_name))
    whole_number("first_k", first_k, 0, count - 1, "num_hidden_layers - 1")
    whole_number("last_k", last_k, 0, count - 1 - first_k, "num_hidden_layers - 1 - first_k")
    with_norm = last_k == 0 and not fold and not isinstance(config, LadderConfig)

    def section(start: int, stop: int, *, norm: bool) -> nn.Module | None:
        if start >= stop:
            return None
        part = _section(decoder, layers_name, norm_name, range(start, stop), norm=norm)
        if start and hasattr(part, MULTIPLIER):
            setattr(part, MULTIPLIER, 1.0)
        for module in part.modules():  # they are copies: what is active in the model stays so
            if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper):
                module._active_adapter, module._disable_adapters = [adapter_name], False
        return part

    def as_trained(module: nn.Module) -> nn.Module:  # as this adapter has it in modules_to_save
        if not isinstance(module, ModulesToSaveWrapper):
            return module
        return module.modules_to_save[adapter_name] if adapter_name in module._adapters else module.original_module

    middle = section(first_k, count - last_k, norm=with_norm)
    last = _section(decoder, layers_name, norm_name, range(count - 1, count), norm=False)
    _require_nothing_else(last, layers_name, norm_name, decoder.get_input_embeddings())
    here, exchanges, matrices, ranks, riders = Here(), [], [], {}, {}
    norm, m, before = as_trained(getattr(decoder, norm_name)), None, {}
    if isinstance(config, LadderConfig):
        m, order, norm = norm.ladder_M[adapter_name], norm.taps[adapter_name], norm.base_layer
    for layer in (cloud_layers := getattr(middle, layers_name)):
        for parent, names in _shared_inputs(layer, adapter_name):
            projections = [getattr(parent, name) for name in names]
            if isinstance(config, LadderConfig):
                for name, tap in zip(names, projections, strict=True):
                    seat = order.index(tap.module)
                    riders[seat] = Rider(seat, tap.base_layer, tap.ladder_A[adapter_name], here)
                    setattr(parent, name, riders[seat])
                continue
            late = getattr(config, "late", False)
            added = (before[*names],) if late and tuple(names) in before else ()
            foldable = fold and layer is cloud_layers[-1] and len(names) == 1 and not riders
            alone = section(count - 1, count, norm=False) if foldable else None
            if foldable and _adds_to_the_state(alone, getattr(alone, layers_name)[0], layer, projections[0]):
                (projection,), m = projections, Folded(projections[0], adapter_name)
                riders[0] = Rider(0, projection.base_layer, projection.privatelora_A[adapter_name], here)
                riders[0].added = added
                setattr(parent, names[0], riders[0])
                continue
            group = len(exchanges)
            if isinstance(config, PrivateLoraConfig):
                exchange = LowRank(group, projections, adapter_name, here)
                matrices.append([projection.privatelora_M[adapter_name] for projection in projections])
                ranks[config.r_c2d, config.r_d2c] = group
            else:
                exchange = FullActivations(group, projections, here)
                matrices.append([LoraBranches(projections, adapter_name)])
                ranks[projections[0].in_features, sum(exchange.widths)] = group
            if late:  # the last of them adds its own answer as well
                last = projections[0].late[adapter_name][2]
                exchange.added, before[tuple(names)] = (*added, exchange) if last else added, exchange
            exchanges.append(exchange)
            for index, name in enumerate(names):
                setattr(parent, name, Projection(exchange, index))
    if fold and not riders:
        raise ValueError("fold=True needs an adapter whose projection the last layer adds to its output as it is")
    if trained := [name for name, parameter in middle.named_parameters() if parameter.requires_grad]:
        raise ValueError(f"{trained[0]} is trained, but would be in the cloud: keep it on the device, or freeze it")
    if len(ranks) > 1:
        raise ValueError(f"full activations need the same widths in every exchange, got {list(ranks)}")
    widths = [len(riders[seat].a) for seat in range(len(riders))]
    ends = dict(
        embedding=as_trained(decoder.get_input_embeddings()),
        positions=next((as_trained(getattr(decoder, name)) for name in POSITIONS if hasattr(decoder, name)), None),
        lm_head=as_trained(whole.get_output_embeddings()),
        softcap=getattr(whole.config, "final_logit_softcapping", None),
        scale=getattr(whole.config, "logit_scale", None) or 1 / (getattr(whole.config, "logits_scaling", None) or 1),
    )

    tail = Tail(norm, m, ends["embedding"].embedding_dim, sum(widths)) if riders else None
    device = DevicePart(
        **ends, first=section(0, first_k, norm=False), last=section(count - last_k, count, norm=True),
        matrices=matrices, ranks=next(iter(ranks), (0, 0)), tail=tail,
    )  # fmt: skip
    _require_own_logits(whole, device)
    return device, CloudPart(middle, exchanges, widths, here)


def release(model: PeftModel, *parts: DevicePart | CloudPart, adapter_name: str | None = None) -> None:
    """Free what a model holds beside its parts: a process that serves one end needs no more.

    The model cannot compute afterwards.

    Parameters
    ----------
    model, parts
        What was given to :func:`split`, and of what it gave the one that is used.
    adapter_name
        An adapter that can still be saved and loaded into the model: a device's own.
    """
    kept = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    if adapter_name is not None:
        kept += get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False).values()
    storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.untyped_storage().data_ptr() not in storages:
            tensor.data = tensor.new_empty(0)


def _section(decoder: nn.Module, layers_name: str, norm_name: str, layers: range, *, norm: bool) -> nn.Module:
    """A decoder of the same class with some of the layers, without embedding, sharing the tensors."""
    config = copy.deepcopy(decoder.config)
    config.num_hidden_layers = len(layers)
    if (kinds := getattr(decoder.config, "layer_types", None)) is not None:
        try:
            config.layer_types = [kinds[i] for i in layers]
        except AttributeError:  # Jamba's follow from the layers' numbers
            name = type(decoder).__name__
            raise ValueError(f"the kinds of {name}'s layers cannot be chosen: it cannot be cut here") from None
    # The same tensors in new modules: their numbers within the KV cache change.
    shared = {id(t): t for t in (*decoder.parameters(), *decoder.buffers())}
    with torch.device("meta"):
        part = type(decoder)(config)
    chosen = nn.ModuleList(copy.deepcopy(getattr(decoder, layers_name)[i], dict(shared)) for i in layers)
    for number, layer in enumerate(chosen):
        for module in layer.modules():
            for name in ("layer_idx", "layer_id"):
                if hasattr(module, name):
                    setattr(module, name, number)
    setattr(part, layers_name, chosen)
    setattr(part, norm_name, copy.deepcopy(getattr(decoder, norm_name), dict(shared)) if norm else nn.Identity())
    if getattr(decoder, "rotary_emb", None) is not None:  # Granite's hybrids may have none
        part.rotary_emb = OwnInEachThread(copy.deepcopy(decoder.rotary_emb))
    part.set_input_embeddings(None)
    for name in POSITIONS:
        if hasattr(decoder, name):
            setattr(part, name, _Nothing())
    here = {id(tensor) for tensor in shared.values()}
    for name, tensor in (*part.named_parameters(), *part.named_buffers()):
        if tensor.is_meta and id(tensor) not in here:
            raise ValueError(f"{type(decoder).__name__} has {name} beside its layers: it cannot be cut here")
    return part.train(decoder.training)


class _Nothing(nn.Module):
    """Adds nothing where a decoder adds its position embedding: the device has done so."""

    def forward(self, *_, **__) -> torch.Tensor:
        return torch.zeros(())  # without dimensions, so that it changes no type, and fits on any device


def _require_own_logits(whole: nn.Module, device: DevicePart) -> None:
    """Refuse a model that makes other logits of its decoder's states than the device will."""
    weight, head = device.lm_head.weight, whole.get_output_embeddings()
    hidden = torch.linspace(-1, 1, device.embedding.embedding_dim)[None, None].to(weight)
    whole = copy.copy(whole)  # with the head of the adapter that was asked for
    whole._modules = {name: device.lm_head if each is head else each for name, each in whole._modules.items()}
    with torch.no_grad():
        own, ours = logits_of(whole, hidden), device.head(hidden)
    if (own - ours).abs().max() > 8 * torch.finfo(weight.dtype).eps * own.abs().max():
        raise ValueError(
            f"{type(whole).__name__} changes its logits by more than a known scale or cap: it cannot be cut"
        )


def _require_nothing_else(part: nn.Module, layers_name: str, norm_name: str, embedding: nn.Module) -> None:
    """Refuse a decoder that is more than its layers and a norm behind them: without layers, it is what stands there.

    Nor may it change the tokens' ``embedding`` before the first layer.
    """
    device = part.device
    setattr(part, layers_name, nn.ModuleList())
    setattr(part, norm_name, nn.LeakyReLU(3.0))  # three times what is negative
    part.eval().set_input_embeddings(embedding)
    at = torch.zeros(1, 1, dtype=torch.long, device=device)
    ids = at + embedding.num_embeddings - 1
    with torch.no_grad():
        own = part(input_ids=ids, position_ids=at, use_cache=False).last_hidden_state
        if not torch.equal(own, run_layers(part, embedding(ids), None, at, None)):
            raise ValueError(
                f"{type(part).__name__} changes its tokens' embeddings before the first layer: it cannot be cut here"
            )
    if hasattr(part, MULTIPLIER):
        setattr(part, MULTIPLIER, 1.0)  # the first layers keep it
    hidden = -torch.ones(1, 1, part.config.hidden_size, device=device)
    final = run_layers(part, hidden, None, at, None)
    if not torch.equal(final, 3 * hidden):
        raise ValueError(f"{type(part).__name__} is more than its layers and a norm: it cannot be cut here")


def _adds_to_the_state(part: nn.Module, copied: nn.Module, layer: nn.Module, projection: nn.Module) -> bool:
    """Whether a layer adds what a projection gives to its output as it is: then both have the same gradient.

    ``part`` is a decoder of the layer's copy alone.
    """
    path, given = next(name for name, module in layer.named_modules() if module is projection), []

    def keep(_, inputs, output: torch.Tensor) -> torch.Tensor:
        given.append(output.detach().requires_grad_())
        return given[-1].clone()  # Falcon adds to it in place

    copied.get_submodule(path).register_forward_hook(keep)
    for module in copied.modules():
        if isinstance(module, BaseTunerLayer):
            module._disable_adapters = True  # a late one waits for the layer before
    weight = projection.get_base_layer().weight
    with torch.inference_mode(False), torch.enable_grad():
        hidden = torch.linspace(-1, 1, 2 * part.config.hidden_size).reshape(1, 2, -1).to(weight)
        final = run_layers(part.eval(), hidden, None, torch.arange(2, device=weight.device)[None], None)
        gradients = torch.autograd.grad(final, given, hidden, allow_unused=True) if len(given) == 1 else [None]
    return gradients[0] is not None and torch.equal(gradients[0].flatten(), hidden.flatten())


def is_adapted(module: nn.Module, adapter_name: str) -> bool:
    """Whether a module has this adapter: of this room, or LoRA's."""
    if isinstance(module, LadderTap):
        return adapter_name in module.ladder_A
    return isinstance(module, PrivateLoraLayer | LoraLayer) and adapter_name in getattr(
        module, module.adapter_layer_names[0]
    )


def _shared_inputs(layer: nn.Module, adapter_name: str) -> list[tuple[nn.Module, list[str]]]:
    """The adapted projections of a layer by the input that they share; what has only other adapters loses them."""
    groups = []
    for parent in list(layer.modules()):
        adapted = [name for name, child in parent.named_children() if is_adapted(child, adapter_name)]
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer) and name not in adapted:
                setattr(parent, name, child.get_base_layer())
        for together in (*PROJECTIONS, ("gate_proj", "up_proj")):
            if chosen := [name for name in together if name in adapted]:
                groups.append((parent, chosen))
        groups += [(parent, [name]) for name in adapted if not any((parent is p and name in n) for p, n in groups)]
    return groups
