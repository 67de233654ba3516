"""The methods of personalising that the benchmarks compare, how a model learns by one, and what is asked of it."""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional

from plpkg import corpora
from plpkg.corpora import Document
from plpkg.projections import QKV
from plpkg.residual import PrivateLoraConfig, bases
from plpkg.residual.adapter import layers
from plpkg.residual.config import ProjectionConfig
from plpkg.residual.methods import LadderConfig
from plpkg.validation import whole_number

STEPS, BATCH, SEQ = 60, 4, 256
TEST_BYTES = 40_000
EVERYWHERE = [*QKV, "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Method:
    """How a model is personalised.

    ``model`` is what starts: ``"plpkg-small"``, ``"4 bit"`` or ``"smaller"``; ``config`` an adapter's, ``"head"`` or
    nothing; ``basis`` whose gradient gives A and B: ``"own"``, ``"other"`` or ``"public"``, or ``"weights"``, whose
    singular vectors they are; ``strongest`` how many layers are adapted, those with the largest of these gradients,
    instead of all.
    """

    config: PrivateLoraConfig | LadderConfig | LoraConfig | str | None = None
    lr: float = 0.0
    basis: str | None = None
    model: str = "plpkg-small"
    strongest: int | None = None


def low(rank: int, targets=QKV, **settings) -> PrivateLoraConfig:
    return PrivateLoraConfig(r_c2d=rank, r_d2c=rank, target_modules=list(targets), **settings)


def ladder(width: int | None = None, **settings) -> LadderConfig:
    return LadderConfig(r=96, width=width, **settings)


def lora(rank: int, targets=QKV) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets))


DOWN = low(48, ["down_proj"], init="given")
ADAPTERS = {
    "all layers": Method(DOWN, 1e-2, "own"),
    "two layers": Method(DOWN, basis="own", strongest=2),
    "one layer late": Method(low(48, ["down_proj"], init="given", late=True), basis="own"),
    "ladder": Method(ladder(init="given"), basis="public"),
    "ladder 512": Method(ladder(512, init="given"), basis="public"),
}
"""The first has the usual round trips, the others fewer. But for the first, each benchmark has its learning rates."""


def strongest_layers(norms: dict[str, float], count: int) -> list[int]:
    """The decoder layers with the largest gradients, for ``layers_to_transform``; an adapted LM head is in none.

    Parameters
    ----------
    norms
        What ``bases.from_gradients`` gave for an adapter in every layer.
    count
        How many.
    """
    squares: dict[int, float] = {}
    for module, norm in norms.items():
        if layer := re.search(r"\.(\d+)\.", module):
            squares[int(layer[1])] = squares.get(int(layer[1]), 0.0) + norm**2
    whole_number("count", count, 1, len(squares), "the adapted layers")
    return sorted(sorted(squares, key=squares.get, reverse=True)[:count])


def svd_projections(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B from W's largest singular vectors: ``B A`` is the best approximation of W of that rank.

    Parameters
    ----------
    weight
        ``(out_features, in_features)``.
    rank
        At most the smaller of both.
    """
    u, s, vh = torch.linalg.svd(weight.detach().float(), full_matrices=False)
    return vh[:rank].contiguous(), (u[:, :rank] * s[:rank]).contiguous()


def bases_from_weights(model) -> None:
    """Every A and B as LoRA-XS has them (arXiv 2405.17604), for ``init="given"`` and one rank for both ways."""
    for layer in layers(model).values():
        rank = len(layer.privatelora_A["default"])
        a, b = svd_projections(layer.get_base_layer().weight, rank)
        layer.privatelora_A["default"] = a
        layer.privatelora_B["default"] = b


def prepared(method: Method, start, for_bases: Iterator[torch.Tensor] | None = None, seed: int = 0):
    """A copy of the model, ready to learn by the method.

    A and B come from the gradient of the batches ``for_bases``, or from ``seed`` if they are random.
    """
    model = copy.deepcopy(start)
    first = None if for_bases is None else list(islice(for_bases, 8))
    if method.config == "head":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # no longer the embedding
    elif method.config is not None:
        torch.manual_seed(0)
        config = copy.deepcopy(method.config)
        if isinstance(config, ProjectionConfig):
            config.projection_seed = seed
        if method.strongest is not None:
            everywhere = get_peft_model(copy.deepcopy(start), config)
            norms = bases.from_gradients(everywhere, first)
            config.layers_to_transform = strongest_layers(norms, method.strongest)
        model = get_peft_model(model, config)
        if method.basis == "weights":
            bases_from_weights(model)
        elif first is not None:
            bases.from_gradients(model, first)
    return model


def personalise(model, stream, lr: float, steps: int = STEPS) -> None:
    """AdamW; the rate rises over ten steps and falls to zero over the last third."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    model.train()
    for step in range(steps):
        ids = next(stream)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 10, (steps - step) / (steps / 3))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.inference_mode()
def token_accuracy(model, encoded) -> float:
    """Share of the scored tokens that greedy decoding would have written, in per cent."""
    right = total = 0
    for tokens in encoded:
        for ids, scored in zip(tokens.ids.split(SEQ), tokens.scored.split(SEQ), strict=True):
            hits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].argmax(-1) == ids[1:]
            right, total = right + int(hits[scored[1:]].sum()), total + int(scored[1:].sum())
    return 100 * right / total


def opening(name: str, split: str) -> list[Document]:
    """The writer's documents of a split, the first 40 kB or so."""
    chosen, size = [], 0
    for document in corpora.writer(name).split(split):
        if size < TEST_BYTES:
            chosen.append(document)
            size += len(document.text)
    return chosen


def test_text(name: str) -> list[Document]:
    """The writer's test documents, the first 40 kB or so."""
    return opening(name, "test")


def asked(question: str) -> str:
    return f"Question: {question}\nAnswer:"


@torch.inference_mode()
def answer(model, tokenizer, question: str) -> str:
    ids = tokenizer(tokenizer.bos_token + asked(question), return_tensors="pt")["input_ids"]
    written = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
