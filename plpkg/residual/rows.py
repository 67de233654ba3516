"""What both methods of this room are for PEFT: which rows of a batch an adapter is for, and what may be loaded.

``model(…, adapter_names=["ann", "bob"])`` is PEFT's, at inference. A saved adapter is exact, or refused: before PEFT
builds it, and again when PEFT loads the tensors that it has read.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence

import torch
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import AuxiliaryTrainingWrapper, get_peft_model_state_dict

from plpkg.residual import saved
from plpkg.untrusted import finite, misfits, sentences

NO_ADAPTER = "__base__"
"""What PEFT calls the adapter of a row that has none."""


def rows_of(adapter_names: Sequence[str], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The rows of ``(batch, …)`` that each adapter is for: PEFT's ``model(…, adapter_names=[…])``."""
    if len(adapter_names) != len(x):
        raise ValueError(f"adapter_names has {len(adapter_names)} names for a batch of {len(x)}")
    chosen = [name for name in dict.fromkeys(adapter_names) if name != NO_ADAPTER]
    indices = {name: [i for i, other in enumerate(adapter_names) if other == name] for name in chosen}
    return {name: torch.tensor(rows, device=x.device) for name, rows in indices.items()}


class RowwiseTuner(BaseTuner):
    """A PEFT method of this room, each row of whose batches can have an adapter of its own."""

    def shapes(self, config, modules: dict[str, torch.nn.Module]) -> dict[str, tuple[int, ...]]:
        """The tensors of a saved adapter of these modules, by their names in the model."""
        raise NotImplementedError

    def inject_adapter(self, model: torch.nn.Module, adapter_name: str, *arguments, **options) -> None:
        config = self.peft_config[adapter_name] = copy.copy(self.peft_config[adapter_name])  # one for each model
        saved.require_backbone(config, model)
        super().inject_adapter(model, adapter_name, *arguments, **options)

    def _prepare_adapter_config(self, peft_config, model_config: dict):
        """PEFT calls this before it builds the adapter.

        Raises
        ------
        ValueError
            The weights that the configuration was read with are not those of such an adapter.
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
            needed = {f"base_model.model.{name}": shape for name, shape in self.shapes(config, modules).items()}
            if reasons := misfits(config.shapes, needed):
                raise ValueError("; ".join(f"{saved.WEIGHTS}: {reason}" for reason in reasons))
        elif modules:  # a saved adapter has names, never a pattern
            config.target_modules, config.exclude_modules = set(modules), None
        return config

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, model, config, adapter_name: str, state_dict: dict) -> dict:
        """PEFT calls this with the tensors that it has read.

        Raises
        ------
        ValueError
            They are not exactly the adapter's, or not finite numbers.
        """
        needed = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
        given = {name.replace(f".modules_to_save.{adapter_name}", ""): each for name, each in state_dict.items()}
        reasons = misfits(*({name: each.shape for name, each in tensors.items()} for tensors in (given, needed)))
        wrong = [name for name, each in given.items() if name in needed and not _fits(each, needed[name].dtype)]
        reasons += sentences({"has values that are not finite numbers here": wrong}) if wrong else []
        if reasons:
            raise ValueError("; ".join(reasons))
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


def _known_to(module: torch.nn.Module, names: list[str]) -> list[str]:
    """The names, without those of adapters that have not trained this module as well: PEFT would look them up."""
    if not isinstance(module, AuxiliaryTrainingWrapper):
        return names
    return [name if name in module._adapters else NO_ADAPTER for name in names]
