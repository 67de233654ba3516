"""A folder with a model's files, as a stranger may have written it, judged before transformers reads it.

transformers takes more than is meant: an adapter that lies beside the weights becomes part of the model, pickled
weights are opened, a pipe makes it wait, files and code are taken that a field names, and every number is believed.
Python files are let be: they are never imported (``trust_remote_code=False``), and real downloads have them.
"""

import itertools
import json
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from plpkg.untrusted import header_length, open_regular, read_file, shown

MAX_JSON_BYTES = 2**24
VOCABULARY = r"(tokenizer|tekken|.*vocab.*|emoji|normalizer|byte_maps|word_\w+)\.json"
TOKENS, INDEX = r"(tokenizer_config|special_tokens_map|added_tokens)\.json", r".*\.safetensors\.index.*"
JUDGED = rf"(generation_)?config\.json|{TOKENS}|{INDEX}"
"""The JSON files that transformers believes; others, a list of languages, say, are not its."""
FILES = {
    r"(generation_)?config\.json": (MAX_JSON_BYTES, {b",[{": 2**17}),
    r"added_tokens\.json": (MAX_JSON_BYTES, {b",[{": 2**15}),
    TOKENS: (MAX_JSON_BYTES, {b",[{": 2**18}),
    INDEX: (MAX_JSON_BYTES, {b",[{": 2**19}),
    VOCABULARY: (2**26, {b",[{": 3 * 2**20, b"{": 2**15}),
    r"(merges|vocab|dict)\.txt|bpe\.codes|prophetnet\.tokenizer": (2**25, {b"\n": 3 * 2**17}),
    r".*\.(model|spm)|tokenizer\.model.*": (2**25, {}),
    r".*\.jinja": (2**20, {}),
}
"""What transformers reads: the most bytes, and how often these may stand there, since each makes an object in memory.

Gemma's vocabulary, of a quarter of a million words, has half of what is allowed; a brace begins an added token.
"""
READ = (".json", ".safetensors", ".txt")
MAX_TEMPLATES = 64
MAX_SHARD_HEADER_BYTES = 2**22
"""Of some 30,000 tensors in one file."""
MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1024),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), 2**14),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "vocab_size"), 2**24),
    "num_labels": 2**16,
}
"""The sizes that decide what is built, and the most that each may be."""
MOST_BY_PART = {
    "(layers|blocks|experts)$": 2**14,
    "theta|base|freq|seed|param|max_length|pixels": 10**31,  # a tokenizer's longest text is 10^30
    "position|length|ctx|seq|window": 2**24,
    "": 2**21,
}
"""The same for any other whole number: by what is in its name, the first that is."""
MAX_LISTED_TOKENS = 4096
NOTHING = (None, "", [], {})
ALLOWED = {
    # The names of other files, which nobody has judged, or what a tokenizer's constructor opens.
    **dict.fromkeys(("transformers_weights", "configuration_files", "fast_tokenizer_files"), NOTHING),
    **dict.fromkeys(
        ("gguf_file", "vocab_file", "merges_file", "model_file", "vocab", "merges", "init_inputs"), NOTHING
    ),
    # Other values are packages to import, or kernels to fetch from the hub.
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), ("eager", "sdpa", "flex_attention", None)),
    **dict.fromkeys(("experts_implementation", "_experts_implementation"), ("eager", "grouped_mm", "batched_mm", None)),
    **dict.fromkeys(("padding_side", "truncation_side"), ("left", "right", None)),
}
"""Fields that decide what else is read or run, wherever they stand, and their values."""
MODULES, MODULES_PER_TENSOR, MAX_MODULES, SPARE = 4096, 16, 2**14, 2**24
"""What may be built: Llama has 1.4 modules for each tensor; a byte may hold four numbers; some tables are besides."""


def parts(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Everything within a JSON value, itself included, and the nearest name above it."""
    left = [(name, value)]
    while left:
        name, value = left.pop()
        yield str(name), value
        if isinstance(value, Mapping):
            left += value.items()
        elif isinstance(value, (list, tuple)):
            left += [(name, each) for each in value]


def require_sizes(fields: dict, file: str = "config.json") -> None:
    """ValueError if a number or another value of a configuration is none that a real model has.

    Where a list or None stands for a size, it is let be: transformers says so.
    """
    for name, value in parts(fields):
        most = MOST.get(name)
        if most and isinstance(value, (int, float, str)) and not (type(value) is int and 1 <= value <= most):
            raise _refusal(file, name, f"a whole number from 1 to {most:,}", value)
        most = next(most for part, most in MOST_BY_PART.items() if re.search(part, name))
        if type(value) is int and abs(value) > most and name not in MOST:
            raise _refusal(file, name, f"a whole number of at most {most:,}", value)
        if isinstance(value, float) and (value != value or (name.endswith(("eps", "epsilon")) and not 0 <= value <= 1)):
            raise _refusal(file, name, "a number" if value != value else "a number from 0 to 1", value)
        if name in ALLOWED and value not in ALLOWED[name]:
            values = ", ".join(map(repr, ALLOWED[name][:-1]))
            raise _refusal(file, name, "empty" if ALLOWED[name] is NOTHING else f"one of {values}", value)


def _refusal(file: str, name: str, allowed: str, value: object) -> ValueError:
    return ValueError(f"{file}: {shown(name)[1:-1]} must be {allowed}, got {shown(value)}")


def _require_tokenizer(file: str, fields: dict) -> None:
    """Its class is a tokenizer (``AutoModel`` would be taken as well), and its tokens are few, with usual numbers."""
    import transformers

    name = str(fields.get("tokenizer_class"))
    kind = getattr(transformers, name, transformers.PreTrainedTokenizerBase)  # an unknown one is replaced
    lacking = hasattr(kind, "_backends")  # transformers will say which package it needs
    if not (lacking or (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedTokenizerBase))):
        raise _refusal(file, "tokenizer_class", "a tokenizer's", name)
    for name, value in parts(fields):
        if name.endswith("special_tokens") and isinstance(value, (list, dict)) and len(value) > MAX_LISTED_TOKENS:
            raise _refusal(file, name, f"at most {MAX_LISTED_TOKENS:,} tokens", value)
    if file == "tokenizer_config.json" and len(fields) > MAX_LISTED_TOKENS:  # any "…_token" is one
        raise ValueError(f"{file} has {len(fields):,} fields, at most {MAX_LISTED_TOKENS:,} are allowed")
    ids = fields.get("added_tokens_decoder")
    odd = [each for each in ids if not re.fullmatch("[0-9]{1,7}", each)] if isinstance(ids, dict) else []
    if odd:
        raise _refusal(file, "added_tokens_decoder", "tokens by numbers of at most 7 digits", odd[0])


def require_file(path: Path, folder: Path) -> dict | None:
    """Judge a file that transformers may read; returns the fields, if it is a JSON file that is believed."""
    if not (path.exists() and stat.S_ISREG(path.stat().st_mode)):
        raise ValueError(f"{path.name} is not a regular file")
    target = path.resolve()  # the hub's cache has links to its blobs
    if target.parent.name != "blobs" and not target.is_relative_to(folder.resolve()):
        raise ValueError(f"{path.name} must be a file of this folder, got a link to {shown(str(target))}")
    for names, (most_bytes, most) in FILES.items():
        if re.fullmatch(names, path.name):
            _require_small(path, most_bytes, most)
            break
    if not re.fullmatch(JUDGED, path.name):
        return None
    fields = read_json(path)
    require_sizes(fields, path.name)
    return fields


def require_model_folder(folder: Path) -> tuple[int, int]:
    """Judge a folder with a model in it; returns how many tensors and bytes its weights have.

    Raises
    ------
    ValueError
        A file that transformers reads is no regular one of this folder or too large, a JSON file is none, a number or
        another value is out of range, an adapter lies beside the model, or the weights are pickles, no floating-point
        numbers, or elsewhere. The sentence names the file.
    """
    tensors, size, quantized, whole = 0, 0, False, []
    templates = list(folder.glob("additional_chat_templates/*.jinja"))
    if len(templates) > MAX_TEMPLATES:
        raise ValueError(f"additional_chat_templates has {len(templates):,} files, at most {MAX_TEMPLATES} are allowed")
    for path in sorted([*folder.iterdir(), *templates]):
        if path.name.startswith("adapter_"):
            raise ValueError(f"{path.name} lies beside the model, and would become part of it: keep adapters elsewhere")
        if not (path.suffix in READ or any(re.fullmatch(names, path.name) for names in FILES)):
            continue
        if (fields := require_file(path, folder)) is not None:
            (_require_inside if ".index" in path.name else _require_tokenizer)(path.name, fields)
            quantized |= bool(fields.get("quantization_config"))
        if path.suffix == ".safetensors":
            kinds = _dtypes(path)
            tensors, size = tensors + len(kinds), size + path.stat().st_size
            whole += [
                f"{path.name}: {shown(name)} must be floating-point numbers, got {kind}"
                for name, kind in kinds.items()
                if name.endswith(".weight") and not re.match("B?F|C", kind)
            ]
    if whole and not quantized:
        raise ValueError(whole[0])
    pickles = [path.name for path in folder.glob("*.bin")]
    if pickles and not tensors:
        convert = "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise ValueError(f"{pickles[0]} is a pickle, which is never read: if you trust it, convert it by {convert}")
    return tensors, size


def _require_small(path: Path, most_bytes: int, most: dict[bytes, int]) -> None:
    if (size := path.stat().st_size) > most_bytes:
        raise ValueError(f"{path.name} has {size:,} bytes, at most {most_bytes:,} are allowed")
    found = dict.fromkeys(most, 0)
    with open_regular(path) as file:
        for chunk in iter(lambda: file.read(2**20), b""):
            for each in most:
                found[each] += sum(map(chunk.count, each))
    for each, count in found.items():
        if count > most[each]:
            raise ValueError(
                f"{path.name} has {count:,} of the characters {each.decode()!r}, at most {most[each]:,} are allowed"
            )


def read_json(path: Path) -> dict:
    """A JSON object of at most :data:`MAX_JSON_BYTES`; its numbers need not be finite: some real ones are not."""
    try:
        fields = json.loads(read_file(path, MAX_JSON_BYTES).decode())
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    except ValueError as error:
        said = shown(str(error))[1:-1]
        raise ValueError(said if said.startswith(path.name) else f"{path.name} is not JSON: {said}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path.name} is not an object, but {shown(fields)}")
    return fields


def _dtypes(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    with open_regular(path) as file:
        try:
            header_length(file.read(8), MAX_SHARD_HEADER_BYTES)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
    try:
        with safe_open(path, "pt") as tensors:
            return {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"the weights of {path.name} are damaged: {shown(str(error))}") from None


def _require_inside(name: str, fields: dict) -> None:
    if not isinstance(files := fields.get("weight_map"), dict):
        raise ValueError(f"{name} has no weight_map")
    outside = {
        str(file) for file in files.values() if Path(str(file)).name != file or Path(file).suffix != ".safetensors"
    }
    if outside:
        raise ValueError(f"{name} points to {shown(min(outside))}, which is no safetensors file of this folder")
    if not isinstance(fields.get("metadata"), dict):
        raise ValueError(f"{name} has no metadata")


def on_meta(config, kind, tensors: int | None = None, size: int | None = None):
    """The model that ``kind``, an Auto class, makes of a configuration, without its numbers.

    ValueError if it has more modules than any real one, or far more than ``tensors`` and ``size`` bytes can fill.
    """
    import torch
    from torch.nn.modules.module import register_module_module_registration_hook

    most = MAX_MODULES if tensors is None else min(MAX_MODULES, MODULES + MODULES_PER_TENSOR * tensors)
    count, thread = itertools.count(1), threading.get_ident()

    def limit(*_) -> None:
        if threading.get_ident() == thread and next(count) > most:
            raise ValueError(f"config.json: its sizes must make at most {most:,} modules")

    hook = register_module_module_registration_hook(limit)
    try:
        with torch.device("meta"):
            model = kind.from_config(config)
    finally:
        hook.remove()
    numbers = sum(each.numel() for each in itertools.chain(model.parameters(), model.buffers()))
    if size is not None and numbers > 4 * size + SPARE:
        raise ValueError(f"config.json: its sizes make {numbers:,} numbers, but the weights have {size:,} bytes")
    return model


def reason(error: Exception, fields: Mapping = MappingProxyType({})) -> str:
    """An exception of transformers' as a clause, with the name of the field whose value it is about, if it is known."""
    if isinstance(error, KeyError) and error.args:
        name = next((name for name, value in parts(fields) if value == error.args[0]), None)
        if name:
            return f"config.json: {shown(name)[1:-1]} must be one that transformers knows, got {shown(error.args[0])}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])[:200]
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__} {text}".strip()
