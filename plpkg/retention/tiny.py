"""A two-layer language model that learns to find pairs in noise in under a minute, on one core.

It is a stock Llama but for its word embedding, which also knows the token before: ``E[x_t] + E'[x_(t-1)]``. That is a
shortcut, and an open one: it does what an attention head of the layer below takes long to learn (a "previous-token
head"), so that one layer of attention suffices to find what followed a key. For the model's stateless embedding
both tokens are packed in one id, ``x_t + vocab · x_(t-1)``.
"""

import math
import random

import torch
from torch import nn
from torch.nn import functional
from tqdm.auto import tqdm

from plpkg.retention.prefill import chunked_prefill
from plpkg.retention.scorers import Scorer
from plpkg.retention.tasks import VOCAB, Pairs, pairs_in_noise

LENGTHS = (16, 128)
"""Between which the model sees noise while it learns."""


class PairEmbedding(nn.Module):
    """Of packed ids ``(batch, seq)``: the sum of the token's own embedding and of the one before it."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.own, self.before = nn.Embedding(vocab, hidden), nn.Embedding(vocab, hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.own(ids % self.vocab) + self.before(ids // self.vocab)


def packed(ids: torch.Tensor, vocab: int = VOCAB) -> torch.Tensor:
    """Ids with their predecessors in them; before the first stands token 0."""
    return ids + vocab * functional.pad(ids[:, :-1], (1, 0))


def untrained(*, num_layers: int = 2, vocab: int = VOCAB, seed: int = 0):
    """A Llama of width 64 with 4 query and 2 KV heads of 16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=vocab,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        model.set_input_embeddings(PairEmbedding(vocab, config.hidden_size))
        for table in model.get_input_embeddings().children():
            nn.init.normal_(table.weight, std=0.1)
    return model.eval()


def train(*, steps: int = 300, tokens: int = 3072, lr: float = 5e-3, seed: int = 0, progress: bool = True):
    """A model that finds pairs in noise, trained from nothing: short noise first, :data:`LENGTHS` by half of the steps.

    Parameters
    ----------
    steps, tokens, lr
        Of AdamW with betas (0.9, 0.98): steps of up to so many tokens, 50 of them warm-up, then a cosine down to zero.
    seed
        Of weights and data.
    progress
        Show a bar.
    """
    model = untrained(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    draw = random.Random(seed)
    model.train()
    bar = tqdm(range(steps), "two layers", disable=not progress)
    for step in bar:
        shortest, longest = LENGTHS
        length = draw.randint(shortest, min(longest, shortest + 8 + 2 * (longest - shortest) * step // steps))
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        task = pairs_in_noise(min(64, tokens // (length + 14)), length, seed=(seed + 1) * 1_000_003 + step)
        logits = model(packed(task.ids), use_cache=False).logits[:, task.prompt.shape[1] :]
        loss = functional.cross_entropy(logits[:, 1::2].flatten(0, 1), task.answer[:, 2::2].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.eval().requires_grad_(False)


def examples(count: int, *, batch: int = 16, length: int = 128, seed: int = 1):
    """Prompts and answers for :func:`plpkg.retention.train_heads`, packed."""
    for i in range(count):
        task = pairs_in_noise(batch, length, seed=(seed + 1) * 1_000_033 + i)
        ids = packed(task.ids)
        yield ids[:, : task.prompt.shape[1]], ids[:, task.prompt.shape[1] :]


@torch.no_grad()
def accuracy(model, task: Pairs, scorer: Scorer | None, budget: int, chunk_size: int = 32, **options) -> float:
    """The share of values that the model finds; the prompt is read with eviction, the answer is not cut.

    Parameters
    ----------
    model
        Of this module.
    task
        A batch.
    scorer
        Decides what is kept; ``None`` reads the prompt with a full cache.
    budget, chunk_size, **options
        Of :func:`plpkg.retention.chunked_prefill`.
    """
    ids, prompt_len = packed(task.ids), task.prompt.shape[1]
    if scorer is None:
        return task.accuracy(model(ids, use_cache=False).logits[:, prompt_len:])
    read = chunked_prefill(model, ids[:, :prompt_len], scorer, budget, chunk_size, log_positions=False, **options)
    return task.accuracy(model(ids[:, prompt_len:], past_key_values=read.cache).logits)
