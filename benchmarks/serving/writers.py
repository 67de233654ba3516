"""Nine writers' adapters, trained together in one run, and what each knows of the others' text.

plpkg-small, LoRA of rank 8 on q, k, v and o, in float32; written to ``data/serving/`` in bfloat16. Two threads.

* ``training``: tokens of each writer, CPU seconds of the whole run.
* ``writers``: bits per byte of each writer's test text (row) under each writer's adapter, and under none.

Run: ``python -m benchmarks.serving.writers``, about fifteen minutes; then ``make checksums``. Not part of
``make bench``.
"""

import itertools
import time
from dataclasses import replace

from peft import LoraConfig

from benchmarks import record
from plpkg import catalog, corpora
from plpkg.backbones import load_backbone
from plpkg.scoring import score
from plpkg.serving import Adapter, merge, train_many, unmerge

STEPS, BATCH, SEQ, LR, SCORED = 300, 2, 128, 3e-3, 12_000
CONFIG = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")


def main() -> None:
    model, tokenizer = load_backbone("plpkg-small")
    names = corpora.writers()
    texts = {name: corpora.encode(corpora.writer(name).split("train"), tokenizer) for name in names}
    batches = {
        name: list(itertools.islice(corpora.batches(text, batch=BATCH, seq=SEQ, seed=0), STEPS))
        for name, text in texts.items()
    }
    began = time.process_time()
    adapters = train_many(model, CONFIG, batches, steps=STEPS, lr=LR, max_grad_norm=1.0)
    seconds = time.process_time() - began
    for name, adapter in adapters.items():
        half = {m: replace(f, down=f.down.bfloat16(), up=f.up.bfloat16()) for m, f in adapter.factors.items()}
        adapters[name] = Adapter.of(adapter.config, half)
        adapters[name].save(catalog.data_path() / "serving" / name)
    rows = [{
        "section": "training", "case": f"{len(names)} writers", "steps": STEPS, "tokens": STEPS * BATCH * SEQ,
        "cpu_s": round(seconds, 1),
    }]  # fmt: skip
    for name in names:
        test = beginning(corpora.encode(corpora.writer(name).split("test"), tokenizer))
        for whose in (None, *names):
            if whose:
                merge(model, adapters[whose])
            bits = score(model, tokenizer, test).bits_per_byte
            if whose:
                unmerge(model, adapters[whose])
            row = {"section": "writers", "case": name, "adapter": whose or "none", "bits_per_byte": round(bits, 4)}
            rows.append(row)
        print(*rows[-10:], sep="\n", flush=True)
    record.write("serving.writers", rows)


def beginning(documents: list) -> list:
    """The first documents, as many as have ``SCORED`` tokens."""
    sizes = itertools.accumulate(map(len, documents))
    return [document for document, end in zip(documents, sizes, strict=True) if end <= SCORED] or documents[:1]


if __name__ == "__main__":
    main()
