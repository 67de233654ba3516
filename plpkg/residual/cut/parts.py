"""One model cut in two: the device keeps embedding, LM head and every M, the cloud the decoder layers, A and B.

The device may also keep the first and the last decoder layers whole. What the parts do is in
:mod:`plpkg.residual.cut.cloud_part` and :mod:`plpkg.residual.cut.device_part`. Two things make fewer round trips of a
pass: a ladder's M is behind all layers; and the last layer's A·x can travel with the final hidden state (``fold``), for
what its projection adds, it adds to that state. A model with ordinary LoRA can be cut as well, for comparison: then all
of LoRA is on the device, and activations cross at full width.

Left out: layers whose input is not one hidden state (encoder-decoders).
"""

from collections.abc import Sequence
from typing import Any

from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, get_peft_model_state_dict
from torch import nn

from plpkg.projections import PROJECTIONS
from plpkg.residual.adapter import PrivateLoraLayer
from plpkg.residual.cut.cloud_part import CloudPart
from plpkg.residual.cut.device_part import DevicePart, Folded, LoraBranches, Tail
from plpkg.residual.cut.exchange import Exchange, FullActivations, Here, LowRank, Projection, Rider
from plpkg.residual.cut.sections import (
    LAYERS as LAYERS,  # a benchmark finds it here
    POSITIONS,
    Sections,
    require_own_logits,
)
from plpkg.residual.ladder import LadderTap, decoder_of
from plpkg.residual.methods import LadderConfig, PrivateLoraConfig
from plpkg.validation import flag, whole_number

PLAIN_LORA = {"use_dora": False, "lora_dropout": 0, "bias": "none", "lora_bias": False, "alora_invocation_tokens": None}


def split(
    model: PeftModel, first_k: int = 0, last_k: int = 0, *, fold: bool = False, adapter_name: str = "default"
) -> tuple[DevicePart, CloudPart]:
    """Cut a model with an adapter of this room into the device's part and the cloud's.

    The parts share the model's tensors; the model itself stays usable, unless :func:`release` is called.

    Parameters
    ----------
    model
        The result of ``get_peft_model(model, PrivateLoraConfig(...))``, or a ``LadderConfig``; or a ``LoraConfig``
        without dropout.
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
    config = _checked_config(model, first_k, last_k, fold, adapter_name)
    _require_own_adapters(model, adapter_name)
    whole: Any = model.get_base_model()  # of any family
    if whole.get_output_embeddings() is None:
        raise ValueError(f"{type(whole).__name__} has no LM head")
    sections = Sections(decoder_of(whole), adapter_name)
    count = sections.count
    whole_number("first_k", first_k, 0, count - 1, "num_hidden_layers - 1")
    whole_number("last_k", last_k, 0, count - 1 - first_k, "num_hidden_layers - 1 - first_k")
    is_ladder = isinstance(config, LadderConfig)
    norm_in_cloud = last_k == 0 and not fold and not is_ladder
    middle = sections.section(first_k, count - last_k, norm=norm_in_cloud)
    sections.require_nothing_else()

    crossings = _Crossings(config, adapter_name)
    norm = _as_trained(sections.norm, adapter_name)
    order: list[str] = []  # of a ladder's taps, behind the last layer
    if is_ladder:
        crossings.behind = norm.ladder_M[adapter_name]
        order = norm.taps[adapter_name]
        norm = norm.base_layer
    last_layer = sections.layers(middle)[-1]
    for layer in sections.layers(middle):
        for parent, names in _shared_inputs(layer, adapter_name):
            if is_ladder:
                crossings.ride(parent, names, order)
            elif fold and layer is last_layer and _can_fold(sections, crossings, layer, parent, names):
                crossings.fold(parent, names)
            else:
                crossings.ask(parent, names)
    if fold and not crossings.riders:
        raise ValueError("fold=True needs an adapter whose projection the last layer adds to its output as it is")
    for name, parameter in middle.named_parameters():
        if parameter.requires_grad:
            raise ValueError(f"{name} is trained, but would be in the cloud: keep it on the device, or freeze it")
    if len(crossings.ranks) > 1:
        raise ValueError(f"full activations need the same widths in every exchange, got {crossings.ranks}")

    riders = crossings.riders
    widths = [len(riders[seat].a) for seat in range(len(riders))]
    ends = _ends(whole, adapter_name)
    tail = None
    if riders:
        tail = Tail(norm, crossings.behind, ends["embedding"].embedding_dim, sum(widths))
    device = DevicePart(
        **ends,
        first=sections.section(0, first_k, norm=False),
        last=sections.section(count - last_k, count, norm=True),
        matrices=crossings.matrices,
        ranks=crossings.ranks[0] if crossings.ranks else (0, 0),
        tail=tail,
    )
    require_own_logits(whole, device)
    return device, CloudPart(middle, crossings.exchanges, widths, crossings.here)


def _checked_config(
    model: PeftModel, first_k: int, last_k: int, fold: bool, adapter_name: str
) -> PrivateLoraConfig | LadderConfig | LoraConfig:
    """The adapter's configuration, if a model with it can be cut like this."""
    config = getattr(model, "peft_config", {}).get(adapter_name)
    if not isinstance(config, PrivateLoraConfig | LadderConfig | LoraConfig):
        raise ValueError(f"{type(model).__name__} has no PrivateLoRA adapter {adapter_name!r}")
    if isinstance(config, LoraConfig):
        for field, plain in PLAIN_LORA.items():
            value = getattr(config, field, plain)
            if value != plain:
                raise ValueError(f"{field}={value!r}: only plain LoRA can be cut, with {field}={plain!r}")
    if isinstance(config, LadderConfig) and (first_k, last_k) != (0, 0):
        raise ValueError(f"a ladder needs every layer in the cloud, got first_k={first_k}, last_k={last_k}")
    if flag("fold", fold) and (not isinstance(config, PrivateLoraConfig) or last_k):
        method = str(config.peft_type).removeprefix("PeftType.")
        raise ValueError(f"fold=True needs a PrivateLoRA adapter and last_k=0, got {method}, last_k={last_k}")
    return config


def _require_own_adapters(model: Any, adapter_name: str) -> None:
    """Refuse weights that are not there or have an adapter in them, and adapters of other methods."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model's weights are not in memory: cut it before it is offloaded")
    tuned = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    if any(layer.merged for layer in tuned.values()):
        raise ValueError("an adapter is merged into the weights: unmerge it first")
    for name, layer in tuned.items():
        if not isinstance(layer, model.base_model.tuner_layer_cls):
            raise ValueError(f"{name} has an adapter of another method, which would be lost: merge that first")
    for layer in tuned.values():
        variants = getattr(layer, "lora_variant", {})
        if adapter_name in variants:
            variant = type(variants[adapter_name]).__name__
            raise ValueError(f"{adapter_name!r} is LoRA's {variant}: only plain LoRA can be cut")


def _as_trained(module: nn.Module, adapter_name: str) -> Any:
    """A module as an adapter has it in ``modules_to_save``."""
    if not isinstance(module, ModulesToSaveWrapper):
        return module
    if adapter_name in module._adapters:
        return module.modules_to_save[adapter_name]
    return module.original_module


def _ends(whole: Any, adapter_name: str) -> dict:
    """The modules and numbers before and behind the layers, as a :class:`.DevicePart` takes them."""
    decoder = decoder_of(whole)
    positions = None
    for name in POSITIONS:
        if positions is None and hasattr(decoder, name):
            positions = _as_trained(getattr(decoder, name), adapter_name)
    divisor = getattr(whole.config, "logits_scaling", None) or 1  # Granite's
    return dict(
        embedding=_as_trained(decoder.get_input_embeddings(), adapter_name),
        positions=positions,
        lm_head=_as_trained(whole.get_output_embeddings(), adapter_name),
        softcap=getattr(whole.config, "final_logit_softcapping", None),
        scale=getattr(whole.config, "logit_scale", None) or 1 / divisor,
    )


class _Crossings:
    """Puts modules that ask the device, or let A·x ride down to it, in the places of the cloud's adapted projections.

    Attributes
    ----------
    here
        The pass that a thread of the cloud has under way.
    exchanges, matrices
        The asking modules, layer by layer; and for each exchange the module that answers on the device.
    ranks
        The widths that cross, ``(r_c2d, r_d2c)``: different ones, in the order of the exchanges.
    riders, behind
        By seat, what rides down with the final hidden state; and what answers to all of it, behind the last layer.
    """

    def __init__(self, config: PrivateLoraConfig | LadderConfig | LoraConfig, adapter_name: str) -> None:
        self._config = config
        self._adapter_name = adapter_name
        self._late = getattr(config, "late", False)
        self._before: dict[tuple[str, ...], Exchange] = {}  # by projections' names, of the layer before
        self.here = Here()
        self.exchanges: list[Exchange] = []
        self.matrices: list[Sequence[nn.Module]] = []
        self.ranks: list[tuple[int, int]] = []
        self.riders: dict[int, Rider] = {}
        self.behind: nn.Module | None = None

    def ride(self, parent: nn.Module, names: list[str], order: list[str]) -> None:
        """Let a ladder's taps ride, each in the seat that ``order`` has for its module."""
        for name in names:
            tap = getattr(parent, name)
            seat = order.index(tap.module)
            self.riders[seat] = Rider(seat, tap.base_layer, tap.ladder_A[self._adapter_name], self.here)
            setattr(parent, name, self.riders[seat])

    def fold(self, parent: nn.Module, names: list[str]) -> None:
        """Let the last layer's only projection ride; its M and B are behind the last layer."""
        (name,) = names
        projection = getattr(parent, name)
        self.behind = Folded(projection, self._adapter_name)
        rider = Rider(0, projection.base_layer, projection.privatelora_A[self._adapter_name], self.here)
        rider.added = self._arriving(names)
        self.riders[0] = rider
        setattr(parent, name, rider)

    def ask(self, parent: nn.Module, names: list[str]) -> None:
        """Let the projections of one input ask the device together."""
        projections = [getattr(parent, name) for name in names]
        group = len(self.exchanges)
        if isinstance(self._config, PrivateLoraConfig):
            exchange = LowRank(group, projections, self._adapter_name, self.here)
            matrices = [projection.privatelora_M[self._adapter_name] for projection in projections]
            ranks = (self._config.r_c2d, self._config.r_d2c)
        else:
            exchange = FullActivations(group, projections, self.here)
            matrices = [LoraBranches(projections, self._adapter_name)]
            ranks = (projections[0].in_features, sum(exchange.widths))
        if self._late:
            exchange.added = self._arriving(names)
            _, _, is_last = projections[0].late[self._adapter_name]
            if is_last:  # no later layer adds its answer
                exchange.added += (exchange,)
            self._before[tuple(names)] = exchange
        self.exchanges.append(exchange)
        self.matrices.append(matrices)
        if ranks not in self.ranks:
            self.ranks.append(ranks)
        for index, name in enumerate(names):
            setattr(parent, name, Projection(exchange, index))

    def _arriving(self, names: list[str]) -> tuple[Exchange, ...]:
        """The exchange of the layer before whose answer a late adapter adds here, if there is one."""
        before = self._before.get(tuple(names))
        return () if before is None else (before,)


def _can_fold(sections: Sections, crossings: _Crossings, layer: nn.Module, parent: nn.Module, names: list[str]) -> bool:
    """Whether these are one projection whose output the last layer adds to its own."""
    if len(names) > 1 or crossings.riders:
        return False
    return sections.last_layer_adds(getattr(parent, names[0]), layer)


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


def is_adapted(module: nn.Module, adapter_name: str) -> bool:
    """Whether a module has this adapter: of this room, or LoRA's."""
    if isinstance(module, LadderTap):
        return adapter_name in module.ladder_A
    if isinstance(module, PrivateLoraLayer | LoraLayer):
        adapters = getattr(module, module.adapter_layer_names[0])
        return adapter_name in adapters
    return False


def _shared_inputs(layer: nn.Module, adapter_name: str) -> list[tuple[nn.Module, list[str]]]:
    """The adapted projections of a layer by the input that they share; what has only other adapters loses them."""
    groups: list[tuple[nn.Module, list[str]]] = []
    for parent in list(layer.modules()):
        children = dict(parent.named_children())
        adapted = [name for name, child in children.items() if is_adapted(child, adapter_name)]
        for name, child in children.items():
            if isinstance(child, BaseTunerLayer) and name not in adapted:
                setattr(parent, name, child.get_base_layer())
        grouped: list[str] = []
        for together in (*PROJECTIONS, ("gate_proj", "up_proj")):
            chosen = [name for name in together if name in adapted]
            if chosen:
                groups.append((parent, chosen))
                grouped += chosen
        groups += [(parent, [name]) for name in adapted if name not in grouped]
    return groups
