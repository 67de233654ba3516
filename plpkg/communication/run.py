"""The tokens that a split model is asked to process, and the places of its layers."""

from dataclasses import dataclass
from typing import TypedDict

from plpkg.catalog import ModelShape
from plpkg.validation import one_of, whole_number

PHASES = ("decode", "prefill", "training")
"""``decode``: one pass a token. ``prefill``: one pass over a prompt. ``training``: one forward and backward pass."""


class RunSettings(TypedDict, total=False):
    """The keywords that describe a :class:`Run`, for type checkers."""

    phase: str
    tokens: int
    batch: int
    first_k: int
    last_k: int
    adapted_layers: int | None
    final_hidden: str


@dataclass(frozen=True)
class Run:
    """One run of a split model: the last keyword arguments of every function that counts traffic.

    Attributes
    ----------
    model
        The shape.
    phase
        One of :data:`~plpkg.communication.PHASES`.
    tokens, batch
        Tokens of each sequence, and sequences.
    first_k, last_k
        Layers at either end that run on the device and send nothing.
    adapted_layers
        How many of the cloud's layers carry adapters; all by default.
    final_hidden
        Which positions of the final hidden state come down in a prefill: ``"last"`` (enough to
        generate) or ``"all"`` (to verify drafted tokens, or to score a text).

    Raises
    ------
    ValueError
        A value is out of range, or more layers are asked for than the model or the cloud has.
    """

    model: ModelShape
    phase: str = "decode"
    tokens: int = 1
    batch: int = 1
    first_k: int = 0
    last_k: int = 0
    adapted_layers: int | None = None
    final_hidden: str = "last"

    def __post_init__(self) -> None:
        def settle(name: str, value: object) -> None:  # a checked value is a plain int, whatever came in
            object.__setattr__(self, name, value)

        layers = self.model.num_layers
        one_of("phase", self.phase, PHASES)
        one_of("final_hidden", self.final_hidden, ("last", "all"))
        settle("tokens", whole_number("tokens", self.tokens, 1))
        settle("batch", whole_number("batch", self.batch, 1))
        settle("first_k", whole_number("first_k", self.first_k, 0, layers, "num_layers"))
        settle("last_k", whole_number("last_k", self.last_k, 0, layers - self.first_k, "num_layers-first_k"))
        if self.adapted_layers is not None:
            adapted = whole_number("adapted_layers", self.adapted_layers, 0, self.cloud_layers, "layers on the cloud")
            settle("adapted_layers", adapted)

    @property
    def cloud_layers(self) -> int:
        """Layers that run on the cloud."""
        return self.model.num_layers - self.first_k - self.last_k

    @property
    def crossing_layers(self) -> int:
        """Layers that exchange residuals: those on the cloud that carry adapters."""
        return self.cloud_layers if self.adapted_layers is None else self.adapted_layers
