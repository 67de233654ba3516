"""What ``benchmarks/retention/quality.py`` measured, as tables. Every number is *measured (recorded)*."""

from plpkg import catalog
from plpkg.validation import one_of

SECTIONS = (
    *("budget", "chunk", "asked", "stabilizers", "positions", "length", "flat", "lookup", "table"),
    *("text heads", "text", "text, no tail", "quanto", "heads", "eviction", "speed", "space", "fake"),
)


def section(name: str):
    """The rows of one section, without empty columns and without their origin.

    Parameters
    ----------
    name
        One of :data:`SECTIONS`.
    """
    rows = catalog.measured("retention_quality")
    rows = rows[rows["section"] == one_of("name", name, SECTIONS)]
    origin = ["section", "command", "commit", "seed", "machine", "versions"]
    return rows.drop(columns=origin).dropna(axis=1, how="all").reset_index(drop=True)


def budget():
    """Accuracy as a share of the full cache's: by scorer and budget, the mean of the models with its interval.

    Returns
    -------
    pandas.DataFrame
        By ``case`` and ``x`` (the budget): ``mean`` and ``ci``, half of the 95 % interval of Student's t over models.
    """
    rows = section("budget").dropna(subset="x")
    found = rows.groupby(["case", "x"], sort=False)["of_full"]
    return found.agg(mean="mean", ci=_half_width).reset_index()


def _half_width(values) -> float:
    from scipy.stats import t

    n = len(values)
    return float(t.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5) if n > 1 else float("nan")


def by_case(name: str, value: str = "accuracy"):
    """One section as a table: a row a case, a column for each ``x``."""
    table = section(name).dropna(subset="x").pivot(index="case", columns="x", values=value)
    order = section(name)["case"].drop_duplicates()
    return table.reindex([case for case in order if case in table.index]).rename(columns=int)
