import pytest

from plpkg import catalog
from plpkg.throughput import score

BENCHMARKS = ["gsm8k", "hellaswag", "boolq", "piqa", "mmlu"]


def cells():
    table = catalog.published("private_lora_accuracy")
    untuned = table[table["method"] == "none"].set_index("model")
    return [(row, untuned.loc[row["model"]]) for _, row in table.dropna(subset=["m_s"]).iterrows()]


CELLS = cells()


TO_TWO_DIGITS = {"llama-2-7b": 4.62, "llama-2-13b": 3.81, "llama-30b": 3.12}


@pytest.mark.parametrize(("row", "untuned"), CELLS, ids=[f"{row['model']}-{row['method']}" for row, _ in CELLS])
def test_every_published_cell(row, untuned):
    computed = score(row["tokens_per_s"], untuned["tokens_per_s"], row[BENCHMARKS], untuned[BENCHMARKS])
    assert computed == pytest.approx(row["m_s"], abs=0.05)
    if row["method"] == "PL":
        assert computed == pytest.approx(TO_TWO_DIGITS[row["model"]], abs=0.005)
    assert row[BENCHMARKS].mean() == pytest.approx(row["average"], abs=0.0501)


def test_single_numbers():
    assert score(10, 20, 60.0, 50.0) == 5.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 20, 60, 50), "tokens_per_s must be greater than 0, got 0"),
        ((10, -1, 60, 50), "gpu_tokens_per_s must be greater than 0, got -1"),
        ((10, 20, 160, 50), "accuracy must be at least 0 and at most 100, got 160"),
        ((10, 20, 60, 150), "untuned_accuracy must be at least 0 and at most 100, got 150"),
        ((10, 20, [], []), "accuracy must hold at least one benchmark"),
        (("10", 20, 60, 50), "tokens_per_s must be greater than 0, got '10'"),
        ((10, 20, [60, 50], [50]), "same benchmarks, got 2 and 1"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        score(*arguments)
