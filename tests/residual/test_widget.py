"""The explorer's numbers, against a real cut of the model; its words; its bars."""

import pytest
from peft import get_peft_model

from plpkg import recorded, theme
from plpkg.backbones import load_backbone
from plpkg.residual import PrivateLoraConfig, split, widget
from plpkg.residual.cost import device_cost


@pytest.mark.parametrize("first_k", [0, 2, 4])
@pytest.mark.parametrize(
    ("adapter", "rank", "targets"),
    [
        ("PrivateLoRA r=16", 16, None),
        ("PrivateLoRA r=64", 64, None),
        ("PrivateLoRA down r=48, gradient", 48, ["down_proj"]),
    ],
)
def test_bytes_and_parameters_are_those_of_the_cut_model(adapter, rank, targets, first_k):
    model = load_backbone("plpkg-small")[0]
    model = get_peft_model(model, PrivateLoraConfig(r_c2d=rank, r_d2c=rank, target_modules=targets))
    cost = device_cost(split(model, first_k)[0])
    choice = widget.compute(adapter, first_k)
    assert choice.bytes_per_token == cost.up_bytes_per_token + cost.down_bytes_per_token
    assert choice.device_parameters == cost.parameters


def test_quality_and_attack_are_the_recorded_ones():
    choice = widget.compute("PrivateLoRA r=64", 1)
    row = widget.quality().loc["PrivateLoRA r=64"]
    assert choice.share_of_lora == row["share_of_lora"]
    assert choice.recovered == recorded.section("residual_attacks", "inversion").query("x == 1")["recovered"].max()
    assert widget.compute("PrivateLoRA r=64", 0).share_of_actual == pytest.approx(row["share_of_actual"], abs=5e-5)


def test_bars_are_the_choice():
    ax = theme.axes()
    choice = widget.compute("PrivateLoRA r=16", 0)
    widget.draw(choice, ax)
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == pytest.approx([100 * v for v in (choice.share_of_actual, choice.share_of_lora, choice.recovered)])
    assert "Three bars for PrivateLoRA r=16" in theme.alt(ax.figure)
