"""Make a model a person's own on their device: learn a folder of text files, and suggest next words before and after.

    python examples/learn_overnight.py --scope lora --out my_night

A folder of your own .txt and .md files may stand before the options; else texts of invented people are learnt. Of
each file eight tenths are learnt, the next tenth says when to stop, and the last one is the test.
"""

import argparse
import sys

import torch
from peft import PeftModel

from plpkg import autonomy, backbones, catalog, corpora


def part(documents: list[corpora.Tokens], begin: float, end: float) -> corpora.Examples:
    spans = [slice(int(begin * len(each)), int(end * len(each))) for each in documents]
    cut = [corpora.Tokens(d.ids[s], d.scored[s], d.num_bytes[s]) for d, s in zip(documents, spans, strict=True)]
    return corpora.token_examples(cut, seq=64)


@torch.no_grad()
def suggested(model, tokenizer, test: corpora.Examples) -> str:
    pieces = tokenizer.convert_ids_to_tokens(range(model.config.vocab_size))
    begins = torch.tensor([str(piece)[:1] in "Ġ▁" and str(piece)[1:2].isalpha() for piece in pieces])
    hits = torch.zeros(0, 3, dtype=torch.bool)
    for window in test.chunks(1):
        words = begins[window.y[0]] & (window.y[0] >= 0)  # where a word begins: its first token is suggested
        scores = model(input_ids=window.x).logits[0][words].masked_fill(~begins, -torch.inf)
        hits = torch.cat([hits, scores.topk(3).indices == window.y[0][words][:, None]])
    return f"of {len(hits)} words {hits[:, 0].sum()} are the first suggestion, {hits.sum()} among three (measured)"


def main(folder: str, scope: str, steps: int, out: str, model: str) -> None:
    texts = [text for writer in corpora.text_folder(folder, shares=(1, 0, 0)) for text in writer.split("train")]
    public, tokenizer = backbones.load_backbone(model)
    documents = corpora.encode(texts, tokenizer)
    learnt, later, test = part(documents, 0, 0.8), part(documents, 0.8, 0.9), part(documents, 0.9, 1)
    print("before:", suggested(public, tokenizer, test))
    mine = autonomy.transfer(public, learnt, later, scope, steps=steps, batch=4, evaluate_every=max(1, steps // 2))
    print(f"learnt {mine.step} of {steps} steps; after:", suggested(mine.model, tokenizer, test))
    mine.save(out)
    loaded = PeftModel.from_pretrained(public, out) if scope == "lora" else autonomy.load(public, out).model
    print(f"loaded from {out}:", suggested(loaded.eval(), tokenizer, test))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=catalog.data_path("notes", "folders", "long"))
    parser.add_argument("--scope", choices=["lora", "head"], default="lora")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", default="my_night")
    parser.add_argument("--model", default="smollm2")
    try:
        main(**vars(parser.parse_args()))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
