"""The kept units of a layer: their keys and values, in the precision in which they came."""

from collections.abc import Callable

import torch


class UnitStore:
    """A layer's keys and values, as two tensors. :mod:`plpkg.retention.cache.quantize` has another kind."""

    keys: torch.Tensor  # (batch, num_kv_heads, kept, head_dim), once units have come
    values: torch.Tensor  # (batch, num_kv_heads, kept, value_dim)

    def __len__(self) -> int:
        return self.keys.shape[-2] if hasattr(self, "keys") else 0

    @property
    def num_bytes(self) -> int:
        """The bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes if len(self) else 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add units at the end."""
        if len(self):
            self.keys = torch.cat([self.keys, keys], dim=-2)
            self.values = torch.cat([self.values, values], dim=-2)
        else:
            self.keys = keys
            self.values = values

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values."""
        return self.keys, self.values

    def keep(self, indices: torch.Tensor) -> None:
        """Forget all units but those of these indices ``(batch, num_kv_heads, kept)``."""
        self.keys = gather(self.keys, indices)
        self.values = gather(self.values, indices)

    def change(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``function`` to every tensor: its first dimension is the batch."""
        if len(self):
            self.keys = function(self.keys)
            self.values = function(self.values)

    @property
    def kind(self) -> dict | None:
        """Arguments that make another of its kind, for :func:`plpkg.retention.load`; ``None`` for two tensors."""
        if type(self) is not UnitStore:
            raise ValueError(f"a {type(self).__name__} does not say what makes another: it cannot be saved")
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it holds, by name."""
        return {"keys": self.keys, "values": self.values}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Hold what :meth:`tensors` gave."""
        self.keys = tensors["keys"]
        self.values = tensors["values"]

    def mark(self) -> object:
        """The state that :meth:`rewind` needs to forget the units that come after now."""
        return len(self)

    def rewind(self, mark: object, repeats: int = 1) -> None:
        """Forget the units that came after ``mark``, and the copies if the batch was repeated since."""
        self.change(lambda tensor: tensor[::repeats, :, :mark].clone())  # a view would hold all of it


def gather(states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Select the units ``(batch, heads, kept)`` of states ``(batch, heads, n, width)``."""
    batch, heads, n, width = states.shape
    first_rows = torch.arange(0, batch * heads * n, n, device=states.device).view(batch, heads, 1)  # of each head
    rows = (first_rows + indices).flatten()
    selected = states.reshape(-1, width).index_select(0, rows)  # moves whole rows, unlike Tensor.gather
    return selected.view(batch, heads, -1, width)


def under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with a prefix, by their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
