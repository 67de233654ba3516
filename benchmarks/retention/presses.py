"""Every press that kvpress exports, on a small random Llama: taken by ``from_press`` or refused, and why.

Columns: ``whole`` is a prompt read in one chunk, ``chunks`` in three of 96 tokens, ``short`` the same with one token
more, ``decoding`` four tokens within ``evicting()`` after ``chunks``, or after ``whole`` where chunks are refused.
``same`` is the share of units that are kvpress's own choice, read whole at a compression ratio of a half. A press that
wraps others is made with one that is taken.

kvpress 0.5.5 excludes the transformers that this project pins, so it needs an environment of its own, which has the
project's packages behind it::

    python3.11 -m venv build/kvpress
    realpath .venv/lib/python3.11/site-packages > build/kvpress/lib/python3.11/site-packages/project.pth
    build/kvpress/bin/pip install --no-deps kvpress==0.5.5
    build/kvpress/bin/pip install "cachetools<6" "fire<0.7" datasets

Run there: ``python -m benchmarks.retention.presses`` (some seconds). Not part of ``make bench``.
"""

import os
import warnings
from importlib.metadata import version

os.environ["HF_HUB_OFFLINE"] = "1"  # presses with weights of their own have none for a random model

import kvpress
import torch

from benchmarks import record
from plpkg.backbones import random_backbone
from plpkg.retention import chunked_prefill
from plpkg.retention.presses import from_press

CHUNK, BUDGET, RATIO = 96, 144, 0.5
INNER = dict(press=kvpress.KnormPress)
BASE = dict(base_press=kvpress.KnormPress)
ARGUMENTS = {
    **dict.fromkeys(("CriticalAdaKVPress", "CriticalKVPress", "AdaKVPress", "KeyRerotationPress", "ChunkPress"), INNER),
    **dict.fromkeys(("ChunkKVPress", "BlockPress", "DMSPress", "MergingPress", "EntropyGatedChunkKVPress"), INNER),
    **dict.fromkeys(("CAMPress", "DecodingPress", "CompressionRatioDecodingPress"), BASE),
    "PerLayerCompressionPress": INNER | dict(compression_ratios=[RATIO, RATIO]),
    "ComposedPress": dict(presses=[]),
    "RandomPress": dict(seed=0),
}
"""What a press needs that has no default, and a seed."""
ATTRIBUTES = {"FinchPress": dict(window_size=16)}
"""What a press is given by its own pipeline only."""
WITH_ATTENTION = ("ObservedAttentionPress",)


def own_choice(model, ids: torch.Tensor, press) -> torch.Tensor:
    """Which units the press keeps by its own ``compress``: ``(layers, batch, num_kv_heads, seq)``."""
    chosen, layers = [], [layer.self_attn for layer in model.model.layers]

    def hook(module, _args, kwargs, output):
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        _, values = press.compress(module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs)
        chosen.append((values[:, :, :, None] == layer.values[:, :, None]).all(dim=-1).any(dim=2))

    hooks = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    for layer in layers:
        layer.rotary_emb = model.model.rotary_emb
    with torch.no_grad():
        model(ids, use_cache=True)
    for layer, handle in zip(layers, hooks, strict=True):
        handle.remove()
        del layer.rotary_emb
    return torch.stack(chosen)


def made(name: str) -> tuple[object, str]:
    """A press, and what it was given, in words."""
    given, after = ARGUMENTS.get(name, {}), ATTRIBUTES.get(name, {})
    press = getattr(kvpress, name)(
        **{key: value() if isinstance(value, type) else value for key, value in given.items()}
    )
    for key, value in after.items():
        setattr(press, key, value)
    if "compression_ratio" in getattr(press, "__dict__", {}):
        press.compression_ratio = RATIO
    shown = {key: f"{value.__name__}()" if isinstance(value, type) else value for key, value in (given | after).items()}
    return press, ", ".join(f"{key}={value}" for key, value in shown.items())


def measured(name: str, ids: torch.Tensor) -> dict:
    """One row."""
    attentions = name in WITH_ATTENTION
    model = random_backbone(
        "llama",
        num_kv_heads=2,
        vocab=512,
        max_positions=512,
        options={"attn_implementation": "eager" if attentions else "sdpa"},
    )
    even, reads = ids[:, :-1], {}
    row = {"press": name, "arguments": made(name)[1] + "attentions=True" * attentions, "same": None}
    for how, prompt, size in (("whole", even, even.shape[-1]), ("chunks", even, CHUNK), ("short", ids, CHUNK)):
        press, _ = made(name)
        try:
            scorer = from_press(press, attentions=attentions)
            reads[how] = chunked_prefill(model, prompt, scorer, BUDGET, size, positions="original", log_positions=True)
            row[how] = "taken"
        except ValueError as error:
            row[how] = str(error)
        if how == "whole" and how in reads:
            kept = reads[how].log[-1].kept.long()
            row["same"] = round(own_choice(model, even, press).gather(-1, kept).float().mean().item(), 4)
    row["decoding"] = None
    if reads:
        read = reads.get("chunks") or reads["whole"]
        try:
            with read.evicting():
                model.generate(**read.inputs(), max_new_tokens=4, min_new_tokens=4, do_sample=False)
            row["decoding"] = "taken"
        except ValueError as error:
            row["decoding"] = str(error)
    return row


def main() -> None:
    warnings.filterwarnings("ignore")  # of kvpress and transformers, dozens a press
    # No token twice: units are told apart by their values.
    ids = torch.randperm(512, generator=torch.Generator().manual_seed(0))[None, : 3 * CHUNK + 1]
    names = sorted(name for name in kvpress.__all__ if not name.endswith("Pipeline"))
    tools = {"tools": f"kvpress {version('kvpress')}, transformers {version('transformers')}"}
    record.write("retention.presses", [measured(name, ids) | tools for name in names])


if __name__ == "__main__":
    main()
