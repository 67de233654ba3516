"""The published memory and FLOPs, and what a real phone part weighs."""

from dataclasses import replace

import pytest
import torch

from plpkg import catalog
from plpkg.throughput import phone_flops, phone_memory, phone_only_tokens_per_s, whole_model_bytes, whole_model_flops


@pytest.mark.parametrize(
    ("model", "published_accounting", "with_embedding"),
    [("llama-2-7b", 265.29, 527.43), ("llama-2-13b", 331.61, 659.29), ("llama-30b", 431.88, 857.87)],
)
def test_published_memory_leaves_out_the_embedding(model, published_accounting, with_embedding):
    assert phone_memory(model).total_mb == pytest.approx(published_accounting, abs=0.005)
    assert phone_memory(model, embedding=True).total_mb == pytest.approx(with_embedding, abs=0.005)


def test_flops_of_the_publication_and_of_fewer_ms():
    share = {m: 100 * phone_flops(m) / whole_model_flops(m) for m in ("llama-2-7b", "llama-30b")}
    assert share["llama-2-7b"] == pytest.approx(2.008, abs=0.0005)  # the article says "below 2 %"
    assert share["llama-30b"] == pytest.approx(0.668, abs=0.0005)
    assert phone_flops("gpt2", 8, projections=1, adapted_layers=2) == 2 * (50257 * 768 + 2 * 64)


def test_memory_equals_the_bytes_of_real_modules():
    model = catalog.model("qwen2.5-0.5b")
    head = torch.nn.Linear(model.hidden, model.vocab, bias=False, dtype=torch.bfloat16, device="meta")
    ms = [torch.nn.Linear(16, 16, bias=False, dtype=torch.bfloat16, device="meta") for _ in range(3 * model.num_layers)]
    counted = sum(p.numel() * p.element_size() for module in [head, *ms] for p in module.parameters())
    assert phone_memory(model, 16).total_bytes == counted


@pytest.mark.parametrize("width", [None, 12])
def test_a_ladder_on_the_phone_equals_the_bytes_of_real_modules(width):
    model, on = catalog.model("qwen2.5-0.5b"), dict(dtype=torch.bfloat16, device="meta")
    numbers = 8 * model.num_layers
    modules = [torch.nn.Linear(numbers, model.hidden, bias=False, **on)]
    if width:
        modules += [torch.nn.Linear(numbers, width, **on) for _ in ("up", "gate")]
        modules.append(torch.nn.Linear(width, model.hidden, bias=False, **on))
    counted = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
    assert phone_memory(model, 8, method="ladder", width=width).m_bytes == counted


def test_parts_by_hand():
    memory = phone_memory("llama-3.1-8b", bits=4, embedding=True, r_c2d=6, r_d2c=10, projections=1, adapted_layers=3)
    table = 128_256 * 4096 * 0.5
    assert (memory.lm_head_bytes, memory.m_bytes, memory.embedding_bytes) == (table, 3 * 6 * 10 * 0.5, table)
    assert [row["mb"] for row in memory.rows()] == pytest.approx(
        [table / 1e6, 9e-5, table / 1e6, 2 * table / 1e6 + 9e-5]
    )
    assert phone_memory("gpt2", 8, embedding=True).embedding_bytes == 0
    # A folded layer brings its B: hidden times r_d2c weights.
    plain, folded = (phone_memory("gpt2", 8, projections=1, r_d2c=4, folded=f).m_bytes for f in (False, True))
    assert folded - plain == 768 * 4 * 2


def test_phone_alone_is_a_bound_above_the_reported_speeds_and_a_small_one_is_said():
    roofline = phone_only_tokens_per_s("llama-2-7b", bits=4)
    assert roofline == pytest.approx(12.93, abs=0.005)
    claims = catalog.published("private_lora_claims").set_index("claim")["value"]
    assert claims["phone_only_decode_text"] < claims["phone_only_decode_figure"] < roofline
    with pytest.warns(UserWarning, match="llama-2-13b: 6.43 GB do not fit the 6 GB of iphone-13-pro-max"):
        phone_only_tokens_per_s("llama-2-13b")


def test_experts_are_held_all_and_read_few():
    idle = replace(catalog.model("gpt2"), expert_parameters=6_000_000, num_experts=6, num_experts_per_tok=2)
    assert whole_model_bytes(idle) == whole_model_bytes("gpt2")
    assert whole_model_flops("gpt2") - whole_model_flops(idle) == 2 * 4_000_000
    assert phone_only_tokens_per_s(idle, 16) == pytest.approx(42.7e9 / (2 * (124_439_808 - 4_000_000)))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="rank must be between 1 and hidden=768, got 0"):
        phone_memory("gpt2", 0)
    with pytest.raises(ValueError, match="bits must be between 1 and 64, got 0"):
        whole_model_bytes("gpt2", 0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'phone_bits': did you mean 'bits'"):
        phone_memory("gpt2", 8, phone_bits=4)  # which changed nothing
