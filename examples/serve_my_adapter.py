"""Serve LoRA adapters in one batch on one model, yours beside others': each answers the same prompt.

    python examples/serve_my_adapter.py --prompt "What is my cat called?"

Name folders of adapters before the options: my_adapter other_adapter --prompt … Without any, those of three invented
people are served, which come with the package. An adapter that does not fit the model is refused, with the reason.
"""

import argparse
import sys
import time
from pathlib import Path

from plpkg import catalog
from plpkg.backbones import load_backbone
from plpkg.serving import Engine, Request


def main(folders: list[Path], prompt: str, tokens: int, model: str) -> None:
    backbone, tokenizer = load_backbone(model)
    engine = Engine(backbone, tokenizer)
    for folder in folders:
        engine.load(str(folder), folder)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]

    names = [None, *engine.adapters]  # None: the model without an adapter
    began = time.perf_counter()
    answers = engine.generate([Request(ids, adapter=name, max_new_tokens=tokens) for name in names])
    seconds = time.perf_counter() - began

    print(f"prompt: {prompt}")
    for name, answer in zip(names, answers, strict=True):
        text = " ".join(tokenizer.decode(answer, skip_special_tokens=True).split())
        print(f"{Path(name).name if name else 'no adapter'}: {text}")
    written = sum(map(len, answers))
    print(f"measured: {written} tokens for {len(names)} requests in one batch, in {seconds:.1f} s")
    model_bytes = sum(parameter.nbytes for parameter in backbone.parameters())
    adapter_bytes = sum(adapter.num_bytes for adapter in engine.adapters.values())
    print(f"measured: the model has {model_bytes / 1e6:.1f} MB, all adapters together {adapter_bytes / 1e6:.2f} MB")


if __name__ == "__main__":
    people = [catalog.data_path("people", name) for name in ("ann", "bob", "cem")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=people)
    parser.add_argument("--prompt", default="What is my cat called?")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer, at most")
    parser.add_argument("--model", default="smollm2")
    try:
        main(**vars(parser.parse_args()))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
