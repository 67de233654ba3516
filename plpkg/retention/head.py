"""Retaining heads: a small MLP beside each attention layer that predicts what each new cache unit will be worth.

From a token's query, key and value before rotary positions, side by side, layer i's head computes one number for each
KV head, the causal importance score: ``CIS = W2 · act(W1 · [q, k, v])``, without biases (arXiv 2410.01805, section
3.3). The backbone is not changed; :mod:`plpkg.retention.watch` shows its projections to the heads.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from plpkg.backbones import fingerprint
from plpkg.files import checkpoints
from plpkg.retention.layers import attention_layers
from plpkg.validation import shown, whole_number

FILE = "retaining_heads.safetensors"
"""The file of a folder that holds retaining heads."""


@dataclass(frozen=True)
class HeadsConfig:
    """The dimensions of retaining heads, and the backbone that they belong to.

    Attributes
    ----------
    backbone
        :func:`plpkg.backbones.fingerprint`.
    num_layers, num_heads, num_kv_heads, head_dim
        The backbone's.
    hidden
        Between W1 and W2: the publication's d_R.
    activation
        The function between them, by transformers' name.
    """

    backbone: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    activation: str


class RetainingHeads(nn.Module):
    """One head a layer.

    Attributes
    ----------
    config
        A :class:`HeadsConfig`.
    layers
        For each layer ``Linear(width, hidden)``, the activation, ``Linear(hidden, num_kv_heads)``.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        width = _width(config.num_heads, config.num_kv_heads, config.head_dim)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, config.hidden, bias=False),
                ACT2FN[config.activation],
                nn.Linear(config.hidden, config.num_kv_heads, bias=False),
            )
            for _ in range(config.num_layers)
        )

    @classmethod
    def attach(cls, model: Any, hidden: int | None = None, *, seed: int = 0) -> "RetainingHeads":
        """Untrained heads for a model, where it is and in its precision, with its own activation.

        Parameters
        ----------
        model
            A Hugging Face causal language model.
        hidden
            The publication's d_R: by default a quarter of the model's hidden size, as for Llama-3.1-8B; its code has
            1,024 for Phi-3-mini as well, which is a third.
        seed
            The seed of the weights.

        Raises
        ------
        ValueError
            The model's layers cannot be watched, or are not alike.
        """
        layers = attention_layers(model)
        kinds = {(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.width) for layer in layers}
        if len(kinds) > 1:
            raise ValueError(f"layers must be alike, got (num_heads, num_kv_heads, head_dim, width) of {sorted(kinds)}")
        kind = kinds.pop()
        dims = kind[:3]
        width = kind[3]
        if width != _width(*dims):
            raise ValueError(
                f"the projections of a layer of {type(model).__name__} give {width} numbers, and query, key and value "
                f"of (num_heads, num_kv_heads, head_dim)={dims} are {_width(*dims)}: heads would not fit"
            )
        text_config = model.config.get_text_config(decoder=True)
        hidden = _published_hidden(text_config) if hidden is None else whole_number("hidden", hidden, 1)
        config = HeadsConfig(fingerprint(model), len(layers), *dims, hidden, _activation(text_config))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            heads = cls(config)
        return heads.to(model.device, model.dtype)

    def score(self, layer: int, projected: torch.Tensor) -> torch.Tensor:
        """CIS of a layer's new units: ``(batch, n, width)`` → ``(batch, num_kv_heads, n)``."""
        return self.layers[layer](projected).transpose(1, 2)

    def forward(self, projected: list[torch.Tensor]) -> torch.Tensor:
        """CIS of all layers: a ``(batch, n, width)`` each → ``(layers, batch, num_kv_heads, n)``."""
        return torch.stack([self.score(i, states) for i, states in enumerate(projected)])

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``retaining_heads.safetensors``, its owner's alone, whole or not at all."""
        checkpoints.save(Path(folder, FILE), {"config": asdict(self.config), "state": self.state_dict()})

    @classmethod
    def from_pretrained(cls, folder: str | Path, model: Any) -> "RetainingHeads":
        """Read heads for the model that they were trained with, where it is and in its precision.

        Raises
        ------
        FileNotFoundError
            The folder lacks the file.
        ValueError
            The file is damaged or of another version, or the heads belong to another backbone.
        """
        saved = checkpoints.read(Path(folder, FILE), ("config", "state"))
        config = HeadsConfig(**saved["config"])
        _check(config.backbone, model)
        heads = cls(config)
        heads.load_state_dict(saved["state"])
        return heads.to(model.device, model.dtype)

    def check(self, model: nn.Module) -> None:
        """Whether these heads belong to ``model``.

        Raises
        ------
        ValueError
            They do not; with both fingerprints.
        """
        _check(self.config.backbone, model)

    def __repr__(self) -> str:
        config = self.config
        count = sum(parameter.numel() for parameter in self.parameters())
        return (
            f"RetainingHeads({config.num_layers} layers × {config.num_kv_heads} KV heads, hidden={config.hidden}, "
            f"{count:,} weights)"
        )


def _width(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """The width of query, key and value side by side."""
    return (num_heads + 2 * num_kv_heads) * head_dim


def _published_hidden(config: PreTrainedConfig) -> int:
    """The publication's d_R for a backbone, or for one that it does not have a quarter of the hidden size."""
    if config.model_type == "phi3" and config.hidden_size == 3072:  # Phi-3-mini
        return 1024
    return max(1, config.hidden_size // 4)


def _activation(config: PreTrainedConfig) -> str:
    """The name of a backbone's activation; SiLU where its configuration names none."""
    given = [getattr(config, name, None) for name in ("hidden_act", "hidden_activation", "activation_function")]
    activation = next(filter(None, given), "silu")
    if type(activation) is str and activation in ACT2FN:
        return activation
    some = ", ".join(list(ACT2FN)[:4])
    raise ValueError(f"activation must be one that transformers knows ({some}, …), got {shown(activation)}")


def _check(backbone: str, model: nn.Module) -> None:
    """ValueError unless a model has the fingerprint ``backbone``."""
    actual = fingerprint(model)
    if actual != backbone:
        raise ValueError(
            f"these heads belong to a backbone with fingerprint {backbone[:12]}…, "
            f"but {type(model).__name__} has {actual[:12]}…: train heads of its own"
        )
