"""AutLearn's image classifier on digits by writer: its schemes and those that its paper left out. One thread.

Writers are the 14 blocks of scikit-learn's digits (inferred from their order, not labelled). Half of a person's images
are for training, half for the test; nobody has validation data: all learn for as many steps, 200 batches of 16 of each
person's. Rates are a scheme's own; those of the last layer and of all layers were chosen of four in trials on the first
three of these splits of the writers, with other halves of their images; the schemes that train all layers share theirs.

* ``schemes``: six splits of the writers, half of them public; the mean accuracy of the other half.
* ``far``: the public images are printed digits, of the fonts in matplotlib; all 14 writers are private, two seeds.
* ``augmented``: AutLearn with as many images again, changed or (the control) unchanged; the splits of ``schemes``.

Run: ``python -m benchmarks.autonomy.digits``, about eight minutes.
"""

import sys
import time
from functools import partial

import torch

from benchmarks import record
from plpkg import corpora
from plpkg.autonomy import MobileNet, augment_images, baselines, evaluate, nets, transfer
from plpkg.corpora import Examples, Person

SPLITS, SEEDS = 6, 2
PRETRAINING = dict(steps=1000, lr=1e-2, batch=32, batch_norm=True, patience=None)
COMMON = dict(steps=200, batch=16, patience=None)
AUGMENTATION = dict(degrees=10, scale=0.1)  # of eight pixels, a shift or a crop by one is far
SCHEMES = {
    "public only": baselines.public_only,
    "local only": partial(baselines.local_only, lr=1e-2, batch_norm=True, **COMMON),
    "FedAvg": partial(baselines.fed_avg, rounds=10, lr=3e-3, **COMMON),
    "FedAvg, tuned": partial(baselines.fed_avg_tuned, rounds=10, lr=3e-3, **COMMON),
    "CloudTrain": partial(baselines.cloud_train, lr=3e-3, **COMMON),
    "AutLearn: last layer": partial(baselines.personal, lr=3e-2, **COMMON),
    "all layers": partial(baselines.personal, scope="all", lr=3e-3, **COMMON),
    "CloudCustomize": partial(baselines.cloud_customize, lr=3e-3, **COMMON),
}


def main() -> None:
    torch.set_num_threads(1)
    rows = [row for split in range(SPLITS) for row in near(split)]
    rows += [row for seed in range(SEEDS) for row in far(seed)]
    record.write("autonomy.digits", rows)


def writers(seed: int) -> dict[str, Person]:
    """The 14 people, half of each one's images for training, in an order of their own for each seed."""
    people = {}
    for i in torch.randperm(14, generator=torch.Generator().manual_seed(seed)).tolist():
        block = corpora.digits().block(i)
        order = torch.randperm(len(block), generator=torch.Generator().manual_seed(seed))
        images = Examples(block.images[order], block.labels[order])
        people[f"writer {i}"] = Person(images[: len(images) // 2], None, images[len(images) // 2 :])
    return people


def near(split: int) -> list[dict]:
    """All schemes, where half of the writers are the public."""
    everybody = writers(split)
    names = list(everybody)
    shown = Examples.joined(part for name in names[:7] for part in (everybody[name].train, everybody[name].test))
    public = transfer(nets.untrained(MobileNet(), split), shown, None, "all", seed=split, **PRETRAINING).model
    people = {name: everybody[name] for name in names[7:]}
    rows = [compared("schemes", split, name, scheme, public, people) for name, scheme in SCHEMES.items()]
    head = partial(baselines.personal, lr=3e-2, **COMMON)
    for name, options in (("unchanged", {}), ("changed", AUGMENTATION)):
        rows.append(compared("augmented", split, name, head, public, augmented(people, options, split)))
    return rows


def far(seed: int) -> list[dict]:
    """Some schemes, where the public images are printed."""
    printed = corpora.printed_digits()
    shown = Examples(printed.images, printed.labels)
    public = transfer(nets.untrained(MobileNet(), seed), shown, None, "all", seed=seed, **PRETRAINING).model
    people = writers(seed)
    head = SCHEMES["AutLearn: last layer"]
    rows = [compared("far", seed, name, scheme, public, people) for name, scheme in SCHEMES.items()]
    rows.append(compared("far", seed, "last layer, augmented", head, public, augmented(people, AUGMENTATION, seed)))
    return rows


def augmented(people: dict[str, Person], options: dict, seed: int) -> dict[str, Person]:
    """People with each training image once more, changed."""
    generator, result = torch.Generator().manual_seed(seed), {}
    for name, person in people.items():
        more = Examples(augment_images(person.train.x, generator, **options), person.train.y)
        result[name] = person._replace(train=Examples.joined([person.train, more]))
    return result


def compared(section: str, seed: int, case: str, scheme, public, people: dict[str, Person]) -> dict:
    """A scheme's mean accuracy over people, and how many of them it serves better than the public model."""
    began = time.process_time()
    models = scheme(public, people)
    seconds = time.process_time() - began
    accuracy = {name: evaluate(models[name], person.test).accuracy for name, person in people.items()}
    better = sum(accuracy[name] > evaluate(public, person.test).accuracy for name, person in people.items())
    row = {
        "section": section, "case": case, "run": seed, "people": len(people), "better": better,
        "accuracy": round(sum(accuracy.values()) / len(people), 5), "cpu_s": round(seconds, 2),
    }  # fmt: skip
    print(row, file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    main()
