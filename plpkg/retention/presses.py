"""Another library's methods as scorers: presses of kvpress whose scores of a unit do not depend on the chunk.

kvpress reads a prompt whole and cuts once. Here its method runs chunk by chunk, beside what is kept. That is the same
method only if a unit gets the score that it would get in a prompt read whole: not if the press counts the votes of all
queries, places them by the chunk's length, draws numbers, reads its own ``compression_ratio``, or keeps what it saw.
"""

from dataclasses import dataclass
from typing import Any

import torch

from plpkg.retention.scorers import Scorer
from plpkg.retention.watch import Units

SAME_IN_CHUNKS = ("CURPress", "KeyDiffPress", "KnormPress", "TOVAPress")
"""The presses of kvpress 0.5.5 that score chunks as the whole prompt, and keep its own choice:
``data/measured/retention_presses.csv`` has every press that it exports."""


@dataclass
class Press(Scorer):
    """A press: another library's method, which judges all units anew at each chunk. See :func:`from_press`.

    Recency: none is protected; its scores decide.

    Attributes
    ----------
    press
        The method.
    """

    press: Any

    def update(self, units: Units, stored: torch.Tensor | None) -> torch.Tensor:
        hidden_states = units.inputs["hidden_states"]
        attentions = None  # not computed yet: units are shown before
        scores = self.press.score(units.module, hidden_states, units.keys, units.values, attentions, units.inputs)
        return scores.float()


def from_press(press: object, **protection: int) -> Press:
    """A press of kvpress (https://github.com/NVIDIA/kvpress) as a scorer: its scores, under this room's budget.

    Parameters
    ----------
    press
        One of :data:`SAME_IN_CHUNKS`. Nothing of kvpress is imported: its ``score`` is called with the chunk's hidden
        states ``(batch, n, hidden)``, and the keys and values of all units that it sees, rotated.
    **protection
        ``sink`` and ``recent``, as for every scorer.

    Raises
    ------
    ValueError
        Another press.
    """
    name = type(press).__name__
    if name not in SAME_IN_CHUNKS:
        raise ValueError(
            f"{name} is not known to score chunks as it scores a whole prompt ({', '.join(SAME_IN_CHUNKS)} are): "
            "write its formula as a scorer (plpkg.retention.scorers)"
        )
    return Press(press, **protection)
