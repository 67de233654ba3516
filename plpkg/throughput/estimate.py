r"""Tokens per second of a split model, as a sum of times (PrivateLoRA article, speed formula).

.. math::

    \frac{1}{TPS} = \underbrace{\frac{1}{TPS_C^{Decoder}}}_{\text{decoder}}
    + \underbrace{\frac{T_D^{PL} + T_C^{PL}}{bs \cdot seq}}_{\text{m, a\_and\_b}}
    + \underbrace{\frac{1}{TPS_D^{LM\ Head}}}_{\text{lm\_head}} + t + \text{kv\_cache}

Every computing term is a roofline: the longer of reading the weights and doing the arithmetic,
``max(bytes / bandwidth, 2 · parameters · positions / FLOPS)``. The network time ``t`` comes from
:mod:`plpkg.communication`: end points, uplink, downlink and (absent in the article) round trips.
Absent there, too: the KV cache, which a pass reads once for each sequence. After ``context`` positions
each layer holds ``2 · kv_heads · head_dim · context`` numbers, or those of the last ``sliding_window - 1``
positions where it has a window (as transformers' ``DynamicCache``); by default there are none.

Two accountings:

* ``literal``: the printed formula, every term, one after the other.
* ``figure``: what the article's curves were drawn with, recovered from them. Its decoding curves
  leave out M's time on the phone and the downlink of the residuals (as if both hid behind the
  q, k, v projections); its prefill curves leave out the cloud's decoder. It is refused for what
  the article does not have: a ladder, late or folded residuals, a KV cache.

A token of a mixture of experts computes with the experts that it meets, and a pass reads each that
one of its positions meets, under even and independent choices.

Left out: attention among a prompt's own positions, sampling, framing and software overhead.
"""

from dataclasses import dataclass
from typing import Any

from plpkg.catalog import Link, ModelShape
from plpkg.communication import Traffic
from plpkg.results import Tabular
from plpkg.throughput.split import Split
from plpkg.validation import keywords, number, one_of, whole_number

ACCOUNTINGS = ("literal", "figure")
"""``literal``: every term of the formula. ``figure``: the terms that reproduce the published curves."""
TERMS = ("decoder", "lm_head", "m", "a_and_b", "endpoints", "uplink", "downlink", "round_trips", "kv_cache")
"""The parts of a token's time. ``uplink`` and ``downlink`` carry the residuals, ``endpoints`` the
embedding and the final hidden state; ``kv_cache`` is read on the cloud."""

FIGURE_OMITS = {"decode": ("m", "downlink"), "prefill": ("decoder",)}


@dataclass(frozen=True)
class Estimate(Tabular):
    """A computed speed, with everything that it is made of.

    Attributes
    ----------
    model, accounting, link
        The names of the model, the accounting and the link.
    r_c2d, r_d2c
        The ranks.
    seconds_per_token
        One value for each of :data:`~plpkg.throughput.TERMS`; an omitted term is 0.
    omitted
        Terms that this accounting leaves out.
    gpu_tokens_per_s
        The speed of the whole model on the cloud's GPU alone, with which the split is compared.
    gpu
        The origin of that speed: ``"published"``, ``"roofline"`` or ``"given"``.
    round_trips_per_token, up_bytes_per_token, down_bytes_per_token
        The traffic, whatever the accounting omits.
    unfit
        A sentence for each device whose memory does not hold its part: the speed is what it would be if it did.
    context
        Positions before the token. The GPU's speed includes reading their cache, too.
    """

    model: str
    accounting: str
    link: str
    r_c2d: int
    r_d2c: int
    seconds_per_token: tuple[float, ...]
    omitted: tuple[str, ...]
    gpu_tokens_per_s: float
    gpu: str
    round_trips_per_token: float
    up_bytes_per_token: float
    down_bytes_per_token: float
    unfit: tuple[str, ...] = ()
    context: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, all sequences of the batch together."""
        return 1 / sum(self.seconds_per_token)

    @property
    def gpu_fraction(self) -> float:
        """``tokens_per_s`` as a share of the GPU's own speed."""
        return self.tokens_per_s / self.gpu_tokens_per_s

    def breakdown(self) -> dict[str, float]:
        """Seconds per token of each term; they sum to ``1 / tokens_per_s``."""
        return dict(zip(TERMS, self.seconds_per_token, strict=True))

    def rows(self) -> list[dict]:
        total = sum(self.seconds_per_token)
        parts = self.breakdown()
        if not self.context:
            del parts["kv_cache"]
        return [
            {"term": term, "ms_per_token": 1e3 * seconds, "share_percent": 100 * seconds / total}
            for term, seconds in parts.items()
        ]

    def __repr__(self) -> str:
        rank = f"rank {self.r_c2d}" if self.r_c2d == self.r_d2c else f"ranks {self.r_c2d} down, {self.r_d2c} up"
        context = f", context {self.context:,}" if self.context else ""
        unfit = "".join(f"; {sentence}" for sentence in self.unfit)
        return (
            f"{self.model}, {rank}, {self.link}, {self.accounting}{context}: {self.tokens_per_s:.2f} tokens/s, "
            f"{100 * self.gpu_fraction:.1f} % of the GPU's {self.gpu_tokens_per_s:.1f} ({self.gpu}){unfit}"
        )


@keywords(Split)
def decode(
    model: str | ModelShape,
    rank: int = 64,
    accounting: str = "literal",
    link: str | Link = "5g-published",
    rtt_s: float | None = None,
    *,
    gpu: str | float | None = None,
    batch: int = 1,
    context: int = 0,
    draft_tokens: int = 0,
    tokens_per_pass: float | None = None,
    **split: Any,
) -> Estimate:
    """Estimate the speed of generating tokens one after the other.

    Parameters
    ----------
    model, rank, link, rtt_s, **split
        Fields of :class:`~plpkg.throughput.Split`: the model and how it is divided (``method``,
        ``late``, ``folded`` …), the network, the ``device`` and the ``cloud``.
    accounting
        ``"literal"`` or ``"figure"``: see the module.
    gpu
        The cloud's speed with the whole model: ``"published"`` (reported for this model and
        cloud at 16 bit), ``"roofline"``, or a number of tokens per second. ``None`` takes the
        published one where there is one, else the roofline; the result's ``gpu`` says which.
    batch
        Sequences decoded together. As in the article, a published or given speed is not
        multiplied by a larger batch; the roofline is.
    context
        Positions of each sequence before this token. A pass reads their keys and values from the cloud's KV cache; in
        a layer with a sliding window only those of the window. A published or given ``gpu`` is taken as the speed
        without them: reading them is added to the GPU's time as well.
    draft_tokens
        Speculative or look-ahead decoding: the number of guesses of the device that travel with the last token;
        making them takes no time. A published or given GPU speed checks them at the price of one token; the roofline
        charges their arithmetic. ``gpu_tokens_per_s`` stays the GPU's speed without guesses.
    tokens_per_pass
        The measured number of tokens that a pass with these guesses yields for each sequence. (If each guess is right
        with probability a, given that those before it were: ``1 + a + a² + …``, arXiv 2211.17192, eq. 1.)

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        An argument is out of range, ``gpu="published"`` for a model or cloud without one,
        guesses without what they yield or in a batch whose GPU speed is not a roofline, or settings
        that exclude each other.
    """
    arrangement = Split(model, rank, link, rtt_s, **split)
    batch = whole_number("batch", batch, 1)
    context = whole_number("context", context, 0)
    in_flight = 1 + whole_number("draft_tokens", draft_tokens, 0)
    if tokens_per_pass is None and draft_tokens:
        raise ValueError(f"draft_tokens={draft_tokens} needs tokens_per_pass, what a pass with them yields")
    yielded = 1 if tokens_per_pass is None else number("tokens_per_pass", tokens_per_pass, 1, in_flight)
    produced = batch * yielded

    pass_s = arrangement.pass_seconds(in_flight, batch, "all", context)
    sent = arrangement.traffic(in_flight, batch, "all")
    gpu_speed, source = arrangement.gpu_tokens_per_s(gpu, batch)
    if source != "roofline" and draft_tokens and batch > 1:
        raise ValueError(
            f"draft_tokens={draft_tokens} with batch={batch} needs gpu='roofline': a {source} speed says neither "
            "what a batch saves nor what checking guesses costs"
        )
    if source != "roofline":  # the quoted speed includes the LM head, which here runs on the phone
        shape = arrangement.model
        head_share = shape.embedding_parameters / (shape.computing_parameters - shape.unread_parameters())
        pass_s["decoder"] = batch / gpu_speed * (1 - head_share)
    if context:  # the GPU alone has to read the cache as well
        gpu_pass_s = batch / gpu_speed + arrangement.cache_s(context, batch, batch)
        gpu_speed = batch / gpu_pass_s
    return _estimate(
        arrangement,
        accounting,
        FIGURE_OMITS["decode"],
        pass_s,
        sent,
        produced,
        gpu_speed,
        source,
        context,
        cache_bytes=arrangement.cache_bytes(context, batch),
    )


@keywords(Split)
def prefill(
    model: str | ModelShape,
    tokens: int = 256,
    rank: int = 64,
    accounting: str = "literal",
    link: str | Link = "5g-published",
    rtt_s: float | None = None,
    *,
    logits: str = "all",
    **split: Any,
) -> Estimate:
    """Estimate the speed of reading a prompt of ``tokens`` tokens in one pass.

    Parameters
    ----------
    logits
        ``"all"``, as in the article: every position's final hidden state comes down and meets the
        LM head. ``"last"``: only the last position's, which is all that generation needs.

    Other parameters, result and errors as in :func:`decode`. The cloud's decoder is a roofline,
    since no prefill speed of the GPU was published.
    """
    arrangement = Split(model, rank, link, rtt_s, **split)
    tokens = whole_number("tokens", tokens, 1)
    one_of("logits", logits, ("all", "last"))
    pass_s = arrangement.pass_seconds(tokens, 1, logits)
    sent = arrangement.traffic(tokens, 1, logits)
    gpu_speed, source = arrangement.gpu_tokens_per_s("roofline", tokens)
    return _estimate(arrangement, accounting, FIGURE_OMITS["prefill"], pass_s, sent, tokens, gpu_speed, source)


def _estimate(
    split: Split,
    accounting: str,
    figure_omits: tuple[str, ...],
    pass_s: dict[str, float],
    sent: Traffic,
    produced: float,
    gpu_speed: float,
    gpu: str,
    context: int = 0,
    cache_bytes: float = 0.0,
) -> Estimate:
    """Share one pass among the tokens it ``produced``, without the terms that the accounting omits."""
    one_of("accounting", accounting, ACCOUNTINGS)
    omitted = ()
    if accounting == "figure":
        omitted = figure_omits
        if split.method != "low_rank" or split.late or split.folded or context:
            raise ValueError(
                f"accounting={accounting!r} is the article's: no ladder, nothing late or folded, no context"
            )
    link = split.link.name
    if split.rtt_s != split.link.rtt_s:
        link = f"{link} with RTT {1e3 * split.rtt_s:g} ms"
    return Estimate(
        model=split.model.name,
        accounting=accounting,
        link=link,
        r_c2d=split.r_c2d,
        r_d2c=split.r_d2c,
        seconds_per_token=tuple(0.0 if term in omitted else pass_s[term] / produced for term in TERMS),
        omitted=omitted,
        gpu_tokens_per_s=gpu_speed,
        gpu=gpu,
        round_trips_per_token=sent.round_trips / produced,
        up_bytes_per_token=sent.uplink_bits / 8 / produced,
        down_bytes_per_token=sent.downlink_bits / 8 / produced,
        unfit=split.unfit(cache_bytes),
        context=context,
    )
