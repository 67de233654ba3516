"""Real text under a budget: how well a model goes on with a document of which it keeps some units only."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch.nn import functional

from plpkg import corpora
from plpkg.decoding import cache_argument
from plpkg.retention.prefill import chunked_prefill
from plpkg.retention.scorers import Scorer
from plpkg.validation import whole_number


def continuations(
    tokenizer, split: str, count: int, *, prompt_len: int = 384, answer_len: int = 128, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Stretches of the public text, cut in two: what a model reads, and how it really goes on.

    Parameters
    ----------
    tokenizer
        The model's.
    split
        ``"train"``, ``"validation"`` or ``"test"`` of :func:`plpkg.corpora.public`.
    count
        The number of stretches.
    prompt_len, answer_len
        Tokens. Together 512 by default, the window that plpkg-small has learnt from: beyond it a full cache does worse
        than a small one, for its positions are new to the model.
    seed
        The seed of the choice.

    Yields
    ------
    prompt, answer
        ``(1, prompt_len)`` and ``(1, answer_len)`` ids.
    """
    encoded = corpora.encode(corpora.public(split), tokenizer)
    stream = corpora.batches(encoded, batch=1, seq=prompt_len + answer_len, seed=seed)
    for _ in range(whole_number("count", count, 1)):
        ids = next(stream)
        yield ids[:, :prompt_len], ids[:, prompt_len:]


@torch.no_grad()
def perplexity(
    model,
    examples: Iterable[tuple[torch.Tensor, torch.Tensor]],
    scorer: Scorer | None,
    budget: int,
    chunk_size: int = 64,
    **options,
) -> float:
    """The perplexity of the answers per token, each read after its prompt was cut to ``budget`` units.

    Parameters
    ----------
    model
        A causal language model.
    examples
        ``(prompt, answer)`` ids ``(batch, seq)``.
    scorer
        Decides what is kept; ``None`` keeps everything.
    budget, chunk_size, **options
        The arguments of :func:`plpkg.retention.chunked_prefill`.
    """
    nats = 0.0
    tokens = 0
    for prompt, answer in examples:
        if scorer is None:
            whole = torch.cat([prompt, answer], dim=1)
            first = prompt.shape[1] - 1  # the prompt's last token predicts the answer's first
            logits = model(whole, use_cache=False).logits[:, first:-1]
        else:
            read = chunked_prefill(model, prompt, scorer, budget, chunk_size, **options)
            logits = read.logits[:, None]
            if answer.shape[1] > 1:
                after = model(answer[:, :-1], **cache_argument(read.cache)).logits
                logits = torch.cat([logits, after], dim=1)
        nats += functional.cross_entropy(logits.flatten(0, 1).float(), answer.flatten(), reduction="sum").item()
        tokens += answer.numel()
    return math.exp(nats / tokens)
