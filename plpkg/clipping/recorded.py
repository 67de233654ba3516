"""What ``benchmarks/clipping/`` measured. Every number is *measured (recorded)*."""

from plpkg import catalog
from plpkg.validation import one_of

SECTIONS = ("cost", "lora", "long", "grid")
DECODER = "decoder, width 256, 4 layers, T=128, B=16"
LORA = "LoRA r=8, width 256, 4 layers, T=256, B=8"
LEARNING = {
    "rate": ["lr", "noise_multiplier", "bits_per_byte"],
    "accuracy": ["epsilon", "noise_multiplier", "bits_per_byte", "accuracy"],
    "exposure": ["epsilon", "noise_multiplier", "mean_exposure", "max_exposure", "rank_1", "right", "bits_per_byte"],
}
"""The sections of what private learning learnt, and their columns after ``method``, ``case`` and ``seed``."""
_ORIGIN = ["command", "commit", "seed", "machine", "versions"]


def section(name: str):
    """The rows of a section of the costs, without their origin.

    Parameters
    ----------
    name
        One of :data:`SECTIONS`.
    """
    rows = catalog.measured("clipping_costs")
    rows = rows[rows["section"] == one_of("name", name, SECTIONS)]
    return rows.drop(columns=["section", *_ORIGIN]).dropna(axis=1, how="all").reset_index(drop=True)


def cases() -> tuple[str, ...]:
    """The settings that were measured beside SGD and Opacus."""
    rows = catalog.measured("clipping_costs")
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
    rows = catalog.measured("clipping_costs")
    rows = rows[rows["section"].str.endswith("default malloc") == default_malloc]
    return rows[rows["case"] == case].drop(columns=["section", "case", *_ORIGIN]).reset_index(drop=True)


def grid():
    """The plan beside ghost clipping: ``width``, ``seq``, ``batch``, ``ratio`` (CPU time), ``peak_ratio``."""
    rows = section("grid")
    sizes = rows["case"].str.extract(r"width (?P<width>\d+), T=(?P<seq>\d+), B=(?P<batch>\d+)").astype(int)
    return sizes.join(rows[["ratio", "flop_ratio", "peak_ratio"]])


def learning(name: str):
    """What a small language model learnt privately, a row a run: the untuned model first, then by method and ε.

    Parameters
    ----------
    name
        ``rate``: bits per byte of validation text by learning rate. ``accuracy``: ``bits_per_byte`` and next-token
        ``accuracy`` (percent) of one writer's held-out text by ε. ``exposure``: the mean and the largest exposure of
        the diary's secrets (bits; Carlini et al., arXiv 1802.08232), how many come first of all candidates
        (``rank_1``), how many facts the model tells when it is asked (``right``), and bits per byte of public text.
    """
    columns = ["method", "case", "seed", *LEARNING[one_of("name", name, tuple(LEARNING))]]
    rows = catalog.measured("clipping_learning")
    rows = rows[rows["section"] == name]
    cases = ["untuned", "private", "clipped", "not clipped"]
    rows = rows.assign(method_place=rows["method"].ne("none"), place=rows["case"].map(cases.index))
    by = ["method_place", "method", "place", *(["epsilon_target"] if name != "rate" else ["lr"]), "seed"]
    return rows.sort_values(by)[columns].reset_index(drop=True)


def learning_by_epsilon(name: str):
    """Means over the seeds of :func:`learning`, a row for each method, case and ε; ``runs`` is how many.

    Parameters
    ----------
    name
        ``accuracy`` or ``exposure``.
    """
    rows = learning(one_of("name", name, ("accuracy", "exposure")))
    rows["epsilon"] = rows["epsilon"].round(1)
    groups = rows.drop(columns=["seed", "noise_multiplier"]).groupby(["method", "case", "epsilon"], sort=False)
    return groups.mean().assign(runs=groups.size())
