"""The attention layers of a model that can be watched, and the tokens that it can read."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from transformers.pytorch_utils import Conv1D

from plpkg.inputs import Ids, token_ids
from plpkg.projections import PROJECTIONS

LEARNT = ("wpe", "embed_positions", "position_embeddings")
"""Names of the embeddings that are tables of learnt positions; a model has no positions beyond its table."""


@dataclass
class Layer:
    """An attention module that can be watched.

    Attributes
    ----------
    module
        The module.
    projections
        Its query, key and value projections, or the fused one.
    num_heads, num_kv_heads, head_dim
        Dimensions of query and key.
    value_dim
        The width of a value, which is seldom another than a key's.
    width
        The width of the projections' outputs, side by side.
    interleaved
        Whether the fused one gives each head's query, key and value together: GPT-NeoX's, and one kind of GPTBigCode's.
    """

    module: Any  # its attributes are named by each family
    projections: tuple[nn.Module, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    width: int
    interleaved: bool

    def side_by_side(self, output: torch.Tensor) -> torch.Tensor:
        """A projection's output ``(batch, n, width)`` with all heads' queries first, then keys, then values."""
        if not self.interleaved:
            return output
        by_head = output.unflatten(-1, (self.num_heads, 3, self.head_dim))
        return by_head.transpose(-3, -2).flatten(-3)


def attention_layers(model: Any) -> list[Layer]:
    """The attention modules of a causal language model, in order.

    Raises
    ------
    ValueError
        Not a Hugging Face decoder with one query, key and value projection a layer.
    """
    _refuse_virtual_tokens(model)
    layers: dict[int, Layer] = {}
    for module in model.modules():
        names = _projection_names(module)
        if names is None:
            continue
        kind = type(module).__name__
        if not _uses_interface(module):
            raise ValueError(f"{kind} computes its attention past transformers' interface: it cannot be watched")
        if hasattr(module, "mp_num"):  # CodeGen's: queries, values and keys of each of four parts
            raise ValueError(f"{kind} has its fused projection's outputs in another order: it cannot be watched")
        if not hasattr(module, "config"):  # linear attention
            continue
        if module.layer_idx < 0:  # Zamba2's, which several layers share
            continue
        if module.layer_idx in layers or "Cross" in kind or not getattr(module, "is_causal", True):
            raise ValueError(
                f"layer {module.layer_idx} of {type(model).__name__} attends to something else than its own text so "
                f"far ({kind}): plpkg.retention reads with decoders alone"
            )
        projections = tuple(getattr(module, name) for name in names)
        interleaved = names == ("query_key_value",) or getattr(module, "multi_query", None) is False
        layers[module.layer_idx] = Layer(module, projections, *_sizes(module, projections), interleaved)
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", -1)
    if sorted(layers) != list(range(count)):
        raise ValueError(
            f"{type(model).__name__} has attention that can be watched in {len(layers)} of its {count} layers: each "
            "needs a module of its own with query, key and value projections"
        )
    return [layers[i] for i in range(count)]


def _refuse_virtual_tokens(model: nn.Module) -> None:
    """ValueError if a PEFT adapter of the model is a learnt prompt."""
    adapter: Any = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError(
            f"{type(model).__name__} puts virtual tokens before the prompt ({adapter.peft_type.value}), which have no "
            "ids: take an adapter of the layers"
        )


def _projection_names(module: nn.Module) -> tuple[str, ...] | None:
    """The names of an attention module's query, key and value projections; ``None`` for other modules."""
    if not hasattr(module, "layer_idx"):
        return None
    children = {name for name, _ in module.named_children()}
    for names in PROJECTIONS:
        if children.issuperset(names):
            return names
    return None


def _uses_interface(module: nn.Module) -> bool:
    """Whether the file of the module's class, or of a class above it, has transformers' attention functions."""
    files = [sys.modules[each.__module__] for each in type(module).__mro__]
    return any("ALL_ATTENTION_FUNCTIONS" in vars(file) for file in files)


def _sizes(module: Any, projections: Sequence[nn.Module]) -> tuple[int, int, int, int, int]:
    """``num_heads``, ``num_kv_heads``, ``head_dim``, ``value_dim`` and ``width`` of a :class:`Layer`.

    Configurations do not always say how many KV heads there are, or say it of other layers: the widths of the
    projections decide, if they are linear layers, or adapters around them, which tell.
    """
    num_heads = module.config.num_attention_heads
    head_dim = getattr(module, "head_dim", None) or module.config.hidden_size // num_heads
    told = [_output_width(projection) for projection in projections]
    widths = [width for width in told if width is not None]
    if len(widths) < len(told):
        num_kv_heads = getattr(module.config, "num_key_value_heads", None) or num_heads
        width = (num_heads + 2 * num_kv_heads) * head_dim
        return num_heads, num_kv_heads, head_dim, head_dim, width
    if len(widths) == 1:  # fused: the queries leave equal parts to keys and values
        key_width = value_width = (widths[0] - num_heads * head_dim) // 2
    else:
        _, key_width, value_width = widths
    value_dim = value_width * head_dim // key_width
    return num_heads, key_width // head_dim, head_dim, value_dim, sum(widths)


def _output_width(projection: Any) -> int | None:
    """The width of a linear layer's output, an adapter around it or not; ``None`` if it does not tell."""
    if hasattr(projection, "get_base_layer"):
        projection = projection.get_base_layer()
    if isinstance(projection, Conv1D):
        return projection.nf
    return getattr(projection, "out_features", None)


def check_ids(model: Any, ids: Ids, before: int = 0) -> torch.Tensor:
    """Tokens as ``(batch, n)``; ValueError unless the model can read them after so many others."""
    name = type(model).__name__
    ids = token_ids(ids)
    vocab: Any = getattr(model.get_input_embeddings(), "num_embeddings", None)
    numbered = vocab and not is_fake(ids)  # fake ids have no numbers that could be out of range
    if numbered and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(f"input_ids must be within the {vocab} tokens of {name}, got {ids.min()} to {ids.max()}")
    tokens = before + ids.shape[-1]
    for path, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or path.rpartition(".")[2] not in LEARNT:
            continue
        longest = _learnt_positions(module)
        if tokens > longest:
            raise ValueError(f"{name} has {longest} learnt positions, got {tokens} tokens")
    return ids


def _learnt_positions(table: Any) -> int:
    """The number of positions that a table has for tokens: some families leave its first rows unused."""
    if hasattr(table, "offset"):
        return table.num_embeddings - table.offset
    if table.padding_idx is not None:  # RoBERTa's begin behind the padding's row
        return table.num_embeddings - (table.padding_idx + 1)
    return table.num_embeddings
