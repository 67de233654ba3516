"""Every press that kvpress exports, on a small random Llama: does it score chunks as it scores a whole prompt?

Two texts of 288 tokens are read whole and in chunks, and nothing is cut: so keys and values are the same.

* ``same``: of a text that is read whole, the share of units that are kvpress's own choice at a ratio of a half.
* ``apart``: the largest difference between a unit's scores in chunks of 95 tokens and in the whole text, as a share of
  the scores' standard deviation. In chunks the texts change places in their batch, and the press has a ratio of 0.9:
  scores must not go by either. :data:`plpkg.retention.presses.SAME_IN_CHUNKS` has the presses whose ``same`` is 1 and
  whose ``apart`` is 0.
* ``why_not``: what it raises. A press that wraps others is made with one that is the same.

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
from plpkg.decoding import cache_among
from plpkg.retention import chunked_prefill
from plpkg.retention.presses import SAME_IN_CHUNKS, Press
from plpkg.retention.reading import PrefillResult

SEQ, RATIO = 288, 0.5
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


def own_choice(model, ids: torch.Tensor, press) -> torch.Tensor:
    """Which units the press keeps by its own ``compress``: ``(layers, batch, num_kv_heads, seq)``."""
    chosen, layers = [], [layer.self_attn for layer in model.model.layers]

    def hook(module, _args, kwargs, output):
        layer = cache_among(kwargs).layers[module.layer_idx]
        _, values = press.compress(module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs)
        chosen.append((values[:, :, :, None] == layer.values[:, :, None]).all(dim=-1).any(dim=2))

    hooks = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        model(ids, use_cache=True)
    for handle in hooks:
        handle.remove()
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


def read(model, ids: torch.Tensor, press, budget: int, chunk_size: int) -> PrefillResult:
    if hasattr(press, "post_init_from_model"):
        press.post_init_from_model(model)
    scorer = Press(press)
    return chunked_prefill(model, ids, scorer, budget, chunk_size, positions="original", log_positions=True)


def scores(reading: PrefillResult) -> torch.Tensor:
    """Of all units: ``(layers, batch, num_kv_heads, seq)``."""
    return torch.stack([layer.scores for layer in reading.cache.layers])


def measured(name: str, ids: torch.Tensor) -> dict:
    """One row."""
    model = random_backbone("llama", num_kv_heads=2, vocab=512, max_positions=512)
    for layer in model.model.layers:
        layer.self_attn.__dict__["rotary_emb"] = model.model.rotary_emb  # where presses look for it
    row = {"press": name, "arguments": made(name)[1], "listed": name in SAME_IN_CHUNKS, "same": None, "apart": None}
    try:
        cut = read(model, ids, made(name)[0], SEQ // 2, SEQ)
        row["same"] = own_choice(model, ids, made(name)[0]).gather(-1, cut.log[-1].kept.long()).float().mean().item()
        whole = scores(read(model, ids, made(name)[0], SEQ, SEQ))
        press, _ = made(name)
        for each in (press, *getattr(press, "__dict__", {}).values()):  # what it wraps may have a ratio of its own
            if hasattr(each, "compression_ratio"):
                each.compression_ratio = 0.9
        chunks = scores(read(model, ids.flip(0), press, SEQ, 95)).flip(1)
        row["apart"] = round(float((chunks - whole).abs().max() / whole.std()), 4)
    except Exception as error:  # of another library, which may raise anything
        row["why_not"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return row


def main() -> None:
    warnings.filterwarnings("ignore")  # of kvpress and transformers, dozens a press
    # No token twice: units are told apart by their values.
    shuffled = [torch.randperm(512, generator=torch.Generator().manual_seed(seed))[:SEQ] for seed in range(2)]
    ids = torch.stack(shuffled)
    names = sorted(name for name in kvpress.__all__ if not name.endswith("Pipeline"))
    tools = {"tools": f"kvpress {version('kvpress')}, transformers {version('transformers')}"}
    record.write("retention.presses", [measured(name, ids) | tools for name in names])


if __name__ == "__main__":
    main()
