"""How well a language model predicts a text: bits per byte and perplexity, on the spans that may be scored.

Bits per byte compare models with different tokenizers, and a compressor; perplexity is per token and does not.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from plpkg.corpora.documents import Document
from plpkg.corpora.tokens import Tokens, encode
from plpkg.results import Tabular
from plpkg.validation import whole_number


@dataclass(frozen=True)
class Score(Tabular):
    """The bits that a model needs to encode a text.

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

    @classmethod
    def of(cls, documents: Sequence[Tokens], bits: float) -> Self:
        """The score of documents whose scored tokens, but for the first of each, need so many bits altogether.

        Raises
        ------
        ValueError
            Nothing to score, or ``bits`` is not finite.
        """
        tokens = sum(int(d.scored[1:].sum()) for d in documents)
        if not tokens:
            raise ValueError("nothing to score: no document has an unmasked token after its first")
        if not math.isfinite(bits):
            raise ValueError(f"the model's log-probabilities add up to {bits}")
        num_bytes = sum(int(d.num_bytes[1:][d.scored[1:]].sum()) for d in documents)
        if not num_bytes:
            raise ValueError(f"nothing to score: the {tokens} unmasked tokens stand for no text")
        return cls(bits, tokens, num_bytes)

    @property
    def bits_per_byte(self) -> float:
        """Bits for each byte of text."""
        return self.bits / self.num_bytes

    @property
    def perplexity(self) -> float:
        """2 to the bits per token; infinite where no float is so large."""
        per_token = self.bits / self.tokens
        return 2**per_token if per_token < 1024 else math.inf

    def rows(self) -> list[dict]:
        return [vars(self) | {"bits_per_byte": self.bits_per_byte, "perplexity": self.perplexity}]

    def __repr__(self) -> str:
        return (
            f"Score({self.bits_per_byte:.3f} bits per byte, perplexity {self.perplexity:.2f}, {self.tokens:,} tokens)"
        )


class Reading(Protocol):
    """A prompt that a model has read: how likely is what goes on from there?"""

    def score(self, model, ids: torch.Tensor) -> torch.Tensor:
        """The log-probability ``(prompts, n)`` of each token of ``ids`` ``(1, n)``, in nats, after each prompt."""
        ...


LOGITS = 2**28
"""Logits in memory at a time: 1 GiB in float32."""

POSITIONS = "max_position_embeddings"


def score(
    model,
    tokenizer,
    documents: Iterable[Document | str | Tokens],
    *,
    seq: int | None = None,
    stride: int | None = None,
    batch: int = 16,
    reading: Reading | None = None,
) -> Score:
    """Score documents, each on its own: nothing but a ``reading`` comes before it.

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
    reading
        The text before each document, read already: :func:`plpkg.retention.chunked_prefill` gives one. A document
        goes on from it in one piece, without the token for the beginning of a text: there is no ``seq`` and no
        ``stride``. If a tokenizer has no such token, a document's first one is not scored, as without a reading.

    Raises
    ------
    ValueError
        Nothing to score; ``seq``, ``stride`` or ``batch`` out of range; the model gives no number; or a reading of
        several prompts, or of another model.
    TypeError
        A single text instead of several.
    """
    documents = _encoded(documents, tokenizer)
    log_probs = token_log_probs(model, tokenizer, documents, seq=seq, stride=stride, batch=batch, reading=reading)
    nats = 0.0
    for document, each in zip(documents, log_probs, strict=True):
        scored = each[document.scored[1:]]
        nats -= scored.double().sum().item()  # in float64: a document's sum would lose digits of its tokens
    return Score.of(documents, nats / math.log(2))


def token_log_probs(
    model,
    tokenizer,
    documents: Iterable[Document | str | Tokens],
    *,
    seq: int | None = None,
    stride: int | None = None,
    batch: int = 16,
    reading: Reading | None = None,
) -> list[torch.Tensor]:
    """The natural logarithm of each token's probability: :func:`score` adds them up, and takes the same arguments.

    Returns
    -------
    list[torch.Tensor]
        For each document ``(tokens - 1,)``, float32: no first token is predicted. NaN stands for what is not scored.
    """
    documents = _encoded(documents, tokenizer)
    if reading is not None:
        for name, value in (("seq", seq), ("stride", stride)):
            if value is not None:
                raise ValueError(f"{name}={value} is of windows: after a reading a document is read in one piece")
        return [_after(reading, model, document) for document in documents]
    sizes = list(map(len, documents))
    log_probs = torch.full((sum(sizes),), math.nan)  # (tokens,) of all documents
    for logits, targets, places in _predictions(model, documents, seq, stride, batch):
        log_probs[places] = -cross_entropy(logits, targets, reduction="none").cpu()
    return [each[1:] for each in log_probs.split(sizes)]


def _after(reading: Reading, model, document: Tokens) -> torch.Tensor:
    """A document's :func:`token_log_probs` after what was read."""
    log_probs = torch.full((max(0, len(document) - 1),), math.nan)  # (tokens - 1,)
    scored = document.scored[1:]
    if not scored.any():
        return log_probs
    # A first token that stands for no text says that a text begins; this one has begun before.
    begin = 1 if document.num_bytes[0] == 0 else 0
    found = reading.score(model, document.ids[None, begin:].to(model.device))  # (prompts, tokens - begin)
    if len(found) != 1:
        raise ValueError(f"a document goes on from one prompt, and this is a reading of {len(found)}")
    of_others = found[0, 1 - begin :].float().cpu()  # (tokens - 1,): without the first token's, which is not scored
    log_probs[scored] = of_others[scored]
    return log_probs


def _encoded(documents: Iterable[Document | str | Tokens], tokenizer) -> list[Tokens]:
    """Documents as tokens, where they are not yet."""
    if isinstance(documents, str | Document | Tokens):
        raise TypeError(f"documents must be several documents, a list say, got one {type(documents).__name__}")
    return [d if isinstance(d, Tokens) else encode([d], tokenizer)[0] for d in documents]


@torch.inference_mode()
def _predictions(
    model, documents: list[Tokens], seq: int | None, stride: int | None, batch: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Batch by batch the logits ``(scored, vocab)``, what followed, and its place among all documents' tokens."""
    vocab = model.config.vocab_size
    positions = getattr(model.config, POSITIONS, None)
    if seq is None:
        seq = min(512, positions or 512)
    seq = whole_number("seq", seq, 2, positions, POSITIONS)
    if stride is None:
        stride = seq // 2
    stride = whole_number("stride", stride, 1, seq, "seq")
    most_windows = max(1, LOGITS // (seq * vocab))
    batch = min(whole_number("batch", batch, 1), most_windows)
    windows = []
    first = 0  # the place of a document's first token among all documents' tokens
    for document in documents:
        windows += _windows(document, seq, stride, first)
        first += len(document)
    windows.sort(key=lambda window: -len(window[0]))  # alike lengths together: little padding
    was_training = model.training
    model.eval()
    try:
        for i in range(0, len(windows), batch):
            ids, scored, places = zip(*windows[i : i + batch], strict=True)
            ids = pad_sequence(list(ids), batch_first=True)  # (batch, seq + 1)
            if ids.min() < 0 or ids.max() >= vocab:
                raise ValueError(
                    f"a text has the tokens {ids.min()} to {ids.max()}, and the model's vocabulary {vocab}"
                )
            ids = ids.to(model.device)
            scored = pad_sequence(list(scored), batch_first=True).to(model.device)[:, 1:]
            # Padding stands on the right, where causal attention never looks; it needs no attention mask.
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[scored].float()  # (scored, vocab)
            yield logits, ids[:, 1:][scored], torch.cat(places)
    finally:
        model.train(was_training)


def _windows(tokens: Tokens, seq: int, stride: int, first: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Up to ``seq + 1`` ids, which of them to score, so that each token is scored once, and the places of these."""
    done = 1  # the first token has nothing before it
    for begin in range(0, len(tokens) - 1, stride):
        end = min(begin + seq + 1, len(tokens))
        scored = tokens.scored[begin:end].clone()
        scored[: done - begin] = False
        if scored.any():
            yield tokens.ids[begin:end], scored, first + begin + scored.nonzero().flatten()
        done = end
        if end == len(tokens):
            return
