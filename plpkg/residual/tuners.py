"""Both adapters of this room as PEFT's tuners: which layers are adapted, and where in the model they go.

A saved adapter is exact, or refused: when it is built, and when its weights take the place of others.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, delete_adapter
from peft.utils import get_peft_model_state_dict
from torch import nn
from transformers.pytorch_utils import Conv1D

from plpkg import wheels
from plpkg.adapters import WRAPPED
from plpkg.backbones import fingerprint
from plpkg.projections import PROJECTIONS
from plpkg.residual.adapter import NO_ADAPTER, PrivateLoraLayer, UnderWay, layers
from plpkg.residual.config import WEIGHTS, LadderConfig, PrivateLoraConfig, ProjectionConfig
from plpkg.residual.ladder import NORMS, LadderLayer, LadderNorm, LadderTap, Rungs, decoder_of, named, taps
from plpkg.validation import shown, whole_number

LADDER_TARGETS = (["down_proj"], ["mlp.c_proj"])
"""The last projection of the MLP, also as GPT-2 calls it: its input is the widest that a layer has."""


class RowwiseTuner(BaseTuner):
    """A PEFT method of this room, each row of whose batches can have an adapter of its own."""

    peft_config: dict[str, Any]  # of this room's two kinds

    targets: Sequence[Sequence[str]]
    """Names of what is adapted by default: the first of these lists whose every name the model has."""

    def inject_adapter(
        self,
        model: nn.Module,
        adapter_name: str,
        autocast_adapter_dtype: bool = True,
        low_cpu_mem_usage: bool = False,
        state_dict: dict | None = None,  # not asked: the configuration says which layers
    ) -> None:
        if adapter_name in ("", NO_ADAPTER) or "." in adapter_name:
            raise ValueError(f"{adapter_name!r} cannot be an adapter's name: PyTorch or PEFT uses it otherwise")
        config = copy.copy(self.peft_config[adapter_name])  # one for each model
        self.peft_config[adapter_name] = config
        require_backbone(config, model)
        try:
            super().inject_adapter(model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage)
            self._complete(model, adapter_name, low_cpu_mem_usage)
            if isinstance(config.target_modules, str):  # a saved adapter has names, never a pattern
                config.target_modules = {layer.module for layer in adapted(model, adapter_name)}
            if config.folder is not None and (config.folder / WEIGHTS).exists():
                config.require_weights(self.shapes(adapter_name))
        except Exception:  # the next attempt, with other modules, finds the model without it
            delete_adapter(model, adapter_name, self.prefix, self.tuner_layer_cls)
            raise

    def _complete(self, model: nn.Module, adapter_name: str, low_cpu_mem_usage: bool) -> None:
        """Finish an adapter's layers once all are in the model; PEFT's hooks see only the first adapter."""

    def _prepare_adapter_config(self, peft_config: ProjectionConfig, model_config: dict) -> ProjectionConfig:
        if peft_config.target_modules is None:
            peft_config.target_modules = default_targets(self.model, self.targets)
        return peft_config

    def shapes(self, adapter_name: str) -> dict[str, tuple[int, ...]]:
        """Of an adapter's tensors, by their names in its file."""
        tensors = get_peft_model_state_dict(self, adapter_name=adapter_name, save_embedding_layers=False)
        return {f"base_model.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}

    def require_like(self, adapter_name: str, saved: ProjectionConfig) -> None:
        """Refuse a saved adapter whose M would mean something else under a name that the model has already.

        Raises
        ------
        ValueError
            The two differ in more than M, or the model's is merged into the weights.
        """
        config = self.peft_config[adapter_name]
        if any(layer.merged for layer in self.modules() if isinstance(layer, BaseTunerLayer)):
            raise ValueError(
                f"{adapter_name!r} is merged into the weights: unmerge it before another M takes its place"
            )
        for name in ("late", "r", "init", "projection_seed", "backbone"):
            ours = getattr(config, name, None)
            theirs = getattr(saved, name, None)
            if ours != theirs:
                raise ValueError(
                    f"{saved.folder} holds an adapter with {name}={shown(theirs)}, but {adapter_name!r} has "
                    f"{shown(ours)}: load it under another name"
                )
        for layer in adapted(self.model, adapter_name):
            if not self._check_target_module_exists(saved, layer.module):
                raise ValueError(
                    f"{saved.folder} holds an adapter of other modules than {adapter_name!r}: {layer.module}"
                )
        saved.require_weights(self.shapes(adapter_name))

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
        if not known.issuperset(adapter_names):
            raise ValueError(f"adapter_names must be a list of {', '.join(sorted(known))}, got {adapter_names!r}")
        texts = max(num_beams or 1, num_return_sequences or 1)  # of each row, as generate makes them
        names = []
        for name in adapter_names:
            names += [name] * texts

        def with_names(_, arguments: tuple, options: dict) -> tuple[tuple, dict]:
            return arguments, options | {"adapter_names": names}

        tuned = [module for module in self.modules() if isinstance(module, self.tuner_layer_cls)]
        handles = [module.register_forward_pre_hook(with_names, with_kwargs=True) for module in tuned]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class PrivateLoraModel(RowwiseTuner):
    """Tuner that ``get_peft_model`` builds for a :class:`PrivateLoraConfig`."""

    prefix = "privatelora_"
    tuner_layer_cls = PrivateLoraLayer
    targets = PROJECTIONS
    peft_config: dict[str, PrivateLoraConfig]

    def _check_merge_allowed(self) -> None:
        """PEFT calls this before it merges, and warns."""
        tied = self._get_tied_target_modules(self.model)
        if tied:
            raise ValueError(f"{tied[0]} shares its weight with the embeddings, which would change when it is merged")

    def _create_and_replace(
        self, peft_config: PrivateLoraConfig, adapter_name, target, target_name, parent, current_key, **_
    ) -> None:
        layer = target
        if not isinstance(target, PrivateLoraLayer):
            layer = PrivateLoraLayer(target, current_key)
            layer._active_adapter = adapter_name
            self._replace_module(parent, target_name, layer, target)
        layer.update_layer(adapter_name, peft_config)

    def _complete(self, model: nn.Module, adapter_name: str, low_cpu_mem_usage: bool) -> None:
        if not self.peft_config[adapter_name].late:
            return
        self._require_no_checkpointing([adapter_name])
        by_name: dict[str, list[PrivateLoraLayer]] = {}
        for layer in layers(model, adapter_name).values():
            by_name.setdefault(layer.module.rpartition(".")[2], []).append(layer)
        for name, same in by_name.items():
            widths = {layer.out_features for layer in same}
            if len(widths) > 1:
                raise ValueError(f"late=True needs one width of every {name}, got {sorted(widths)}")
            under_way = UnderWay()
            for layer in same:
                is_first = layer is same[0]
                is_last = layer is same[-1]
                layer.late[adapter_name] = (under_way, is_first, is_last)

    def _require_no_checkpointing(self, adapter_names: list[str]) -> None:
        """Asked where it may have been switched on: when a late adapter is made, and before a pass in training."""
        late = [name for name in adapter_names if self.peft_config[name].late]
        if late and getattr(self.model, "is_activation_checkpointing", False):
            raise ValueError(
                f"the adapter {late[0]!r} is late and needs the layer before, but gradient checkpointing computes each "
                "layer alone: switch it off, or take late=False"
            )

    def _enable_peft_forward_hooks(self, *arguments, **options):
        if self.training:
            self._require_no_checkpointing(self.active_adapters)
        return super()._enable_peft_forward_hooks(*arguments, **options)

    def as_lora(self, adapter_name: str) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
        """An adapter's configuration and tensors as ordinary LoRA's."""
        config = self.peft_config[adapter_name]
        if config.late:
            raise ValueError(f"{adapter_name!r} is late: LoRA has no residual that arrives one layer later")
        rank = min(config.r_c2d, config.r_d2c)
        state: dict[str, torch.Tensor] = {}
        targets: list[str] = []
        transposed = False
        for path, layer in layers(self.model, adapter_name).items():
            m = layer.privatelora_M[adapter_name].weight.detach()
            a = layer.privatelora_A[adapter_name].to(m.dtype)
            b = layer.privatelora_B[adapter_name].to(m.dtype)
            if config.r_c2d <= config.r_d2c:  # M goes where the rank is the smaller one
                b = b @ m
            else:
                a = m @ a
            state[f"{WRAPPED}{path}.lora_A.weight"] = a.contiguous()
            state[f"{WRAPPED}{path}.lora_B.weight"] = b.contiguous()
            targets.append(layer.module)
            transposed |= isinstance(layer.get_base_layer(), Conv1D)
        lora = LoraConfig(
            r=rank,
            lora_alpha=rank,  # so that the scaling is 1
            target_modules=targets,
            fan_in_fan_out=transposed,
            task_type=config.task_type,
        )
        return lora, state


class LadderModel(RowwiseTuner):
    """Tuner that ``get_peft_model`` builds for a :class:`LadderConfig`."""

    prefix = "ladder_"
    tuner_layer_cls = LadderLayer
    targets = LADDER_TARGETS
    peft_config: dict[str, LadderConfig]
    inside: str
    rungs: Rungs

    def _prepare_model(self, peft_config: LadderConfig, model: Any) -> None:
        norm, _ = final_norm(model)
        whole_number("r", peft_config.r, 1, model.config.hidden_size, "hidden_size")
        self.inside = norm[: norm.rfind(".") + 1]
        ladders = [module for module in model.modules() if isinstance(module, LadderLayer)]
        self.rungs = ladders[0].rungs if ladders else Rungs()  # one for all ladders of a model

    def _check_merge_allowed(self) -> None:
        """PEFT calls this before it merges."""
        raise ValueError("a ladder cannot be merged: what it adds depends on every layer's input; unload() drops it")

    def as_lora(self, adapter_name: str) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
        raise ValueError(
            f"{adapter_name!r} is a ladder, which cannot be LoRA: what it adds at the final norm depends on the inputs "
            "of every layer"
        )

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        """PEFT looks for it at the end only, and M may have several tensors."""
        inside = key.replace(f".ladder_M.{adapter_name}.", ".ladder_M.")
        if inside != key:
            return inside
        return super()._remove_adapter_name_from_key(key, adapter_name)

    def _create_and_replace(
        self, peft_config: LadderConfig, adapter_name, target, target_name, parent, current_key, **_
    ) -> None:
        tap = target
        if not isinstance(target, LadderTap):
            if not current_key.startswith(self.inside):
                raise ValueError(
                    f"{current_key} is not in the decoder {self.inside[:-1]}: a ladder ends at its final norm"
                )
            tap = LadderTap(target, current_key, self.rungs)
            tap._active_adapter = adapter_name
            self._replace_module(parent, target_name, tap, target)
        tap.update_layer(adapter_name, peft_config)

    def _complete(self, model: Any, adapter_name: str, low_cpu_mem_usage: bool) -> None:
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


def final_norm(model: nn.Module) -> tuple[str, nn.Module]:
    """The final norm of a model's decoder, or of a decoder, by its name in the model."""
    decoder = decoder_of(model)
    norm = getattr(decoder, named(decoder, NORMS))
    (name,) = (name for name, module in model.named_modules() if module is norm)
    return name, norm


def default_targets(model: nn.Module, candidates: Sequence[Sequence[str]]) -> set[str]:
    """The first of some lists whose every name a model has, whatever its architecture.

    Raises
    ------
    ValueError
        It has all names of none.
    """
    modules = [f".{name}" for name, _ in model.named_modules()]

    def is_there(name: str) -> bool:  # a name may have several parts, ``mlp.c_proj``
        return any(module.endswith(f".{name}") for module in modules)

    for names in candidates:
        if all(is_there(name) for name in names):
            return set(names)
    tried = "; ".join(", ".join(names) for names in candidates)
    raise ValueError(
        f"no default target_modules for {type(model).__name__}, which has none of {tried}: name its linear layers"
    )


def require_backbone(config: ProjectionConfig, model: nn.Module) -> None:
    """Give a new adapter the model's fingerprint; refuse a saved one of another backbone.

    Raises
    ------
    ValueError
        The saved adapter belongs to another backbone, or the model is compiled or offloaded.
    """
    if any("_orig_mod" in name.split(".") for name, _ in model.named_modules()):
        raise ValueError("the model is compiled, so its modules have other names: adapt it first, then compile it")
    if any(getattr(getattr(module, "_hf_hook", None), "offload", False) for module in model.modules()):  # accelerate's
        raise ValueError("the model's weights are offloaded, and an adapter's would be lost: adapt it first")
    if not hasattr(model, "config") or any(tensor.is_meta for tensor in model.state_dict().values()):
        return  # no language model, or nothing in it
    actual = fingerprint(model)
    if config.folder is None:
        config.backbone = actual
    name = getattr(model.config, "_name_or_path", None)
    if config.backbone != actual and not wheels.is_of_the_original(config.base_model_name_or_path, name):
        raise ValueError(
            f"the adapter belongs to a backbone with fingerprint {str(config.backbone)[:12]}…, "
            f"but {type(model).__name__} has {actual[:12]}…"
        )


def adapted(model: nn.Module, adapter_name: str) -> list[PrivateLoraLayer | LadderTap]:
    """The linear layers that have an adapter of this room, in their order."""
    return [*layers(model, adapter_name).values(), *taps(model, adapter_name)]
