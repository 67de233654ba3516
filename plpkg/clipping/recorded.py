"""What ``benchmarks/clipping.py`` measured, as tables. Every number is *measured (recorded)*."""

from plpkg import catalog
from plpkg.validation import one_of

SECTIONS = ("cost", "lora", "long", "grid")
_ORIGIN = ["command", "commit", "seed", "machine", "versions"]


def section(name: str):
    """The rows of a section of the costs, without their origin.

    Parameters
    ----------
    name
        One of :data:`SECTIONS`.
    """
    rows = catalog.measured("clipping")
    rows = rows[rows["section"] == one_of("name", name, SECTIONS)]
    return rows.drop(columns=["section", *_ORIGIN]).dropna(axis=1, how="all").reset_index(drop=True)


def cases() -> tuple[str, ...]:
    """The settings that were measured beside SGD and Opacus."""
    rows = catalog.measured("clipping")
    return tuple(rows[rows["section"].isin(SECTIONS[:3])]["case"].drop_duplicates())


def costs(case: str, *, default_malloc: bool = False):
    """One setting: ``what``, ``cpu_ms``, ``gflop``, ``peak_mib`` and their ratios to SGD's.

    Parameters
    ----------
    case
        One of :func:`cases`.
    default_malloc
        With the C library's own settings, where large tensors cost page faults (the first case only).
    """
    one_of("case", case, cases())
    rows = catalog.measured("clipping")
    rows = rows[rows["section"].str.endswith("default malloc") == default_malloc]
    return rows[rows["case"] == case].drop(columns=["section", "case", *_ORIGIN]).reset_index(drop=True)


def grid():
    """The plan beside ghost clipping: ``width``, ``seq``, ``batch``, ``ratio`` (CPU time), ``peak_ratio``."""
    rows = section("grid")
    sizes = rows["case"].str.extract(r"width (?P<width>\d+), T=(?P<seq>\d+), B=(?P<batch>\d+)").astype(int)
    return sizes.join(rows[["ratio", "flop_ratio", "peak_ratio"]])
