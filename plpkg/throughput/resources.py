"""Memory and FLOPs of the phone (PrivateLoRA article, resource table).

The published rows count, exactly: for PrivateLoRA the LM head and the Ms, decimal megabytes,
**without** the word embedding that the article puts on the phone too; for a whole model all
weights that compute, again without the input embedding.
"""

import warnings
from dataclasses import dataclass
from typing import Any

from plpkg.catalog import Device, ModelShape, device as find_device, model as find_model
from plpkg.results import Tabular
from plpkg.throughput.split import Split, does_not_fit
from plpkg.validation import flag, keywords, whole_number


@dataclass(frozen=True)
class PhoneMemory(Tabular):
    """Bytes of weights on the phone. ``embedding_bytes`` is 0 when it was not asked for."""

    lm_head_bytes: float
    m_bytes: float
    embedding_bytes: float

    @property
    def total_bytes(self) -> float:
        """All parts together."""
        return self.lm_head_bytes + self.m_bytes + self.embedding_bytes

    @property
    def total_mb(self) -> float:
        """``total_bytes`` in MB of 10^6 bytes."""
        return self.total_bytes / 1e6

    def rows(self) -> list[dict]:
        parts = {
            "LM head": self.lm_head_bytes,
            "M": self.m_bytes,
            "word embedding": self.embedding_bytes,
            "total": self.total_bytes,
        }
        return [{"part": part, "mb": n / 1e6} for part, n in parts.items()]

    def __repr__(self) -> str:
        return (
            f"Phone memory: LM head {self.lm_head_bytes / 1e6:.2f} MB + M {self.m_bytes / 1e6:.2f} MB "
            f"+ word embedding {self.embedding_bytes / 1e6:.2f} MB = {self.total_mb:.2f} MB"
        )


@keywords(Split, without=("phone_bits", "cloud_bits", "cache_bits"))
def phone_memory(
    model: str | ModelShape,
    rank: int = 128,
    bits: int = 16,
    *,
    embedding: bool = False,
    **split: Any,
) -> PhoneMemory:
    """Weights that PrivateLoRA puts on the phone.

    Parameters
    ----------
    model
        A shape or its catalog name.
    rank
        Rank of M, both ways.
    bits
        Bits of a weight.
    embedding
        Count the word embedding as well. A model that ties it to the LM head needs it once.
    **split
        Fields of :class:`~plpkg.throughput.Split` that shape M: ``r_c2d``, ``r_d2c``,
        ``projections``, ``adapted_layers``.

    Raises
    ------
    ValueError
        An argument is out of range.
    """
    model = find_model(model)
    bits = whole_number("bits", bits, 1, 64)
    m = Split(model, rank, **split).m_parameters
    lm_head = model.embedding_parameters
    needs_second_table = flag("embedding", embedding) and not model.tied_embeddings
    second_table = model.embedding_parameters if needs_second_table else 0
    return PhoneMemory(lm_head * bits / 8, m * bits / 8, second_table * bits / 8)


@keywords(Split)
def phone_flops(model: str | ModelShape, rank: int = 128, **split: Any) -> int:
    """Floating-point operations the phone does for one token: twice its LM head and Ms.

    Parameters and errors as in :func:`phone_memory`.
    """
    model = find_model(model)
    m = Split(model, rank, **split).m_parameters
    return 2 * (model.embedding_parameters + m)


@keywords()
def whole_model_bytes(model: str | ModelShape, bits: int = 16) -> float:
    """Bytes of a whole model's computing weights at ``bits`` a weight, the input embedding left out.

    All experts of a mixture have to be held, though a token reads only those that it meets.
    """
    return find_model(model).computing_parameters * whole_number("bits", bits, 1, 64) / 8


@keywords()
def whole_model_flops(model: str | ModelShape) -> int:
    """Floating-point operations of one token through the whole model: two for each weight that it computes with."""
    model = find_model(model)
    return 2 * round(model.computing_parameters - model.unread_parameters())


@keywords()
def phone_only_tokens_per_s(
    model: str | ModelShape, bits: int = 4, device: str | Device = "iphone-13-pro-max"
) -> float:
    """Roofline of decoding the whole model on the phone: its weights (those of active experts) are read once a token.

    An upper bound: the article reports 5.7 and 8.1 tokens/s where this gives 12.9. Warns of weights
    that the phone's memory does not hold.
    """
    model = find_model(model)
    device = find_device(device)
    held = whole_model_bytes(model, bits)
    for sentence in does_not_fit(held, device):
        warnings.warn(f"{model.name}: {sentence}", stacklevel=3)  # named as the caller's, above the decorator's wrapper
    read = held - model.unread_parameters() * bits / 8
    return device.memory_bandwidth_bytes_per_s / read
