"""The explorer of notebook 02: rank, layer, tokens seen and noise → the error of the M that the cloud solves for.

*Simulated*: u is A·x of plpkg-small on public text, with A and M drawn at random; messages are rounded to fp16.
"""

from dataclasses import dataclass
from functools import cache

import ipywidgets
import torch

from plpkg import corpora, theme
from plpkg.backbones import load_backbone
from plpkg.explorer import Explorer
from plpkg.residual.attacks import recover_m, relative_error

RANKS, TOKENS, NOISES = (
    (4, 8, 16, 32, 64, 128),
    (8, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048),
    (0.0, 0.1, 0.3, 1.0),
)

GOOD = 0.16
"""With an error of this size a copy was as good as its original (*measured, recorded*: ``residual_attacks.csv``)."""


@dataclass(frozen=True)
class Theft:
    """What a cloud has of M.

    Attributes
    ----------
    rank, layer, tokens, noise
        Of M; which layer's; how many tokens have passed; noise on the answers, as a multiple of their size.
    errors
        Relative, Frobenius, by the number of tokens.
    """

    rank: int
    layer: int
    tokens: int
    noise: float
    errors: dict[int, float]

    @property
    def error(self) -> float:
        """After ``tokens``."""
        return self.errors[self.tokens]


@cache
def inputs() -> tuple[torch.Tensor, ...]:
    """What q_proj of each layer reads in the first public test texts: ``(tokens, hidden)``."""
    model, tokenizer = load_backbone("plpkg-small")
    ids = next(corpora.batches(corpora.encode(corpora.public("test"), tokenizer), batch=8, seq=256, seed=0))
    reads, handles = [], []
    for layer in model.model.layers:
        hook = layer.self_attn.q_proj.register_forward_pre_hook(lambda _, given: reads.append(given[0].flatten(0, 1)))
        handles.append(hook)
    with torch.no_grad():
        model.model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return tuple(reads)


@cache
def compute(rank: int, layer: int, tokens: int, noise: float) -> Theft:
    """Draw A and M, let the text pass, and solve for M."""
    x, generator = inputs()[layer], torch.Generator().manual_seed(rank)
    a, m = (torch.randn(*size, generator=generator) for size in ((rank, x.shape[1]), (rank, rank)))
    u = (x @ a.T / x.shape[1] ** 0.5).half()
    v = u.float() @ m.T
    v = (v + noise * v.std() * torch.randn(v.shape, generator=generator)).half()
    errors = {n: relative_error(recover_m(u[:n], v[:n]), m) for n in TOKENS}
    return Theft(rank, layer, tokens, noise, errors)


def read_out(theft: Theft) -> str:
    """The result in words."""
    verdict = "a copy as good as the original" if theft.error <= GOOD else "no good copy yet"
    noisy = f" and noise of {theft.noise:g} times the answers" * bool(theft.noise)
    return (
        f"From {theft.tokens:,} tokens{noisy} the cloud has layer {theft.layer}'s M of rank {theft.rank} with a "
        f"relative error of {theft.error:.1g}: {verdict}."
    )


def draw(theft: Theft, ax):
    """The error against the tokens that have passed; the chosen number is filled."""
    colour = theme.styles(1)[0]["color"]
    ax.plot(list(theft.errors), list(theft.errors.values()), "o-", color=colour, mfc="white")
    ax.plot(theft.tokens, theft.error, "o", color=colour, ms=10)
    ax.axhline(GOOD, color="0.4", lw=1, ls="--")
    ax.axvline(theft.rank, color="0.4", lw=1, ls=":")
    ax.text(TOKENS[-1], GOOD, "below: as good as the original", ha="right", va="bottom", fontsize=9, color="0.3")
    ax.text(theft.rank, 2e-5, " tokens = rank", fontsize=9, color="0.3")
    ax.set(xlabel="tokens that have passed", ylabel="relative error of the cloud's M", yscale="log", ylim=(1e-5, 200))
    ax.set_xscale("log", base=2)
    ax.set_title(f"M of rank {theft.rank} in layer {theft.layer}, noise {theft.noise:g} (simulated)")
    points = ", ".join(f"{error:.2g} from {tokens:,}" for tokens, error in theft.errors.items())
    return theme.describe(
        ax, f"Error of an M of rank {theft.rank}, layer {theft.layer}, noise {theft.noise:g}: {points}."
    )


def explorer() -> Explorer:
    """The widget."""
    layers = [(f"layer {i}", i) for i in range(len(inputs()))]
    noises = [("none", 0.0), *((f"{noise:g} × the answers", noise) for noise in NOISES[1:])]
    controls = {
        "rank": ipywidgets.SelectionSlider(options=RANKS, value=32, description="Rank of M"),
        "layer": ipywidgets.SelectionSlider(options=layers, value=2, description="Layer"),
        "tokens": ipywidgets.SelectionSlider(options=TOKENS, value=48, description="Tokens seen"),
        "noise": ipywidgets.SelectionSlider(options=noises, value=0.0, description="Noise on the answers"),
    }
    return Explorer(controls, compute, read_out, draw)
