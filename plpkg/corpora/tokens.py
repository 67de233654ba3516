"""From documents to tensors: token ids with what each may be scored for, and endless batches of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plpkg.corpora.documents import Document, several
from plpkg.inputs import IGNORED
from plpkg.validation import whole_number


@dataclass(frozen=True)
class Tokens:
    """One document as a model reads it.

    Attributes
    ----------
    ids
        ``(tokens,)``, int64; the first is the tokenizer's beginning (or end) of text, if it has one.
    scored
        ``(tokens,)``, bool: whether the token is part of the text and none of its characters is masked. (A
        document's first token is never predicted, hence never scored, whatever stands here.)
    num_bytes
        ``(tokens,)``, int64: the UTF-8 bytes of text that the token adds.
    """

    ids: torch.Tensor
    scored: torch.Tensor
    num_bytes: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)


def encode(documents: Iterable[Document | str], tokenizer: Any, *, control_tokens: bool = False) -> list[Tokens]:
    """Turn documents into tokens.

    Parameters
    ----------
    documents
        :class:`Document` or plain strings (nothing masked).
    tokenizer
        A fast Hugging Face tokenizer, one that knows where in the text each token stands.
    control_tokens
        Whether a control token that is spelt out in a text, ``"<|endoftext|>"`` say, is that token: for what a chat
        template wrote. By default it is read as the characters that it is.

    Raises
    ------
    ValueError
        The tokenizer does not give offsets.
    TypeError
        A single string instead of documents.
    """
    documents = several(documents)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} does not tell where its tokens stand in the text: not a fast one")
    start = tokenizer.bos_token_id
    if start is None:
        start = tokenizer.eos_token_id
    encoded = []
    for document in documents:
        fields = tokenizer(
            document.text,
            add_special_tokens=False,
            split_special_tokens=not control_tokens,
            return_offsets_mapping=True,
            truncation=False,
            verbose=False,
        )
        ids = fields["input_ids"]
        offsets = np.array(fields["offset_mapping"], dtype=np.int64).reshape(-1, 2)  # no token: still two columns
        scored, num_bytes = _spans(document, offsets)
        written = control_tokens and ids[:1] == [start]  # by the template
        if start is not None and not written:
            ids = [start, *ids]
            scored = np.concatenate([[False], scored])
            num_bytes = np.concatenate([[0], num_bytes])
        tokens = Tokens(
            ids=torch.tensor(ids, dtype=torch.int64),
            scored=torch.from_numpy(scored),
            num_bytes=torch.from_numpy(num_bytes),
        )
        encoded.append(tokens)
    return encoded


def _spans(document: Document, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each token whether it is scored and how many bytes it adds, from its characters' ``(start, end)``."""
    codes = np.frombuffer(document.text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)  # in UTF-8
    masked = np.zeros(len(codes), dtype=np.int64)
    for start, end in document.masked:
        masked[start:end] = 1
    # How many bytes, and how many masked characters, stand before each character: (characters + 1,).
    byte_at = np.concatenate([[0], np.cumsum(widths)])
    masked_at = np.concatenate([[0], np.cumsum(masked)])
    # A token's text begins where the one before it ended: characters that a tokenizer drops (a space,
    # say) count for the next token, and a character in several tokens counts once, for the first.
    if not len(offsets):
        return np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int64)
    ends = np.maximum.accumulate(offsets[:, 1])
    starts = np.concatenate([[0], ends[:-1]])
    touched = masked_at[ends] - masked_at[np.minimum(starts, offsets[:, 0])]
    num_bytes = byte_at[ends] - byte_at[starts]
    return touched == 0, num_bytes


def batch(documents: Sequence[Tokens]) -> dict[str, torch.Tensor]:
    """Documents as one batch, in the form that everything here learns from, and Hugging Face models too.

    Returns
    -------
    dict
        ``input_ids``, ``attention_mask`` and ``labels``, ``(documents, seq)`` int64: padded on the right with 0, and
        -100 where nothing is learnt, which is padding and what is not scored. So that only an answer is learnt,
        encode a :class:`Document` whose prompt is masked.

    Raises
    ------
    ValueError
        No documents.
    """
    if not documents:
        raise ValueError("there are no documents")
    ids = [document.ids for document in documents]
    masks = [torch.ones_like(each) for each in ids]
    labels = [document.ids.masked_fill(~document.scored, IGNORED) for document in documents]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad(masks, batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=IGNORED),
    }


def batches(
    documents: Sequence[Tokens], *, batch: int, seq: int, seed: int = 0, start: int = 0
) -> Iterator[torch.Tensor]:
    """Endless training batches: ``(batch, seq)`` int64 each, the same for the same seed.

    Each epoch shuffles the documents, joins them, cuts the stream at a random place into windows of
    ``seq`` tokens and shuffles these. What is left over is left out until the next epoch.

    Parameters
    ----------
    documents
        The documents, from :func:`encode`.
    batch, seq
        Windows in a batch, and tokens in a window.
    seed
        The seed of the order.
    start
        The number of the first batch to yield: to go on where a run has stopped.

    Raises
    ------
    ValueError
        Too little text for one batch.
    """
    whole_number("batch", batch, 1)
    whole_number("seq", seq, 1)
    whole_number("start", start, 0)
    whole_number("seed", seed, 0)
    total = sum(map(len, documents))
    per_epoch = (total - seq + 1) // (batch * seq)  # whatever the cut
    if per_epoch < 1:
        raise ValueError(f"{total} tokens are too few for one batch of batch={batch} windows of seq={seq} tokens")

    def endless() -> Iterator[torch.Tensor]:
        epoch, first = divmod(start, per_epoch)
        while True:
            generator = np.random.default_rng((seed, epoch))
            stream = torch.cat([documents[i].ids for i in generator.permutation(len(documents))])
            windows = stream[generator.integers(seq) :].unfold(0, seq, seq)  # (windows, seq)
            order = torch.from_numpy(generator.permutation(len(windows)))
            for i in range(first, per_epoch):
                yield windows[order[i * batch : (i + 1) * batch]]
            epoch += 1
            first = 0

    return endless()
