"""The explorer of notebook 02: a sentence, how much text has passed, rank, layer → what the cloud reads, and its M.

*Simulated*: u is A·x of plpkg-small on the sentence and then on a diary, with A and M drawn at random; messages are
rounded to fp16. Directions of u that are weaker than this rounding say nothing of M, and the cloud leaves them out.
"""

from dataclasses import dataclass
from functools import cache

import ipywidgets
import torch

from plpkg import corpora
from plpkg.backbones import load_backbone
from plpkg.residual.attacks import public_table, recover_tokens, relative_error
from plpkg.show import theme
from plpkg.show.explorer import Explorer

RANKS = (4, 8, 16, 32, 64, 128)
NOTHING = -1
SENT = (NOTHING, 0, 16, 32, 64, 128, 256, 512, 1024)
"""How many tokens of the diary have followed the sentence; or not even that has been sent."""
OTHERS = 256
"""On so many tokens, the diary's last, the copy's answers are compared."""
ROUNDING = 2.0**-10
"""Of fp16, relative."""


@dataclass(frozen=True)
class Theft:
    """Spoils of a cloud: what it has of a sentence and of M.

    Attributes
    ----------
    rank, layer
        Of M; which layer's.
    tokens
        Of the sentence.
    read, right
        The text that the cloud has read of it, and how many of its tokens are right.
    errors
        By the number of tokens that have passed: the copy's relative error, Frobenius, and that of its answers to other
        text. Without a copy both are 1.
    """

    rank: int
    layer: int
    tokens: int
    read: str
    right: int
    errors: dict[int, tuple[float, float]]


@cache
def _model() -> tuple:
    model, tokenizer = load_backbone("plpkg-small")
    return model, tokenizer, public_table(model)


def _ids(text: str) -> torch.Tensor:
    """``(tokens,)``, without a token for the beginning: a sentence of yours has none."""
    _, tokenizer, _ = _model()
    return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0].long()


@cache
def reads(text: str) -> torch.Tensor:
    """Inputs of q_proj in each layer: ``(layers, tokens, hidden)``."""
    model, _, _ = _model()
    ids = _ids(text)
    kept: list[torch.Tensor] = []
    if not len(ids):
        return torch.zeros(len(model.model.layers), 0, model.config.hidden_size)
    hooks = [
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, given: kept.append(given[0][0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model.model(ids[None, : model.config.max_position_embeddings], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(kept)


@cache
def diary() -> torch.Tensor:
    """As :func:`reads`, of as many of the diary's entries as are needed, one after the other."""
    return torch.cat([reads(entry.text) for entry in corpora.diary().entries[:8]], dim=1)


def compute(sentence: str, sent: int, rank: int, layer: int) -> Theft:
    """Draw A and M, let the text pass, read it, and solve for M."""
    _, tokenizer, table = _model()
    ids = _ids(sentence)
    if sent == NOTHING:
        return Theft(rank, layer, len(ids), "", 0, {})
    found = recover_tokens(table[ids].half(), table)
    right = int((found == ids).sum())
    passed = torch.cat([reads(sentence)[layer], diary()[layer, :sent]])  # (tokens, hidden)
    others = diary()[layer, -OTHERS:]
    return Theft(rank, layer, len(ids), tokenizer.decode(found), right, errors(passed, rank, others))


def errors(x: torch.Tensor, rank: int, others: torch.Tensor) -> dict[int, tuple[float, float]]:
    """Those of a copy of M by how many of the inputs ``x`` ``(tokens, hidden)`` have passed: 1, 2, 4 … all.

    Around the rank, where the copy begins to be good, a quarter below and above it too.
    """
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(rank, x.shape[1], generator=generator)
    m = torch.randn(rank, rank, generator=generator)
    u, v = _crossed(x @ a.T, m)
    other_u, other_v = _crossed(others @ a.T, m)
    counts = {2**k for k in range(11)} | {rank * 3 // 4, rank * 5 // 4}
    counts = {n for n in counts if 0 < n < len(u)}
    if len(u):
        counts.add(len(u))
    errors = {}
    for n in sorted(counts):
        copy = torch.linalg.lstsq(u[:n], v[:n], rcond=ROUNDING, driver="gelsd").solution.T
        errors[n] = (relative_error(copy, m), relative_error(other_u @ copy.T, other_v))
    return errors


def _crossed(u: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """u and M·u as the cloud has them, rounded to fp16: ``(tokens, rank)`` each."""
    v = u @ m.T
    return u.half().double(), v.half().double()


def read_out(theft: Theft) -> str:
    """The result in words."""
    if not theft.errors:
        return (
            f"Nothing has been sent: the cloud knows nothing of your {theft.tokens} tokens, nor of the "
            f"{theft.rank} × {theft.rank} numbers of layer {theft.layer}'s M."
        )
    passed, (error, off) = list(theft.errors.items())[-1]
    return (
        f"The cloud reads “{theft.read}”, {theft.right} of {theft.tokens} tokens right. From {passed:,} tokens it has "
        f"layer {theft.layer}'s M of rank {theft.rank} with a relative error of {_per_cent(error)}; its copy's answers "
        f"to other text are off by {_per_cent(off)}."
    )


def _per_cent(share: float) -> str:
    return "less than 1 %" if share < 0.01 else f"{share:.0%}".replace("%", " %")


def draw(theft: Theft, ax):
    """Both errors against the tokens that have passed."""
    of_m, of_answers = theme.styles(2)
    passed = list(theft.errors)
    ax.plot(passed, [error for error, _ in theft.errors.values()], label="M", **of_m)
    ax.plot(passed, [error for _, error in theft.errors.values()], label="its answers to other text", **of_answers)
    ax.axvline(theft.rank, color="0.4", lw=1, ls=":")
    ax.text(theft.rank, 1.3, " tokens = rank", fontsize=9, color="0.3")
    ax.set(xlabel="tokens that have passed", ylabel="relative error of the copy (1: no copy)")
    ax.set(xscale="log", yscale="log", xlim=(0.9, 1400), ylim=(3e-5, 3))
    ax.set_xticks([1, 4, 16, 64, 256, 1024], [1, 4, 16, 64, 256, 1024], minor=False)
    ax.minorticks_off()
    sent = max(theft.errors, default=0)
    which = f"rank {theft.rank}, layer {theft.layer}"
    ax.set_title(f"{which}: {sent:,} tokens sent, {theft.tokens} in the sentence (simulated)")
    if theft.errors:
        ax.legend(loc="lower left")
    points = "; ".join(f"{n:,}: {m:.2g} and {answers:.2g}" for n, (m, answers) in theft.errors.items())
    return theme.describe(
        ax,
        f"Relative error of the cloud's copy of an M of rank {theft.rank} in layer {theft.layer}, and of its answers, "
        f"by tokens that have passed: {points or 'nothing has been sent'}.",
    )


def explorer() -> Explorer:
    """The widget."""
    model, _, _ = _model()
    layers = [(f"layer {i}", i) for i in range(len(model.model.layers))]
    sent = [("nothing", NOTHING), ("the sentence", 0), *((f"and {n:,} tokens of a diary", n) for n in SENT[2:])]
    controls = {
        "sentence": ipywidgets.Text(value="Nobody knows what I write here.", description="Your sentence"),
        "sent": ipywidgets.SelectionSlider(options=sent, value=NOTHING, description="Sent"),
        "rank": ipywidgets.SelectionSlider(options=RANKS, value=32, description="Rank of M"),
        "layer": ipywidgets.SelectionSlider(options=layers, value=2, description="Layer"),
    }
    question = "How many tokens does the cloud need before it has M, and how does that depend on the rank?"
    return Explorer(controls, compute, read_out, draw, question)
