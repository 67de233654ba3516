"""Tokens on the device: their check, how the next one is chosen, and what ends a sequence."""

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from plpkg.validation import flag, number, whole_number


def token_ids(name: str, ids: torch.Tensor) -> torch.Tensor:
    """``ids`` as int64 on the CPU, if they are whole numbers of shape ``(batch, seq)``.

    Raises
    ------
    ValueError
        They are not.
    """
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"{name} must be a tensor of shape (batch, seq), got a {type(ids).__name__}")
    if ids.ndim != 2 or not ids.numel() or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{name} must be whole numbers of shape (batch, seq), got {ids.dtype} of {tuple(ids.shape)}")
    return ids.to("cpu", torch.long)


def warpers(
    max_new_tokens: int, *, do_sample: bool = False, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> LogitsProcessorList:
    """Hugging Face's own, in the order in which its ``generate`` applies them; none if nothing is sampled.

    Raises
    ------
    ValueError
        Arguments of :meth:`plpkg.residual.DeviceClient.generate` that cannot be.
    """
    whole_number("max_new_tokens", max_new_tokens, 1)
    flag("do_sample", do_sample)
    number("temperature", temperature, open_low=do_sample)
    whole_number("top_k", top_k, 0)
    number("top_p", top_p, 0, 1, open_low=True)
    chosen = LogitsProcessorList()
    if do_sample and temperature != 1:
        chosen.append(TemperatureLogitsWarper(float(temperature)))
    if do_sample and top_k:
        chosen.append(TopKLogitsWarper(top_k))
    if do_sample and top_p < 1:
        chosen.append(TopPLogitsWarper(top_p))
    return chosen


def ends(model: PreTrainedModel, eos_token_id: int | list[int] | None) -> list[int]:
    """The tokens that end a sequence: those asked for, or the model's own; -1 for none.

    Raises
    ------
    ValueError
        Something that is no token.
    """
    if eos_token_id is None:
        settings = model.config if model.generation_config is None else model.generation_config
        eos_token_id = settings.eos_token_id
    chosen = eos_token_id if isinstance(eos_token_id, list | tuple) else [eos_token_id]
    return [whole_number("eos_token_id", end, -1) for end in chosen if end is not None]


def reads_anew_beyond(model: PreTrainedModel) -> int | None:
    """The length beyond which Hugging Face's ``generate`` reads all of a sequence again: Phi-3's, with other RoPE."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if model.config.model_type in ("phi3", "phimoe") and rope.get("rope_type") == "longrope":
        return model.config.original_max_position_embeddings
    return None
