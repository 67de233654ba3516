"""The explorer of notebook 03: model, rank, link and round-trip time → tokens per second."""

import warnings
from dataclasses import dataclass

import ipywidgets

from plpkg import catalog
from plpkg.communication.plots import RANKS
from plpkg.communication.widget import links
from plpkg.show.explorer import Explorer
from plpkg.throughput import plots
from plpkg.throughput.estimate import Estimate, decode
from plpkg.throughput.resources import phone_only_tokens_per_s, whole_model_bytes
from plpkg.throughput.split import does_not_fit


@dataclass(frozen=True)
class Speeds:
    """The split model beside the two alternatives: the cloud's GPU alone, the phone alone."""

    split: Estimate
    phone_only_tokens_per_s: float
    phone_only_unfit: tuple[str, ...]


def compute(model: str, rank: int, link: str, rtt_ms: float) -> Speeds:
    """Estimate with the ``literal`` accounting; the phone alone runs 4-bit weights at its roofline."""
    phone = catalog.device("iphone-13-pro-max")
    with warnings.catch_warnings(action="ignore"):  # the read-out says it
        alone = phone_only_tokens_per_s(model, 4, phone)
    unfit = does_not_fit(whole_model_bytes(model, 4), phone)
    return Speeds(decode(model, rank, link=link, rtt_s=rtt_ms / 1e3), alone, unfit)


def read_out(result: Speeds) -> str:
    """The result in words."""
    split = result.split
    parts = split.breakdown()
    largest = max(parts, key=parts.__getitem__)
    unfit = "".join(f" But {sentence}." for sentence in (*split.unfit, *result.phone_only_unfit))
    return (
        f"{split.model}, rank {split.r_c2d}, {split.link}: {split.tokens_per_s:.2f} tokens/s, "
        f"{100 * split.gpu_fraction:.1f} % of the GPU's {split.gpu_tokens_per_s:.1f} ({split.gpu}). "
        f"Largest term: {plots.TERM_LABELS[largest]}, {1e3 * parts[largest]:.1f} ms of {1e3 / split.tokens_per_s:.1f}. "
        f"The phone alone, 4 bit, roofline: {result.phone_only_tokens_per_s:.2f} tokens/s.{unfit}"
    )


def draw(result: Speeds, ax):
    """A bar of the split's time for a token by term, beside the GPU alone and the phone alone."""
    alone = {
        "GPU alone": result.split.gpu_tokens_per_s,
        "phone alone,\n4 bit, roofline": result.phone_only_tokens_per_s,
    }
    return plots.breakdown({f"split, rank {result.split.r_c2d}": result.split}, alone, ax=ax)


def explorer() -> Explorer:
    """The widget. Choosing a link also sets the round-trip time to that link's own."""
    controls = {
        "model": ipywidgets.SelectionSlider(options=catalog.decoders(), value="llama-2-7b", description="Model"),
        "rank": ipywidgets.SelectionSlider(options=RANKS, value=64, description="Rank (values)"),
        "link": links(),
        "rtt_ms": ipywidgets.FloatSlider(value=0, min=0, max=60, step=0.5, description="RTT (ms)"),
    }

    def take_rtt(change) -> None:
        controls["rtt_ms"].value = 1e3 * catalog.link(change["new"]).rtt_s

    controls["link"].observe(take_rtt, "value")  # before the explorer observes it, and draws
    question = "At which round-trip time does the split model become slower than the phone alone?"
    return Explorer(controls, compute, read_out, draw, question)
