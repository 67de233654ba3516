"""How well plpkg-small predicts: public text beside honest baselines, and each private writer's.

The baselines read the same training text: a 5-gram model with modified Kneser-Ney smoothing over the same
tokens, its discounts tuned on the validation text, and xz -9e, which compresses the test text after the
training text. All are judged on the spans of the test text that no training text has. (The compressor gets
them end to end, nothing between them; the models are not judged on tokens that reach into a masked span, so that
their bytes are a few fewer.)

Run: ``python -m benchmarks.backbones.scores`` (about 3 minutes).
"""

import numpy as np
import torch

from benchmarks import record
from benchmarks.backbones.baselines import KneserNey, xz_bits
from plpkg import corpora
from plpkg.backbones import load_backbone
from plpkg.scoring import Score, score


def kneser_ney(tokenizer) -> Score:
    """The n-gram model on the public test text."""
    train, validation, test = (corpora.encode(corpora.public(s), tokenizer) for s in corpora.SPLITS)

    def arrays(documents: list, field: str) -> list[np.ndarray]:  # without the token that begins a document
        return [getattr(t, field)[1:].numpy() for t in documents]

    model = KneserNey.fit(arrays(train, "ids"), vocab=len(tokenizer))
    model.tune(arrays(validation, "ids"), arrays(validation, "scored"))
    scored = arrays(test, "scored")
    bits = sum(model.bits(ids)[s].sum() for ids, s in zip(arrays(test, "ids"), scored, strict=True))
    num_bytes = sum(n[s].sum() for n, s in zip(arrays(test, "num_bytes"), scored, strict=True))
    return Score(float(bits), int(sum(s.sum() for s in scored)), int(num_bytes))


def xz() -> tuple[float, int]:
    """Bits per byte of the compressor on the public test text, and the bytes."""
    train = "\n\n".join(d.text for d in corpora.public("train")).encode()
    test = "".join(piece for d in corpora.public("test") for piece in d.unmasked()).encode()
    return xz_bits(train, test) / len(test), len(test)


def row(text: str, model: str, found: Score) -> dict:
    return {
        "text": text,
        "model": model,
        "bits_per_byte": round(found.bits_per_byte, 4),
        "perplexity": round(found.perplexity, 3),
        "tokens": found.tokens,
        "bytes": found.num_bytes,
        "masked_share": round(corpora.writer(text).masked_share("test"), 4),
    }


if __name__ == "__main__":
    torch.set_num_threads(2)
    model, tokenizer = load_backbone("plpkg-small")
    rows = [
        row(name, "plpkg-small", score(model, tokenizer, corpora.writer(name).split("test")))
        for name in ("public", *corpora.writers())
    ]
    rows.append(row("public", "Kneser-Ney 5-gram", kneser_ney(tokenizer)))
    bits_per_byte, num_bytes = xz()
    rows.append({"text": "public", "model": "xz -9e", "bits_per_byte": round(bits_per_byte, 4), "bytes": num_bytes})
    record.write("backbones.scores", rows)
