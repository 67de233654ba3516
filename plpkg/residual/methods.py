"""Both adapters of this room as methods of PEFT: how they are saved and loaded, and converted to LoRA.

Importing this module makes PEFT know them: ``get_peft_model(model, PrivateLoraConfig(...))``, ``save_pretrained`` and
``PeftModel.from_pretrained`` then work as with any other, and ``model(…, adapter_names=["ann", "bob"])`` at inference
is PEFT's. PEFT's list of methods is closed, so three of its dictionaries are written to, and two methods of
``PeftModel`` are wrapped; tests pin what this relies on.

A saved adapter is exact, or refused: when it is built, and when its weights take the place of others
(:mod:`plpkg.residual.tuners`). What cannot be saved is refused when its configuration is made
(:mod:`plpkg.residual.config`).
"""

import functools
import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from torch import nn
from transformers import PreTrainedModel

from plpkg.files.checkpoints import private_folder, replace_files
from plpkg.files.untrusted import read_object
from plpkg.residual.adapter import matrices
from plpkg.residual.config import (
    CONFIG,
    LADDER,
    PRIVATE_LORA,
    WEIGHTS,
    LadderConfig,
    PrivateLoraConfig,
    ProjectionConfig,
)
from plpkg.residual.ladder import LadderTap
from plpkg.residual.tuners import LadderModel, PrivateLoraModel, adapted

__all__ = ["LadderConfig", "PrivateLoraConfig", "convert_to_lora", "load", "matrices"]
"""Whoever takes these from here can give PEFT an adapter of this room."""


def fingerprint_of_bases(model: nn.Module, adapter_name: str) -> str:
    """A digest of every A and B of an adapter: of their signs, which are the same in every precision."""
    digest = hashlib.sha256()
    for layer in adapted(model, adapter_name):
        is_tap = isinstance(layer, LadderTap)
        projections = [layer.ladder_A] if is_tap else [layer.privatelora_A, layer.privatelora_B]
        for buffers in projections:
            digest.update(torch.signbit(buffers[adapter_name]).cpu().numpy().tobytes())
    return digest.hexdigest()


def convert_to_lora(model: PeftModel, adapter_name: str = "default") -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """The same adapter as ordinary LoRA, exactly: for servers that know only that.

    With ``r_c2d`` the smaller rank LoRA's A is A and its B is B·M, else they are M·A and B; LoRA's rank is the
    smaller of both.

    Returns
    -------
    config, state_dict
        The configuration and tensors that ``peft.set_peft_model_state_dict`` loads; scaling is 1.

    Raises
    ------
    ValueError
        The adapter is not there, not a PrivateLoRA one, or late.
    """
    configs = getattr(model, "peft_config", {})
    if not isinstance(configs.get(adapter_name), ProjectionConfig):
        raise ValueError(f"{adapter_name!r} is not a PrivateLoRA adapter of this model: {list(configs)}")
    return model.base_model.as_lora(adapter_name)  # pyright: ignore[reportCallIssue] (a tuner of ours, see above)


def saved_config(folder: str | Path) -> PrivateLoraConfig | LadderConfig:
    """The configuration of an adapter of this room in a folder.

    Raises
    ------
    FileNotFoundError
        The folder has no ``adapter_config.json``.
    ValueError
        It is no adapter of this room, or not what may be read.
    """
    if not Path(folder, CONFIG).exists():  # PEFT would ask the hub
        raise FileNotFoundError(f"{folder} holds no adapter: it has no {CONFIG}")
    try:
        method = read_object(Path(folder, CONFIG)).get("peft_type")
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    if method not in (PRIVATE_LORA, LADDER):
        raise ValueError(f"{folder} holds a {str(method)[:40]} adapter, not a PrivateLoRA one or a ladder")
    config_class = LadderConfig if method == LADDER else PrivateLoraConfig
    return config_class.from_pretrained(folder)


def load(
    model: PreTrainedModel | PeftModel, folder: str | Path, adapter_name: str = "default", *, trainable: bool = False
) -> PeftModel:
    """Give a model an adapter of this room that was saved.

    Parameters
    ----------
    model
        The backbone, or what ``load`` has given for another adapter.
    folder
        The folder that ``save_pretrained`` wrote, with safetensors.
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
    if not Path(folder, WEIGHTS).exists():
        raise FileNotFoundError(f"{folder} holds no adapter: it has no {WEIGHTS}")
    if not isinstance(model, PeftModel):
        return PeftModel.from_pretrained(model, folder, adapter_name, is_trainable=trainable, config=config)
    if adapter_name in model.peft_config:
        raise ValueError(f"the model has an adapter {adapter_name!r} already: {', '.join(model.peft_config)}")
    model.load_adapter(folder, adapter_name, is_trainable=trainable)
    return model


def _whole(save):
    """``PeftModel.save_pretrained``; an adapter of this room is saved whole, and as it can be loaded, or not at all."""

    @functools.wraps(save)
    def save_pretrained(
        self,
        save_directory: str | Path,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: str | bool = "auto",
        **options,
    ) -> None:
        if not any(isinstance(config, ProjectionConfig) for config in self.peft_config.values()):
            return save(self, save_directory, safe_serialization, selected_adapters, save_embedding_layers, **options)
        if not safe_serialization or save_embedding_layers is True:
            raise ValueError(
                f"safe_serialization={safe_serialization}, save_embedding_layers={save_embedding_layers}: "
                "only safetensors are loaded, and no part of the backbone; leave both out"
            )
        folder = private_folder(save_directory)

        def write(temporary: str) -> None:
            if (folder / "README.md").is_file():  # which PEFT goes on with
                shutil.copy(folder / "README.md", temporary)
            save(self, temporary, selected_adapters=selected_adapters, save_embedding_layers=False, **options)

        return replace_files(folder, write, private=True)

    return save_pretrained


def _like(load):
    """``PeftModel.load_adapter``; onto an adapter of this room that is there already go weights of its like alone."""

    @functools.wraps(load)
    def load_adapter(self, model_id: str | Path, adapter_name: str, *arguments, **options):
        config = self.peft_config.get(adapter_name)
        if isinstance(config, ProjectionConfig):
            saved = type(config).from_pretrained(model_id, options.get("subfolder"))
            self.base_model.require_like(adapter_name, saved)
        return load(self, model_id, adapter_name, *arguments, **options)

    return load_adapter


PeftModel.save_pretrained = _whole(PeftModel.save_pretrained)  # pyright: ignore[reportAttributeAccessIssue] (patched on purpose)
"""PEFT writes into the folder itself: killed between the weights and the configuration, it would leave neither."""
PeftModel.load_adapter = _like(PeftModel.load_adapter)  # pyright: ignore[reportAttributeAccessIssue] (patched on purpose)
"""PEFT reads no configuration for an adapter that is there already: its A and B may be others."""

METHODS: dict[Any, tuple] = {PRIVATE_LORA: (PrivateLoraConfig, PrivateLoraModel), LADDER: (LadderConfig, LadderModel)}
for _method, (_config, _tuner) in METHODS.items():
    PEFT_TYPE_TO_CONFIG_MAPPING[_method] = _config
    PEFT_TYPE_TO_TUNER_MAPPING[_method] = _tuner
    PEFT_TYPE_TO_PREFIX_MAPPING[_method] = _tuner.prefix
