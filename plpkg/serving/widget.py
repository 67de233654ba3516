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
    speed, fit = result.tokens_per_s, min(result.resident, tenants)
    return (
        f"{result.requests} requests for {result.distinct} adapters of {result.adapter_bytes / 1e6:,.0f} MB: "
        f"{speed['one batch']:,.0f} tokens/s in one batch, {speed['switching']:,.0f} by switching, "
        f"{speed['no adapters']:,.0f} without adapters. Of {tenants:,} tenants' adapters {fit:,} fit into the memory."
    )


def draw(result: tuple[Decoding, int], ax):
    """Tokens per second by how the batch is served."""
    return plots.decoding(result[0], ax=ax)


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
    return Explorer(controls, compute, read_out, draw)
