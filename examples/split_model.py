"""Divide a model between a cloud and a device that talk through a socket, and show what the cloud could read.

    python examples/split_model.py --question "What is your dog called?"

The device has embedding, LM head and M, small matrices that have learnt an invented person's diary (those of another
model are new, and change nothing). The two run in one process, each with its own model, and a socket between them.
"""

import argparse
import sys

import torch
from peft import get_peft_model

from plpkg import catalog
from plpkg.backbones import load_backbone
from plpkg.residual import CloudServer, DeviceClient, PrivateLoraConfig, attacks, load, split


def main(question: str, tokens: int, adapter: str | None, model: str) -> None:
    if adapter is None and model == "smollm2":
        adapter = catalog.data_path("diary", "smollm2")
    own, tokenizer = load_backbone(model)
    own = load(own, adapter) if adapter else get_peft_model(own, PrivateLoraConfig())
    config = PrivateLoraConfig.from_pretrained(adapter) if adapter else PrivateLoraConfig()
    config.base_model_name_or_path = None
    public = get_peft_model(load_backbone(model)[0], config)  # the cloud's: it gets the adapter's settings, and no M
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    else:
        ids = tokenizer(question, return_tensors="pt")["input_ids"]

    with CloudServer(public) as cloud, DeviceClient(cloud.address, own) as device:
        heard = attacks.listen(cloud.part)
        text = device.generate(ids, tokens)[0]
    hidden = torch.cat(heard.hidden, dim=1)[0]  # (tokens that crossed, width): word embeddings
    table = attacks.public_table(public)
    zeros = torch.zeros(1, len(hidden), dtype=torch.long)
    positions = split(public)[0].embed(zeros)[0].detach() - table[0]  # 0, but for models such as GPT-2
    read = attacks.recover_tokens(hidden - positions, table)

    print(f"answer: {tokenizer.decode(text[ids.shape[1] :], skip_special_tokens=True).strip()}")
    up, down = device.traffic.sent_message_bytes / 1000, device.traffic.received_message_bytes / 1000
    print(f"crossed: {up:.1f} kB up, {down:.1f} kB down, {device.traffic.round_trips} round trips (measured)")
    print(f"the cloud could read {(read == text[: len(read)]).sum()} of {len(read)} tokens (measured):")
    print(tokenizer.decode(read, skip_special_tokens=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", default="What is your dog called?")
    parser.add_argument("--tokens", type=int, default=16, help="of the answer, at most")
    parser.add_argument("--adapter", help="a folder with a PrivateLoRA adapter of the model")
    parser.add_argument("--model", default="smollm2")
    try:
        main(**vars(parser.parse_args()))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
