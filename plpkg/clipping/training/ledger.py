"""The steps released from a model's parameters, by all private trainings of this process that they took part in."""

import secrets
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch.utils.weak import WeakIdKeyDictionary

from plpkg.validation import number, shown, whole_number

Spent = tuple[float, float, int]
"""σ, the sampling rate, and how many steps had them."""


@dataclass
class Life:
    """Steps of a training whose noise was drawn once: it goes on, and never back.

    Attributes
    ----------
    number
        Noise and samples are drawn with it, the seed and the step's number.
    name
        Random: tells the lives of two trainings apart.
    steps
        The number of its next step.
    spent
        For each of its steps: (σ, sampling rate, how many steps in a row).
    """

    number: int = 0
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    steps: int = 0
    spent: list = field(default_factory=list)

    def spend(self, sigma: float, rate: float) -> None:
        """One more step; those in a row that spend the same are one entry, as in Opacus's accountants."""
        last = self.spent[-1] if self.spent else None
        if last and last[:2] == (sigma, rate):
            self.spent[-1] = sigma, rate, last[2] + 1
        else:
            self.spent.append((sigma, rate, 1))


class Ledger:
    """Every step that was released from a model, by life. It only grows.

    A training that goes back to an earlier state has nevertheless released what came after it. So those steps stay
    spent, and what follows is another life, whose noise and samples are drawn anew: the same noise on two gradients
    would cancel in their difference.
    """

    def __init__(self) -> None:
        self._lives: dict[str, Life] = {}

    @property
    def spent(self) -> list[Spent]:
        """The entries of all lives."""
        entries = []
        for life in self._lives.values():
            entries += life.spent
        return entries

    def life(self, steps: int, name: str = "") -> Life:
        """The life in which the step of this number is taken: the one of this name, unless another life
        has drawn this step's noise already, else a new one.
        """
        life = self._lives.get(name)
        if life is None or self._is_taken(life.number, steps):
            return Life(self._next_number(), steps=steps)
        return life

    def _is_taken(self, number: int, step: int) -> bool:
        """Whether a life of this number, of whichever training, has drawn the noise of this step."""
        return any(life.number == number and life.steps > step for life in self._lives.values())

    def _next_number(self) -> int:
        return max((life.number + 1 for life in self._lives.values()), default=0)

    def join(self, other: "Ledger") -> None:
        """Both are one from now on, whoever holds which."""
        self._lives |= other._lives
        other._lives = self._lives

    def begin_with(self, spent: Sequence[Spent]) -> None:
        """Count what was released elsewhere."""
        steps = sum(count for *_, count in spent)
        self.record(Life(self._next_number(), steps=steps, spent=list(spent)))

    def record(self, life: Life) -> None:
        """A life begins, or a step of it is about to be released."""
        self._lives[life.name] = life

    def state(self, life: Life) -> list[dict]:
        """All lives, and this one, which may have released nothing yet."""
        lives = {**self._lives, life.name: life}
        return [asdict(each) for each in lives.values()]

    def merge(self, state: list[dict]) -> None:
        """Take over a saved ledger's steps that are not in this one: what :meth:`state` gave."""
        for each in state:
            life = Life(**each)
            known = self._lives.get(life.name)
            if known is None or known.steps < life.steps:
                self._lives[life.name] = replace(life, spent=list(life.spent))


def entries_of(spent: Iterable) -> list[Spent]:
    """Checked entries of what steps have spent: σ, the sampling rate and the number of steps each.

    Raises
    ------
    ValueError, TypeError
        It is something else.
    """
    entries = [tuple(entry) for entry in spent]
    for entry in entries:
        if len(entry) != 3:
            raise ValueError(f"spent must be σ, a sampling rate and a number of steps each, got {shown(entry)}")
        sigma, rate, count = entry
        number("σ", sigma)
        number("the sampling rate", rate, 0, 1, open_low=True)
        whole_number("count", count, 1)
    return entries


_LEDGERS: MutableMapping[torch.nn.Module | torch.Tensor, Ledger] = WeakIdKeyDictionary()


def ledger_of(model: torch.nn.Module, learning: Iterable[torch.Tensor]) -> Ledger:
    """The ledger of a model, and from now on of the parameters that learn.

    What was released of any of a model's parameters was released of the model: a head before the whole model, a base
    inside of an adapter's model, a model inside of ``nn.Sequential``.
    """
    known = [_LEDGERS[each] for each in (*model.modules(), *model.parameters()) if each in _LEDGERS]
    ledger = known[0] if known else Ledger()
    for other in known[1:]:
        ledger.join(other)
    for each in (model, *learning):
        _LEDGERS[each] = ledger
    return ledger
