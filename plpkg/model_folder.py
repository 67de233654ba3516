"""A folder with a model's files, as a stranger may have written it, judged before transformers reads it.

transformers takes more than is meant: an adapter that lies beside the weights becomes part of the model, pickled
weights are opened, a pipe makes it wait, and a configuration's sizes are believed. Python files are let be: they are
never imported (``trust_remote_code=False``), and real downloads have them.
"""

import json
import stat
from pathlib import Path

from plpkg.untrusted import header_length, open_regular, read_file, shown

MAX_JSON_BYTES = 2**24
LARGE, MAX_LARGE_BYTES = ("tokenizer.json", "vocab.json"), 2**26
"""Vocabularies, which tokenizers reads; Gemma's, of a quarter of a million words, has half of these bytes."""
MAX_SHARD_HEADER_BYTES = 2**22
"""Of some 30,000 tensors in one file."""
MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1024),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), 2**14),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim", "intermediate_size", "vocab_size"), 2**24),
}
"""The sizes that decide what is built, and the most that each may be."""


def require_sizes(fields: dict) -> None:
    """ValueError if a configuration's sizes are no whole numbers from 1 to :data:`MOST`; None and lists are let be."""
    inner = [value for name, value in fields.items() if name.endswith("_config") and isinstance(value, dict)]
    for each in (fields, *inner):
        for name, most in MOST.items():
            value = each.get(name)
            if isinstance(value, (int, float, str)) and not (type(value) is int and 1 <= value <= most):
                raise ValueError(f"config.json: {name} must be a whole number from 1 to {most:,}, got {shown(value)}")


def require_model_folder(folder: Path) -> None:
    """Judge a folder with a model in it.

    Raises
    ------
    ValueError
        A file is no regular one or too large, a JSON file is none, a size is out of range, an adapter lies beside the
        model, the weights are pickles, or an index points out of the folder. The sentence names the file.
    """
    for path in sorted(folder.iterdir()):
        if path.name.startswith("adapter_"):
            raise ValueError(f"{path.name} lies beside the model, and would become part of it: keep adapters elsewhere")
        if path.suffix in (".json", ".safetensors", ".txt", ".model", ".jinja"):
            if not (path.exists() and stat.S_ISREG(path.stat().st_mode)):
                raise ValueError(f"{path.name} is not a regular file")
            if path.suffix == ".safetensors":
                _require_header(path)
            elif path.name in LARGE and (size := path.stat().st_size) > MAX_LARGE_BYTES:
                raise ValueError(f"{path.name} has {size:,} bytes, at most {MAX_LARGE_BYTES:,} are allowed")
            elif path.suffix == ".json" and path.name not in LARGE:
                fields = read_json(path)
                if path.name == "config.json":
                    require_sizes(fields)
                if path.name.endswith(".index.json"):
                    _require_inside(path.name, fields)
    pickles = [path.name for path in folder.glob("*.bin")]
    if pickles and not list(folder.glob("*.safetensors")):
        convert = "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise ValueError(f"{pickles[0]} is a pickle, which is never read: if you trust it, convert it by {convert}")


def read_json(path: Path) -> dict:
    """A JSON object of at most :data:`MAX_JSON_BYTES`; its numbers need not be finite: some real ones are not."""
    try:
        fields = json.loads(bytes(read_file(path, MAX_JSON_BYTES)))
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    except ValueError as error:
        said = shown(str(error))[1:-1]
        raise ValueError(said if said.startswith(path.name) else f"{path.name} is not JSON: {said}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path.name} is not an object, but {shown(fields)}")
    return fields


def _require_header(path: Path) -> None:
    with open_regular(path) as file:
        try:
            header_length(file.read(8), MAX_SHARD_HEADER_BYTES)
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None


def _require_inside(name: str, fields: dict) -> None:
    if not isinstance(files := fields.get("weight_map"), dict):
        raise ValueError(f"{name} has no weight_map")
    outside = {
        str(file) for file in files.values() if Path(str(file)).name != file or Path(file).suffix != ".safetensors"
    }
    if outside:
        raise ValueError(f"{name} points to {shown(min(outside))}, which is no safetensors file of this folder")
