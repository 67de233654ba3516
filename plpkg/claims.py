"""What was claimed elsewhere, and what became of it here: ``data/claims.csv``, a row for each claim.

A row has the claim, its source with the place, the reported figure, what has this project's figure (``from``), that
figure with its interval of 95 % (none where it is exact, or was measured once), and a verdict, which :func:`verdict_on`
gives by one rule.
``benchmarks/claims.py`` computes the figures again. Everything called *reported* is somebody else's.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping

from plpkg import ROOMS, catalog
from plpkg.results import Tabular
from plpkg.validation import one_of

SYSTEMS = {room.rpartition(".")[2]: number for room, (number, _) in ROOMS.items()}
"""What a claim is about, and the notebook of it."""

ANOTHER_SCALE = "another scale"
"""What ``holds_if`` says where our model, machine, baseline or delay is too unlike the claim's to count either way."""

VERDICTS = (
    *("holds", "holds within 10 %", "holds in direction", "fails", "undecided here"),
    *("not comparable at this scale", "not testable here"),
)
"""The columns of :func:`verdicts`; a row says within how many per cent."""

NEAR = 0.1
"""How far a figure may be from the reported one, as a share of that, and still count as near it."""


def table(system: str | None = None):
    """The claims about one system, or all of them.

    Returns
    -------
    pandas.DataFrame
        ``id``, ``system``, ``notebook``; ``claim`` and its ``source``; ``reported``, ``unit`` and ``published``, where
        in ``data/published`` that figure is; ``holds_if``, what counts as holding where the reported figure does not
        say that itself; ``how`` and ``from``, what has the figure here; ``ours``, ``low`` and ``high``; ``verdict``
        and ``why``. All but the three numbers are text.

    Raises
    ------
    ValueError
        An unknown system; the message lists those that there are.
    """
    import pandas as pd

    numbers = dict.fromkeys(("ours", "low", "high"), float)
    rows = pd.read_csv(catalog.data_path("claims.csv"), dtype=str, keep_default_na=False)
    for column in numbers:
        rows[column] = pd.to_numeric(rows[column])
    if system is None:
        return rows
    return rows[rows["system"] == one_of("system", system, tuple(SYSTEMS))].reset_index(drop=True)


class Part(Tabular):
    """Some claims by their ``ids``, as a notebook shows them: what is reported, what was found, the verdict and why."""

    def __init__(self, *ids: str) -> None:
        rows = table().set_index("id")
        self._rows = [rows.loc[one_of("id", name, tuple(rows.index))] for name in ids]

    def rows(self) -> list[dict]:
        return [
            {
                "claim": row["claim"],
                "reported": row["reported"] + _unit(row) * is_figure(row["reported"]),
                "here": shown(row),
                "verdict": row["verdict"],
                "why": row["why"],
            }
            for row in self._rows
        ]

    def __repr__(self) -> str:
        counts = Counter(row["verdict"] for row in self._rows)
        return f"{len(self._rows)} claims: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}"


def verdicts():
    """How many claims of each system hold, hold nearly, fail and so on: a ``pandas.DataFrame``."""
    rows = table()
    kind = rows["verdict"].str.replace(r"within \d+ %", VERDICTS[1].removeprefix("holds "), regex=True)
    counts = rows.groupby(["system", kind]).size().unstack(fill_value=0)
    return counts.reindex(index=list(SYSTEMS), columns=list(VERDICTS), fill_value=0).rename_axis(None, axis=1)


def verdict_on(row: Mapping) -> str:
    """The verdict on a claim.

    * ``how`` is ``none``: not testable here. ``holds_if`` is ``another scale``: not comparable at this scale, whether
      ours is near the reported figure or far from it. An answer of a toy that is trained for one task, an emulation,
      or the time of a CPU's core neither confirms nor refutes a figure of a large model or of a GPU.
    * ``how`` is ``tested``: it holds or fails as ``holds_if`` says that the test ``passes`` where the claim is right,
      or shows that it ``fails``.
    * Otherwise the criterion is ``holds_if``, or the reported figure if that is empty: ``27.8``, ``= 27.8``,
      ``> 95``, ``< 2``, ``20 to 30``.
    * A limit (``<``, ``>``) holds if ours is beyond it with its whole interval, and fails if none of the interval is.
    * A figure holds if ours, rounded as the reported one was printed, is the same (of ``holds_if`` nothing is
      rounded), or lies between the two of a range. It holds within so many per cent if ours is at most a tenth away.
      If ours is farther it fails, unless its interval reaches the figure.
    * Where an interval leaves it open: undecided here.
    * Where there is a figure, but ``holds_if`` asks for less, for models or machines are others: a claim that holds
      holds in direction.
    """
    if row["how"] == "none":
        return "not testable here"
    if row["holds_if"] == ANOTHER_SCALE:
        return "not comparable at this scale"
    if row["how"] == "tested":
        return {"passes": "holds", "fails": "fails"}[row["holds_if"]]
    ours = float(row["ours"])
    low, high = (
        ours if math.isnan(end := float("nan" if row[key] == "" else row[key])) else end for key in ("low", "high")
    )
    sign, first, last, half = _criterion(row["holds_if"] or row["reported"])
    half = 0.0 if row["holds_if"] else half
    if sign in "<>":
        beyond = [end < first if sign == "<" else end > first for end in (low, high)]
        verdict = "holds" if all(beyond) else "undecided here" if any(beyond) else "fails"
    else:
        away = max(first - ours, ours - last, 0.0)
        nearest = abs(first if ours < first else last)
        share = away / nearest if nearest else math.inf
        if away <= half * (1 + 1e-9) + 1e-12:
            verdict = "holds"
        elif share <= NEAR:
            verdict = f"holds within {max(1, math.ceil(100 * share - 1e-9))} %"
        else:
            verdict = "undecided here" if low <= last and high >= first else "fails"
    asks_less = row["holds_if"] and is_figure(row["reported"])
    return "holds in direction" if asks_less and verdict.startswith("holds") else verdict


def shown(row: Mapping) -> str:
    """Ours in words: four digits, the unit, and the interval."""
    numbers = [f"{float(f'{row[key]:.4g}'):,.10g}" for key in ("ours", "low", "high") if row[key] == row[key]]
    interval = [f"[{', '.join(numbers[1:])}]"] if numbers[1:] else []
    return " ".join([*numbers[:1], *interval]) + _unit(row) if numbers else ""


def _unit(row: Mapping) -> str:
    return "" if row["unit"] == "ratio" else f" {row['unit']}"


NUMBER = r"-?\d[\d,]*\.?\d*"


def is_figure(text: str) -> bool:
    """Whether that is a figure, a limit or a range."""
    return re.fullmatch(rf"[<>=]? ?{NUMBER}|{NUMBER} to {NUMBER}", text) is not None


def _criterion(text: str) -> tuple[str, float, float, float]:
    """Sign, both ends, and half a unit of the last printed digit."""
    if not is_figure(text):
        raise ValueError(f"no figure, limit or range: {text!r}")
    numbers = re.findall(NUMBER, text)
    values = [float(number.replace(",", "")) for number in numbers]
    half = 0.5 * 10.0 ** -len(numbers[0].partition(".")[2]) if len(numbers) == 1 else 0.0
    return text[0] if text[0] in "<>" else "=", values[0], values[-1], half
