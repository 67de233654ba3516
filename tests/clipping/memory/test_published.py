"""The article's tables: how they are read, and how the installed Opacus and the emulation compare."""

import math
import re
import warnings
from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plpkg import catalog
from plpkg.clipping import published
from plpkg.clipping.memory.dataflow import EXECUTIONS, PHASES, WIDTHS, Choices, emulate, measure
from plpkg.memory import MIB, MemoryTimeline


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("0.47", (0.47, 0.005)),
        ("0", (0, 0.5)),
        ("3,663", (3663, 0.5)),
        ("1,142 MB", (1142, 0.5)),
        ("1.04 GB", (1040, 5)),
        ("3.6 GB", (3600, 50)),
        ("OOM", (math.nan, math.nan)),  # out of memory is no number
    ],
)
def test_a_printed_figure_and_its_last_digit(printed, expected):
    assert published.figure_and_tolerance(printed) == pytest.approx(expected, nan_ok=True)


def test_readers():
    synthetic, bert = published.synthetic(), published.bert()
    assert len(synthetic) == 23
    assert synthetic.query("printed == 'OOM'")[["batch", "method"]].values.tolist() == [[2**17, "hooks"]]
    assert len(bert) == 4 * 5
    assert bert["reported_mib"].count() == 12
    assert bert["seconds"].count() == 12
    for table in (synthetic, bert):
        assert table["source"].str.startswith("Opacus article (PyTorch blog, 2024-08-20)").all()


@pytest.mark.parametrize(
    ("batch", "widths"),
    [(32, WIDTHS), (2**17, WIDTHS), (5, (64, 256, 512)), (1000, (8, 16, 64)), (9, (30, 20, 40, 10))],
)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_installed_opacus_does_what_the_emulation_says(execution, batch, widths):
    timeline = measure(published.opacus_step(published.two_layer_task(batch, widths), execution))
    emulated = emulate(execution, batch, widths, Choices(late_first_hook=False, deepcopy_grad=True))
    increases = {phase.name: phase.increase_bytes for phase in timeline.phases if phase.name != "iteration"}
    assert list(increases) == list(emulated.parts_bytes)
    assert increases == {phase: emulated.increase_bytes(phase) for phase in increases}
    assert timeline.phases[-1].name == "iteration"


def test_fast_clipping_holds_one_layer_twice():
    phases = {p.name: p for p in measure(published.opacus_step(published.two_layer_task(32), "fast")).phases}
    assert phases["first backward"].increase_bytes / MIB == pytest.approx(3213, abs=0.5)


@pytest.mark.parametrize("execution", published.PUBLISHED)
def test_opacus_on_real_tensors_agrees(execution):
    task = published.two_layer_task(6, (7, 5, 3))
    real, fake = (measure(published.opacus_step(task, execution), fake=fake) for fake in (False, True))
    assert [(p.name, p.increase_bytes) for p in real.phases] == [(p.name, p.increase_bytes) for p in fake.phases]


def test_the_warnings_and_the_mode_are_left_as_they_were():
    before = list(warnings.filters)
    measure(published.opacus_step(published.two_layer_task(2, (3, 2, 2)), "ghost"))
    assert warnings.filters == before
    assert "__deepcopy__" not in vars(FakeTensorMode)


def test_any_step_can_be_measured():
    def step(timeline):
        with timeline.phase("forward"):
            torch.ones(2**40)

    timeline = measure(step)
    assert isinstance(timeline, MemoryTimeline)
    assert timeline.phases[0].increase_bytes == 4 * 2**40


def test_bert_within_five_percent():
    table = published.bert_table(128, 100).set_index("method")
    assert (table["ratio"] - 1).abs().max() < 0.05
    assert list(table.index) == list(published.PUBLISHED)
    assert (table["computed_mib"] / table["reported_mib"]).tolist() == table["ratio"].tolist()


def test_the_trainable_part_of_bert_is_the_articles():
    task = published.bert_task(1, 8)
    sizes = Counter()

    def step(timeline):
        for parameter in task.build().parameters():
            sizes[parameter.requires_grad] += parameter.numel()

    measure(step)
    assert sizes[True] == 7_680_771  # "7.6M"
    assert sum(sizes.values()) == 109_484_547
    assert sum(sizes.values()) - 3 * 769 == catalog.model("bert-base").parameters  # without the classifier


def test_about_a_hundred_tokens_explain_the_table():
    table = published.fit_seq(128)
    best = int(table["deviation"].idxmin())
    assert 95 <= best <= 107
    assert table.loc[best, "deviation"] < 0.02
    assert table["deviation"].loc[[80, 120]].min() > 0.05
    measured = published.bert_table(128, 110, ("sgd", "hooks")).set_index("method")["ratio"]
    assert table.loc[110, ["sgd", "hooks"]].tolist() == pytest.approx(measured.tolist(), rel=1e-3)


ONE_OF = "execution must be one of 'sgd', 'hooks', 'fast', 'ghost', got "
BAD = [
    (lambda: published.figure_and_tolerance("5 TB"), "got '5 TB'"),
    (lambda: published.figure_and_tolerance("N/A"), "got 'N/A'"),
    (lambda: published.bert_table(64), "batch must be one of 32, 128, 512, 1024, 2048, got 64"),
    (lambda: published.bert_table(32, 513), "seq must be between 1 and max_position_embeddings=512, got 513"),
    (lambda: published.bert_table(32, executions=("gc",)), ONE_OF),
    (lambda: published.fit_seq(2048), "the article reports no memory for batch=2048"),
    (lambda: published.two_layer_task(0), "batch must be a whole number of at least 1, got 0"),
    (lambda: published.two_layer_task(2, (3,)), "widths must have at least an input and an output, got (3,)"),
    (lambda: published.opacus_step(published.two_layer_task(1), "functorch"), ONE_OF + "'functorch'"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_side_by_side_has_every_cell():
    table = published.synthetic_table()
    assert table["matches"].all()
    shown = published.side_by_side(table)
    assert list(shown.columns) == [phase for phase in PHASES if phase in set(table["phase"])]
    assert (shown != "").sum().sum() == len(table)
    assert shown.loc[(2**17, "ghost"), "first backward"] == "2625 | 2,625.00"
