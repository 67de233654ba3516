"""How well plpkg-small predicts: public text beside a general compressor, and each private writer's.

The compressor, xz -9e, reads the test text after the training text. Both are judged on the spans of the test text
that no training text has. (The compressor gets them end to end, nothing between them; the model is not judged on
tokens that reach into a masked span, so that its bytes are a few fewer.)

Run: ``python -m benchmarks.backbones.scores`` (about 3 minutes).
"""

import lzma

import numpy as np
import torch

from benchmarks import record
from plpkg import corpora
from plpkg.backbones import load_backbone
from plpkg.scoring import Score, token_log_probs

DRAWS = 10_000
"""Of a text's documents, for the interval of its bits per byte."""
XZ_DICTIONARY = 2**26
"""Bytes in which ``xz -9e`` finds repetitions: its dictionary of 64 MiB."""


def xz_bits(train: bytes, test: bytes) -> int:
    """Bits that ``test`` adds to ``train`` when both are compressed as by ``xz -9e``: 8 · (|train + test| - |train|).

    The difference cancels what the format adds to every file, but sizes are whole multiples of 4 bytes.
    ``xz -9e`` has a dictionary of 64 MiB, so that all of ``train`` is still in sight at the end of ``test``.

    Raises
    ------
    ValueError
        The two together are larger than the dictionary.
    """
    if len(train) + len(test) > XZ_DICTIONARY:
        raise ValueError(f"xz -9e looks back {XZ_DICTIONARY} bytes, got {len(train)} + {len(test)} of train and test")
    both, alone = (len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) for data in (train + test, train))
    return 8 * (both - alone)


def xz() -> tuple[float, int]:
    """Bits per byte of the compressor on the public test text, and the bytes."""
    train = "\n\n".join(d.text for d in corpora.public("train")).encode()
    test = "".join(piece for d in corpora.public("test") for piece in d.unmasked()).encode()
    return xz_bits(train, test) / len(test), len(test)


def interval(bits: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """The 95 % interval of a text's bits per byte, from documents drawn anew; arguments ``(documents,)``."""
    drawn = np.random.default_rng(0).integers(len(bits), size=(DRAWS, len(bits)))
    return np.quantile(bits[drawn].sum(1) / num_bytes[drawn].sum(1), (0.025, 0.975)).round(4)


def row(text: str, model, tokenizer) -> dict:
    writer = corpora.writer(text)
    encoded = corpora.encode(writer.split("test"), tokenizer)
    log_probs = token_log_probs(model, tokenizer, encoded)
    judged = [
        Score.of([document], -float(of_tokens.double().nansum()) / np.log(2))
        for document, of_tokens in zip(encoded, log_probs, strict=True)
        if document.scored[1:].any()
    ]
    bits, num_bytes = (np.array([getattr(each, name) for each in judged]) for name in ("bits", "num_bytes"))
    whole = Score(bits.sum(), sum(each.tokens for each in judged), int(num_bytes.sum()))
    low, high = interval(bits, num_bytes)
    return {
        "text": text,
        "model": "plpkg-small",
        "bits_per_byte": round(whole.bits_per_byte, 4),
        "low": low,
        "high": high,
        "perplexity": round(whole.perplexity, 3),
        "documents": len(judged),
        "tokens": whole.tokens,
        "bytes": whole.num_bytes,
        "masked_share": round(writer.masked_share("test"), 4),
    }


if __name__ == "__main__":
    torch.set_num_threads(2)
    model, tokenizer = load_backbone("plpkg-small")
    rows = [row(name, model, tokenizer) for name in ("public", *corpora.writers())]
    bits_per_byte, num_bytes = xz()
    rows.append({"text": "public", "model": "xz -9e", "bits_per_byte": round(bits_per_byte, 4), "bytes": num_bytes})
    record.write("backbones.scores", rows)
