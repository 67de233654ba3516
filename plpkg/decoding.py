"""What all who write tokens share: what is sampled from, and beyond which length a model's rotary positions change."""

from transformers import (
    LogitsProcessorList,
    PreTrainedConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def warpers(*, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> LogitsProcessorList:
    """Hugging Face's own, in the order in which its ``generate`` applies them."""
    chosen = LogitsProcessorList()
    if temperature != 1:
        chosen.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chosen.append(TopPLogitsWarper(float(top_p)))
    return chosen


def rope_changes(config: PreTrainedConfig) -> list[tuple[str, int]]:
    """Where the frequencies of rotary positions depend on the length: the kind, and the length that changes them.

    ``longrope`` changes once, beyond that length; ``dynamic`` again with every token beyond it. Most models have
    neither; some have several, for layers of several kinds. Where a configuration names an original length, it counts,
    although transformers has ``dynamic`` change beyond ``max_position_embeddings`` alone: the shorter is safe.
    """
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    return [
        (kind["rope_type"], kind.get("original_max_position_embeddings") or config.max_position_embeddings)
        for kind in kinds
        if kind.get("rope_type") in ("longrope", "dynamic")
    ]
