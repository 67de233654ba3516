"""One model cut in two: the device keeps embedding, LM head and every M, the cloud the decoder layers, A and B.

The device may also keep the first and the last decoder layers whole. What the parts do is in
:mod:`plpkg.residual.parts`. A model with ordinary LoRA can be cut as well, for comparison: then all of LoRA is on the
device, and activations cross at full width.

Left out: layers whose input is not one hidden state (encoder-decoders).
"""

import copy

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from torch import nn

from plpkg.residual.adapter import PrivateLoraConfig, PrivateLoraLayer
from plpkg.residual.parts import CloudPart, DevicePart, FullActivations, Here, LoraBranches, LowRank, Projection
from plpkg.validation import whole_number

ADAPTED = (PrivateLoraLayer, LoraLayer)

LAYERS, NORMS = ("layers", "h"), ("norm", "ln_f")
"""What Hugging Face's decoders call their list of layers and their final norm."""


def split(
    model: PeftModel, first_k: int = 0, last_k: int = 0, *, adapter_name: str = "default"
) -> tuple[DevicePart, CloudPart]:
    """Cut a model with a PrivateLoRA adapter into the device's part and the cloud's.

    The parts share the model's tensors; the model itself stays usable, unless :func:`release` is called.

    Parameters
    ----------
    model
        What ``get_peft_model(model, PrivateLoraConfig(...))`` gave; or a ``LoraConfig`` without dropout.
    first_k, last_k
        How many decoder layers the device keeps at either end. Adapters in them stay whole on the device.
    adapter_name
        Which adapter.

    Returns
    -------
    device, cloud
        ``device.logits(cloud(device.embed(ids)))`` are the model's logits, once the cloud is connected.

    Raises
    ------
    ValueError
        No such adapter, one merged into the weights, nothing left for the cloud, or an architecture that has not
        the parts of a Hugging Face decoder.
    """
    config = getattr(model, "peft_config", {}).get(adapter_name)
    if not isinstance(config, PrivateLoraConfig | LoraConfig):
        raise ValueError(f"{type(model).__name__} has no PrivateLoRA adapter {adapter_name!r}")
    if isinstance(config, LoraConfig) and (config.use_dora or config.lora_dropout):
        raise ValueError(f"LoRA without DoRA and dropout can be cut, got {config.use_dora=}, {config.lora_dropout=}")
    if any(isinstance(module, ADAPTED) and module.merged for module in model.modules()):
        raise ValueError("an adapter is merged into the weights: unmerge it first")
    whole = model.get_base_model()
    decoder = whole.base_model
    layers_name, norm_name = (_named(decoder, names) for names in (LAYERS, NORMS))
    count = len(getattr(decoder, layers_name))
    whole_number("first_k", first_k, 0, count - 1, "num_hidden_layers - 1")
    whole_number("last_k", last_k, 0, count - 1 - first_k, "num_hidden_layers - 1 - first_k")

    def section(start: int, stop: int, *, norm: bool) -> nn.Module | None:
        return _section(decoder, layers_name, norm_name, range(start, stop), norm=norm) if start < stop else None

    middle = section(first_k, count - last_k, norm=last_k == 0)
    exchanges, matrices, ranks, here = [], [], {}, Here()
    for layer in getattr(middle, layers_name):
        for parent, names in _shared_inputs(layer):
            projections = [getattr(parent, name) for name in names]
            group = len(exchanges)
            if isinstance(config, PrivateLoraConfig):
                exchange = LowRank(group, projections, adapter_name, here)
                matrices.append([projection.privatelora_M[adapter_name] for projection in projections])
                ranks[config.r_c2d, config.r_d2c] = group
            else:
                exchange = FullActivations(group, projections, here)
                matrices.append([LoraBranches(projections, adapter_name)])
                ranks[projections[0].in_features, sum(exchange.widths)] = group
            exchanges.append(exchange)
            for index, name in enumerate(names):
                setattr(parent, name, Projection(exchange, index))
    if len(ranks) > 1:
        raise ValueError(f"full activations need the same widths in every exchange, got {list(ranks)}")
    device = DevicePart(
        decoder.get_input_embeddings(),
        getattr(decoder, "wpe", None),
        section(0, first_k, norm=False),
        section(count - last_k, count, norm=True),
        matrices,
        next(iter(ranks), (0, 0)),
        whole.get_output_embeddings(),
        getattr(whole.config, "final_logit_softcapping", None),
    )
    return device, CloudPart(middle, exchanges, here)


def release(model: PeftModel, part: DevicePart | CloudPart, *, adapter_name: str | None = None) -> None:
    """Free what a model holds beside one of its parts: a process that serves one end needs no more.

    The model cannot compute afterwards.

    Parameters
    ----------
    model, part
        What was given to :func:`split`, and one of what it gave.
    adapter_name
        An adapter that can still be saved and loaded into the model: a device's own.
    """
    kept = [*part.parameters(), *part.buffers()]
    if adapter_name is not None:
        kept += get_peft_model_state_dict(model, adapter_name=adapter_name).values()
    storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.untyped_storage().data_ptr() not in storages:
            tensor.data = tensor.new_empty(0)


def _named(decoder: nn.Module, names: tuple[str, ...]) -> str:
    for name in names:
        if hasattr(decoder, name):
            return name
    raise ValueError(f"{type(decoder).__name__} has none of {', '.join(names)}: not a decoder that can be cut here")


def _section(decoder: nn.Module, layers_name: str, norm_name: str, layers: range, *, norm: bool) -> nn.Module:
    """A decoder of the same class with some of the layers, without embedding, sharing the tensors."""
    config = copy.deepcopy(decoder.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[i] for i in layers]
    # The same tensors in new modules: their numbers within the KV cache change.
    shared = {id(t): t for t in (*decoder.parameters(), *decoder.buffers())}
    with torch.device("meta"):
        part = type(decoder)(config)
    chosen = nn.ModuleList(copy.deepcopy(getattr(decoder, layers_name)[i], dict(shared)) for i in layers)
    for number, layer in enumerate(chosen):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    setattr(part, layers_name, chosen)
    setattr(part, norm_name, copy.deepcopy(getattr(decoder, norm_name), dict(shared)) if norm else nn.Identity())
    if hasattr(decoder, "rotary_emb"):
        part.rotary_emb = copy.deepcopy(decoder.rotary_emb)
    part.set_input_embeddings(None)
    if hasattr(decoder, "wpe"):
        part.wpe = _Nothing()
    return part.train(decoder.training)


class _Nothing(nn.Module):
    """Adds nothing where a decoder adds its position embedding: the device has done so."""

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, device=position_ids.device)


def _shared_inputs(layer: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """The adapted projections of a layer by the input that they share, in the order of computation."""
    groups = []
    for parent in layer.modules():
        adapted = [name for name, child in parent.named_children() if isinstance(child, ADAPTED)]
        for together in (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]):
            if chosen := [name for name in together if name in adapted]:
                groups.append((parent, chosen))
        groups += [(parent, [name]) for name in adapted if not any((parent is p and name in n) for p, n in groups)]
    return groups
