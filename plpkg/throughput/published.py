"""The publication's tables beside ours: every row *reported*, every added column *computed*.

Source: the PrivateLoRA article and its images, in ``data/published/``.
"""

from plpkg import catalog
from plpkg.throughput.estimate import decode, prefill
from plpkg.throughput.resources import phone_flops, phone_memory, whole_model_bytes, whole_model_flops
from plpkg.throughput.score import score

BENCHMARKS = ["gsm8k", "hellaswag", "boolq", "piqa", "mmlu"]


def curves(stage: str):
    """The digitised points of ``"decode"`` or ``"prefill"``, with ``computed``, ``literal`` and ``difference_percent``.

    Returns a ``pandas.DataFrame``; speeds in tokens per second, ``computed`` by the ``figure`` accounting.
    """
    points = catalog.published(f"private_lora_{stage}")
    for column, accounting in (("computed", "figure"), ("literal", "literal")):
        if stage == "decode":
            runs = [decode(p.model, p.rank, accounting, batch=p.batch) for p in points.itertuples()]
        else:
            runs = [prefill(p.model, p.tokens, p.rank, accounting) for p in points.itertuples()]
        points[column] = [run.tokens_per_s for run in runs]
    points["difference_percent"] = 100 * (points["computed"] / points["tokens_per_s"] - 1).abs()
    return points


def resources():
    """The table of memory (MB) and computation (GFLOPs a token): ``reported_…`` beside ``computed_…``."""
    table = catalog.published("private_lora_resources")
    table = table.rename(columns={"memory_mb": "reported_mb", "gflops_per_token": "reported_gflops"})
    whole = table["method"] == "whole model"
    table["computed_mb"] = [
        whole_model_bytes(row.model, row.bits) / 1e6 if is_whole else phone_memory(row.model).total_mb
        for row, is_whole in zip(table.itertuples(), whole, strict=True)
    ]
    table["computed_gflops"] = [
        (whole_model_flops(row.model) if is_whole else phone_flops(row.model)) / 1e9
        for row, is_whole in zip(table.itertuples(), whole, strict=True)
    ]
    return table


def scores():
    """The table of speed and accuracy (percent), with ``computed``: M_S from the row's other cells."""
    table = catalog.published("private_lora_accuracy").dropna(subset="m_s")
    untuned = table[table["method"] == "none"].set_index("model")
    table["computed"] = [
        score(row["tokens_per_s"], base["tokens_per_s"], row[BENCHMARKS], base[BENCHMARKS])
        for (_, row), base in zip(table.iterrows(), (untuned.loc[name] for name in table["model"]), strict=True)
    ]
    return table
