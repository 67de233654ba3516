"""The explorer of notebook 06: model, popularity, rank, batch → tokens per second, *computed*."""

import ipywidgets

from plpkg.serving import plots
from plpkg.serving.popularity import POPULARITIES, Decoding, adapters, decode
from plpkg.show.explorer import Explorer

MODELS = {
    "Llama-2-7B, A100": ("llama-2-7b", "a100-80gb-sxm"),
    "Llama-3.1-8B, H100": ("llama-3.1-8b", "h100-sxm"),
}
"""By the slider's name: the catalog's model, and the GPU that serves it."""


def compute(model: str, popularity: str, rank: int, requests: int) -> Decoding:
    """A decoding step of one of ``MODELS``."""
    return decode(adapters(popularity, requests), rank, *MODELS[model])


def read_out(result: Decoding) -> str:
    """Say the result in words."""
    speed = result.tokens_per_s
    return (
        f"{result.requests} requests for {result.distinct} adapters of {result.adapter_bytes / 1e6:,.0f} MB: "
        f"{speed['one batch']:,.0f} tokens/s in one batch, {speed['switching']:,.0f} by switching, "
        f"{speed['no adapters']:,.0f} without adapters. {result.resident:,} such adapters fit into the memory."
    )


def draw(result: Decoding, ax):
    """Tokens per second by how the batch is served."""
    ax = plots.decoding(result, ax=ax)
    kept = result.tokens_per_s["one batch"] / result.tokens_per_s["no adapters"]
    ax.set_title(f"one batch keeps {kept:.0%} of the speed without adapters")
    return ax


def explorer() -> Explorer:
    """The widget of the notebook."""
    powers = [2**k for k in range(7)]
    controls = {
        "model": ipywidgets.SelectionSlider(options=list(MODELS), description="Model and GPU"),
        "popularity": ipywidgets.SelectionSlider(options=POPULARITIES, value="distinct", description="Popularity"),
        "rank": ipywidgets.SelectionSlider(options=powers[2:], value=16, description="Rank (values)"),
        "requests": ipywidgets.SelectionSlider(options=powers, value=32, description="Batch (requests)"),
    }
    question = "With which model, rank and batch do adapters cost half of the speed, though all are in one batch?"
    return Explorer(controls, compute, read_out, draw, question)
