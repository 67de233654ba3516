"""The explorer of notebook 06: popularity, tenants, rank, batch → tokens per second, *computed*."""

import ipywidgets

from plpkg.explorer import Explorer
from plpkg.serving import plots
from plpkg.serving.popularity import POPULARITIES, Decoding, adapters, decode


def compute(popularity: str, tenants: int, rank: int, requests: int) -> tuple[Decoding, int]:
    """A decoding step of Llama-2-7B on an A100, and how many tenants there are."""
    return decode(adapters(popularity, requests, tenants), rank), tenants


def read_out(result: tuple[Decoding, int]) -> str:
    """Say the result in words."""
    result, tenants = result
    speed = result.tokens_per_s
    return (
        f"{result.requests} requests for {result.distinct} adapters of {result.adapter_bytes / 1e6:,.0f} MB: "
        f"{speed['one batch']:,.0f} tokens/s in one batch, {speed['switching']:,.0f} by switching, "
        f"{speed['no adapters']:,.0f} without adapters. {_memory(result, tenants)}."
    )


def _memory(result: Decoding, tenants: int) -> str:
    return f"Of {tenants:,} tenants' adapters {min(result.resident, tenants):,} fit into the memory"


def draw(result: tuple[Decoding, int], ax):
    """Tokens per second by how the batch is served; above, whose adapters the memory holds."""
    ax = plots.decoding(result[0], ax=ax)
    ax.set_title(_memory(*result))
    return ax


def explorer() -> Explorer:
    """The widget of the notebook."""
    powers = [2**k for k in range(7)]
    controls = {
        "popularity": ipywidgets.SelectionSlider(options=POPULARITIES, value="distinct", description="Popularity"),
        "tenants": ipywidgets.SelectionSlider(
            options=[4**k for k in range(8)], value=64, description="Tenants (adapters)"
        ),
        "rank": ipywidgets.SelectionSlider(options=powers[2:], value=16, description="Rank (values)"),
        "requests": ipywidgets.SelectionSlider(options=powers, value=32, description="Batch (requests)"),
    }
    question = "For which popularity is switching between adapters as fast as one batch for all?"
    return Explorer(controls, compute, read_out, draw, question)
