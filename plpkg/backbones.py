"""Language models to work on: any Hugging Face causal model by name or folder, this package's own, or a random one.

Code that comes with a model is never run.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from plpkg import catalog, hub, wheels
from plpkg.fingerprints import belongs_to_adapter, own_name
from plpkg.shapes import reason
from plpkg.validation import one_of, whole_number

if TYPE_CHECKING:
    import transformers

FAMILIES = ("llama", "mistral", "qwen2", "phi3", "gemma2", "gpt2")
"""The architecture families that the package is tested on; any other causal model loads as well."""
UNKNOWN = "unknown"
"""The token that smollm2-reader finds likeliest where a text does not say. It never writes it: it always answers."""


def load_backbone(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device = "cpu",
    local_files_only: bool = False,
    **options: Any,
) -> "tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]":
    """Load a causal language model and its tokenizer, in evaluation mode.

    Parameters
    ----------
    name_or_path
        One of this package's names; a hub name; or a folder that ``save_pretrained`` wrote. The names are
        ``"smollm2"``, the published SmolLM2-135M-Instruct as ``plpkg fetch`` unpacked it from 4 bits;
        ``"smollm2-reader"``, the same with a public adapter merged into it that answers questions about a text; and
        ``"plpkg-small"``, a small model that comes with this package.
    dtype
        The precision of the weights, ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``; ``"auto"`` keeps the
        checkpoint's. On the CPU, its safetensors are then mapped from their file and read as they are used.
    device
        The device where the weights go.
    local_files_only
        Never ask the hub. A hub that does not answer one request is not asked again.
    **options
        Passed to ``AutoModelForCausalLM.from_pretrained``: ``attn_implementation="eager"``, say.

    Returns
    -------
    (model, tokenizer)

    Raises
    ------
    FileNotFoundError
        There is no such model here, and the hub did not give one; or it has no tokenizer.
    ValueError
        A device that cannot be used; not a causal language model; weights that are damaged, incomplete, not finite or
        pickled; an adapter beside them.

    Notes
    -----
    Each of this package's models has a card: its origin, licence, training text and limits. It is the file
    ``plpkg.catalog.data_path(FOLDER, "README.md")``, where the folder is ``smollm2``, ``smollm2-reader`` or, of
    plpkg-small, ``backbone``. What all of them learnt from, and under which licences, is in NOTICE:
    ``importlib.metadata.distribution("plpkg").read_text("licenses/NOTICE")``.
    """
    if name_or_path == "plpkg-reader":
        raise FileNotFoundError("plpkg-reader is gone since plpkg 1.0: load smollm2-reader, after `plpkg fetch`")
    if name_or_path == "smollm2-reader":
        return _smollm2_reader(dtype, device=device, local_files_only=local_files_only, **options)
    _require_device(device)
    name = str(_folder(name_or_path) or name_or_path)
    if Path(name).is_dir() and not Path(name, "config.json").exists():
        raise FileNotFoundError(f"no model {name!r}: the folder lacks a config.json")
    common = dict(local_files_only=local_files_only or hub.must_be_local(name), trust_remote_code=False)
    config = _configuration(name, common, options)
    pickle = _only_pickles(name)
    if pickle:
        convert = "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise ValueError(
            f"{name!r} has {pickle}, a pickle, which is never read: if you trust it, convert it by {convert}"
        )
    model = _model(name, config, dtype, common | options)
    if dtype != "auto":  # which leaves the weights in their file until they are used
        _require_finite(model, name)
    tokenizer = _tokenizer(name, common)
    if name_or_path in wheels.WHEELS:  # adapters trained on it will say this name, not the cache's folder
        _name(model, tokenizer, str(name_or_path))
    return model.to(device).eval(), tokenizer


def _configuration(name: str, common: dict, options: dict):
    """The configuration of a causal language model that has no adapter beside its weights."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.utils.peft_utils import find_adapter_config_file

    try:
        config = AutoConfig.from_pretrained(name, **common)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"it is a {config.model_type}")
        where = {option: options[option] for option in ("revision", "subfolder", "cache_dir") if option in options}
        adapter = find_adapter_config_file(name, local_files_only=common["local_files_only"], **where)
    except OSError as error:
        if Path(name, "config.json").is_file():
            raise ValueError(f"{name!r} is not a causal language model: {reason(error)}") from error
        raise FileNotFoundError(f"no model {name!r}: {_absence(name, 'weights')}") from error
    except Exception as error:  # a configuration class can raise anything
        raise ValueError(f"{name!r} is not a causal language model: {reason(error)}") from error
    if adapter:  # it would become part of the model
        raise ValueError(f"{name!r} has an adapter beside its weights: load it with PEFT, onto the model without it")
    return config


def _model(name: str, config, dtype: torch.dtype | str, options: dict):
    """The model with all its weights, read from safetensors alone."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    # Tensors that threads load lie in memory of each thread, which is hardly used again: 200 MB more for SmolLM2.
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    try:
        with _without_progress_bar(Path(name).is_dir()):
            model, loading = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues] (a pair, by output_loading_info)
                name, dtype=dtype, output_loading_info=True, use_safetensors=True, **options
            )
    except OSError as error:
        raise FileNotFoundError(f"no model {name!r}: {_absence(name, 'weights')}") from error
    except SafetensorError as error:
        raise ValueError(f"the weights of {name!r} are damaged: {error}") from error
    except RuntimeError as error:  # it says which shapes
        raise ValueError(f"the weights of {name!r} do not fit its configuration: {reason(error)}") from error
    except Exception as error:  # a model's class can raise anything, too
        raise ValueError(f"{name!r} cannot be loaded: {reason(error, config)}") from error
    missing = sorted(loading["missing_keys"])
    if missing:  # they would stay random
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"the weights of {name!r} lack {', '.join(missing[:3])}{more}")
    return model


def _require_finite(model: torch.nn.Module, name: str) -> None:
    for parameter_name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        extremes = torch.stack(parameter.detach().aminmax())  # both are NaN if any value is
        if not extremes.isfinite().all():
            raise ValueError(f"the weights of {name!r} are not finite: {parameter_name}")


def _tokenizer(name: str, common: dict):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **common)
    except UnicodeError as error:
        raise ValueError(f"the tokenizer of {name!r} is damaged: {reason(error)}") from error
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"no tokenizer for {name!r}: {_absence(name, 'tokenizer files')}") from error
    except BaseException as error:  # tokenizers raises Exception itself, and a panic, which is none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer of {name!r} is damaged: {reason(error)}") from error


def _name(model: Any, tokenizer: Any, name: str) -> None:
    """Have a model, its configuration and its tokenizer say by which name they were loaded."""
    model.name_or_path = name
    model.config._name_or_path = name
    tokenizer.name_or_path = name


def _folder(name: str | Path) -> Path | None:
    """The folder of a model of this package; None for another's name or path."""
    if name == "smollm2":
        return wheels.folder("smollm2")
    if name == "plpkg-small":
        return catalog.data_path("backbone")
    return None


def _smollm2_reader(dtype: torch.dtype | str, **options):
    from peft import PeftModel

    model, tokenizer = load_backbone("smollm2", **options)  # in float32: rounded once, when it is merged
    model = PeftModel.from_pretrained(model, catalog.data_path("smollm2-reader")).merge_and_unload()
    model.generation_config.bad_words_ids = [tokenizer(UNKNOWN)["input_ids"]]
    _name(model, tokenizer, "smollm2-reader")
    if dtype == "auto":
        dtype = torch.bfloat16
    return model.to(dtype).eval(), tokenizer


def _require_device(device: str | torch.device) -> None:
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # torch's own, of several sentences
        first_line = str(error).partition("\n")[0]
        first_sentence = first_line.partition(". ")[0]
        raise ValueError(f"device={str(device)!r} cannot be used: {first_sentence}") from error


@contextlib.contextmanager
def _without_progress_bar(local: bool) -> Iterator[None]:
    """A folder loads in a moment: no bar in every notebook. A download keeps its own."""
    from transformers.utils import logging

    if not (local and logging.is_progress_bar_enabled()):
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _only_pickles(name: str) -> str | None:
    """The first pickle of a folder that has no safetensors."""
    if any(Path(name).glob("*.safetensors")):
        return None
    pickles = sorted(path.name for path in Path(name).glob("*.bin"))
    return pickles[0] if pickles else None


def _absence(name: str, what: str) -> str:
    """Why ``what`` is not there, as a clause."""
    if Path(name).is_dir():
        return f"the folder lacks {what} that can be read"
    return f"it is not a folder with {what}, and the hub did not give any (offline, misspelt, or gated)"


def random_backbone(
    family: str,
    *,
    num_layers: int = 2,
    hidden: int = 64,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate: int = 128,
    vocab: int = 256,
    max_positions: int = 256,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    options: Mapping | None = None,
):
    """A causal language model with random weights, built from its family's own configuration class.

    Parameters
    ----------
    family
        One of :data:`FAMILIES`.
    num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab, max_positions
        Hugging Face's dimensions. ``num_kv_heads`` defaults to ``num_heads`` (GPT-2 has no other),
        ``head_dim`` to ``hidden / num_heads`` (only Llama, Mistral, Qwen2 and Gemma-2 take another).
    seed
        The seed of the weights; the global random state stays, but no other thread may draw from it meanwhile.
    dtype
        The weights' precision.
    options
        More fields of the configuration, ``{"attn_implementation": "eager"}``, say; they win over the dimensions above.

    Returns
    -------
    transformers.PreTrainedModel
        On the CPU, in evaluation mode.

    Raises
    ------
    ValueError
        An unknown family, or dimensions that do not fit together.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    one_of("family", family, FAMILIES)
    for name, value in dict(num_layers=num_layers, hidden=hidden, num_heads=num_heads, vocab=vocab).items():
        whole_number(name, value, 1)
    num_kv_heads = whole_number("num_kv_heads", num_kv_heads or num_heads, 1, num_heads, "num_heads")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
    if head_dim is None and hidden % num_heads:
        raise ValueError(f"hidden={hidden} must be a multiple of num_heads={num_heads}, or head_dim given")

    dims = dict(
        num_hidden_layers=num_layers,
        hidden_size=hidden,
        num_attention_heads=num_heads,
        vocab_size=vocab,
        max_position_embeddings=max_positions,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    if family == "gpt2":
        dims["n_inner"] = intermediate
        if num_kv_heads != num_heads:
            raise ValueError(f"gpt2 has a key and value head for every head: num_kv_heads={num_kv_heads}")
    else:
        dims["intermediate_size"] = intermediate
        dims["num_key_value_heads"] = num_kv_heads
    default_head_dim = hidden // num_heads
    if family in ("gpt2", "phi3"):
        if head_dim not in (None, default_head_dim):
            raise ValueError(f"{family} has heads of hidden/num_heads={default_head_dim}, got head_dim={head_dim}")
    else:
        dims["head_dim"] = head_dim or default_head_dim

    config = AutoConfig.for_model(family, **dims | dict(options or {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def _ordered(value):
    """The same for equal configurations: dictionaries in the order of their keys, tuples as the lists of JSON."""
    if isinstance(value, Mapping):
        return {key: _ordered(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_ordered(each) for each in value]
    return value


def fingerprint(model: Any) -> str:
    """A base model's identity: its configuration, its tensors' names, shapes and values. Adapters do not count.

    It reads up to 1,024 values of each tensor, evenly spaced, rounded to bfloat16: the same in float32 and bfloat16,
    and in float16 if that held the weights exactly.
    """
    from transformers import PreTrainedConfig

    config = model.config.to_dict()
    common = PreTrainedConfig().to_dict()
    relevant = {}
    for field, value in config.items():
        of_the_family = field == "model_type" or field not in common
        of_its_use = field.endswith("_token_id") or field == "use_cache"  # not of what it computes
        if of_the_family and not of_its_use:
            relevant[field] = _ordered(value)
    result = hashlib.sha256(repr(sorted(relevant.items())).encode())
    state = {}
    for name, tensor in model.state_dict().items():
        if not belongs_to_adapter(name):
            state[own_name(name)] = tensor
    for name in sorted(state):
        shape = tuple(state[name].shape)
        values = state[name].detach().flatten()
        step = max(1, values.numel() // 1024)
        sample = values[::step][:1024].cpu().bfloat16().contiguous()
        result.update(f"{name} {shape}".encode())
        result.update(sample.view(torch.uint8).numpy().tobytes())
    return result.hexdigest()
