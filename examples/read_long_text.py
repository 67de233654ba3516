"""Read a long text in a bounded memory, and ask a question about it at the end.

    python examples/read_long_text.py --budget 512 --question "What does she weigh, now that she's finished?"

A file may stand before the options; without one an invented person's log is read. Each KV head of each layer keeps
BUDGET units (a token's key and value), whatever the text's length. A rule chooses them (SnapKV, arXiv 2404.14469), or
with --heads heads trained for the model (Locret, arXiv 2410.01805). Ours find what stands out from documentation; in a
diary they lose most. --compare also asks a cache that forgets nothing: so small a model is often wrong with it, too.
"""

import argparse
import sys
from pathlib import Path

from plpkg import catalog, questions
from plpkg.backbones import load_backbone
from plpkg.retention import RetainingHeads, chunked_prefill, scorers


def main(text: Path, question: str, budget: int, positions: str, heads: bool, compare: bool, model: str) -> None:
    reader, tokenizer = load_backbone(model)
    rule, scorer = "SnapKV", scorers.SnapKv()
    if heads:
        trained = RetainingHeads.from_pretrained(catalog.data_path("retention", model), reader)
        rule, scorer = "trained heads", scorers.Locret(trained)
    before, after = questions.parts(text.read_text("utf-8"), question, tokenizer)
    ids = tokenizer(before, return_tensors="pt")["input_ids"]
    asked = tokenizer(after, return_tensors="pt", add_special_tokens=False)["input_ids"]
    print(f"question: {question}")
    for units in (budget, ids.shape[1]) if compare else (budget,):
        read = chunked_prefill(reader, ids, scorer, units, chunk_size=256, positions=positions)
        kept, seen = read.cache.kept, read.cache.seen
        answer = read.ask(reader, asked, max_new_tokens=questions.LONGEST, do_sample=False)[0]
        mib = read.cache.num_bytes / 2**20
        print(f"kept {kept} of {seen} tokens in each KV head, chosen by {rule}")
        print(f"cache {mib:.1f} MiB (measured), of all tokens {mib * seen / kept:.1f} MiB (computed)")
        print(f"answer: {questions.first_line(tokenizer.decode(answer, skip_special_tokens=True))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path, default=catalog.data_path("notes/folders/long/canoe-log.md"))
    parser.add_argument("--question", default="What does she weigh, now that she's finished?")
    parser.add_argument("--budget", type=int, default=512, help="units of each KV head")
    parser.add_argument("--positions", default="original", help="reassigned: of any length, for models like Llama")
    parser.add_argument("--heads", action="store_true", help="those of the package: smollm2-reader or plpkg-small")
    parser.add_argument("--compare", action="store_true", help="read it again with a cache that forgets nothing")
    parser.add_argument("--model", default="smollm2-reader")
    try:
        main(**vars(parser.parse_args()))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
