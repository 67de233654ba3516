"""A fleet of 1,000 simulated devices, in this process and as Ray tasks. One thread in each process.

Each person has 40 images of one of the private writers (drawn at random, with repetition) and trains the last layer of
the digits' network for 40 steps. The results have to be the same bits.

* ``engines``: CPU seconds of learning for a person, wall seconds of all, wall seconds of starting Ray.

Run: ``python -m benchmarks.autonomy.fleet``, about four minutes.
"""

import time

import torch

from benchmarks import record
from plpkg import corpora
from plpkg.autonomy import pretrained, transfer
from plpkg.autonomy.fleet import fleet
from plpkg.corpora import Examples

PEOPLE, IMAGES, STEPS = 1000, 40, 40


def main() -> None:
    torch.set_num_threads(1)
    blocks = [corpora.digits().block(i) for i in range(7, 14)]
    people = {}
    for k in range(PEOPLE):
        block = blocks[k % len(blocks)]
        which = torch.randint(len(block), (IMAGES,), generator=torch.Generator().manual_seed(k))
        people[f"person {k}"] = (block.images[which], block.labels[which])
    model, rows, results = pretrained("digits"), [], {}

    def learn(name: str, data: tuple[torch.Tensor, torch.Tensor]) -> dict:
        began = time.process_time()
        result = transfer(model, Examples(*data), None, steps=STEPS, lr=3e-2, patience=None)
        return result.state | {"cpu_s": time.process_time() - began}

    for engine in ("process", "ray"):
        began = time.perf_counter()
        results[engine] = fleet(people, learn, engine=engine, workers=2, progress=False)
        wall = time.perf_counter() - began
        cpu = sum(result.pop("cpu_s") for result in results[engine].values()) / PEOPLE
        rows.append({"section": "engines", "case": engine, "people": PEOPLE, "cpu_ms_a_person": round(1e3 * cpu, 3),
                     "wall_s": round(wall, 1)})  # fmt: skip
    same = all(
        torch.equal(value, results["ray"][name][key])
        for name, result in results["process"].items() for key, value in result.items()
    )  # fmt: skip
    rows.append({"section": "engines", "case": "ratio, ray to process", "people": PEOPLE, "same_bits": same,
                 "cpu_ms_a_person": round(rows[1]["cpu_ms_a_person"] / rows[0]["cpu_ms_a_person"], 4)})  # fmt: skip
    record.write("autonomy.fleet", rows)


if __name__ == "__main__":
    main()
