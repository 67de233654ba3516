"""Token ids and labels: the forms in which callers have them, as the one that models read, ``(batch, seq)``."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch

from plpkg.validation import shown

IGNORED = -100
"""A label that is neither learnt nor scored: torch's ``ignore_index``."""

Ids = torch.Tensor | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Any]

ABOUT_TOKENS = ("special_tokens_mask", "offset_mapping", "length", "num_truncated_tokens", "overflow_to_sample_mapping")
"""Fields that a tokenizer gives on request, and no model reads."""


def token_ids(ids: Ids, name: str = "input_ids", *, least: int = 1) -> torch.Tensor:
    """Token ids ``(batch, seq)``, int64, where they are.

    Parameters
    ----------
    ids
        Of one text, ``(tokens,)``, or of several of one length, ``(batch, seq)``: a tensor, an array or a list; or what
        a tokenizer gives, without padding. What a processor gives beside text (images, say) is refused.
    name
        Their name in messages.
    least
        The fewest numbers.

    Raises
    ------
    ValueError
        They are something else.
    """
    given: object = ids
    mask = None
    if isinstance(ids, Mapping):
        _refuse_others(ids, name)
        mask = ids.get("attention_mask")
        given = ids.get("input_ids")
    try:
        tensor = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is not None and not tensor.numel() and not isinstance(given, torch.Tensor):
        tensor = tensor.long()  # an empty list has no dtype of its own
    if not _are_ids(tensor) or tensor.numel() < least:
        got = shown(given) if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"{name} must be token ids, (tokens,) or (batch, seq), got {got}")
    if mask is not None:
        mask = torch.as_tensor(mask)
        if mask.numel() != tensor.numel():
            raise ValueError(f"attention_mask is {tuple(mask.shape)}, {name} {tuple(tensor.shape)}")
        padding = int((mask == 0).sum())
        if padding:
            raise ValueError(f"{padding} tokens of {name} are padding: give texts of one length, or one by one")
    tensor = tensor.long()
    return tensor if tensor.ndim == 2 else tensor[None]


def _are_ids(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether it is ``(tokens,)`` or ``(batch, seq)`` of whole numbers."""
    if tensor is None or tensor.ndim not in (1, 2):
        return False
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _refuse_others(fields: Mapping[str, Any], name: str) -> None:
    """ValueError if a mapping has something beside ids and their mask that a model would read."""
    known = {"input_ids", "attention_mask", *ABOUT_TOKENS}
    if not torch.as_tensor(fields.get("token_type_ids", 0)).any():  # all of the first of two texts, as without them
        known.add("token_type_ids")
    others = sorted(str(key) for key in fields.keys() - known if fields[key] is not None)
    if others:
        raise ValueError(f"{name} come with {shown(others[0])}, which is not read here: give the text's ids alone")


def one_text(ids: Ids, name: str = "input_ids", *, least: int = 1) -> list[int]:
    """The token ids of one text, in any form that :func:`token_ids` takes.

    Raises
    ------
    ValueError
        They are something else, or of several texts.
    """
    rows = token_ids(ids, name, least=least)
    if len(rows) != 1:
        raise ValueError(f"{name} must be one text's ids, (tokens,) or (1, tokens), got {tuple(rows.shape)}")
    return rows[0].tolist()


def ids_and_labels(batch, name: str = "a batch") -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, from which a step learns, both ``(samples, seq)``, int64; a label is its own place's token.

    Parameters
    ----------
    batch
        Ids as in :func:`token_ids`; a pair of ids and labels; or a mapping with ``input_ids``, and perhaps ``labels``
        and ``attention_mask``, padded on the right: what ``corpora.batch`` or a Hugging Face collator makes. Labels of
        -100 are not learnt. Without labels the text itself is, without its padding.
    name
        Its name in messages.

    Raises
    ------
    ValueError
        It is something else, shapes do not fit, padding stands on the left, or is to be learnt.
    """
    pair = isinstance(batch, tuple) or (isinstance(batch, list) and any(isinstance(x, torch.Tensor) for x in batch))
    if pair and len(batch) != 2:
        raise ValueError(f"{name} must be token ids, (ids, labels) or a mapping, got {len(batch)} things")
    if isinstance(batch, Mapping):
        fields = batch
    elif pair:
        fields = {"input_ids": batch[0], "labels": batch[1]}
    else:
        fields = {"input_ids": batch}
    fields = {key: value for key, value in fields.items() if value is not None}
    others = sorted(fields.keys() - {"input_ids", "labels", "attention_mask"})
    if others:
        raise ValueError(f"{name} has {shown(others[0])}: input_ids, labels and attention_mask are read")
    ids = token_ids(fields.get("input_ids"), f"input_ids of {name}")  # pyright: ignore[reportArgumentType] (refuses None)
    mask = torch.as_tensor(fields.get("attention_mask", torch.ones_like(ids)), device=ids.device) != 0
    if mask.ndim != 2:
        mask = mask[None]
    if mask.shape != ids.shape:
        raise ValueError(f"{name} has an attention_mask of shape {tuple(mask.shape)} for ids of {tuple(ids.shape)}")
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError(f"{name} has an attention_mask with 0 before 1: pad on the right, where nothing reads it")
    labels = ids.masked_fill(~mask, IGNORED)
    if "labels" in fields:
        labels = token_ids(fields["labels"], f"labels of {name}").to(ids.device)
    if labels.shape != ids.shape:
        raise ValueError(f"{name} has labels of shape {tuple(labels.shape)} for ids of {tuple(ids.shape)}")
    if ((labels != IGNORED) & ~mask).any():
        raise ValueError(f"{name} has labels where its padding is: -100 has to stand there")
    return ids, labels
