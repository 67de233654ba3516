"""Tokens: their check, how the next one is chosen, and what ends a sequence.

A sampled token is the argmax of p / E, where p are the probabilities and E exponential random numbers. Whoever knows
E and a similar p often finds the same token: so the cloud guesses what the device will sample, and however wrong its
guesses are, what the device samples is distributed as it should be
(Daliri, Musco, Suresh 2024, arXiv 2408.07978; the rule of Leviathan et al., arXiv 2211.17192, accepts a little more
often, but needs the cloud's distributions on the device).
"""

import math

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


def race(scores: torch.Tensor, seed: int, position: int) -> torch.Tensor:
    """A token ``(batch,)`` sampled from logits ``(batch, vocab)``: the same in the same random numbers.

    Parameters
    ----------
    seed, position
        Of the sequence, and of the token in it: they give the random numbers.
    """
    generator = torch.Generator().manual_seed((seed + position) % 2**63)
    times = torch.empty(scores.shape).exponential_(generator=generator).to(scores.device)
    return (scores.float().softmax(-1) / times).argmax(-1)


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


def guesses_before_rope_turns(model: PreTrainedModel, length: int) -> float:
    """How many guesses may follow ``length`` tokens in one pass: with more, RoPE changes for the whole sequence.

    Long RoPE changes once; dynamic RoPE with every token beyond the length that the model was made for.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    room = math.inf
    for each in (rope,) if "rope_type" in rope else rope.values():  # or one for each kind of layer
        if each["rope_type"] == "longrope" and length <= each["original_max_position_embeddings"]:
            room = min(room, each["original_max_position_embeddings"] - length)
        elif "dynamic" in each["rope_type"]:
            room = min(room, max(0, model.config.max_position_embeddings - 1 - length))
    return room
