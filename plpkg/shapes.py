"""Read a :class:`~plpkg.catalog.ModelShape` off a Hugging Face configuration.

The model is instantiated on the meta device, where tensors have shapes but no storage; what the
configuration says is then checked against the modules that are really there, because
configurations of new architectures keep their old fields and mean something else by them.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from plpkg import hub
from plpkg.projections import PROJECTIONS
from plpkg.validation import shown, whole_number

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # Mixtral; Qwen3-MoE; DeepSeek and GLM


def dimensions(config, name: str | None, local_files_only: bool) -> dict:
    """The fields of a model shape; arguments and errors as in ``ModelShape.from_config``."""
    from transformers import PreTrainedConfig

    if isinstance(config, (str, Path)):
        name = name or str(config)
        config = _read(str(config), local_files_only)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"a configuration is a name, a folder or a PreTrainedConfig object, got {config!r}")
    name = name or config.name_or_path or config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} ({type(config).__name__}) is an encoder-decoder: "
            "plpkg describes models whose every layer has one attention block"
        )
    try:
        text = config.get_text_config(decoder=True)
        sizes = _dimensions(text)
        experts = _experts(text)
        counted = _count_on_meta(text, config, experts["num_experts"])
        windows = {} if counted["encoder"] else _windows(text)
    except Exception as error:  # a configuration class can raise anything when its model is built
        said = reason(error, config)
        raise ValueError(f"cannot describe {name} ({type(config).__name__}): {said}") from error

    width = sizes["num_layers"] * (sizes["num_heads"] + 2 * sizes["num_kv_heads"]) * sizes["head_dim"]
    if counted.pop("attention_width") != width:
        raise ValueError(
            f"cannot describe {name} ({type(config).__name__}): its attention projections are not "
            f"{sizes['num_layers']} layers of {sizes['num_heads']} query and {sizes['num_kv_heads']} key and value "
            f"heads of {sizes['head_dim']} each"
        )
    if counted.pop("embedding_shape") != (sizes["vocab"], sizes["hidden"]):
        raise ValueError(
            f"cannot describe {name} ({type(config).__name__}): its word embedding is not "
            f"vocab={sizes['vocab']} × hidden={sizes['hidden']}"
        )
    source = f"{type(config).__name__}, counted on the meta device"
    return dict(name=name, family=config.model_type, source=source, **sizes, **experts, **counted, **windows)


def _read(name: str, local_files_only: bool):
    from transformers import AutoConfig

    local_files_only = local_files_only or hub.must_be_local(name)
    try:
        return AutoConfig.from_pretrained(name, local_files_only=local_files_only, trust_remote_code=False)
    except OSError as error:
        if Path(name, "config.json").is_file():
            raise ValueError(f"cannot describe {name!r}: {reason(error)}") from error
        hint = (
            "it is not a folder with a config.json, and the hub did not give one (offline, misspelt, or gated); "
            "a name of plpkg's own catalog belongs in catalog.model(...)"
        )
        raise FileNotFoundError(f"no configuration for {name!r}: {hint}") from error
    except Exception as error:  # a configuration class can raise anything
        raise ValueError(f"cannot describe {name!r}: {reason(error)}") from error


def _dimensions(config) -> dict:
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ValueError(f"it has no single number of attention heads, but {heads!r}")
    for name in ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size"):
        whole_number(name, getattr(config, name), 1)
    others = set()
    for kind in getattr(config, "layer_types", None) or ():
        if isinstance(kind, str) and (kind == "linear_attention" or not kind.endswith("_attention")):
            others.add(kind)
    if others:
        raise ValueError(f"it has layers that are not one attention block each: {', '.join(sorted(others))}")
    # Falcon and GPTBigCode say "multi_query" where others say num_key_value_heads=1.
    multi_query = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    intermediate = _first(config, ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "dff"))
    if isinstance(intermediate, (list, tuple)):  # one width a layer
        intermediate = max(intermediate)
    if not intermediate:
        # GPT-2's n_inner=None means four times hidden; MPT calls the factor expansion_ratio.
        intermediate = getattr(config, "expansion_ratio", 4) * config.hidden_size
    return dict(
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        num_heads=heads,
        num_kv_heads=1 if multi_query else kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=intermediate,
        vocab=config.vocab_size,
    )


def _first(config, names: tuple[str, ...]) -> object:
    """The first of these fields that a configuration has and that is not 0 or None."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return value
    return None


def _experts(config) -> dict:
    """The experts of a layer, and how many of them a token meets; 1 and 1 in a dense model."""
    total = _first(config, EXPERTS) or 1
    chosen = getattr(config, "num_experts_per_tok", None)
    if not chosen and total == 1:
        chosen = 1
    if not isinstance(total, int) or not isinstance(chosen, int):
        raise ValueError(
            f"it has no single number of experts and of those that a token meets, but {total!r}, {chosen!r}"
        )
    return dict(num_experts=total, num_experts_per_tok=chosen)


def _windows(config) -> dict:
    """The window of the layers that have one, and how many have: as the cache that transformers makes knows them."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    layers = DynamicCache(config=config).layers
    for i, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"layer {i} of its cache is a {type(layer).__name__}, not keys and values of its own alone"
            )
    windows = [layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
    if len(set(windows)) > 1:
        raise ValueError(f"it has no single sliding window, but {sorted(set(windows))}")
    if not windows:
        return dict(sliding_window=0, num_sliding_layers=0)
    return dict(sliding_window=windows[0], num_sliding_layers=len(windows))


def _count_on_meta(config, whole, num_experts: int) -> dict:
    """Count the weights of the model that ``config`` describes: the language part of ``whole``, or all of it."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )

    encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    causal = type(whole) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not (encoder or causal or type(whole) in MODEL_FOR_MULTIMODAL_LM_MAPPING):
        raise ValueError("it is not a language model")
    speaks = AutoModelForCausalLM if causal else AutoModelForMultimodalLM
    headless = encoder or config is not whole
    model = _on_meta(config, AutoModel if headless else speaks)
    embedding = model.get_input_embeddings().weight  # (vocab, hidden)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    routed = 0
    for path, parameter in model.named_parameters():
        # All experts of a layer lie in one tensor, (num_experts, …), or each in its own module.
        together = num_experts > 1 and parameter.ndim == 3 and len(parameter) == num_experts
        if together or "experts" in path.split("."):
            routed += parameter.numel()
    if bool(routed) != (num_experts > 1):
        raise ValueError(f"its configuration says {num_experts} experts a layer, and {routed} weights are theirs")
    tied = encoder  # which has no head of its own
    if not encoder:
        speaker = model if config is whole else _on_meta(whole, speaks)
        head = speaker.get_output_embeddings()
        tied = head.weight is speaker.get_input_embeddings().weight
        if speaker is not model:  # the head sits outside of the language part, and the whole says whether it is tied
            parameters += sum(parameter.numel() for parameter in head.parameters())
            if tied:
                parameters -= embedding.numel()
    return dict(
        tied_embeddings=tied,
        encoder=encoder,
        parameters=parameters,
        expert_parameters=routed,
        attention_width=_attention_width(model),
        embedding_shape=tuple(embedding.shape),
    )


def _attention_width(model) -> int:
    """The output widths of all layers' query, key and value projections together."""
    names = set(itertools.chain.from_iterable(PROJECTIONS))
    total = 0
    for path, module in model.named_modules():
        is_projection = path.rsplit(".", 1)[-1] in names and getattr(module, "weight", None) is not None
        if is_projection:
            total += module.nf if hasattr(module, "nf") else module.out_features  # nf: of GPT-2's Conv1D
    return total


def _on_meta(config, kind):
    """The model that ``kind``, an Auto class, makes of a configuration, without its numbers."""
    import torch

    with torch.device("meta"):
        return kind.from_config(config)


def reason(error: BaseException, config=None) -> str:
    """An exception of transformers as a clause; of a value that it does not know, with the field that has it."""
    if isinstance(error, KeyError) and error.args and config:
        for name, value in _fields(vars(config)):
            if value == error.args[0]:
                return f"{name} must be one that transformers knows, got {shown(value)}"
    if isinstance(error, RecursionError):  # what it says depends on Python
        return "nested too deeply"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = 2 if lines and lines[0].endswith(":") else 1  # the first may only announce the second
    text = " ".join(lines[:count])[:200]
    if isinstance(error, KeyError) or not text:
        return f"{type(error).__name__} {text}".strip()
    return text


def _fields(fields: Mapping) -> Iterator[tuple[str, object]]:
    """Every field, those within others included."""
    for name, value in fields.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from _fields(value)
