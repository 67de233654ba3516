"""The explorer of notebook 02: adapter and cut depth → bytes, quality, recovered tokens.

Quality and recovered tokens are *measured (recorded)*, the bytes *computed*. The layers on the device keep their M,
so that the cut's depth does not change the quality.
"""

from dataclasses import dataclass
from functools import cache

import ipywidgets

from plpkg import recorded, theme
from plpkg.backbones import load_backbone
from plpkg.catalog import ModelShape
from plpkg.explorer import Explorer
from plpkg.residual.cost import kept_layers_cost
from plpkg.residual.plots import LORA, personalisation


@dataclass(frozen=True)
class Choice:
    """What an adapter and a cut of plpkg-small come to.

    Attributes
    ----------
    adapter, first_k
        Of the benchmark's methods, and decoder layers on the device.
    bytes_per_token, share_of_actual
        Both ways, 16 bit, with end points; and relative to LoRA's full activations without layers on the device.
    share_of_lora
        Of LoRA's mean gain in bits per byte.
    recovered
        Share of the tokens that the strongest attacker reads, of a device with an adapter of rank 64 whatever is
        chosen.
    device_parameters
        On the device: embedding, every M, and its layers with their A and B.
    """

    adapter: str
    first_k: int
    bytes_per_token: float
    share_of_actual: float
    share_of_lora: float
    recovered: float
    device_parameters: int


@cache
def shape() -> ModelShape:
    """plpkg-small's."""
    return ModelShape.from_config(load_backbone("plpkg-small")[0].config, "plpkg-small")


@cache
def quality():
    """The recorded quality by method: :func:`plpkg.residual.plots.personalisation`."""
    return personalisation(recorded.section("residual_quality", "quality"))


@cache
def strongest_inversion():
    """The share of tokens that the best attacker recovered, by the number of layers on the device."""
    return recorded.section("residual_attacks", "inversion").groupby("x")["recovered"].max()


def adapters() -> list[str]:
    """PrivateLoRA's variants in the benchmark, by the bytes that they send and by what they gain."""
    table = quality().sort_values(["bytes_per_token", "gain"])
    return [name for name in table.index if name.startswith("PrivateLoRA")]


def compute(adapter: str, first_k: int) -> Choice:
    """Look quality and attack up; compute the bytes."""
    row, model = quality().loc[adapter], shape()
    rank = int(row["rank"])
    ends = 2 * 2 * model.hidden  # word embedding and final hidden state, 2 bytes a value
    crossing = (model.num_layers - first_k) / model.num_layers
    bytes_per_token = ends + (row["bytes_per_token"] - ends) * crossing
    return Choice(
        adapter,
        first_k,
        bytes_per_token,
        row["share_of_actual"] * bytes_per_token / row["bytes_per_token"],
        row["share_of_lora"],
        strongest_inversion()[first_k],
        kept_layers_cost(model, first_k, r_c2d=rank, r_d2c=rank, targets=row["targets"].split()).parameters,
    )


def read_out(choice: Choice) -> str:
    """The result in words."""
    return (
        f"{choice.adapter}, {choice.first_k} of {shape().num_layers} layers on the device: "
        f"{choice.bytes_per_token:,.0f} bytes a token, {100 * choice.share_of_actual:.0f} % of full activations; "
        f"{100 * choice.share_of_lora:.0f} % of the gain of {LORA}; the strongest attacker reads "
        f"{100 * choice.recovered:.0f} % of the tokens; {choice.device_parameters / 1e6:.1f} million parameters on the "
        "device."
    )


def draw(choice: Choice, ax):
    """Three bars: what is sent, what is gained, what is read."""
    names = ["bytes sent\n(of full activations)", f"gain\n(of {LORA})", "tokens that the\ncloud reads"]
    values = [100 * v for v in (choice.share_of_actual, choice.share_of_lora, choice.recovered)]
    for name, value, fill in zip(names, values, theme.fills(3), strict=True):
        ax.barh(name, value, **fill)
        ax.text(max(value, 0), name, f" {value:.0f} %", va="center")
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlabel="per cent", xlim=(0, 1.2 * max(100, *values)), title=f"{choice.adapter}, first_k={choice.first_k}")
    bars = ", ".join(f"{name} {value:.0f} %" for name, value in zip(("bytes", "gain", "read"), values, strict=True))
    return theme.describe(ax, f"Three bars for {choice.adapter} with {choice.first_k} layers on the device: {bars}.")


def explorer() -> Explorer:
    """The widget."""
    names = adapters()
    controls = {
        "adapter": ipywidgets.SelectionSlider(
            options=[(name.removeprefix("PrivateLoRA "), name) for name in names],
            value=names[0],
            description="PrivateLoRA (adapter)",
        ),
        "first_k": ipywidgets.IntSlider(
            value=0, min=0, max=shape().num_layers - 1, description="On the device (layers)"
        ),
    }
    return Explorer(controls, compute, read_out, draw)
