"""The two networks that come with the package, pre-trained on public data as AutLearn's cloud would.

``data/autonomy/``: the word predictor (``words.safetensors`` in half precision, ``words.txt`` its vocabulary), of the
public text; the digits' network (``digits.safetensors``), of the writers 0 to 6 of scikit-learn's digits. One thread.

* ``training``: labels, steps, CPU seconds, and how well each does on public data that it has not seen.

Run: ``python -m benchmarks.autonomy.pretrain``, about a quarter of an hour; then ``make checksums``. Not part of
``make bench``.
"""

import time

import torch
from safetensors.torch import save_file

from benchmarks import record
from plpkg import autonomy, catalog, corpora

PUBLIC_WRITERS = range(7)


def main() -> None:
    torch.set_num_threads(1)
    folder = catalog.data_path() / "autonomy"
    folder.mkdir(exist_ok=True)
    vocabulary = corpora.Vocabulary.of(corpora.public("train"))
    parts = {split: corpora.word_examples(corpora.public(split), vocabulary) for split in corpora.SPLITS}
    words = autonomy.WordLSTM(len(vocabulary))
    rows = [learn(words, parts, "words", folder, steps=6000, lr=4e-3, batch=64, evaluate_every=500, patience=3)]
    (folder / "words.txt").write_text("\n".join(vocabulary.words) + "\n", encoding="utf-8")

    digits = [corpora.digits().block(i).split(shares=(0.8, 0.1, 0.1)) for i in PUBLIC_WRITERS]
    parts = {
        split: corpora.Examples.joined(corpora.Examples(each[split].images, each[split].labels) for each in digits)
        for split in corpora.SPLITS
    }
    settings = dict(steps=1000, lr=1e-2, batch=32, batch_norm=True, patience=None)
    rows.append(learn(autonomy.MobileNet(), parts, "digits", folder, **settings))
    record.write("autonomy.pretrain", rows)


def learn(model: torch.nn.Module, parts: dict, case: str, folder, **settings) -> dict:
    """Train a network from nothing, keep it, and say how it went."""
    began = time.process_time()
    result = autonomy.transfer(autonomy.nets.untrained(model), parts["train"], parts["validation"], "all", **settings)
    weights = {name: t.half() if t.is_floating_point() else t for name, t in result.model.state_dict().items()}
    save_file(weights, folder / f"{case}.safetensors")
    judged = autonomy.evaluate(autonomy.pretrained(case), parts["test"])
    return {
        "section": "training", "case": case, "labels": parts["train"].labels, "steps": result.step,
        "batch": settings["batch"], "cpu_s": round(time.process_time() - began, 1),
        "test_loss": round(judged.loss, 4), "test_accuracy": round(judged.accuracy, 4),
    }  # fmt: skip


if __name__ == "__main__":
    main()
