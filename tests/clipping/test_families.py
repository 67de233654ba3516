"""Tiny models of many families, weights at random: each is exact, or refused in a sentence that names a layer."""

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
MOE = SIZES | dict(intermediate_size=48, num_key_value_heads=2, num_experts_per_tok=2)
RELATIVE = dict(
    relative_attention=True, position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True,
    pos_att_type=["p2c", "c2p"], position_biased_input=False,
)  # fmt: skip


def tiny(name, **config):
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config))


def bart(family="Bart"):
    return tiny(f"{family}ForConditionalGeneration", **SEQ2SEQ)


def opt(word_embed_proj_dim=32, **options):
    sizes = SIZES | dict(ffn_dim=48, word_embed_proj_dim=word_embed_proj_dim)
    return tiny("OPTForCausalLM", **sizes, **NO_DROPOUT, **options)


def deberta(**options):
    sizes = SIZES | dict(intermediate_size=48, num_labels=3, type_vocab_size=0)
    return tiny("DebertaV2ForSequenceClassification", **sizes, **STILL, **options)


def mixtral(how="batched_mm"):
    return tiny("MixtralForCausalLM", **MOE, num_local_experts=4, experts_implementation=how)


def qwen_moe(how="batched_mm"):
    sizes = MOE | dict(num_experts=4, moe_intermediate_size=24, head_dim=8)
    return tiny("Qwen3MoeForCausalLM", **sizes, experts_implementation=how)


ENCODER = SIZES | STILL | dict(intermediate_size=48, num_labels=3)
MODERN = SIZES | dict(
    intermediate_size=48, num_labels=3, pad_token_id=1, bos_token_id=0, eos_token_id=2, cls_token_id=0, sep_token_id=2,
    attn_implementation="eager",
)  # fmt: skip
BLOOM = dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=64, hidden_dropout=0.0, attention_dropout=0.0)


def pegasus():
    return tiny("PegasusForConditionalGeneration", **SEQ2SEQ)


def convnext():
    return tiny("ConvNextForImageClassification", num_channels=3, patch_size=2, hidden_sizes=[8, 16, 16, 16],
                depths=[1, 1, 1, 1], num_labels=3)  # fmt: skip


def swin():
    sizes = dict(image_size=16, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4)
    return tiny("SwinForImageClassification", **sizes, **STILL, drop_path_rate=0.0, num_labels=3)


def lora(model, *layers):
    model = get_peft_model(model, LoraConfig(r=4, target_modules=list(layers)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.3)
    return model


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
        self.wte, self.wpe = nn.Embedding(64, 16), nn.Embedding(16, 16)
        self.h = nn.Sequential(Block(16), Block(16))
        self.ln_f, self.lm_head = nn.LayerNorm(16), nn.Linear(16, 64, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        return self.lm_head(self.ln_f(self.h(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])))))


class Hypernetwork(nn.Module):
    """One layer gives another's weight."""

    def __init__(self):
        super().__init__()
        self.wte, self.hyper = nn.Embedding(64, 6), nn.Linear(4, 30)
        self.register_buffer("code", torch.randn(1, 4))

    def forward(self, ids):
        return functional.linear(self.wte(ids), self.hyper(self.code).reshape(5, 6))


def ids(batch=3, seq=8):
    return torch.randint(3, 64, (batch, seq), generator=torch.Generator().manual_seed(2))


PADDED = {"input_ids": ids(), "attention_mask": (torch.arange(8) < torch.tensor([[6], [8], [8]])).long()}
IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2, 1])


def next_tokens(logits, tokens):
    return functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none").mean(1)


def causal(model, tokens):
    out = model(tokens)
    return next_tokens(out if isinstance(out, torch.Tensor) else out.logits, tokens)


def seq2seq(model, batch):
    tokens = batch["input_ids"]
    return next_tokens(model(**batch, decoder_input_ids=tokens, use_cache=False).logits, tokens)


def of_class(model, batch):
    return functional.cross_entropy(model(**batch).logits, batch["input_ids"][:, 0] % 3, reduction="none")


def of_image(model, batch):
    return functional.cross_entropy(model(pixel_values=batch[0]).logits, batch[1], reduction="none")


EXACT = {
    "BART, LoRA": (lambda: lora(bart(), "q_proj", "v_proj"), seq2seq, PADDED),
    "BART": (bart, seq2seq, PADDED),
    "mBART": (lambda: bart("MBart"), seq2seq, PADDED),
    "OPT": (opt, causal, ids()),
    "OPT, as many tokens as examples": (opt, causal, ids(8, 8)),
    "OPT, one example": (opt, causal, ids(1)),
    "OPT-350M's order": (lambda: opt(word_embed_proj_dim=16, do_layer_norm_before=False), causal, ids()),
    "OPT, reentrant checkpoints": (lambda: reentrant(opt()), causal, ids()),
    "DeBERTa-v2, absolute positions": (deberta, of_class, PADDED),
    "DeBERTa-v3, LoRA beside the attention": (lambda: lora(deberta(**RELATIVE), "dense"), of_class, PADDED),
    **{
        f"{name}, {batch} examples": (lambda tied=tied: GPT(tied), causal, ids(batch))
        for name, tied in (("nanoGPT", True), ("LLMs-from-scratch", False))
        for batch in (3, 8, 1)
    },
    "Mixtral": (mixtral, causal, ids()),
    "Mixtral, LoRA": (lambda: lora(mixtral(), "q_proj", "v_proj"), causal, ids()),
    "Mixtral, reentrant checkpoints": (lambda: reentrant(mixtral()), causal, ids()),
    "Qwen3-MoE": (qwen_moe, causal, ids()),
    "Swin, position biases frozen": (lambda: frozen(swin(), "relative_position"), of_image, IMAGES),
}
HELD_OUT = {
    "mBART, LoRA": (lambda: lora(bart("MBart"), "q_proj", "v_proj"), seq2seq, PADDED),
    "OPT, LoRA": (lambda: lora(opt(), "q_proj", "v_proj"), causal, ids()),
    "Pegasus": (pegasus, seq2seq, PADDED),
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
    "DeBERTa-v3": (lambda: deberta(**RELATIVE), of_class, PADDED, rf"deberta\.encoder\.LayerNorm \(LayerNorm\) {ONCE}"),
    "DeBERTa-v3, LoRA": (
        lambda: lora(deberta(**RELATIVE), "query_proj"),
        of_class,
        PADDED,
        rf"query_proj\.lora_A.*\(Linear\) {ONCE}",
    ),
    "Mixtral, eager": (lambda: mixtral("eager"), causal, ids(), r"experts \(MixtralExperts\): torch.func cannot diff"),
    "Qwen3-MoE, eager": (lambda: qwen_moe("eager"), causal, ids(), r"experts \(Qwen3MoeExperts\): torch.func cannot"),
    "a hypernetwork": (Hypernetwork, causal, ids(), rf"hyper \(Linear\) {ONCE}"),
    "Swin": (swin, of_image, IMAGES, rf"relative_position_bias \(SwinRelativePositionBias\) {ONCE}"),
}


def build(make):
    torch.manual_seed(0)
    return make().train()


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", EXACT)
def test_exact(name, execution, assert_as_loop, still):
    make, loss, batch = EXACT[name]
    assert_as_loop(still(build(make)), loss, batch, execution)


@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_families_are_exact(name, assert_as_loop, still):
    make, loss, batch = HELD_OUT[name]
    assert_as_loop(still(build(make)), loss, batch, "book_keeping")


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_a_layer_s_name(name, execution, still):
    make, loss, batch, message = REFUSED[name]
    model = still(build(make))
    for _ in range(2):  # it does not forget
        with pytest.raises((ValueError, NotImplementedError), match=message):
            clipped_gradients(model, loss, batch, 0.1, execution)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch.func counts tokens one by one
@pytest.mark.parametrize("make", [mixtral, qwen_moe])
def test_experts_whose_kernel_has_no_float64(make, flat, still):
    """The default, grouped_mm, takes float32 at most; float64's result is the other implementation's."""
    exact, _ = clipped_gradients(still(build(make)).double(), causal, ids(), 0.1, "loop")
    model = still(build(lambda: make("grouped_mm")))
    rough, _ = clipped_gradients(model, causal, ids(), 0.1, "loop")
    for execution in EXECUTIONS:
        sums, _ = clipped_gradients(model, causal, ids(), 0.1, execution)
        assert_as_exact(flat(sums), flat(rough), flat(exact))
