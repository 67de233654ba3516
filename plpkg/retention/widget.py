"""The explorer of notebook 04: budget, stabilizers and scorer → which units each head keeps, and the answer."""

from dataclasses import dataclass
from functools import cache

import ipywidgets
import numpy as np
import torch

from plpkg.decoding import cache_argument
from plpkg.retention import plots, scorers, tiny
from plpkg.retention.eviction import Log
from plpkg.retention.labels import cis_labels
from plpkg.retention.prefill import chunked_prefill
from plpkg.retention.trials.tasks import FIRST_KEY, FIRST_VALUE, Pairs, pairs_in_noise
from plpkg.show import theme
from plpkg.show.explorer import Explorer

LENGTH = 96  # tokens of noise and pairs in a prompt, behind its start
CHUNK = 16
PROMPTS = 64
SCORERS = plots.METHODS


@dataclass(frozen=True)
class Kept:
    """A prompt that was read under a budget, and how 63 others like it went.

    Attributes
    ----------
    scorer, budget, stabilizers
        The settings that were chosen; as many ``stabilizers`` as fit in the budget.
    log
        The log of the prefill.
    right
        The number of values that the model found in the first prompt.
    mean
        The mean of that number over all prompts.
    asked
        The number of values that were asked for in a prompt.
    """

    scorer: str
    budget: int
    stabilizers: int
    log: Log
    right: int
    mean: float
    asked: int


@cache
def example() -> Pairs:
    """The prompts: six pairs in 96 tokens each."""
    return pairs_in_noise(PROMPTS, LENGTH, seed=4)


@cache
def _shipped():
    """The model that finds pairs, and its heads."""
    model, heads = tiny.shipped("pairs")
    return model, heads["pairs"]


def _scorer(name: str):
    model, heads = _shipped()
    ids = tiny.packed(example().ids)
    prompt_len = example().prompt.shape[1]
    makers = {
        "Locret": lambda: scorers.Locret(heads),
        "oracle": lambda: scorers.Static(cis_labels(model, ids, prompt_len)),
        "SnapKV": scorers.SnapKv,
        "H2O": scorers.H2O,
        "SirLLM": lambda: scorers.SirLlm(sink=1),
        "random": scorers.Random,
        "sink + recent": lambda: scorers.SinkRecent(sink=1),
        "key norm": scorers.KeyNorm,
    }
    return makers[name]()


@torch.no_grad()
def compute(scorer: str, budget: int, stabilizers: int) -> Kept:
    """Read the prompts, and ask for every value."""
    model, _ = _shipped()
    task = example()
    chosen = _scorer(scorer)
    stabilizers = min(stabilizers, budget - max(1, chosen.sink))
    ids = tiny.packed(task.ids)
    prompt_len = task.prompt.shape[1]
    read = chunked_prefill(model, ids[:, :prompt_len], chosen, budget, CHUNK, stabilizers, log_positions=True)
    logits = model(ids[:, prompt_len:], **cache_argument(read.cache)).logits
    right = task.right(logits)
    return Kept(
        scorer=scorer,
        budget=budget,
        stabilizers=stabilizers,
        log=read.log,
        right=int(right[0]),
        mean=right.double().mean().item(),
        asked=task.answer[0, 2::2].numel(),
    )


def read_out(kept: Kept) -> str:
    """The result in words."""
    return (
        f"{kept.scorer}, {kept.budget} units, {kept.stabilizers} stabilizers: {kept.right} of {kept.asked} values "
        f"found, {kept.mean:.1f} on average over {PROMPTS} prompts; at most {kept.log.peak} units in a KV head, "
        f"{kept.log[-1].after} of {LENGTH + 1} tokens at the end."
    )


def draw(kept: Kept, ax):
    """The units that every head of both layers kept, above the places of the pairs."""
    by_layer = kept.log[-1].kept[:, 0]  # (layers, num_kv_heads, kept)
    prompt = example().prompt[0].numpy()
    is_key = (prompt >= FIRST_KEY) & (prompt < FIRST_VALUE)
    values = np.flatnonzero(np.roll(is_key, 1))  # a value stands behind its key
    colour = plots.STYLES[kept.scorer]["color"]
    for value in values:
        ax.axvspan(value - 0.5, value + 0.5, color="0.85")
    names = []
    counts = []
    for layer, heads in enumerate(by_layer):
        for head, units in enumerate(heads):
            ax.plot(units, np.full(len(units), len(names)), "s", ms=4, color=colour)
            names.append(f"layer {layer}, KV head {head}")
            counts.append(len(set(values) & set(units.tolist())))
    ax.set_yticks(range(len(names)), names)
    ax.set(xlim=(-1, LENGTH + 1), ylim=(len(names) - 0.5, -0.5), xlabel="position (grey: the values)")
    ax.grid(False)
    ax.set_title(f"{kept.right} of {kept.asked} found here, {kept.mean:.1f} on average")
    said = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
    return theme.describe(ax, f"The units that each KV head kept; of the {len(values)} values: {said}.")


def explorer() -> Explorer:
    """The widget."""
    controls = {
        "scorer": ipywidgets.SelectionSlider(options=SCORERS, value="sink + recent", description="Scorer"),
        "budget": ipywidgets.IntSlider(value=12, min=4, max=48, description="Budget (units)"),
        "stabilizers": ipywidgets.IntSlider(value=0, min=0, max=16, description="Stabilizers (units)"),
    }
    question = "Which scorers find all six values with only 12 units in each head, on average over 64 prompts?"
    return Explorer(controls, compute, read_out, draw, question)
