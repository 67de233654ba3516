"""Tiny models of many families, weights at random: each is exact, or refused in a sentence that names a layer."""

from functools import partial

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional

from plpkg.clipping import clipped_gradients
from plpkg.clipping.execution import EXECUTIONS

from rounding import assert_as_exact

STILL = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
NO_DROPOUT = dict(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
SEQ2SEQ = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64, max_position_embeddings=16,
    pad_token_id=1, bos_token_id=0, eos_token_id=2, forced_eos_token_id=2, decoder_start_token_id=2, **NO_DROPOUT,
)  # fmt: skip
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, max_position_embeddings=16)
BATCHED, EAGER = dict(experts_implementation="batched_mm"), dict(experts_implementation="eager")
MOE = SIZES | BATCHED | dict(intermediate_size=48, num_key_value_heads=2, num_experts_per_tok=2)


def tiny(name, **config):
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config))


def bart(family="Bart"):
    return tiny(f"{family}ForConditionalGeneration", **SEQ2SEQ)


ENCODER = SIZES | STILL | dict(intermediate_size=48, num_labels=3)
MODERN = SIZES | dict(
    intermediate_size=48, num_labels=3, pad_token_id=1, bos_token_id=0, eos_token_id=2, cls_token_id=0, sep_token_id=2,
    attn_implementation="eager",
)  # fmt: skip
BLOOM = dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=64, hidden_dropout=0.0, attention_dropout=0.0)


opt = partial(tiny, "OPTForCausalLM", **SIZES, **NO_DROPOUT, ffn_dim=48, word_embed_proj_dim=32)
deberta = partial(tiny, "DebertaV2ForSequenceClassification", **ENCODER, type_vocab_size=0)
deberta_v3 = partial(
    deberta, relative_attention=True, position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True,
    pos_att_type=["p2c", "c2p"], position_biased_input=False,
)  # fmt: skip
mixtral = partial(tiny, "MixtralForCausalLM", **MOE, num_local_experts=4)
qwen_moe = partial(tiny, "Qwen3MoeForCausalLM", **MOE, num_experts=4, moe_intermediate_size=24, head_dim=8)
convnext = partial(
    tiny, "ConvNextForImageClassification", num_channels=3, patch_size=2, hidden_sizes=[8, 16, 16, 16],
    depths=[1, 1, 1, 1], num_labels=3,
)  # fmt: skip
swin = partial(
    tiny, "SwinForImageClassification", image_size=16, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4],
    window_size=4, drop_path_rate=0.0, num_labels=3, **STILL,
)  # fmt: skip


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def lora(model, *layers):
    return get_peft_model(model, LoraConfig(r=4, target_modules=list(layers), init_lora_weights=False))


def llama(config):
    sizes = SIZES | dict(intermediate_size=48, num_key_value_heads=2)
    model = get_peft_model(tiny("LlamaForCausalLM", **sizes), config)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:  # many adapters begin with zeros
                p.add_(0.05 * torch.randn_like(p))
    return model


ATTENTION = ["q_proj", "v_proj"]
METHODS = {
    "IA³": peft.IA3Config(target_modules=[*ATTENTION, "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": peft.VeraConfig(target_modules=["q_proj"], r=4),
    "AdaLoRA": peft.AdaLoraConfig(target_modules=ATTENTION, total_step=100),
    "DoRA": LoraConfig(target_modules=ATTENTION, use_dora=True),
    "LoHa": peft.LoHaConfig(target_modules=ATTENTION, r=4),
    "RandLoRA": peft.RandLoraConfig(target_modules=["q_proj"], r=4),
    "C³A": peft.C3AConfig(target_modules=["q_proj"], block_size=4),
    "trainable tokens": peft.TrainableTokensConfig(token_indices=[3, 4], target_modules=["embed_tokens"]),
}


def deberta_lora():
    return lora(deberta_v3(), "query_proj")


def frozen(model, part):
    for name, p in model.named_parameters():
        p.requires_grad_(part not in name)
    return model


def reentrant(model):
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return model


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.ln(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """As nanoGPT's or LLMs-from-scratch's (whose head is its own): positions without a batch."""

    def __init__(self, tied):
        super().__init__()
        self.wte, self.wpe, self.lm_head = nn.Embedding(64, 16), nn.Embedding(16, 16), nn.Linear(16, 64, bias=False)
        self.h = nn.Sequential(Block(16), Block(16), nn.LayerNorm(16))
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        return self.lm_head(self.h(self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))))


class Hypernetwork(nn.Module):
    """One layer gives another's weight."""

    def __init__(self):
        super().__init__()
        self.wte, self.hyper = nn.Embedding(64, 6), nn.Linear(4, 30)

    def forward(self, ids):
        return functional.linear(self.wte(ids), self.hyper(torch.ones(1, 4)).reshape(5, 6))


def ids(batch=3, seq=8):
    return torch.randint(3, 64, (batch, seq), generator=torch.Generator().manual_seed(2))


PADDED = {"input_ids": ids(), "attention_mask": (torch.arange(8) < torch.tensor([[6], [8], [8]])).long()}
IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2, 1])


def next_tokens(logits, tokens):
    return functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none").mean(1)


def logits(output):
    return output if isinstance(output, torch.Tensor) else output.logits


def causal(model, tokens):
    return next_tokens(logits(model(tokens)), tokens)


def seq2seq(model, batch):
    tokens = batch["input_ids"]
    return next_tokens(model(**batch, decoder_input_ids=tokens, use_cache=False).logits, tokens)


def of_class(model, batch):
    return functional.cross_entropy(model(**batch).logits, batch["input_ids"][:, 0] % 3, reduction="none")


def of_image(model, batch):
    return functional.cross_entropy(logits(model(batch[0])), batch[1], reduction="none")


EXACT = {
    "BART, LoRA": (lambda: lora(bart(), "q_proj", "v_proj"), seq2seq, PADDED),
    "BART": (bart, seq2seq, PADDED),
    "BERT": (lambda: tiny("BertForSequenceClassification", **ENCODER), of_class, PADDED),
    "mBART": (lambda: bart("MBart"), seq2seq, PADDED),
    "OPT": (opt, causal, ids()),
    "OPT, as many tokens as examples": (opt, causal, ids(8, 8)),
    "OPT, one example": (opt, causal, ids(1)),
    "OPT-350M's order": (lambda: opt(word_embed_proj_dim=16, do_layer_norm_before=False), causal, ids()),
    "OPT, reentrant checkpoints": (lambda: reentrant(opt()), causal, ids()),
    "DeBERTa-v2, absolute positions": (deberta, of_class, PADDED),
    "DeBERTa-v3, LoRA beside the attention": (lambda: lora(deberta_v3(), "dense"), of_class, PADDED),
    **{
        f"{name}, {batch} examples": (lambda tied=tied: GPT(tied), causal, ids(batch))
        for name, tied in (("nanoGPT", True), ("LLMs-from-scratch", False))
        for batch in (3, 8, 1)
    },
    "Mixtral": (mixtral, causal, ids()),
    "Mixtral, LoRA": (lambda: lora(mixtral(), "q_proj", "v_proj"), causal, ids()),
    "Mixtral, reentrant checkpoints": (lambda: reentrant(mixtral()), causal, ids()),
    "Qwen3-MoE": (qwen_moe, causal, ids()),
    "Mixtral, eager": (lambda: mixtral(**EAGER), causal, ids()),
    "Qwen3-MoE, eager": (lambda: qwen_moe(**EAGER), causal, ids()),
    "BERT, masked": (lambda: tiny("BertForMaskedLM", **ENCODER), causal, ids()),
    "ViT": (lambda: tiny("ViTForImageClassification", **ENCODER, image_size=16, patch_size=8), of_image, IMAGES),
    "convolutional": (convolutional, of_image, IMAGES),
    "Swin, position biases frozen": (lambda: frozen(swin(), "relative_position"), of_image, IMAGES),
}
HELD_OUT = {
    **{name: (partial(llama, config), causal, ids()) for name, config in METHODS.items()},
    "mBART, LoRA": (lambda: lora(bart("MBart"), "q_proj", "v_proj"), seq2seq, PADDED),
    "OPT, LoRA": (lambda: lora(opt(), "q_proj", "v_proj"), causal, ids()),
    "Pegasus": (lambda: bart("Pegasus"), seq2seq, PADDED),
    "Bloom": (lambda: tiny("BloomForCausalLM", **BLOOM), causal, ids()),
    "GPT-NeoX": (lambda: tiny("GPTNeoXForCausalLM", **SIZES, intermediate_size=48), causal, ids()),
    "Phi-3": (lambda: tiny("Phi3ForCausalLM", **SIZES, intermediate_size=48, pad_token_id=0), causal, ids()),
    "ALBERT": (lambda: tiny("AlbertForSequenceClassification", **ENCODER, embedding_size=16), of_class, PADDED),
    "ModernBERT": (lambda: tiny("ModernBertForSequenceClassification", **MODERN), of_class, PADDED),
    "ConvNeXt": (convnext, of_image, IMAGES),
}
"""Once each: what was exact when somebody else tried it."""
ONCE = "gives the same for all examples, and the model does not take it once for each"
REFUSED = {
    "DeBERTa-v3": (deberta_v3, of_class, PADDED, rf"deberta\.encoder\.LayerNorm \(LayerNorm\) {ONCE}"),
    "DeBERTa-v3, LoRA": (deberta_lora, of_class, PADDED, rf"query_proj\.lora_A.*\(Linear\) {ONCE}"),
    "a hypernetwork": (Hypernetwork, causal, ids(), rf"hyper \(Linear\) {ONCE}"),
    "Swin": (swin, of_image, IMAGES, rf"relative_position_bias \(SwinRelativePositionBias\) {ONCE}"),
}


def build(make):
    torch.manual_seed(0)
    return make().train()


@pytest.mark.parametrize("name", EXACT | HELD_OUT)
def test_exact(name, assert_as_loop, still):
    make, loss, batch = (EXACT | HELD_OUT)[name]
    executions = EXECUTIONS if name in EXACT else ("book_keeping",)
    assert_as_loop(still(build(make)), loss, batch, *executions)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_a_layer_s_name(name, execution, still):
    make, loss, batch, message = REFUSED[name]
    model = still(build(make))
    for _ in range(2):  # it does not forget
        with pytest.raises((ValueError, NotImplementedError), match=message):
            clipped_gradients(model, loss, batch, 0.1, execution)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch.func counts tokens one by one
@pytest.mark.parametrize("make", [mixtral, qwen_moe], ids=["Mixtral", "Qwen3-MoE"])
def test_experts_whose_kernel_has_no_float64(make, flat, still):
    """The default, grouped_mm, takes float32 at most; float64's result is the other implementation's."""
    exact, _ = clipped_gradients(still(build(make)).double(), causal, ids(), 0.1, "loop")
    model = still(build(partial(make, experts_implementation="grouped_mm")))
    rough, _ = clipped_gradients(model, causal, ids(), 0.1, "loop")
    for execution in EXECUTIONS:
        sums, _ = clipped_gradients(model, causal, ids(), 0.1, execution)
        assert_as_exact(flat(sums), flat(rough), flat(exact))
