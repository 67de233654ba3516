"""Both adapters of this room as methods of PEFT: where their layers go, and what may be loaded.

Importing this module makes PEFT know them: ``get_peft_model(model, PrivateLoraConfig(...))`` and
``PeftModel.from_pretrained`` then work as with any other. PEFT's list of methods is closed, so three of its
dictionaries are written to; tests pin what this relies on.

``model(…, adapter_names=["ann", "bob"])`` is PEFT's, at inference. A saved adapter is exact, or refused: before PEFT
builds it, and again when PEFT loads the tensors that it has read.
"""

import contextlib
import copy
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, get_peft_model_state_dict
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from plpkg.adapters import WRAPPED
from plpkg.projections import PROJECTIONS
from plpkg.residual import saved
from plpkg.residual.adapter import NO_ADAPTER, PrivateLoraLayer, UnderWay, features, layers, matrices
from plpkg.residual.config import LADDER, PRIVATE_LORA, LadderConfig, PrivateLoraConfig, ProjectionConfig
from plpkg.residual.ladder import NORMS, LadderLayer, LadderNorm, LadderTap, Rungs, decoder_of, named, new_m, taps
from plpkg.untrusted import brief, finite, misfits, read_object, sentences
from plpkg.validation import whole_number

__all__ = ["LadderConfig", "PrivateLoraConfig", "convert_to_lora", "load", "matrices"]
"""Whoever takes these from here can give PEFT an adapter of this room."""

LADDER_TARGETS = (["down_proj"], ["mlp.c_proj"])
"""The last projection of the MLP, also as GPT-2 calls it: its input is the widest that a layer has."""


_EMPTY = nn.ModuleDict()


class RowwiseTuner(BaseTuner):
    """A PEFT method of this room, each row of whose batches can have an adapter of its own."""

    def shapes(self, config, modules: dict[str, nn.Module]) -> dict[str, tuple[int, ...]]:
        """The tensors of a saved adapter of these modules, by their names in the model."""
        raise NotImplementedError

    def as_lora(self, adapter_name: str) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
        """What :func:`convert_to_lora` gives."""
        raise NotImplementedError

    def add_weighted_adapter(self, *_, **__) -> None:
        """PEFT's name for an adapter made of others.

        Raises
        ------
        ValueError
            Always.
        """
        raise ValueError(
            "add_weighted_adapter is not for adapters of this room, each of which has projections of its own; "
            "base_model.set_adapter([name, …]) adds up what several give"
        )

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict | None = None,
    ) -> None:
        if not adapter_name or "." in adapter_name or adapter_name == NO_ADAPTER or hasattr(_EMPTY, adapter_name):
            raise ValueError(f"{adapter_name!r} cannot be an adapter's name: PyTorch or PEFT uses it otherwise")
        config = self.peft_config[adapter_name] = copy.copy(self.peft_config[adapter_name])  # one for each model
        saved.require_backbone(config, model)
        before = self._layers_of(model, adapter_name)
        try:
            super().inject_adapter(model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage, state_dict)
            self._complete(model, adapter_name, low_cpu_mem_usage)
        except Exception:  # the next attempt, with other modules, finds the model without it
            for layer in self._layers_of(model, adapter_name) - before:
                layer.delete_adapter(adapter_name)
            raise

    def _layers_of(self, model: nn.Module, adapter_name: str) -> set[nn.Module]:
        """The layers that have something of an adapter."""
        tuned = [module for module in model.modules() if isinstance(module, self.tuner_layer_cls)]
        names = {layer: layer.adapter_layer_names + layer.other_param_names for layer in tuned}
        return {layer for layer in tuned if any(adapter_name in getattr(layer, name) for name in names[layer])}

    def _complete(self, model: nn.Module, adapter_name: str, low_cpu_mem_usage: bool) -> None:
        """What is done to an adapter's layers once all are in the model; PEFT's hooks see only the first adapter."""

    def _prepare_adapter_config(self, peft_config, model_config: dict):
        """PEFT calls this before it builds the adapter.

        Raises
        ------
        ValueError
            The weights beside the configuration are not those of such an adapter, or not finite.
        """
        config = super()._prepare_adapter_config(peft_config, model_config)
        if config.target_modules == "all-linear":
            return config
        if config.shapes is None and not any(
            isinstance(n, str) for n in (config.target_modules, config.exclude_modules)
        ):
            return config
        modules = saved.adapted_modules(self.model, config)
        if config.shapes is not None:
            needed = {f"{WRAPPED}{name}": shape for name, shape in self.shapes(config, modules).items()}
            if reasons := misfits(config.shapes, needed):
                raise ValueError(f"{saved.WEIGHTS}: {brief(reasons)}")
            saved.require_sound(config.folder, config.weights_sha256)
        elif modules:  # a saved adapter has names, never a pattern
            config.target_modules, config.exclude_modules = set(modules), None
        return config

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, model, config, adapter_name: str, state_dict: dict) -> dict:
        """PEFT calls this with the tensors that it has read.

        Raises
        ------
        ValueError
            They are not exactly the adapter's, or not finite numbers; or the adapter is merged.
        """
        if any(adapter_name in each.merged_adapters for each in model.modules() if isinstance(each, BaseTunerLayer)):
            raise ValueError(
                f"{adapter_name!r} is merged into the weights: unmerge it before another M takes its place"
            )
        needed = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
        inside = all(name.startswith(WRAPPED) for name in needed)  # else PEFT's layers are in the model itself
        given = {
            name.removeprefix("" if inside else WRAPPED).replace(f".modules_to_save.{adapter_name}", ""): each
            for name, each in state_dict.items()
        }
        reasons = misfits(*({name: each.shape for name, each in tensors.items()} for tensors in (given, needed)))
        wrong = [name for name, each in given.items() if name in needed and not _fits(each, needed[name].dtype)]
        reasons += sentences({"has values that are not finite numbers here": wrong}) if wrong else []
        if reasons:
            raise ValueError(brief(reasons))
        return super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)

    @contextlib.contextmanager
    def _enable_peft_forward_hooks(
        self, *_, adapter_names=None, num_beams=None, num_return_sequences=None, **__
    ) -> Iterator[None]:
        """PEFT enters this around each forward pass and ``generate``, with their arguments."""
        if adapter_names is None:
            yield
            return
        if self.training:
            raise ValueError("adapter_names is for inference: call eval() first")
        known = {NO_ADAPTER, *self.peft_config}
        if isinstance(adapter_names, str) or not known.issuperset(adapter_names):
            raise ValueError(f"adapter_names must be a list of {', '.join(sorted(known))}, got {adapter_names!r}")
        texts = max(num_beams or 1, num_return_sequences or 1)  # of each row, as generate makes them
        names = [name for name in adapter_names for _ in range(texts)]
        layers = self.tuner_layer_cls if isinstance(self.tuner_layer_cls, tuple) else (self.tuner_layer_cls,)
        handles = [
            module.register_forward_pre_hook(
                lambda module, arguments, options: (arguments, options | {"adapter_names": _known_to(module, names)}),
                with_kwargs=True,
            )
            for module in self.modules()
            if isinstance(module, (*layers, AuxiliaryTrainingWrapper))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _fits(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return values.is_floating_point() and values.numel() > 0 and finite(values, dtype)


def _known_to(module: nn.Module, names: list[str]) -> list[str]:
    """The names, without those of adapters that have not trained this module as well: PEFT would look them up."""
    if not isinstance(module, AuxiliaryTrainingWrapper):
        return names
    return [name if name in module._adapters else NO_ADAPTER for name in names]


class PrivateLoraModel(RowwiseTuner):
    """What ``get_peft_model`` builds for a :class:`PrivateLoraConfig`."""

    prefix = "privatelora_"
    tuner_layer_cls = PrivateLoraLayer

    def _prepare_adapter_config(self, peft_config: PrivateLoraConfig, model_config: dict) -> PrivateLoraConfig:
        if peft_config.target_modules is None:
            peft_config.target_modules = default_targets(self.model, PROJECTIONS)  # what the publication adapts
        return super()._prepare_adapter_config(peft_config, model_config)

    def _check_merge_allowed(self) -> None:
        """PEFT calls this before it merges, and warns."""
        if tied := self._get_tied_target_modules(self.model):
            raise ValueError(f"{tied[0]} shares its weight with the embeddings, which would change when it is merged")

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

    def _complete(self, model: nn.Module, adapter_name: str, low_cpu_mem_usage: bool) -> None:
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

    def as_lora(self, adapter_name: str) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
        config = self.peft_config[adapter_name]
        if config.late:
            raise ValueError(f"{adapter_name!r} is late: LoRA has no residual that arrives one layer later")
        if config.modules_to_save:
            raise ValueError(f"modules_to_save={sorted(config.modules_to_save)} are no part of LoRA: save them apart")
        rank = min(config.r_c2d, config.r_d2c)
        state, targets, transposed = {}, [], False
        for path, layer in layers(self.model, adapter_name).items():
            m = layer.privatelora_M[adapter_name].weight.detach()
            a, b = (p[adapter_name].to(m.dtype) for p in (layer.privatelora_A, layer.privatelora_B))
            lora_a, lora_b = (a, b @ m) if config.r_c2d <= config.r_d2c else (m @ a, b)
            state[f"{WRAPPED}{path}.lora_A.weight"] = lora_a.contiguous()
            state[f"{WRAPPED}{path}.lora_B.weight"] = lora_b.contiguous()
            targets.append(layer.module)
            transposed |= isinstance(layer.get_base_layer(), Conv1D)
        options = dict(target_modules=targets, fan_in_fan_out=transposed, task_type=config.task_type)
        return LoraConfig(r=rank, lora_alpha=rank, **options), state


class LadderModel(RowwiseTuner):
    """What ``get_peft_model`` builds for a :class:`LadderConfig`."""

    prefix = "ladder_"
    tuner_layer_cls = (LadderTap, LadderNorm)

    def _prepare_adapter_config(self, peft_config: LadderConfig, model_config: dict) -> LadderConfig:
        if peft_config.target_modules is None:
            peft_config.target_modules = default_targets(self.model, LADDER_TARGETS)
        final_norm(self.model)
        whole_number("r", peft_config.r, 1, self.model.config.hidden_size, "hidden_size")
        return super()._prepare_adapter_config(peft_config, model_config)

    def as_lora(self, adapter_name: str) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
        raise ValueError(
            f"{adapter_name!r} is a ladder, which cannot be LoRA: what it adds at the final norm depends on the inputs "
            "of every layer"
        )

    def shapes(self, config: LadderConfig, modules: dict[str, nn.Module]) -> dict[str, tuple[int, ...]]:
        name, _ = final_norm(self.model)
        tensors = {f"{module}.ladder_A": (config.r, features(module, each)[0]) for module, each in modules.items()}
        with torch.device("meta"):
            m = new_m(len(modules) * config.r, self.model.config.hidden_size, config.width)
        return (tensors if config.save_projection else {}) | {
            f"{name}.ladder_M.{key}": tuple(weight.shape) for key, weight in m.state_dict().items()
        }

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        """PEFT looks for it at the end only, and M may have several tensors."""
        inside = key.replace(f".ladder_M.{adapter_name}.", ".ladder_M.")
        return super()._remove_adapter_name_from_key(key, adapter_name) if inside == key else inside

    def _create_and_replace(
        self, peft_config: LadderConfig, adapter_name, target, target_name, parent, current_key, **_
    ) -> None:
        if isinstance(target, LadderTap):
            target.update_layer(adapter_name, peft_config)
            return
        if not current_key.startswith(self.inside):
            raise ValueError(f"{current_key} is not in the decoder {self.inside[:-1]}: a ladder ends at its final norm")
        tap = LadderTap(target, current_key, self.rungs)
        tap._active_adapter = adapter_name
        tap.update_layer(adapter_name, peft_config)
        self._replace_module(parent, target_name, tap, target)

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict | None = None,  # it names the norm alone: the configuration says which layers
    ) -> None:
        norm, _ = final_norm(model)
        self.inside = norm[: norm.rfind(".") + 1]
        self.rungs = next((module.rungs for module in model.modules() if isinstance(module, LadderLayer)), Rungs())
        super().inject_adapter(model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage)

    def _complete(self, model: nn.Module, adapter_name: str, low_cpu_mem_usage: bool) -> None:
        name, norm = final_norm(model)
        if not isinstance(norm, LadderNorm):
            norm = LadderNorm(norm, self.rungs)
            norm._active_adapter = adapter_name
            model.set_submodule(name, norm)
        with torch.device("meta") if low_cpu_mem_usage else contextlib.nullcontext():
            every = taps(model, adapter_name)
            norm.update_layer(adapter_name, self.peft_config[adapter_name], every, model.config.hidden_size)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        setattr(parent, child_name, new_module)  # PEFT's also copies weights, which a norm may not have

    def _unload_and_optionally_merge(self, merge: bool = True, **options):
        if merge:
            LadderLayer.merge(self)
        return super()._unload_and_optionally_merge(merge=False, **options)


def final_norm(model: nn.Module) -> tuple[str, nn.Module]:
    """The final norm of a model's decoder, or of a decoder, by its name in the model."""
    decoder = decoder_of(model)
    norm = getattr(decoder, named(decoder, NORMS))
    return next(name for name, module in model.named_modules() if module is norm), norm


def default_targets(model: nn.Module, candidates: Sequence[Sequence[str]]) -> set[str]:
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


def fingerprint_of_bases(model: nn.Module, adapter_name: str) -> str:
    """What identifies every A and B of an adapter: their signs, which are the same in every precision."""
    digest = hashlib.sha256()
    projections = [
        p for layer in layers(model, adapter_name).values() for p in (layer.privatelora_A, layer.privatelora_B)
    ]
    for buffers in (*projections, *(tap.ladder_A for tap in taps(model, adapter_name))):
        digest.update(torch.signbit(buffers[adapter_name]).cpu().numpy().tobytes())
    return digest.hexdigest()


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
        The adapter is not there, not a PrivateLoRA one, late, or has trained other modules as well.
    """
    configs = getattr(model, "peft_config", {})
    if not isinstance(configs.get(adapter_name), ProjectionConfig):
        raise ValueError(f"{adapter_name!r} is not a PrivateLoRA adapter of this model: {list(configs)}")
    return model.base_model.as_lora(adapter_name)


def saved_config(folder: str | Path) -> ProjectionConfig:
    """The configuration of an adapter of this room in a folder, judged with the weights beside it, if there are any.

    Raises
    ------
    FileNotFoundError
        The folder has no ``adapter_config.json``.
    ValueError
        It is no adapter of this room, or not what may be read.
    """
    if not Path(folder, saved.CONFIG).exists():  # PEFT would ask the hub
        raise FileNotFoundError(f"{folder} holds no adapter: it has no {saved.CONFIG}")
    try:
        method = read_object(Path(folder, saved.CONFIG)).get("peft_type")
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"{folder} holds a {str(method)[:40]} adapter, not a PrivateLoRA one or a ladder")
    return METHODS[method][0].from_pretrained(folder)


def load(
    model: PreTrainedModel | PeftModel, folder: str | Path, adapter_name: str = "default", *, trainable: bool = False
) -> PeftModel:
    """Give a model an adapter of this room that was saved: judged first, then loaded by PEFT.

    Parameters
    ----------
    model
        The backbone, or what ``load`` has given for another adapter.
    folder
        What ``save_pretrained`` wrote, with safetensors.
    adapter_name
        The name that the adapter gets in the model.
    trainable
        The adapter is to be trained on.

    Raises
    ------
    FileNotFoundError
        The folder lacks one of the two files.
    ValueError
        It is no adapter of this room, is damaged, or belongs to another backbone.
    """
    config = saved_config(folder)
    if not Path(folder, saved.WEIGHTS).exists():
        raise FileNotFoundError(f"{folder} holds no adapter: it has no {saved.WEIGHTS}")
    if not isinstance(model, PeftModel):
        return PeftModel.from_pretrained(model, folder, adapter_name, is_trainable=trainable, config=config)
    if adapter_name in model.peft_config:
        raise ValueError(f"the model has an adapter {adapter_name!r} already: {', '.join(model.peft_config)}")
    model.load_adapter(folder, adapter_name, is_trainable=trainable)
    return model


METHODS = {PRIVATE_LORA: (PrivateLoraConfig, PrivateLoraModel), LADDER: (LadderConfig, LadderModel)}
for _method, (_config, _tuner) in METHODS.items():
    PEFT_TYPE_TO_CONFIG_MAPPING[_method], PEFT_TYPE_TO_TUNER_MAPPING[_method] = _config, _tuner
    PEFT_TYPE_TO_PREFIX_MAPPING[_method] = _tuner.prefix
