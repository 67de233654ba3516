"""The settings of this room's two adapters, PrivateLoRA's and the ladder, and the file that PEFT keeps them in.

One rule for both: what could be trained but not saved and loaded again is refused when the configuration is made.

A saved adapter is two files. The configuration has the digests of the backbone and of the weights that it was written
with, so that a pair of which one file was replaced is refused.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peft import PeftConfig

from plpkg.files.untrusted import brief, misfits, read_object, read_tensors
from plpkg.validation import flag, one_of, shown, whole_number

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_2_SEQ_LM")
"""Those for which PEFT puts no new head on the model."""


class MethodName(str):
    """A method that is not in PEFT's list, whose entries have a ``value``: PEFT's refusals and status name it."""

    @property
    def value(self) -> str:
        return super().__str__()

    def __str__(self) -> str:
        return f"PeftType.{self.value}"


PRIVATE_LORA = MethodName("PRIVATELORA")
LADDER = MethodName("LADDER")
MAX_RANK = 2**14
"""At least the width of any model."""


@dataclass
class ProjectionConfig(PeftConfig):
    """Where an adapter of this room is, and where its frozen projections come from.

    Attributes
    ----------
    target_modules
        Names of the linear layers, or a regular expression; by default those of the method.
    layers_to_transform
        Numbers of the decoder layers, where ``target_modules`` are names; all by default.
    init
        ``"gaussian"``: the projections are random, from ``projection_seed`` and the module's name. ``"given"``: random
        until something else sets them (:mod:`plpkg.residual.bases`) or they are loaded; they are saved beside M.
    projection_seed
        The seed of the projections, together with each module's name.
    modules_to_save
        Always empty. PEFT would train these modules as well, but they are a part of the backbone.
    backbone
        :func:`plpkg.backbones.fingerprint` of the model that the adapter is for; by default of the one that it is
        built on.
    weights_sha256
        Of the weights' file beside a saved configuration.
    """

    target_modules: list[str] | set[str] | str | None = field(
        default=None, metadata={"help": "Linear layers to adapt."}
    )
    layers_to_transform: list[int] | None = field(default=None, metadata={"help": "Decoder layers to adapt."})
    init: str = field(default="gaussian", metadata={"help": "Where the projections come from."})
    projection_seed: int = field(default=0, metadata={"help": "Seed of the projections."})
    modules_to_save: list[str] | None = field(default=None, metadata={"help": "Always empty."})
    backbone: str | None = field(default=None, metadata={"help": "The backbone's fingerprint."})
    weights_sha256: str | None = field(default=None, metadata={"help": "SHA-256 of the weights' file."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.folder: Path | None = None  # where it was read; no field, which would be saved
        for name, allowed in (("task_type", TASKS), ("modules_to_save", (None, []))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={shown(getattr(self, name))} trains a part of the backbone, which is not saved with M: "
                    "take peft.LoraConfig, which saves it"
                )
        if self.layers_to_transform is not None:
            if isinstance(self.target_modules, str):
                raise ValueError(
                    f"layers_to_transform={shown(self.layers_to_transform)} is for names: the pattern "
                    f"target_modules={shown(self.target_modules)} chooses the layers itself"
                )
            numbers = _listed("layers_to_transform", self.layers_to_transform)
            self.layers_to_transform = [whole_number("layers_to_transform", number, 0) for number in numbers]
        if self.target_modules is not None and not isinstance(self.target_modules, str):
            names = _listed("target_modules", self.target_modules)
            if not all(isinstance(name, str) for name in names):
                raise ValueError(f"target_modules must be names of modules, got {shown(names)}")
            self.target_modules = set(names)
        one_of("init", self.init, ("gaussian", "given"))
        self.projection_seed = whole_number("projection_seed", self.projection_seed, 0, 2**64 - 1)

    @property
    def save_projection(self) -> bool:
        """Whether the projections are saved beside M: nothing else brings those that were given."""
        return self.init == "given"

    def save_pretrained(self, save_directory: str | Path, **options) -> None:
        """As PEFT does it, after the weights.

        Raises
        ------
        ValueError
            The weights are not finite, so that nobody would load them.
        """
        weights = Path(save_directory, WEIGHTS)
        self.weights_sha256 = read_tensors(weights)[1] if weights.exists() else None
        super().save_pretrained(str(save_directory), **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, subfolder: str | None = None, **_):
        """Read a configuration that this method has saved in a folder; PEFT's options for the hub change nothing.

        Raises
        ------
        ValueError
            There is none, or it says what this version does not know.
        """
        folder = Path(pretrained_model_name_or_path, subfolder or "")
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            fields = read_object(folder / CONFIG)
            fields.pop("save_projection", None)  # of earlier versions; it follows from init
            for name in sorted(fields.keys() - known):
                if fields[name] not in (None, False, "", [], {}):
                    raise ValueError(f"{CONFIG}: {shown(name)}={shown(fields[name])} must be empty: it is unknown")
            if isinstance(fields.get("target_modules"), str):
                raise ValueError(f"{CONFIG}: target_modules={shown(fields['target_modules'])} must be a list of names")
            config = cls(**{name: fields[name] for name in fields.keys() & known - {"peft_type"}})
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        config.folder = folder
        return config

    def require_weights(self, needed: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse the weights beside this configuration unless they are those that it was written with, and all needed.

        Parameters
        ----------
        needed
            The shapes of the adapter's tensors, by name.

        Raises
        ------
        ValueError
            They are of another run, not finite, or have other names or shapes.
        """
        assert self.folder is not None, "a configuration that was not read has no weights beside it"
        tensors, sha256 = read_tensors(self.folder / WEIGHTS)
        if self.weights_sha256 not in (None, sha256):
            raise ValueError(
                f"{WEIGHTS} has the SHA-256 {sha256[:12]}…, but {CONFIG} was written with "
                f"{shown(self.weights_sha256)[1:13]}…: one of them is of another adapter, "
                "or a run was killed while it wrote them"
            )
        reasons = misfits({name: tensor.shape for name, tensor in tensors.items()}, needed)
        if reasons:
            raise ValueError(f"{WEIGHTS}: {brief(reasons)}")


@dataclass
class PrivateLoraConfig(ProjectionConfig):
    """How a model is adapted; the other fields are those of :class:`ProjectionConfig`.

    Attributes
    ----------
    r_c2d, r_d2c
        Ranks from cloud to device and back: M is ``(r_d2c, r_c2d)``.
    late
        Each layer's answer is added one adapted layer later, at the same projection; the last layer adds two, the
        previous layer's and its own. So two exchanges can be under way at once. A late adapter cannot be merged, and
        gradient checkpointing, which computes a layer alone, cannot train it.
    """

    r_c2d: int = field(default=64, metadata={"help": "Rank from cloud to device."})
    r_d2c: int = field(default=64, metadata={"help": "Rank from device to cloud."})
    late: bool = field(default=False, metadata={"help": "Add each answer one layer later."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PRIVATE_LORA
        self.r_c2d = whole_number("r_c2d", self.r_c2d, 1, MAX_RANK)
        self.r_d2c = whole_number("r_d2c", self.r_d2c, 1, MAX_RANK)
        flag("late", self.late)


@dataclass
class LadderConfig(ProjectionConfig):
    """How a model gets a ladder; the other fields are those of :class:`ProjectionConfig`.

    Attributes
    ----------
    r
        How many numbers of each layer go to M, at most ``hidden_size``.
    width
        Units of M's hidden layer, beside the matrix; without one M is a matrix alone.
    """

    r: int = field(default=96, metadata={"help": "Numbers of each layer that go to M."})
    width: int | None = field(default=None, metadata={"help": "Units of M's hidden layer."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = LADDER
        self.r = whole_number("r", self.r, 1, MAX_RANK)
        if self.width is not None:
            self.width = whole_number("width", self.width, 1, MAX_RANK)


def _listed(name: str, values: object) -> list:
    """A collection, in whatever form, as a list, which PEFT can save."""
    if isinstance(values, Collection) and not isinstance(values, str):
        return list(values)
    raise ValueError(f"{name} must be a list, got {shown(values)}")
