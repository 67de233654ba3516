"""Tables of measurements by ``benchmarks/``. Every number is *measured (recorded)*."""

from collections.abc import Mapping

from plpkg import catalog
from plpkg.validation import one_of

ORIGIN = ("section", "part", "command", "commit", "seed", "machine", "versions")
"""The columns that name a row's place in its benchmark, and its origin."""


def section(name: str, title: str):
    """The rows of one section of a benchmark, without empty columns and without their origin.

    Parameters
    ----------
    name
        The benchmark, as for :func:`plpkg.catalog.measured`.
    title
        One of its sections.

    Returns
    -------
    pandas.DataFrame
        Rows in the order in which they were measured.

    Raises
    ------
    ValueError
        An unknown benchmark or section; the message lists those that there are.
    """
    rows = catalog.measured(name)
    if "section" not in rows:
        raise ValueError(f"{name} has no sections: catalog.measured({name!r}) is all of it")
    one_of("title", title, tuple(rows["section"].unique()))
    rows = rows[rows["section"] == title]
    rows = rows.drop(columns=list(ORIGIN), errors="ignore").dropna(axis=1, how="all")
    return rows.reset_index(drop=True)


def table(name: str, rows: Mapping[str, Mapping], columns: Mapping[str, str], **same):
    """Some rows of a benchmark under names of their own, as lessons show them.

    Parameters
    ----------
    name
        The benchmark, as for :func:`plpkg.catalog.measured`.
    rows
        By each row's new name, the values that find it: ``{"in the first week": {"week": 1}}``.
    columns
        By each column's new name, its name in the benchmark. If the new name has a ``%``, shares of 1 are shown as
        percentages.
    **same
        Values that all rows have.

    Returns
    -------
    pandas.DataFrame
        Numbers with three digits, and whole from 100 on.

    Raises
    ------
    ValueError
        No row of the benchmark has a row's values, or several have.
    """
    import pandas as pd

    measured = catalog.measured(name)
    shown = {}
    for title, values in rows.items():
        found = measured
        wanted = {**same, **values}
        for column, value in wanted.items():
            found = found[found[column] == value]
        if len(found) != 1:
            raise ValueError(f"{len(found)} rows of {name} have {wanted}; a table's row is one")
        row = found.iloc[0]
        cells = []
        for new, column in columns.items():
            value = 100 * row[column] if "%" in new else row[column]
            cells.append(_shown(value))
        shown[title] = cells
    return pd.DataFrame.from_dict(shown, orient="index", columns=list(columns))


def _shown(value: object) -> object:
    """Three digits of a number, and whole from 100 on."""
    if not isinstance(value, float):
        return value
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def half_width(values) -> float:
    """Half of the 95 % interval of a mean by Student's t; NaN for fewer than two values.

    Parameters
    ----------
    values
        A ``pandas.Series`` of independent measurements; NaN is not counted.
    """
    from scipy.stats import t

    n = values.count()
    if n < 2:
        return float("nan")
    standard_error = values.std(ddof=1) / n**0.5
    return float(t.ppf(0.975, n - 1) * standard_error)
