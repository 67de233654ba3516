"""Token ids and labels: the forms in which callers have them, as the one that models read, ``(batch, seq)``."""

from collections.abc import Mapping, Sequence

import torch

from plpkg.validation import shown

IGNORED = -100
"""A label that is neither learnt nor scored: torch's ``ignore_index``."""

Ids = torch.Tensor | Sequence[int] | Sequence[Sequence[int]] | Mapping


def token_ids(ids: Ids, name: str = "input_ids", *, least: int = 1) -> torch.Tensor:
    """Token ids ``(batch, seq)``, int64, where they are.

    Parameters
    ----------
    ids
        Of one text, ``(tokens,)``, or of several of one length, ``(batch, seq)``: a tensor, an array or a list; or what
        a tokenizer gives, without padding.
    name
        What they are called, for messages.
    least
        The fewest numbers.

    Raises
    ------
    ValueError
        They are something else.
    """
    if isinstance(ids, Mapping):
        mask = ids.get("attention_mask")
        if mask is not None and not torch.as_tensor(mask).bool().all():
            raise ValueError(f"{name} are padded: give texts of one length, or one by one")
        ids = ids.get("input_ids")
    try:
        tensor = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is not None and not tensor.numel() and not isinstance(ids, torch.Tensor):
        tensor = tensor.long()  # an empty list has no dtype of its own
    whole = tensor is not None and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not whole or tensor.ndim not in (1, 2) or tensor.numel() < least:
        got = shown(ids) if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"{name} must be token ids, (tokens,) or (batch, seq), got {got}")
    return tensor.long() if tensor.ndim == 2 else tensor.long()[None]


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
    """What a step learns from: ids and labels, both ``(samples, seq)``, int64; a label is its own place's token.

    Parameters
    ----------
    batch
        Ids as in :func:`token_ids`; a pair of ids and labels; or a mapping with ``input_ids``, and perhaps ``labels``
        and ``attention_mask``, padded on the right: what ``corpora.batch`` or a Hugging Face collator makes. Labels of
        -100 are not learnt. Without labels the text itself is, without its padding.
    name
        What it is called, for messages.

    Raises
    ------
    ValueError
        It is something else, shapes do not fit, padding stands on the left, or is to be learnt.
    """
    pair = isinstance(batch, tuple) or (isinstance(batch, list) and any(isinstance(x, torch.Tensor) for x in batch))
    if pair and len(batch) != 2:
        raise ValueError(f"{name} must be token ids, (ids, labels) or a mapping, got {len(batch)} things")
    fields = batch
    if not isinstance(batch, Mapping):
        fields = dict(zip(("input_ids", "labels"), batch if pair else (batch, None), strict=True))
    fields = {key: value for key, value in fields.items() if value is not None}
    if others := sorted(fields.keys() - {"input_ids", "labels", "attention_mask"}):
        raise ValueError(f"{name} has {shown(others[0])}: input_ids, labels and attention_mask are read")
    ids = token_ids(fields.get("input_ids"), f"input_ids of {name}")
    mask = torch.as_tensor(fields.get("attention_mask", torch.ones_like(ids)), device=ids.device) != 0
    mask = mask if mask.ndim == 2 else mask[None]
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
