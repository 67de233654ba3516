"""Which model families can be divided, by which method.

Tiny models with random weights and a random M, at both ends of a real connection in float32. ``ok``: the device writes
the tokens that PEFT's ``generate()`` writes in one process, and its gradients are autograd's there, as near as float32
rounds (``difference``, the largest of a family's methods). ``refused``: a sentence says why, which is in ``reason``.
Where a family has none of a method's default layers, others are named (``INTO_ATTENTION``, ``OUT_OF_MLP``).

Run: ``python -m benchmarks.residual.families`` (about a minute on an idle core).
"""

import copy
import warnings
from collections.abc import Iterator

import peft
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from benchmarks import record
from benchmarks.decoders import CAUSAL, EXPERTS, GROUPED, SIZES
from plpkg.projections import PROJECTIONS
from plpkg.residual import CloudServer, DeviceClient, LadderConfig, PrivateLoraConfig, RefusedError

IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
NEW_TOKENS = 5
NEAR = 1e-4
"""What float32 may differ by, relatively, after two layers."""
GPT = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
HEADS = GROUPED | dict(head_dim=8)
GRANITE = dict(embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.2)
EAGER = dict(num_local_experts=4, experts_implementation="eager")
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
FAMILIES = CAUSAL | {
    "Apertus": ("apertus", GROUPED),
    "Arcee": ("arcee", GROUPED),
    "BioGPT": ("biogpt", SIZES),
    "CodeGen": ("codegen", GPT | dict(rotary_dim=4)),
    "Cohere": ("cohere", GROUPED | dict(logit_scale=0.0625)),
    "Cohere 2": ("cohere2", GROUPED | dict(logit_scale=0.25)),
    "ERNIE 4.5": ("ernie4_5", HEADS),
    "EXAONE 4": ("exaone4", GROUPED),
    "Falcon, first form": ("falcon", SIZES | dict(alibi=True, multi_query=False)),
    "Falcon H1": ("falcon_h1", GROUPED),
    "Gemma 4": ("gemma4_text", HEADS | dict(hidden_size_per_layer_input=0)),
    "Gemma 4, inputs of layers": (
        "gemma4_text",
        HEADS | dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=64),
    ),
    "GLM": ("glm", HEADS),
    "GLM 4": ("glm4", HEADS),
    "GPT-BigCode": ("gpt_bigcode", GPT),
    "GPT-Neo": ("gpt_neo", SIZES | dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]])),
    "Granite": ("granite", GROUPED | GRANITE),
    "Granite, experts": ("granitemoe", EXPERTS | EAGER | GRANITE),
    "Hunyuan": ("hunyuan_v1_dense", HEADS),
    "Jamba": ("jamba", GROUPED | dict(attn_layer_period=2, attn_layer_offset=1)),
    "LFM 2": ("lfm2", GROUPED | dict(layer_types=["full_attention", "conv"])),
    "MiniCPM 3": ("minicpm3", SIZES | LATENT),
    "Ministral": ("ministral", HEADS),
    "MPT": ("mpt", dict(vocab_size=64, d_model=32, n_layers=2, n_heads=4)),
    "nanochat": ("nanochat", GROUPED),
    "Nemotron": ("nemotron", GROUPED),
    "OLMo": ("olmo", GROUPED),
    "OLMo 3": ("olmo3", GROUPED),
    "OLMoE": ("olmoe", EXPERTS | dict(num_experts=4)),
    "OPT-350m": ("opt", SIZES | dict(ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False)),
    "Persimmon": ("persimmon", SIZES),
    "Phi 3.5, experts": ("phimoe", EXPERTS | EAGER),
    "Qwen 2, experts": (
        "qwen2_moe",
        EXPERTS | dict(num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=24),
    ),
    "Qwen 3 Next": ("qwen3_next", GROUPED | dict(layer_types=["linear_attention", "full_attention"])),
    "Seed OSS": ("seed_oss", HEADS),
    "VaultGemma": ("vaultgemma", HEADS),
    "XGLM": ("xglm", dict(vocab_size=64, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48)),
}
INTO_ATTENTION = (*(name for names in PROJECTIONS for name in names), "q_b_proj")  # the last is DeepSeek's
OUT_OF_MLP = ("down_proj", "mlp.c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2", "o_proj")  # the first that there is
OTHERS = ("in_proj", "layer_2")  # Mamba's and XLNet's, so that it is not PEFT that refuses them


def low(names: list[str], **options) -> PrivateLoraConfig:
    return PrivateLoraConfig(r_c2d=4, r_d2c=3, target_modules=names, **options)


METHODS = {
    "M": (low, INTO_ATTENTION, {}),
    "a layer on the device": (low, INTO_ATTENTION, dict(first_k=1)),
    "late": (lambda names: low(names, late=True), OUT_OF_MLP, {}),
    "folded": (low, OUT_OF_MLP, dict(fold=True)),
    "late, folded": (lambda names: low(names, late=True), OUT_OF_MLP, dict(fold=True)),
    "ladder": (lambda names: LadderConfig(r=4, target_modules=names), OUT_OF_MLP, {}),
    "gated ladder": (lambda names: LadderConfig(r=4, width=8, target_modules=names), OUT_OF_MLP, {}),
    "LoRA": (lambda names: peft.LoraConfig(r=4, target_modules=names), INTO_ATTENTION, {}),
}
"""Of each the adapter's configuration, the layers that it adapts, and how the model is cut."""


def families() -> Iterator[dict]:
    """A row for each family."""
    for name in FAMILIES:
        results = {method: divided(name, method) for method in METHODS}
        row = {method: how for method, (how, _) in results.items()}
        reasons = dict.fromkeys(said for how, said in results.values() if how == "refused")
        differences = [said for how, said in results.values() if how != "refused"]
        yield {"name": name, **row, "difference": max(differences, default=None), "reason": "; ".join(reasons)}


def adapted(family: str, method: str) -> tuple[peft.PeftModel, peft.PeftModel]:
    """The device's model, whose M is random, and the cloud's."""
    kind, options = FAMILIES[family]
    config, names, _ = METHODS[method]
    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **options)).eval()
    linear = [f".{name}" for name, module in whole.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    present = [name for name in (*names, *OTHERS) if any(each.endswith(f".{name}") for each in linear)]
    present = present if names is INTO_ATTENTION else present[:1]
    mine, public = (peft.get_peft_model(copy.deepcopy(whole), config(present)).eval() for _ in range(2))
    for p in mine.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.3)
    return mine, public


def divided(family: str, method: str) -> tuple[str, str | float]:
    """How a method works on a family: ``"ok"`` or ``"WRONG"`` with the difference, or ``"refused"`` with the reason."""
    wire = dict(precision="fp32", **METHODS[method][2])
    try:
        mine, public = adapted(family, method)
        with CloudServer(public, **wire) as cloud, DeviceClient(cloud.address, mine, **wire) as device:
            greedy = dict(do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=torch.ones_like(IDS))
            expected = mine.generate(input_ids=IDS, max_new_tokens=NEW_TOKENS, **greedy)
            same = torch.equal(device.generate(IDS, NEW_TOKENS, eos_token_id=-1), expected)
            device.train_step(IDS, IDS)
    except (ValueError, RefusedError) as error:
        return "refused", str(error)
    learning = [p for p in mine.parameters() if p.requires_grad]
    gradient = torch.cat([p.grad.flatten() for p in learning])
    exact = torch.autograd.grad(mine(input_ids=IDS, labels=IDS).loss, learning)
    exact = torch.cat([each.flatten() for each in exact])
    difference = ((gradient - exact).norm() / exact.norm()).item()
    return "ok" if same and difference < NEAR else "WRONG", difference


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")  # of tiny settings
    record.sections("residual.families", {"families": families}, __doc__)
