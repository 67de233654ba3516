"""The settings of this room's two adapters, PrivateLoRA's and the ladder, as PEFT keeps them in a file."""

import functools
import inspect
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from peft import PeftConfig, PeftModel

from plpkg.checkpoints import PARTIAL, private_folder, replace_files
from plpkg.residual import saved
from plpkg.validation import flag, one_of, shown, whole_number


class MethodName(str):
    """A method that is not in PEFT's list, whose entries have a ``value``: PEFT's refusals and status name it."""

    @property
    def value(self) -> str:
        return super().__str__()

    def __str__(self) -> str:
        return f"PeftType.{self.value}"


PRIVATE_LORA, LADDER = MethodName("PRIVATELORA"), MethodName("LADDER")
MAX_RANK = 2**14
"""At least the width of any model; on a model, a saved adapter's ranks are bounded by its widths."""


@dataclass
class ProjectionConfig(PeftConfig):
    """Where an adapter of this room is, and where its frozen projections come from.

    Attributes
    ----------
    target_modules
        Names of the linear layers, or a regular expression; by default those of the method.
    exclude_modules
        Names, or a regular expression, of layers to leave alone.
    layers_to_transform
        Numbers of the decoder layers; all by default.
    layers_pattern
        The name of the list of layers, where PEFT does not know it.
    init
        ``"gaussian"``: the projections are random, from ``projection_seed`` and the module's name. ``"given"``: random
        until something else sets them (:mod:`plpkg.residual.bases`) or they are loaded.
    projection_seed
        The seed of the projections, together with each module's name.
    save_projection
        Save the projections beside what learns. By default unless they are ``"gaussian"``: singular vectors may change
        sign from one machine to the next, and what was learnt for the others would be wrong.
    modules_to_save
        Other modules to train and save. What is read from a folder has none: they would replace a part of the backbone.
    backbone
        :func:`plpkg.backbones.fingerprint` of the model that the adapter is for; by default of the one that it is
        built on.
    weights_sha256
        Of the weights' file beside a saved configuration.
    """

    target_modules: list[str] | str | None = field(default=None, metadata={"help": "Linear layers to adapt."})
    exclude_modules: list[str] | str | None = field(default=None, metadata={"help": "Layers to leave alone."})
    layers_to_transform: list[int] | int | None = field(default=None, metadata={"help": "Decoder layers to adapt."})
    layers_pattern: list[str] | str | None = field(default=None, metadata={"help": "Name of the list of layers."})
    init: str = field(default="gaussian", metadata={"help": "Where the projections come from."})
    projection_seed: int = field(default=0, metadata={"help": "Seed of the projections."})
    save_projection: bool | None = field(default=None, metadata={"help": "Save the projections."})
    modules_to_save: list[str] | None = field(default=None, metadata={"help": "Other modules to train and save."})
    backbone: str | None = field(default=None, metadata={"help": "The backbone's fingerprint."})
    weights_sha256: str | None = field(default=None, metadata={"help": "SHA-256 of the weights' file."})

    inits = ("gaussian", "given")
    folder, shapes = None, None  # where it was read, and with which tensors: their shapes by name

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
            value = getattr(self, name)
            listed = isinstance(value, Collection) and all(isinstance(each, str) for each in value)
            if value is not None and not listed:
                raise ValueError(f"{name} must be names of modules, got {shown(value)}")
            if value is not None and not isinstance(value, str):  # in a form that PEFT saves, whatever was given
                setattr(self, name, set(value) if name in ("target_modules", "exclude_modules") else list(value))
        if self.task_type not in saved.TASKS:
            raise ValueError(f"task_type={self.task_type} trains a new head, which cannot be saved with the adapter")
        layers = self.layers_to_transform
        if layers is not None:
            several = isinstance(layers, Collection) and not isinstance(layers, str)
            numbers = [whole_number("layers_to_transform", each, 0) for each in (layers if several else [layers])]
            self.layers_to_transform = numbers if several else numbers[0]
        self.projection_seed = whole_number("projection_seed", self.projection_seed, 0, 2**64 - 1)
        one_of("init", self.init, self.inits)
        if self.save_projection is not None:
            flag("save_projection", self.save_projection)
        if self.save_projection is None:
            self.save_projection = self.init != "gaussian"
        if self.init != "gaussian" and not self.save_projection:
            raise ValueError(f"init={self.init!r} needs save_projection=True: nothing else brings the same projections")
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(f"layers_pattern={shown(self.layers_pattern)} needs layers_to_transform")
        if (
            isinstance(self.target_modules, str)
            and self.target_modules != "all-linear"
            and self.layers_to_transform is not None
        ):
            raise ValueError(
                f"layers_to_transform={shown(self.layers_to_transform)} is for names: the pattern "
                f"target_modules={shown(self.target_modules)} chooses the layers itself"
            )

    def save_pretrained(self, save_directory: str | Path, **options) -> None:
        """As PEFT does it, behind the weights; whole or not at all, and its owner's alone.

        Raises
        ------
        ValueError
            There are ``modules_to_save``, or values that are not finite, which nobody would load.
        """
        if self.modules_to_save:
            raise ValueError(
                f"modules_to_save={shown(sorted(self.modules_to_save))} cannot be saved with the adapter: they would "
                "replace a part of the backbone of whoever loads it; keep their state_dict apart"
            )
        folder = private_folder(save_directory)
        weights = folder / saved.WEIGHTS
        self.weights_sha256 = saved.require_sound(folder, None) if weights.exists() else None
        replace_files(folder, functools.partial(super().save_pretrained, **options), private=True)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, subfolder: str | None = None, **options):
        """Read a configuration that this method has saved, and the header of the weights beside it, if there are any.

        The weights themselves are read when the adapter is built, and their shapes have turned out to be the model's.

        Raises
        ------
        ValueError
            One of the two files is not what may be read.
        """
        folder = saved.local_folder(pretrained_model_name_or_path, subfolder, cls._split_kwargs(options)[0])
        try:
            config = cls(**saved.fields_of(folder, cls))
            config.folder, config.shapes = folder, saved.shapes_of(folder)
        except ValueError as error:
            raise ValueError(f"{folder}: {str(error)[:280]}") from None
        return config


@dataclass
class PrivateLoraConfig(ProjectionConfig):
    """How a model is adapted; the other fields are those of :class:`ProjectionConfig`.

    Attributes
    ----------
    r_c2d, r_d2c
        Ranks from cloud to device and back: M is ``(r_d2c, r_c2d)``.
    init
        Also ``"svd"``: A and B are the largest singular vectors of W, B scaled by the singular values.
    late
        Each layer's answer is added one adapted layer later, at the same projection; the last layer adds two, the
        previous layer's and its own. So two exchanges can be under way at once. A late adapter cannot be merged, and
        gradient checkpointing cannot recompute it.
    """

    r_c2d: int = field(default=64, metadata={"help": "Rank from cloud to device."})
    r_d2c: int = field(default=64, metadata={"help": "Rank from device to cloud."})
    late: bool = field(default=False, metadata={"help": "Add each answer one layer later."})

    inits = ("gaussian", "svd", "given")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PRIVATE_LORA
        self.r_c2d, self.r_d2c = rank("r_c2d", self.r_c2d), rank("r_d2c", self.r_d2c)
        flag("late", self.late)
        if self.init == "svd" and self.r_c2d != self.r_d2c:
            raise ValueError(f"init='svd' takes one rank for both ways, got r_c2d={self.r_c2d}, r_d2c={self.r_d2c}")


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
        self.r = rank("r", self.r)
        if self.width is not None:
            self.width = rank("width", self.width)


def _whole(save: Callable) -> Callable:
    """``PeftModel.save_pretrained``; an adapter of this room is saved whole, and as it can be loaded, or not at all."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self, save_directory: str | Path, *arguments, **options) -> None:
        if not any(isinstance(config, ProjectionConfig) for config in self.peft_config.values()):
            return save(self, save_directory, *arguments, **options)
        call = signature.bind(self, save_directory, *arguments, **options)
        if not call.arguments.get("safe_serialization", True):
            raise ValueError("safe_serialization=False would write a pickle, which is never read: leave it out")
        if (embeddings := call.arguments.get("save_embedding_layers", "auto")) not in ("auto", False):
            raise ValueError(
                f"save_embedding_layers={embeddings!r} would save a part of the backbone, which is never loaded with "
                "an adapter: leave it out"
            )
        call.arguments["save_embedding_layers"] = False  # else those that are adapted, or have got more tokens
        if Path(save_directory).name.startswith(PARTIAL):  # a caller's replace_files does it there
            return save(*call.args, **call.kwargs)
        folder = private_folder(save_directory)

        def write(temporary: str) -> None:
            if (folder / "README.md").is_file():  # which PEFT goes on with
                shutil.copy(folder / "README.md", temporary)
            call.arguments["save_directory"] = temporary
            save(*call.args, **call.kwargs)

        return replace_files(folder, write, private=True)

    return save_pretrained


def _like(load: Callable) -> Callable:
    """``PeftModel.load_adapter``; onto an adapter of this room that is there already go weights of its like alone."""

    @functools.wraps(load)
    def load_adapter(self, model_id: str | Path, adapter_name: str, *arguments, **options):
        config = self.peft_config.get(adapter_name)
        if isinstance(config, ProjectionConfig):
            given = type(config).from_pretrained(model_id, **options)
            saved.require_like(given, config, adapter_name, self.get_base_model())
        return load(self, model_id, adapter_name, *arguments, **options)

    return load_adapter


PeftModel.save_pretrained = _whole(PeftModel.save_pretrained)
"""PEFT writes into the folder itself: killed between the weights and the configuration, it would leave neither."""
PeftModel.load_adapter = _like(PeftModel.load_adapter)
"""PEFT reads no configuration for an adapter that is there already: its A and B may be others."""


def rank(name: str, value: object) -> int:
    """A rank, or another width of M."""
    return whole_number(name, whole_number(name, value, 1), 1, MAX_RANK)
