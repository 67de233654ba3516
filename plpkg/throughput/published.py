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
    records = points.to_dict("records")
    for column, accounting in (("computed", "figure"), ("literal", "literal")):
        if stage == "decode":
            runs = [decode(p["model"], p["rank"], accounting, batch=p["batch"]) for p in records]
        else:
            runs = [prefill(p["model"], p["tokens"], p["rank"], accounting) for p in records]
        points[column] = [run.tokens_per_s for run in runs]
    points["difference_percent"] = 100 * (points["computed"] / points["tokens_per_s"] - 1).abs()
    return points


def resources():
    """The table of memory (MB) and computation (GFLOPs a token): ``reported_…`` beside ``computed_…``."""
    table = catalog.published("private_lora_resources")
    table = table.rename(columns={"memory_mb": "reported_mb", "gflops_per_token": "reported_gflops"})
    num_bytes = []
    flops = []
    for row in table.to_dict("records"):
        if row["method"] == "whole model":
            num_bytes.append(whole_model_bytes(row["model"], row["bits"]))
            flops.append(whole_model_flops(row["model"]))
        else:
            num_bytes.append(phone_memory(row["model"]).total_bytes)
            flops.append(phone_flops(row["model"]))
    table["computed_mb"] = [each / 1e6 for each in num_bytes]
    table["computed_gflops"] = [each / 1e9 for each in flops]
    return table


def scores():
    """The table of speed and accuracy (percent), with ``computed``: M_S from the row's other cells."""
    table = catalog.published("private_lora_accuracy").dropna(subset="m_s")
    untuned = table[table["method"] == "none"].set_index("model")
    computed = []
    for _, row in table.iterrows():
        base = untuned.loc[row["model"]]
        computed.append(score(row["tokens_per_s"], base["tokens_per_s"], list(row[BENCHMARKS]), list(base[BENCHMARKS])))
    table["computed"] = computed
    return table
