"""Facts as data: model shapes, devices, links and published tables, each with its source.

Everything is read from ``data/`` (CSV, one source a row). Functions elsewhere take the objects
of this module or their catalog names.

Left out: anything that a configuration does not say. A :class:`ModelShape` describes a decoder
(or an encoder such as BERT) with one attention block a layer. Of a mixture of experts it knows how
many weights the routed experts have, not which of them a text meets: a router is taken to choose evenly.
"""

import csv
import difflib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from plpkg.results import Tabular
from plpkg.validation import flag, number, one_of, whole_number


@dataclass(frozen=True)
class ModelShape(Tabular):
    """The dimensions of a transformer that decide its traffic, memory and speed.

    Attributes
    ----------
    name
        The name to call it by.
    family
        Hugging Face's ``model_type``: ``llama``, ``qwen2``, ``phi3`` …
    num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab
        Hugging Face's dimensions. Queries are ``num_heads * head_dim`` wide, keys and values
        ``num_kv_heads * head_dim`` each.
    tied_embeddings
        Whether the word embedding and the LM head are one tensor.
    parameters
        Every weight, shared ones counted once.
    encoder
        Whether it is an encoder such as BERT: it reads, but does not generate.
    source
        The origin of the numbers.
    expert_parameters, num_experts, num_experts_per_tok
        For a mixture of experts: the weights of all routed experts together, how many there are in a
        layer, and how many of them a token meets. Shared experts are not routed: each token meets them.
    sliding_window, num_sliding_layers
        How many positions a token sees, itself included, in each layer with a sliding window (or with chunked
        attention), and how many layers have one. Both 0: every layer sees the whole text.
    """

    name: str
    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    parameters: int
    encoder: bool = False
    source: str = "given by the user"
    expert_parameters: int = 0
    num_experts: int = 1
    num_experts_per_tok: int = 1
    sliding_window: int = 0
    num_sliding_layers: int = 0

    def __post_init__(self) -> None:
        def settle(name: str, *limits) -> None:
            value = whole_number(name, getattr(self, name), *limits)
            # A plain int: products of NumPy's integers overflow.
            object.__setattr__(self, name, value)

        flag("tied_embeddings", self.tied_embeddings)
        flag("encoder", self.encoder)
        for field in ("num_layers", "hidden", "num_heads", "head_dim", "intermediate", "vocab", "parameters"):
            settle(field, 1)
        settle("num_kv_heads", 1, self.num_heads, "num_heads")
        if self.decoder_parameters < 1:
            raise ValueError(
                f"parameters={self.parameters} of {self.name} leave nothing for the decoder beside "
                f"vocab·hidden={self.embedding_parameters}"
            )
        settle("expert_parameters", 0, self.decoder_parameters, "decoder_parameters")
        settle("num_experts", 1)
        settle("num_experts_per_tok", 1, self.num_experts, "num_experts")
        settle("sliding_window", 0)
        settle("num_sliding_layers", 0, self.num_layers, "num_layers")
        if (self.sliding_window == 0) != (self.num_sliding_layers == 0):
            raise ValueError(
                f"sliding_window={self.sliding_window} and num_sliding_layers={self.num_sliding_layers} of {self.name} "
                "must both be 0, or neither"
            )

    @property
    def query_dim(self) -> int:
        """Width of the query projection's output."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of the key projection's output, and of the value projection's."""
        return self.num_kv_heads * self.head_dim

    @property
    def projection_dims(self) -> tuple[int, int, int]:
        """Output widths of the q, k and v projections."""
        return self.query_dim, self.kv_dim, self.kv_dim

    @property
    def embedding_parameters(self) -> int:
        """Weights of the word embedding; the LM head has as many."""
        return self.vocab * self.hidden

    @property
    def decoder_parameters(self) -> int:
        """Weights of everything but the word embedding and the LM head."""
        copies = 1 if self.tied_embeddings else 2
        return self.parameters - self.embedding_parameters * copies

    @property
    def computing_parameters(self) -> int:
        """Weights that a forward pass multiplies with: decoder and LM head, no embedding look-up."""
        return self.decoder_parameters + self.embedding_parameters

    @property
    def active_parameters(self) -> int:
        """Every weight but those of the experts that one token does not meet; of a dense model all ``parameters``."""
        return self.parameters - round(self.unread_parameters())

    def cached_positions(self, context: int) -> int:
        """Positions whose keys and values the layers hold after ``context`` tokens, summed over the layers.

        A layer with a sliding window holds one position less than its window, as transformers' ``DynamicCache`` does:
        the next token is the last of its own window.
        """
        full = self.num_layers - self.num_sliding_layers
        in_window = min(context, self.sliding_window - 1)
        return full * context + self.num_sliding_layers * in_window

    def unread_parameters(self, positions: int = 1) -> float:
        """Weights of the experts that none of ``positions`` tokens meets, in the mean over even choices."""
        not_met = 1 - self.num_experts_per_tok / self.num_experts  # the chance that a token does not meet an expert
        return self.expert_parameters * not_met**positions

    def rows(self) -> list[dict]:
        qkv = self.num_layers * self.hidden * sum(self.projection_dims)
        out = self.num_layers * self.query_dim * self.hidden
        parts = {
            "word embedding": self.embedding_parameters,
            "LM head": 0 if self.tied_embeddings else self.embedding_parameters,
            "q, k, v projections": qkv,
            "attention output": out,
            "feed-forward, norms, biases": self.decoder_parameters - qkv - out - self.expert_parameters,
        }
        if self.expert_parameters:
            parts["routed experts"] = self.expert_parameters
        rows = []
        for part, count in parts.items():
            rows.append({"part": part, "parameters": count, "share_percent": 100 * count / self.parameters})
        return rows

    def __repr__(self) -> str:
        heads = f"{self.num_heads} heads"
        if self.num_kv_heads != self.num_heads:
            heads += f" ({self.num_kv_heads} for keys and values)"
        vocabulary = f"vocabulary {self.vocab}"
        if self.tied_embeddings:
            vocabulary += " tied"
        parameters = f"{self.parameters:,} parameters"
        if self.expert_parameters:
            parameters += f", {self.active_parameters:,} of them active"
        layers = f"{self.num_layers} layers × {self.hidden}"
        return f"{self.name}: {layers}, {heads} of {self.head_dim}, {vocabulary}, {parameters}"

    @classmethod
    def from_config(cls, config, name: str | None = None, *, local_files_only: bool = False) -> "ModelShape":
        """Read the shape of any Hugging Face model whose every layer has one attention block.

        Parameters
        ----------
        config
            A hub name, a local folder with a ``config.json``, or a ``PreTrainedConfig`` object.
            Code that comes with a model is never run.
        name
            The result's name; by default the configuration's own.
        local_files_only
            Never ask the hub. A hub that does not answer one request is not asked again.

        Returns
        -------
        ModelShape
            Counted on the meta device: the model is instantiated without storage, so tied
            tensors, fused projections and biases are counted as they are, and so are a mixture's
            experts. Of a multimodal model, only the language model with its head is counted. Sliding
            windows are those of transformers' ``DynamicCache``.

        Raises
        ------
        FileNotFoundError
            The name is neither a readable folder nor to be had from the hub.
        ValueError
            An encoder-decoder, or layers that are not one attention block each: mixtures of
            attention and other layers, latent attention, shared layers. Or experts whose number the
            configuration does not say, or sliding windows of several lengths.
        TypeError
            Something else than a name or a configuration.
        """
        from plpkg.shapes import dimensions

        return cls(**dimensions(config, name, local_files_only))


@dataclass(frozen=True)
class Device:
    """A processor with its memory: bytes read per second, floating-point operations per second.

    ``label`` says what kind of figure this is: *reported*, *measured* or *assumed*.
    """

    name: str
    memory_bandwidth_bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    label: str = "given by the user"
    source: str = "given by the user"

    def __post_init__(self) -> None:
        for field in ("memory_bandwidth_bytes_per_s", "flops_per_s", "memory_bytes"):
            value = number(field, getattr(self, field), open_low=True)
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        return (
            f"{self.name}: {self.memory_bandwidth_bytes_per_s / 1e9:g} GB/s, {self.flops_per_s / 1e12:g} TFLOPS, "
            f"{self.memory_bytes / 1e9:g} GB ({self.label})"
        )


@dataclass(frozen=True)
class Link:
    """A network link seen from the device: bits per second each way, and its round-trip time.

    ``label`` says what kind of figure this is: *reported*, *measured* or *assumed*.
    """

    name: str
    uplink_bits_per_s: float
    downlink_bits_per_s: float
    rtt_s: float
    label: str = "given by the user"
    source: str = "given by the user"

    def __post_init__(self) -> None:
        for field in ("uplink_bits_per_s", "downlink_bits_per_s"):
            value = number(field, getattr(self, field), open_low=True)
            object.__setattr__(self, field, value)
        object.__setattr__(self, "rtt_s", number("rtt_s", self.rtt_s))

    def __repr__(self) -> str:
        return (
            f"{self.name}: {self.uplink_bits_per_s / 1e6:g} Mb/s up, {self.downlink_bits_per_s / 1e6:g} Mb/s down, "
            f"RTT {self.rtt_s * 1e3:g} ms ({self.label})"
        )


def data_path(*parts: str) -> Path:
    """The path of a file in ``data/``: inside the installed package, else in the checkout.

    Raises
    ------
    FileNotFoundError
        There is no such file, or no data at all (a broken installation).
    """
    package = Path(__file__).parent
    folder = package / "data"
    if not folder.is_dir():
        folder = package.parent / "data"
    path = folder.joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"no data file {'/'.join(parts) or 'folder'!r} in {folder}")
    return path


def cache_path(*parts: str) -> Path:
    """The path of a file that can be made again: in the user's cache, or in the folder that ``PLPKG_CACHE`` names."""
    from platformdirs import user_cache_path

    named = os.environ.get("PLPKG_CACHE")
    folder = Path(named).expanduser() if named else user_cache_path("plpkg")
    return folder.joinpath(*parts)


def _read(cls, filename: str) -> dict:
    """The objects of a table, by name: a row each, its columns the fields of ``cls``."""
    parse = {int: int, float: float, str: str, bool: lambda text: text == "true"}
    found = {}
    with data_path(filename).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            values = {}
            for column, text in row.items():
                kind = cls.__dataclass_fields__[column].type
                values[column] = parse[kind](text)
            found[row["name"]] = cls(**values)
    return found


@cache
def models() -> dict[str, ModelShape]:
    """All model shapes of ``data/models.csv`` by name."""
    return _read(ModelShape, "models.csv")


def decoders() -> list[str]:
    """The names of the models that generate: all but the encoders."""
    return [name for name, shape in models().items() if not shape.encoder]


@cache
def devices() -> dict[str, Device]:
    """All devices of ``data/devices.csv`` by name."""
    return _read(Device, "devices.csv")


@cache
def links() -> dict[str, Link]:
    """All links of ``data/links.csv`` by name."""
    return _read(Link, "links.csv")


@cache
def assumptions() -> dict[str, float]:
    """The assumed figures of several notebooks, from ``data/assumptions.csv``; each name ends with its unit."""
    with data_path("assumptions.csv").open(encoding="utf-8", newline="") as file:
        return {row["name"]: float(row["value"]) for row in csv.DictReader(file)}


def assumed(name: str) -> float:
    """One of :func:`assumptions`: ``assumed("phone_battery_j")``. ValueError if there is none of that name."""
    return assumptions()[one_of("name", name, tuple(assumptions()))]


def _look_up(kind: str, cls, known: dict, name):
    """An object of the catalog by its name; an object of ``cls`` passes through."""
    if isinstance(name, cls):
        return name
    if not isinstance(name, str):
        got = repr(name)
        if cls is ModelShape and (hasattr(name, "model_type") or isinstance(name, Path)):
            got = f"a {type(name).__name__}: read its shape with ModelShape.from_config"
        raise TypeError(f"a {kind} is a {cls.__name__} or a catalog name, got {got}")
    if name in known:
        return known[name]
    if cls is ModelShape and "/" in name:
        raise ValueError(f"unknown {kind} {name!r}: for a hub's name or a folder, ModelShape.from_config({name!r})")
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    hint = f"near: {', '.join(near)}; " if near else ""
    raise ValueError(f"unknown {kind} {name!r}; {hint}all {len(known)}: {', '.join(known)}")


def model(name: str | ModelShape) -> ModelShape:
    """A model shape by catalog name; a :class:`ModelShape` passes through.

    Raises
    ------
    ValueError
        Unknown name; the message lists the near ones. For a model outside the catalog use
        :meth:`ModelShape.from_config`: a hub's name gets that for an answer.
    TypeError
        Something else; a Hugging Face configuration gets that answer, too.
    """
    return _look_up("model", ModelShape, models(), name)


def device(name: str | Device) -> Device:
    """A device by catalog name; a :class:`Device` passes through. Raises like :func:`model`."""
    return _look_up("device", Device, devices(), name)


def link(name: str | Link) -> Link:
    """A link by catalog name; a :class:`Link` passes through. Raises like :func:`model`."""
    return _look_up("link", Link, links(), name)


def published(name: str):
    """A published table as a ``pandas.DataFrame``, each row with its source.

    Every figure in it is *reported*: re-typed from a publication, or digitised from its
    figures (then with a ``tolerance`` in the unit of the value).

    Raises
    ------
    ValueError
        Unknown name; the message lists the near ones.
    """
    return _table("published", name)


def measured(name: str):
    """A benchmark's last table, as a ``pandas.DataFrame``: ``residual_wire`` of ``benchmarks/residual/wire.py``.

    Every figure in it is *measured (recorded)*: each row says by which command, commit, seed,
    machine and versions. Raises like :func:`published`.
    """
    return _table("measured", name)


def _table(folder: str, name: str):
    import pandas as pd

    tables = {path.stem: path for path in sorted(data_path(folder).glob("*.csv"))}
    path = _look_up(f"{folder} table", Path, tables, name)
    return pd.read_csv(path, dtype={"commit": str})  # 85199e1 is no number


@cache
def published_gpu_tokens_per_s(model: ModelShape, cloud: Device) -> float | None:
    """The decoding speed that a publication reports for this model on this GPU alone, or ``None``.

    Unit: tokens per second, batch 1, 16 bit, LM head included (``published/private_lora_gpu.csv``).
    A shape or a device that only shares its name with the catalog's has no published speed.
    """
    if models().get(model.name) != model or devices().get(cloud.name) != cloud:
        return None
    with data_path("published", "private_lora_gpu.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["cloud"]) == (model.name, cloud.name):
                return float(row["tokens_per_s"])
    return None
