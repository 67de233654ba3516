"""What ``benchmarks/`` measured, as tables. Every number is *measured (recorded)*."""

from plpkg import catalog
from plpkg.validation import one_of

ORIGIN = ("section", "part", "command", "commit", "seed", "machine", "versions")
"""The columns that say what a row belongs to and where it comes from."""


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
    rows = rows[rows["section"] == one_of("title", title, tuple(rows["section"].unique()))]
    return rows.drop(columns=list(ORIGIN), errors="ignore").dropna(axis=1, how="all").reset_index(drop=True)


def half_width(values) -> float:
    """Half of the 95 % interval of a mean by Student's t; NaN for fewer than two values.

    Parameters
    ----------
    values
        A ``pandas.Series`` of independent measurements; NaN is none.
    """
    from scipy.stats import t

    n = values.count()
    return float(t.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5) if n > 1 else float("nan")
