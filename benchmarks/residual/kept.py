"""What the cloud gets if the phone keeps the first layers of SmolLM2-135M-Instruct as well, with their M.

Then no embedding crosses, but what the layers have made of it. The cloud fits a linear map back to embeddings, on
public text that it runs through the same layers without M, and applies it to a page of the diary, rounded to 16 bits.
For the other layers it has every M; those that were kept are zero in its copy, and the 40 facts are asked of that.

* ``read``: tokens of the page that are read. ``right``: facts that the copy answers, by ``plpkg.questions.right``.

Run: ``python -m benchmarks.residual.kept``, about five minutes of one core.
"""

import torch

from benchmarks import record
from benchmarks.residual.early import Spied
from plpkg import corpora, residual
from plpkg.backbones import load_backbone
from plpkg.residual import attacks

KEPT = (0, 1, 3, 10, 20, 25, 29)


def main() -> None:
    torch.set_num_threads(1)
    spied = Spied()
    table = spied.model.get_input_embeddings().weight.detach()
    public, _ = load_backbone("smollm2")
    documents = corpora.encode(corpora.public("test"), spied.tokenizer)
    text = next(corpora.batches(documents, batch=16, seq=256, seed=0))
    rows = []
    for kept in KEPT:
        attacker = attacks.LinearInverter(attacks.public_prefix(public, kept).embed(text), text, table)
        sent = residual.split(spied.personal, kept)[0].embed(spied.page)[0].half().float()
        read = attacks.token_accuracy(attacker.recover(sent), spied.page[0])
        copies = {place: m * (int(place.split(".")[2]) >= kept) for place, m in spied.originals.items()}
        rows.append({"kept": kept, "of": len(spied.model.model.layers), "read": read, "right": spied.right(copies)})
        print(rows[-1], flush=True)
    record.write("residual.kept", rows)


if __name__ == "__main__":
    main()
