import pytest
import torch

from plpkg.autonomy import WordLSTM, widget
from plpkg.autonomy.prune import macs
from plpkg.backbones import load_backbone


def test_the_work_of_the_word_predictor_is_what_a_forward_pass_counts():
    work = widget.MODELS["word LSTM"]
    assert sum(work) == macs(WordLSTM(), torch.zeros(1, 10, dtype=torch.int64))


def test_the_work_of_plpkg_small_is_its_weights_times_its_tokens():
    model, _ = load_backbone("plpkg-small")
    head = model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    assert widget.MODELS["plpkg-small"] == pytest.approx((128 * body, 128 * head), rel=0.01)


def test_each_saving_saves():
    ways = widget.compute((1_400, 2), "MobileNet", "all layers", 1.0).rows()
    assert [row["learning"] for row in ways] == list(widget.LEARNING)
    assert sorted((row["minutes"] for row in ways), reverse=True) == [row["minutes"] for row in ways]
    assert sorted((row["joules"] for row in ways), reverse=True) == [row["joules"] for row in ways]


def test_days_count_windows_and_what_each_loses():
    row = widget.compute((1_400, 2), "MobileNet", "all layers", 1.0, minutes=15).rows()[0]
    full, left = divmod(60 * row["minutes"], 900 - widget.SKIPPED_S)
    assert row["days"] == pytest.approx(full + (left + widget.SKIPPED_S) / 86_400)


def test_the_read_out_names_what_was_chosen():
    plan = widget.compute((1_400, 2), "word LSTM", "last layer, cached", 2.0)
    row = plan.rows()[2]
    assert f"Training last layer, cached takes {row['minutes']:.3g} minutes" in widget.read_out(plan)
