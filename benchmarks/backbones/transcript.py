"""Twenty questions drawn at random from all sets of ``benchmarks.backbones.reading``, and what is answered.

Run: ``python -m benchmarks.backbones.transcript``.
"""

import random

from benchmarks import record
from benchmarks.backbones.reading import QUESTIONS, sets
from plpkg.backbones import load_backbone
from plpkg.questions import ask

SEED = 2026


def main() -> None:
    rng = random.Random(SEED)
    made = {name: make() for name, make in sets(QUESTIONS).items()}
    chosen = [(name, rng.choice(made[name])) for name in rng.choices(list(made), k=20)]
    given = {name: ask(*load_backbone(name), [p for _, p in chosen]) for name in ("plpkg-small", "plpkg-reader")}
    rows = [{"set": name, "text": p.text, "question": p.question, "expected": p.answer} for name, p in chosen]
    for i, row in enumerate(rows):
        row |= {name: judged.given[i] for name, judged in given.items()} | {"right": given["plpkg-reader"].right[i]}
    record.write("backbones.transcript", rows, seed=SEED)


if __name__ == "__main__":
    main()
