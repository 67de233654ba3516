"""The explorer of notebook 01: model, rank and link → bits and milliseconds per token."""

from dataclasses import dataclass

import ipywidgets

from plpkg import catalog, results
from plpkg.communication import plots
from plpkg.communication.formulas import full_activations, low_rank
from plpkg.communication.traffic import Traffic
from plpkg.show.explorer import Explorer


@dataclass(frozen=True)
class Comparison:
    """One token's traffic by low-rank residuals beside what full activations would take."""

    model: str
    rank: int
    link: str
    traffics: dict[str, Traffic]

    @property
    def low_rank(self) -> Traffic:
        """The traffic that the controls ask for."""
        return self.traffics["low rank"]

    def milliseconds(self, name: str) -> float:
        """Milliseconds that a token spends on the link."""
        return 1e3 * sum(self.traffics[name].seconds(self.link).values())


def compute(model: str, rank: int, link: str, endpoints: bool) -> Comparison:
    """Compare the traffic of one decoded token; arguments as in :func:`~plpkg.communication.low_rank`."""
    ends = ", end points" if endpoints else ""
    traffics = {
        "low rank": low_rank(model, rank, endpoints=endpoints),
        f"1 projection{ends}": full_activations(model, 1, endpoints),
        "split LoRA": full_activations(model, 3, endpoints, baseline="actual"),
        f"3 projections down and up{ends}": full_activations(model, 3, endpoints),
    }
    return Comparison(model, rank, link, traffics)


def read_out(result: Comparison) -> str:
    """The result in words."""
    low = result.low_rank
    link = catalog.link(result.link)
    total = result.milliseconds("low rank")
    waits = 1e3 * low.seconds(link)["round_trips"]
    return (
        f"{result.model}, rank {result.rank}, on {link.name} (RTT {1e3 * link.rtt_s:g} ms): a token takes "
        f"{total:.1f} ms, {total - waits:.1f} of them for its "
        f"{results.bits(low.total_bits)}, {waits:.1f} for {low.round_trips} round trips. "
        f"A split LoRA would take {result.milliseconds('split LoRA'):.1f} ms."
    )


def draw(result: Comparison, ax):
    """The four traffics on the link."""
    return plots.link_time(result.traffics, result.link, ax=ax)


def links(value: str = "5g-published") -> ipywidgets.SelectionSlider:
    """A choice of the catalog's links, each shown with its round-trip time."""
    options = [(f"{link.name} ({1e3 * link.rtt_s:g} ms)", name) for name, link in catalog.links().items()]
    return ipywidgets.SelectionSlider(options=options, value=value, description="Link (its RTT)")


def explorer() -> Explorer:
    """The widget: choose a model, a rank, a link, and whether the end points count."""
    controls = {
        "model": ipywidgets.SelectionSlider(options=catalog.decoders(), value="llama-7b", description="Model"),
        "rank": ipywidgets.SelectionSlider(options=plots.RANKS, value=32, description="Rank (values)"),
        "link": links("5g"),
        "endpoints": ipywidgets.Checkbox(value=True, description="Count the end points"),
    }
    question = "What saves a token more time: a lower rank, or a link with a shorter round trip?"
    return Explorer(controls, compute, read_out, draw, question)
