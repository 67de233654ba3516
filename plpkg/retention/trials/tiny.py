"""Two-layer language models that learn to find pairs in noise, or to look one up, in under a minute on one core.

They are stock Llamas but for the word embedding, which also knows the token before: ``E[x_t] + E'[x_(t-1)]``. That is
a shortcut, and an open one: it does what an attention head of the layer below takes long to learn (a "previous-token
head"), so that one layer of attention suffices to find what followed a key. As an embedding has no memory, both
tokens are packed in one id, ``x_t + vocab · x_(t-1)``.
"""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from tqdm.auto import tqdm

from plpkg import catalog
from plpkg.decoding import cache_argument
from plpkg.files.checkpoints import replace_file
from plpkg.retention.head import RetainingHeads
from plpkg.retention.prefill import chunked_prefill
from plpkg.retention.scorers import Scorer
from plpkg.retention.trials.tasks import VOCAB, Lookup, Pairs, pairs_in_noise
from plpkg.training_loop import learn
from plpkg.validation import one_of


class PairEmbedding(nn.Module):
    """The sum of the token's own embedding and of the one before it, for packed ids ``(batch, seq)``."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.token = nn.Embedding(vocab, hidden)
        self.previous = nn.Embedding(vocab, hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.token(ids % self.vocab) + self.previous(ids // self.vocab)


def packed(ids: torch.Tensor, vocab: int = VOCAB) -> torch.Tensor:
    """Ids with their predecessors in them; before the first stands token 0."""
    previous = functional.pad(ids[:, :-1], (1, 0))
    return ids + vocab * previous


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
        for weight in model.get_input_embeddings().parameters():
            nn.init.normal_(weight, std=0.1)
    return model.eval()


HEADS = 64
"""The width of retaining heads that suits these models."""

SHORTEST = 16
"""Tokens of noise and pairs, with which training begins."""


def train(
    *,
    steps: int = 300,
    tokens: int = 3072,
    lr: float = 5e-3,
    pairs: int = 6,
    longest: int = 128,
    seed: int = 0,
    progress: bool = True,
):
    """A model that finds pairs in noise, trained from nothing, on short noise first and on all lengths after half.

    Parameters
    ----------
    steps, tokens, lr
        The arguments of :func:`fit`; a step has up to so many tokens.
    pairs, longest
        The task's pairs, and the longest noise: lengths are drawn from :data:`SHORTEST` on.
    seed
        The seed of weights and data.
    progress
        Show a bar.
    """
    model = untrained(seed=seed)
    draw = random.Random(seed)

    def loss(step: int) -> torch.Tensor:
        # From nearly the shortest noise at first to the longest at half the steps, and on to the end.
        longest_now = min(longest, SHORTEST + 8 + 2 * (longest - SHORTEST) * step // steps)
        length = draw.randint(SHORTEST, longest_now)
        batch = min(64, tokens // (length + 2 + 2 * pairs))  # a start and a query, and the answer's pairs
        task = pairs_in_noise(batch, length, pairs=pairs, seed=(seed + 1) * 1_000_003 + step)
        logits = model(packed(task.ids), use_cache=False).logits[:, task.prompt.shape[1] :]
        after_keys = logits[:, 1::2]  # (batch, pairs, vocab)
        return functional.cross_entropy(after_keys.flatten(0, 1), task.answer[:, 2::2].flatten())

    return fit(model, list(model.parameters()), loss, steps, lr, progress)


def fit(
    model, parameters: list[nn.Parameter], loss: Callable[[int], torch.Tensor], steps: int, lr: float, progress: bool
):
    """Minimise the loss of each step, and return the model: AdamW, 50 steps of warm-up, then a cosine down to zero."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    bar = tqdm(range(steps), "two layers", disable=not progress)

    def gradient(step: int) -> float:
        nats = loss(step)
        nats.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return nats.item()

    def rate(step: int) -> float:
        warm_up = (step + 1) / 50
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        return lr * min(warm_up, cosine)

    model.train()
    for _, nats in learn(bar, gradient, [optimizer], rate):
        bar.set_postfix(loss=f"{nats:.3f}", refresh=False)
    return model.eval().requires_grad_(False)


def save(path: Path, model, heads: dict[str, RetainingHeads]) -> None:
    """Write a model of this module with heads of width 64 by name, in one file, whole or not at all."""
    state = {}
    for kind, module in {"model": model, **heads}.items():
        state |= {f"{kind}.{name}": tensor.contiguous() for name, tensor in module.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda partial: save_file(state, partial))


def shipped(name: str):
    """A model that comes with the package, trained by ``benchmarks/retention/quality.py``, and its heads.

    Parameters
    ----------
    name
        ``"pairs"``, with heads ``"pairs"``; ``"lookup"``, with heads for a question asked ``"last"`` or ``"first"``.

    Returns
    -------
    (model, heads)
        ``heads`` by name.
    """
    one_of("name", name, ("pairs", "lookup"))
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(catalog.data_path("retention") / f"{name}.safetensors").items():
        kind, _, rest = key.partition(".")
        parts.setdefault(kind, {})[rest] = tensor
    model = untrained()
    model.load_state_dict(parts.pop("model"))
    model.requires_grad_(False)
    heads = {}
    for kind, state in parts.items():
        heads[kind] = RetainingHeads.attach(model, HEADS)
        heads[kind].load_state_dict(state)
        heads[kind].requires_grad_(False)
    return model, heads


def examples(draw: Callable[[int], Pairs | Lookup], count: int, *, seed: int = 0) -> Iterator[tuple]:
    """Packed prompts and answers of ``count`` batches, for :func:`plpkg.retention.train_heads`.

    Parameters
    ----------
    draw
        Makes a batch from a seed: ``lambda seed: pairs_in_noise(16, 128, seed=seed)``.
    count
        The number of batches.
    seed
        The number from which the seeds begin; far from those of training.
    """
    for i in range(count):
        task = draw((seed + 1) * 1_000_033 + i)
        ids = packed(task.ids)
        prompt_len = task.prompt.shape[1]
        yield ids[:, :prompt_len], ids[:, prompt_len:]


@torch.no_grad()
def accuracy(model, task: Pairs | Lookup, scorer: Scorer | None, budget: int, chunk_size: int = 32, **options) -> float:
    """The share of values that the model finds; the prompt is read with eviction, the answer is not cut.

    Parameters
    ----------
    model
        A model of this module.
    task
        A batch.
    scorer
        Decides what is kept; ``None`` reads the prompt with a full cache.
    budget, chunk_size, **options
        The arguments of :func:`plpkg.retention.chunked_prefill`.
    """
    ids = packed(task.ids)
    prompt_len = task.prompt.shape[1]
    if scorer is None:
        logits = model(ids, use_cache=False).logits[:, prompt_len:]
    else:
        read = chunked_prefill(model, ids[:, :prompt_len], scorer, budget, chunk_size, **options)
        logits = model(ids[:, prompt_len:], **cache_argument(read.cache)).logits
    return task.accuracy(logits)
