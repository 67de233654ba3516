"""Which rows of a batch an adapter is for: PEFT's ``model(…, adapter_names=["ann", "bob"])``, at inference."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import AuxiliaryTrainingWrapper

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

    @contextlib.contextmanager
    def _enable_peft_forward_hooks(self, *_, adapter_names=None, num_beams=None, **__) -> Iterator[None]:
        """PEFT enters this around each forward pass and ``generate``, with their arguments."""
        if adapter_names is None:
            yield
            return
        if self.training:
            raise ValueError("adapter_names is for inference: call eval() first")
        known = {NO_ADAPTER, *self.peft_config}
        if isinstance(adapter_names, str) or not known.issuperset(adapter_names):
            raise ValueError(f"adapter_names must be a list of {', '.join(sorted(known))}, got {adapter_names!r}")
        names = [name for name in adapter_names for _ in range(num_beams or 1)]
        layers = self.tuner_layer_cls if isinstance(self.tuner_layer_cls, tuple) else (self.tuner_layer_cls,)
        handles = [
            module.register_forward_pre_hook(
                lambda _, arguments, options: (arguments, options | {"adapter_names": names}), with_kwargs=True
            )
            for module in self.modules()
            if isinstance(module, (*layers, AuxiliaryTrainingWrapper))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
