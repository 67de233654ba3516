"""A script of a newcomer: whole but for the four lines that say so. Type checkers read it, nothing runs it."""

import torch

from plpkg import communication, retention, throughput
from plpkg.backbones import load_backbone
from plpkg.clipping import accounting
from plpkg.residual import PrivateLoraConfig
from plpkg.serving import Engine, Request

model, tokenizer = load_backbone("smollm2")
traffic = communication.low_rank("llama-7b", 64)
print(traffic, throughput.decode("llama-7b", 64).tokens_per_s)
print(communication.low_rank("llama-7b", rnak=64))  # mistake: no such keyword
print(throughput.decod("llama-7b"))  # mistake: no such name

config = PrivateLoraConfig(r_c2d=8, r_d2c=8)
sigma: float = accounting.noise_for(8.0, 1e-5, 0.01, 1000)

engine = Engine(model, tokenizer)
ids: torch.Tensor = tokenizer("My dog is called", return_tensors="pt").input_ids
engine.add(Request(ids, adapter="ann", max_new_tokens=8))
engine.add("My dog is called")  # mistake: text, where a request is expected

scorer = retention.scorers.SnapKv()
read = retention.chunked_prefill(model, ids, scorer, budget=64, chunk_size=32)
read = retention.chunked_prefill(model, ids, scorer, budget="many", chunk_size=32)  # mistake: a text for a number
print(read, config, sigma)
