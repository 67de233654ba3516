"""How well a language model predicts a text: bits per byte and perplexity, on the spans that may be scored.

Bits per byte compare models with different tokenizers, and a compressor; perplexity is per token and does not.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from plpkg.corpora.documents import Document
from plpkg.corpora.tokens import Tokens, encode
from plpkg.results import Tabular
from plpkg.validation import whole_number


@dataclass(frozen=True)
class Score(Tabular):
    """What a model needs to encode a text.

    Attributes
    ----------
    bits
        The sum of ``-log2 p`` over the scored tokens.
    tokens
        How many tokens were scored.
    num_bytes
        The UTF-8 bytes that they stand for.
    """

    bits: float
    tokens: int
    num_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Bits for each byte of text."""
        return self.bits / self.num_bytes

    @property
    def perplexity(self) -> float:
        """2 to the bits per token."""
        return 2 ** (self.bits / self.tokens)

    def rows(self) -> list[dict]:
        return [vars(self) | {"bits_per_byte": self.bits_per_byte, "perplexity": self.perplexity}]

    def __repr__(self) -> str:
        return (
            f"Score({self.bits_per_byte:.3f} bits per byte, perplexity {self.perplexity:.2f}, {self.tokens:,} tokens)"
        )


LOGITS = 2**28
"""Logits in memory at a time: 1 GiB in float32."""

POSITIONS = "max_position_embeddings"


@torch.inference_mode()
def score(
    model,
    tokenizer,
    documents: Iterable[Document | str | Tokens],
    *,
    seq: int | None = None,
    stride: int | None = None,
    batch: int = 16,
) -> Score:
    """Score documents, each on its own: what comes before it is never seen.

    Parameters
    ----------
    model
        A causal language model; its mode (training or evaluation) is left as it was and set to evaluation meanwhile.
    tokenizer
        Its tokenizer.
    documents
        Texts, or what :func:`plpkg.corpora.encode` made of them.
    seq
        Tokens that the model reads at once: 512 by default, or as many as it has positions.
    stride
        How far the window moves on. Every token but a document's first ones is predicted from at least
        ``seq - stride`` tokens; ``seq // 2`` by default, and ``seq`` costs half as much.
    batch
        Windows at a time, at the most: fewer if their logits would be more than :data:`LOGITS`.

    Raises
    ------
    ValueError
        Nothing to score; ``seq``, ``stride`` or ``batch`` out of range; or the model gives no number.
    TypeError
        A single text instead of several.
    """
    if isinstance(documents, str | Document | Tokens):
        raise TypeError(f"documents must be several documents, a list say, got one {type(documents).__name__}")
    positions = getattr(model.config, POSITIONS, None)
    seq = whole_number("seq", min(512, positions or 512) if seq is None else seq, 2, positions, POSITIONS)
    stride = whole_number("stride", seq // 2 if stride is None else stride, 1, seq, "seq")
    batch = min(whole_number("batch", batch, 1), max(1, LOGITS // (seq * model.config.vocab_size)))
    documents = [d if isinstance(d, Tokens) else encode([d], tokenizer)[0] for d in documents]
    windows = [window for tokens in documents for window in _windows(tokens, seq, stride)]
    windows.sort(key=lambda window: -len(window[0]))  # alike lengths together: little padding
    was_training = model.training
    model.eval()
    bits, tokens = 0.0, 0
    try:
        for i in range(0, len(windows), batch):
            ids, scored = zip(*windows[i : i + batch], strict=True)
            ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(model.device)  # (batch, seq + 1)
            scored = torch.nn.utils.rnn.pad_sequence(scored, batch_first=True).to(model.device)[:, 1:]
            # Padding stands on the right, where causal attention never looks; it needs no attention mask.
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[scored].float()  # (scored, vocab)
            nats = torch.nn.functional.cross_entropy(logits, ids[:, 1:][scored], reduction="sum")
            bits += nats.item() / math.log(2)
            tokens += int(scored.sum())
    finally:
        model.train(was_training)
    if not tokens:
        raise ValueError("nothing to score: no document has an unmasked token after its first")
    if not math.isfinite(bits):
        raise ValueError(f"the model's log-probabilities add up to {bits}")
    return Score(bits, tokens, sum(int(n[s].sum()) for n, s in map(_predicted, documents)))


def _predicted(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and scored flags of all tokens but the first, which nothing predicts."""
    return tokens.num_bytes[1:], tokens.scored[1:]


def _windows(tokens: Tokens, seq: int, stride: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Windows of up to ``seq + 1`` ids, and which of them to score, so that each token is scored once."""
    done = 1  # the first token has nothing before it
    for begin in range(0, len(tokens) - 1, stride):
        end = min(begin + seq + 1, len(tokens))
        scored = tokens.scored[begin:end].clone()
        scored[: done - begin] = False
        if scored.any():
            yield tokens.ids[begin:end], scored
        done = end
        if end == len(tokens):
            return
