"""The claims of publications and this project's verdicts on them: ``data/claims.csv``, a row for each claim.

A row has the claim, its source with the place, the reported figure, the origin of this project's figure (``from``),
that figure with its 95 % interval (none where it is exact, or was measured once), and a verdict, which
:func:`verdict_on` gives by one rule. ``benchmarks/claims.py`` computes the figures again. Everything called *reported*
is somebody else's.
"""

import math
import operator
import re
from collections import Counter
from collections.abc import Mapping

from plpkg import ROOMS, catalog
from plpkg.results import Tabular
from plpkg.validation import one_of

SYSTEMS = {room.rpartition(".")[2]: number for room, (number, _) in ROOMS.items()}
"""The systems that claims are about, each with the number of its notebook."""

ANOTHER_SCALE = "another scale"
"""The ``holds_if`` of a claim whose model, machine, baseline or delay is too unlike ours for a verdict either way."""

VERDICTS = (
    "holds",
    "holds within 10 %",
    "holds in direction",
    "fails",
    "undecided here",
    "not comparable at this scale",
    "not testable here",
)
"""The columns of :func:`verdicts`. The verdict on a claim may be of fewer per cent than 10."""

NEAR = 0.1
"""The largest distance from the reported figure, as a share of it, that still counts as near."""


def table(system: str | None = None):
    """The claims about one system, or all of them.

    Returns
    -------
    pandas.DataFrame
        ``id``, ``system``, ``notebook``; ``claim`` and its ``source``; ``reported``, ``unit`` and ``published``, the
        place of that figure in ``data/published``; ``holds_if``, the criterion if it is not the reported figure;
        ``how`` and ``from``, the origin of our figure; ``ours``, ``low`` and ``high``; ``verdict`` and ``why``. All
        but the three numbers are text.

    Raises
    ------
    ValueError
        An unknown system; the message lists those that there are.
    """
    import pandas as pd

    rows = pd.read_csv(catalog.data_path("claims.csv"), dtype=str, keep_default_na=False)
    for column in ("ours", "low", "high"):
        rows[column] = pd.to_numeric(rows[column])
    if system is None:
        return rows
    one_of("system", system, tuple(SYSTEMS))
    return rows[rows["system"] == system].reset_index(drop=True)


class Part(Tabular):
    """Some claims by their ``ids``, as a notebook shows them: the reported figure, ours, the verdict and its reason."""

    def __init__(self, *ids: str) -> None:
        rows = table().set_index("id")
        self._rows = [rows.loc[one_of("id", name, tuple(rows.index))] for name in ids]

    def rows(self) -> list[dict]:
        shown_rows = []
        for row in self._rows:
            reported = row["reported"]
            if is_figure(reported):
                reported += _unit(row)
            cells = {"claim": row["claim"], "reported": reported, "here": shown(row)}
            shown_rows.append(cells | {"verdict": row["verdict"], "why": row["why"]})
        return shown_rows

    def __repr__(self) -> str:
        counts = Counter(row["verdict"] for row in self._rows)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        return f"{len(self._rows)} claims: {verdicts}"


def verdicts():
    """The number of claims of each system by their verdict: a ``pandas.DataFrame``."""
    rows = table()
    kind = rows["verdict"].str.replace(r"within \d+ %", "within 10 %", regex=True)
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
    low = _end(row["low"], ours)
    high = _end(row["high"], ours)
    sign, first, last, half = _criterion(row["holds_if"] or row["reported"])
    if sign in "<>":
        verdict = _verdict_on_limit(sign, first, low, high)
    else:
        margin = 0.0 if row["holds_if"] else half
        verdict = _verdict_on_figure(first, last, margin, ours, low, high)
    asks_less = row["holds_if"] and is_figure(row["reported"])
    if asks_less and verdict.startswith("holds"):
        return "holds in direction"
    return verdict


def _end(cell: float | str, ours: float) -> float:
    """An end of our figure's interval: the figure itself if it has none."""
    if cell == "" or math.isnan(float(cell)):
        return ours
    return float(cell)


def _verdict_on_limit(sign: str, limit: float, low: float, high: float) -> str:
    beyond = operator.lt if sign == "<" else operator.gt
    if beyond(low, limit) and beyond(high, limit):
        return "holds"
    if beyond(low, limit) or beyond(high, limit):
        return "undecided here"
    return "fails"


def _verdict_on_figure(first: float, last: float, margin: float, ours: float, low: float, high: float) -> str:
    """The verdict on a figure (``first`` is ``last``) or a range, of which ours may be ``margin`` outside."""
    away = max(first - ours, ours - last, 0.0)
    if away <= margin * (1 + 1e-9) + 1e-12:
        return "holds"
    nearest = abs(first if ours < first else last)
    share = away / nearest if nearest else math.inf
    if share <= NEAR:
        return f"holds within {max(1, math.ceil(100 * share - 1e-9))} %"
    interval_reaches = low <= last and high >= first
    return "undecided here" if interval_reaches else "fails"


def shown(row: Mapping) -> str:
    """Our figure in words: four digits, the interval, the unit; "" if there is none."""
    numbers = []
    for key in ("ours", "low", "high"):
        if not math.isnan(row[key]):
            rounded = float(f"{row[key]:.4g}")
            numbers.append(f"{rounded:,.10g}")
    if not numbers:
        return ""
    figure, *interval = numbers
    if interval:
        figure += f" [{', '.join(interval)}]"
    return figure + _unit(row)


def _unit(row: Mapping) -> str:
    return "" if row["unit"] == "ratio" else f" {row['unit']}"


NUMBER = r"-?\d[\d,]*\.?\d*"


def is_figure(text: str) -> bool:
    """Whether a text is a figure, a limit or a range."""
    return re.fullmatch(rf"[<>=]? ?{NUMBER}|{NUMBER} to {NUMBER}", text) is not None


def _criterion(text: str) -> tuple[str, float, float, float]:
    """Sign, both ends, and half a unit of the last printed digit of a figure, a limit or a range."""
    if not is_figure(text):
        raise ValueError(f"no figure, limit or range: {text!r}")
    numbers = re.findall(NUMBER, text)
    values = [float(number.replace(",", "")) for number in numbers]
    half = 0.0
    if len(numbers) == 1:
        _, _, decimals = numbers[0].partition(".")
        half = 0.5 * 10.0 ** -len(decimals)
    sign = text[0] if text[0] in "<>" else "="
    return sign, values[0], values[-1], half
