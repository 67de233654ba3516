"""ΔW = B·M·A as a PEFT method: frozen projections A and B, one small trainable M between them.

A projection with input x gives ``W x + B (M (A x))``: A brings ``(in_features)`` down to ``r_c2d``, the
rank that the cloud sends to the device, M maps it to ``r_d2c``, the rank that comes back, and B brings that
up to ``(out_features)``. Only M learns; it starts at zero, so that the model starts as it was. A and B come
from a seed and each module's name, so that the cloud can have them without the device, and a saved adapter
is M and a few numbers. (Wang et al. 2023, arXiv 2311.14030; ``init="svd"`` is LoRA-XS, arXiv 2405.17604.)

Importing this module makes PEFT know the method: ``get_peft_model(model, PrivateLoraConfig(...))`` and
``PeftModel.from_pretrained`` then work as with any other. PEFT's list of methods is closed, so three of its
dictionaries are written to, and its reader of configurations is bounded (``saved.py``); tests pin what this relies on.

Left out: quantised base layers, dropout, and LoRA's scaling ``alpha / r``, which the publication does not have.
A fused projection (Phi-3's ``qkv_proj``, GPT-2's ``c_attn``) is one projection with one M.
"""

import hashlib
import threading
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn
from transformers.pytorch_utils import Conv1D

from plpkg.residual import saved
from plpkg.residual.rows import RowwiseTuner, rows_of
from plpkg.untrusted import shown
from plpkg.validation import flag, one_of, whole_number


class MethodName(str):
    """A method that is not in PEFT's list, whose entries have a ``value``: PEFT's refusals name it."""

    @property
    def value(self) -> str:
        return str(self)


PEFT_TYPE = MethodName("PRIVATELORA")
PREFIX = "privatelora_"
QKV = ["q_proj", "k_proj", "v_proj"]
MAX_RANK = 2**14
"""At least the width of any model; on a model, a saved adapter's ranks are bounded by its widths."""
TARGET_MODULES = (QKV, ["qkv_proj"], ["c_attn"])
"""The query, key and value projections, apart or fused as Phi-3's and GPT-2's: what the publication adapts."""


@dataclass
class ProjectionConfig(PeftConfig):
    """Where an adapter of this room is, and where its frozen projections come from.

    Attributes
    ----------
    target_modules
        Names of the linear layers, or a regular expression; by default those of the method.
    exclude_modules
        Names, or a regular expression, of layers to leave alone.
    layers_to_transform
        Numbers of the decoder layers; all by default.
    layers_pattern
        The name of the list of layers, where PEFT does not know it.
    init
        ``"gaussian"``: the projections are random, from ``projection_seed`` and the module's name. ``"given"``: random
        until something else sets them (:mod:`plpkg.residual.bases`) or they are loaded.
    projection_seed
        The seed of the projections, together with each module's name.
    save_projection
        Save the projections beside what learns. By default unless they are ``"gaussian"``: singular vectors may change
        sign from one machine to the next, and what was learnt for the others would be wrong.
    modules_to_save
        Other modules to train and save. What is read from a folder has none: they would replace a part of the backbone.
    backbone
        :func:`plpkg.backbones.fingerprint` of the model that the adapter is for; by default of the one that it is
        built on.
    weights_sha256
        Of the weights' file beside a saved configuration.
    """

    target_modules: list[str] | str | None = field(default=None, metadata={"help": "Linear layers to adapt."})
    exclude_modules: list[str] | str | None = field(default=None, metadata={"help": "Layers to leave alone."})
    layers_to_transform: list[int] | int | None = field(default=None, metadata={"help": "Decoder layers to adapt."})
    layers_pattern: list[str] | str | None = field(default=None, metadata={"help": "Name of the list of layers."})
    init: str = field(default="gaussian", metadata={"help": "Where the projections come from."})
    projection_seed: int = field(default=0, metadata={"help": "Seed of the projections."})
    save_projection: bool | None = field(default=None, metadata={"help": "Save the projections."})
    modules_to_save: list[str] | None = field(default=None, metadata={"help": "Other modules to train and save."})
    backbone: str | None = field(default=None, metadata={"help": "The backbone's fingerprint."})
    weights_sha256: str | None = field(default=None, metadata={"help": "SHA-256 of the weights' file."})

    inits = ("gaussian", "given")
    read, shapes = False, None  # from a folder, and with which tensors: their shapes by name

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
            value = getattr(self, name)
            listed = isinstance(value, Collection) and all(isinstance(each, str) for each in value)
            if value is not None and not listed:
                raise ValueError(f"{name} must be names of modules, got {shown(value)}")
            if isinstance(value, list) and name in ("target_modules", "exclude_modules"):
                setattr(self, name, set(value))
        layers = [] if self.layers_to_transform is None else self.layers_to_transform
        for layer in layers if isinstance(layers, list | tuple | set | range) else [layers]:
            whole_number("layers_to_transform", layer, 0)
        self.projection_seed = whole_number("projection_seed", self.projection_seed, 0)
        one_of("init", self.init, self.inits)
        if self.save_projection is not None:
            flag("save_projection", self.save_projection)
        if self.save_projection is None:
            self.save_projection = self.init != "gaussian"
        if self.init != "gaussian" and not self.save_projection:
            raise ValueError(f"init={self.init!r} needs save_projection=True: nothing else brings the same projections")
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(f"layers_pattern={self.layers_pattern!r} needs layers_to_transform")

    def save_pretrained(self, save_directory: str | Path, **options) -> None:
        """As PEFT does it, behind the weights; both files are then their owner's alone."""
        weights = Path(save_directory, saved.WEIGHTS)
        self.weights_sha256 = saved.digest(weights) if weights.exists() else None
        super().save_pretrained(save_directory, **options)
        for path in (weights, Path(save_directory, saved.CONFIG)):
            if path.exists():
                path.chmod(0o600)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, subfolder: str | None = None, **options):
        """Read a configuration that this method has saved, and look at the weights beside it, if there are any.

        Raises
        ------
        ValueError
            One of the two files is not what may be read, or they do not belong together.
        """
        folder = saved.local_folder(pretrained_model_name_or_path, subfolder, cls._split_kwargs(options)[0])
        try:
            config = cls(**saved.fields_of(folder, cls))
            config.read = True
            config.shapes = saved.shapes_of(folder, config.weights_sha256)
        except ValueError as error:
            raise ValueError(f"{folder}: {str(error)[:1000]}") from None
        return config


@dataclass
class PrivateLoraConfig(ProjectionConfig):
    """How a model is adapted; the other fields are those of :class:`ProjectionConfig`.

    Attributes
    ----------
    r_c2d, r_d2c
        Ranks from cloud to device and back: M is ``(r_d2c, r_c2d)``.
    init
        Also ``"svd"``: A and B are the largest singular vectors of W, B scaled by the singular values.
    late
        Add what a layer's M answers to the same projection of the next adapted layer, the last one's to its own: so
        two exchanges can be under way at once. Cannot be merged, nor recomputed by gradient checkpointing.
    """

    r_c2d: int = field(default=64, metadata={"help": "Rank from cloud to device."})
    r_d2c: int = field(default=64, metadata={"help": "Rank from device to cloud."})
    late: bool = field(default=False, metadata={"help": "Add each answer one layer later."})

    inits = ("gaussian", "svd", "given")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PEFT_TYPE
        self.r_c2d, self.r_d2c = rank("r_c2d", self.r_c2d), rank("r_d2c", self.r_d2c)
        flag("late", self.late)
        if self.init == "svd" and self.r_c2d != self.r_d2c:
            raise ValueError(f"init='svd' takes one rank for both ways, got r_c2d={self.r_c2d}, r_d2c={self.r_d2c}")


def rank(name: str, value: object) -> int:
    """A rank, or another width of M."""
    return whole_number(name, whole_number(name, value, 1), 1, MAX_RANK)


def gaussian_projections(
    seed: int, module: str, in_features: int, out_features: int, r_c2d: int, r_d2c: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of one projection, the same wherever they are drawn.

    Parameters
    ----------
    seed
        The configuration's ``projection_seed``.
    module
        The projection's name in the model, ``model.layers.0.self_attn.q_proj``.
    in_features, out_features, r_c2d, r_d2c
        Dimensions.

    Returns
    -------
    A, B
        ``(r_c2d, in_features)`` of variance ``1 / in_features`` and ``(out_features, r_d2c)`` of variance
        ``1 / r_d2c``, float32, so that A keeps the size of its input's entries, and B of M's.
    """
    digest = hashlib.sha256(f"{seed} {module}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    a = torch.randn(r_c2d, in_features, generator=generator, device="cpu") / in_features**0.5
    b = torch.randn(out_features, r_d2c, generator=generator, device="cpu") / r_d2c**0.5
    return a, b


def svd_projections(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B from W's largest singular vectors: ``B A`` is the best approximation of W of that rank.

    Parameters
    ----------
    weight
        ``(out_features, in_features)``.
    rank
        At most the smaller of both.
    """
    whole_number("rank", rank, 1, min(weight.shape), "min(out_features, in_features)")
    u, s, vh = torch.linalg.svd(weight.detach().float(), full_matrices=False)
    return vh[:rank].contiguous(), (u[:, :rank] * s[:rank]).contiguous()


class PerThread(threading.local):
    """Attributes that each thread has for itself; a copy, pickled or not, begins anew."""

    def __reduce__(self) -> tuple:
        return type(self), ()


class UnderWay(PerThread):
    """What the projections of one name add one layer late, on its way from each to the next."""

    def __init__(self) -> None:
        self.residual: torch.Tensor | None = None


def features(module: str, base: nn.Module) -> tuple[int, int]:
    """``(in_features, out_features)`` of a linear layer, ``nn.Linear`` or GPT-2's ``Conv1D``."""
    if isinstance(base, nn.Linear):
        return base.in_features, base.out_features
    if isinstance(base, Conv1D):
        return base.nx, base.nf
    raise ValueError(f"{module} is a {type(base).__name__}: only nn.Linear and Conv1D can be adapted")


def keep_projections(module: str, adapter_name: str, config: ProjectionConfig, *projections: tuple) -> None:
    """Put ``(buffers, value)`` into a layer: all adapters of one are saved with their projections, or none is."""
    for buffers, value in projections:
        if len(buffers) and buffers.persistent != config.save_projection:
            raise ValueError(
                f"save_projection={config.save_projection} for the adapter {adapter_name!r}, but "
                f"{buffers.persistent} for those that the model already has in {module}"
            )
        buffers.persistent = config.save_projection
        buffers[adapter_name] = value


class PrivateLoraLayer(nn.Module, BaseTunerLayer):
    """A linear layer with one M for each adapter.

    Attributes
    ----------
    base_layer
        The layer as it was: ``nn.Linear``, or GPT-2's ``Conv1D``.
    privatelora_M
        By adapter: ``nn.Linear(r_c2d, r_d2c, bias=False)``.
    privatelora_A, privatelora_B
        By adapter: ``(r_c2d, in_features)`` and ``(out_features, r_d2c)``, frozen, float32 whatever the base layer is:
        the same on both sides of a wire.
    """

    adapter_layer_names = ("privatelora_M",)
    other_param_names = ("privatelora_A", "privatelora_B")

    def __init__(self, base_layer: nn.Module, module: str) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.module = module
        self.in_features, self.out_features = features(module, self.get_base_layer())
        self.privatelora_M = nn.ModuleDict()
        self.privatelora_A = BufferDict(persistent=False)
        self.privatelora_B = BufferDict(persistent=False)
        self.late: dict[str, tuple[UnderWay, bool, bool]] = {}  # of each late adapter: whether first, whether last
        self._disable_adapters = False
        self.merged_adapters = []

    def update_layer(self, adapter_name: str, config: PrivateLoraConfig, inference_mode: bool = False) -> None:
        """Add an adapter: A and B as configured, M zero."""
        if config.init == "svd":
            a, b = svd_projections(self._base_weight(), config.r_c2d)
        else:
            a, b = gaussian_projections(
                config.projection_seed, self.module, self.in_features, self.out_features, config.r_c2d, config.r_d2c
            )
        self.privatelora_M[adapter_name] = nn.Linear(config.r_c2d, config.r_d2c, bias=False)
        nn.init.zeros_(self.privatelora_M[adapter_name].weight)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        here = self.get_base_layer().weight.device
        projections = (self.privatelora_A, a.to(here)), (self.privatelora_B, b.to(here))
        keep_projections(self.module, adapter_name, config, *projections)  # after the move, which rounds
        self.late.pop(adapter_name, None)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def _base_weight(self) -> torch.Tensor:
        """W as ``(out_features, in_features)``, without what is merged into it."""
        if self.merged:
            raise ValueError(f"{self.module} has {self.merged_adapters} merged into it: unmerge first")
        weight = self.get_base_weight()
        return weight.T if isinstance(self.get_base_layer(), Conv1D) else weight

    def residual(self, x: torch.Tensor, adapter_name: str) -> torch.Tensor:
        """What an adapter adds to the output for ``x`` ``(..., in_features)``: ``(..., out_features)``."""
        m = self.privatelora_M[adapter_name]
        a, b = (p[adapter_name].to(m.weight.dtype) for p in (self.privatelora_A, self.privatelora_B))
        u = nn.functional.linear(self._cast_input_dtype(x, m.weight.dtype), a)  # (..., r_c2d), goes to the device
        v = m(u)  # (..., r_d2c), comes back
        return nn.functional.linear(v, b)

    def forward(self, x: torch.Tensor, *args, adapter_names: Sequence[str] | None = None, **kwargs) -> torch.Tensor:
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.merged and adapter_names is not None:
            raise ValueError(f"adapter_names: {self.module} has {self.merged_adapters} merged into it, unmerge first")
        result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        dtype = result.dtype
        if adapter_names is not None:
            for adapter_name, rows in rows_of(adapter_names, x).items():
                if adapter_name in self.privatelora_M:
                    added = self._arriving(self.residual(x[rows], adapter_name), adapter_name)
                    result = result.index_copy(0, rows, (result[rows] + added).to(dtype))
            return result
        for adapter_name in self.active_adapters:
            if adapter_name in self.privatelora_M:
                result = result + self._arriving(self.residual(x, adapter_name), adapter_name)
        return result.to(dtype)

    def _arriving(self, residual: torch.Tensor, adapter_name: str) -> torch.Tensor | int:
        """What an adapter adds here: its residual; if it is late, that of the layer before."""
        if adapter_name not in self.late:
            return residual
        under_way, first, last = self.late[adapter_name]
        before = 0 if first else under_way.residual
        if before is None:
            raise RuntimeError(f"nothing has reached {self.module}: a late adapter takes no gradient checkpointing")
        under_way.residual = None if last else residual
        return before + residual if last else before

    def get_delta_weight(self, adapter_name: str) -> torch.Tensor:
        """B·M·A in the shape of the base layer's weight."""
        if adapter_name in self.late:
            raise ValueError(f"{adapter_name!r} is late: what {self.module} adds is no part of its own weight")
        m = self.privatelora_M[adapter_name].weight
        delta = self.privatelora_B[adapter_name].to(m.dtype) @ m @ self.privatelora_A[adapter_name].to(m.dtype)
        return delta.T if isinstance(self.get_base_layer(), Conv1D) else delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the active adapters' B·M·A to the base weight; with ``safe_merge`` only if all stays finite."""
        for adapter_name in check_adapters_to_merge(self, adapter_names):
            if adapter_name not in self.privatelora_M:
                continue
            weight = self.get_base_weight()
            merged = (weight + self.get_delta_weight(adapter_name)).to(weight.dtype)
            if safe_merge and not torch.isfinite(merged).all():
                raise ValueError(f"merging {adapter_name!r} into {self.module} gives values that are not finite")
            self.set_base_weight(merged)
            self.merged_adapters.append(adapter_name)

    def unmerge(self) -> None:
        """Take the merged adapters out again, up to rounding."""
        while self.merged_adapters:
            weight = self.get_base_weight()
            self.set_base_weight((weight - self.get_delta_weight(self.merged_adapters.pop())).to(weight.dtype))

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return True

    def __repr__(self) -> str:
        return f"privatelora.{super().__repr__()}"


class PrivateLoraModel(RowwiseTuner):
    """What ``get_peft_model`` builds for a :class:`PrivateLoraConfig`."""

    prefix = PREFIX
    tuner_layer_cls = PrivateLoraLayer

    def _prepare_adapter_config(self, peft_config: PrivateLoraConfig, model_config: dict) -> PrivateLoraConfig:
        if peft_config.target_modules is None:
            peft_config.target_modules = default_targets(self.model, TARGET_MODULES)
        return super()._prepare_adapter_config(peft_config, model_config)

    def shapes(self, config: PrivateLoraConfig, modules: dict[str, nn.Module]) -> dict[str, tuple[int, ...]]:
        tensors = {}
        for name, module in modules.items():
            num_in, num_out = features(name, module)
            for side in ("r_c2d", "r_d2c"):  # A and B are drawn, however small M's file is
                whole_number(side, getattr(config, side), 1, 4 * max(num_in, num_out), f"4 times the width of {name}")
            tensors[f"{name}.privatelora_M.weight"] = config.r_d2c, config.r_c2d
            if config.save_projection:
                tensors[f"{name}.privatelora_A"] = config.r_c2d, num_in
                tensors[f"{name}.privatelora_B"] = num_out, config.r_d2c
        return tensors

    def _create_and_replace(
        self, peft_config: PrivateLoraConfig, adapter_name, target, target_name, parent, current_key, **_
    ) -> None:
        if isinstance(target, PrivateLoraLayer):
            target.update_layer(adapter_name, peft_config, inference_mode=peft_config.inference_mode)
            return
        layer = PrivateLoraLayer(target, current_key)
        layer._active_adapter = adapter_name
        layer.update_layer(adapter_name, peft_config, inference_mode=peft_config.inference_mode)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *arguments, **options) -> None:
        super().inject_adapter(model, adapter_name, *arguments, **options)  # its hooks see only the first adapter
        if not self.peft_config[adapter_name].late:
            return
        by_name: dict[str, list[PrivateLoraLayer]] = {}
        for layer in layers(model, adapter_name).values():
            by_name.setdefault(layer.module.rpartition(".")[2], []).append(layer)
        for name, same in by_name.items():
            if len(widths := {layer.out_features for layer in same}) > 1:
                raise ValueError(f"late=True needs one width of every {name}, got {sorted(widths)}")
            under_way = UnderWay()
            for layer in same:
                layer.late[adapter_name] = under_way, layer is same[0], layer is same[-1]


def default_targets(model: nn.Module, candidates: Sequence[list[str]]) -> set[str]:
    """The first of some lists whose every name a model has, whatever its architecture.

    Raises
    ------
    ValueError
        It has all names of none.
    """
    modules = [f".{name}" for name, _ in model.named_modules()]
    for names in candidates:
        if all(any(module.endswith(f".{name}") for module in modules) for name in names):
            return set(names)
    raise ValueError(
        f"no default target_modules for {type(model).__name__}, which has none of "
        f"{'; '.join(', '.join(names) for names in candidates)}: name its linear layers"
    )


def layers(model: nn.Module, adapter_name: str = "default") -> dict[str, PrivateLoraLayer]:
    """The layers that have this PrivateLoRA adapter, by their names in the model; none if there is no such adapter."""
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, PrivateLoraLayer)}
    return {name: layer for name, layer in adapted.items() if adapter_name in layer.privatelora_M}


def matrices(model: nn.Module, adapter_name: str = "default") -> dict[str, nn.Linear]:
    """Every M of an adapter, by the name that its module had before it was adapted.

    Raises
    ------
    ValueError
        The model has no such PrivateLoRA adapter.
    """
    adapted = layers(model, adapter_name).values()
    if not adapted:
        raise ValueError(f"{type(model).__name__} has no PrivateLoRA adapter {adapter_name!r}")
    return {layer.module: layer.privatelora_M[adapter_name] for layer in adapted}


def convert_to_lora(model: PeftModel, adapter_name: str = "default") -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """The same adapter as ordinary LoRA, exactly: for servers that know only that.

    With ``r_c2d`` the smaller rank LoRA's A is A and its B is B·M, else they are M·A and B; LoRA's rank is the
    smaller of both.

    Returns
    -------
    config, state_dict
        What ``peft.set_peft_model_state_dict`` and ``LoraConfig`` users load; scaling is 1.

    Raises
    ------
    ValueError
        The adapter is not there, not a PrivateLoRA one, or has trained other modules as well.
    """
    configs = getattr(model, "peft_config", {})
    config = configs.get(adapter_name)
    if not isinstance(config, PrivateLoraConfig):
        raise ValueError(f"{adapter_name!r} is not a PrivateLoRA adapter of this model: {list(configs)}")
    if config.late:
        raise ValueError(f"{adapter_name!r} is late: LoRA has no residual that arrives one layer later")
    if config.modules_to_save:
        raise ValueError(f"modules_to_save={sorted(config.modules_to_save)} are no part of LoRA: save them apart")
    rank = min(config.r_c2d, config.r_d2c)
    state, targets, transposed = {}, [], False
    for name, layer in layers(model, adapter_name).items():
        m = layer.privatelora_M[adapter_name].weight.detach()
        a, b = (p[adapter_name].to(m.dtype) for p in (layer.privatelora_A, layer.privatelora_B))
        lora_a, lora_b = (a, b @ m) if config.r_c2d <= config.r_d2c else (m @ a, b)
        state[f"{name}.lora_A.weight"], state[f"{name}.lora_B.weight"] = lora_a.contiguous(), lora_b.contiguous()
        targets.append(layer.module)
        transposed |= isinstance(layer.get_base_layer(), Conv1D)
    lora = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=targets, fan_in_fan_out=transposed, task_type=config.task_type
    )
    return lora, state


# peft 0.21 asks transformers 5.23 for an attribute that is going away, at each get_peft_model: no user can help it.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

PEFT_TYPE_TO_CONFIG_MAPPING[PEFT_TYPE] = PrivateLoraConfig
PEFT_TYPE_TO_TUNER_MAPPING[PEFT_TYPE] = PrivateLoraModel
PEFT_TYPE_TO_PREFIX_MAPPING[PEFT_TYPE] = PREFIX
