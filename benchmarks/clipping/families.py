"""Which model families and PEFT methods train privately: fast, by the loop, or not at all.

Tiny models with random weights. ``difference`` is the distance of book-keeping's sum from autograd's, one example's
loss after the other, over its norm. ``fast``: book-keeping takes it and is as near as float32 rounds; ``loop``: it
refuses and the loop takes it; ``refused``: both refuse. ``reason`` is what it says.

Run: ``python -m benchmarks.clipping.families`` (about three minutes on an idle core).
"""

import warnings
from collections.abc import Callable, Iterator

import peft
import torch
import transformers
from torch import nn
from torch.nn import functional

from benchmarks import record
from benchmarks.decoders import CAUSAL, GROUPED, SIZES
from plpkg.clipping import clipped_gradients

MAX_GRAD_NORM, NEAR = 0.1, 1e-4
"""What float32 may differ by, relatively, after two layers."""
IDS = torch.randint(3, 60, (5, 11), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
SOUND = torch.randn(5, 800, generator=torch.Generator().manual_seed(2))
LABELS = dict(num_labels=3)
SEQ2SEQ = dict(vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4)
SEQ2SEQ |= dict(decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64)
T5 = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)

CLASSES = {
    "BERT": ("bert", SIZES | LABELS),
    "RoBERTa": ("roberta", SIZES | LABELS),
    "DistilBERT": ("distilbert", dict(vocab_size=64, dim=32, hidden_dim=48, n_layers=2, n_heads=4) | LABELS),
    "ALBERT": ("albert", SIZES | LABELS | dict(embedding_size=16)),
    "ELECTRA": ("electra", SIZES | LABELS | dict(embedding_size=16)),
    "DeBERTa-v2": ("deberta-v2", SIZES | LABELS | dict(relative_attention=True, pos_att_type=["p2c", "c2p"])),
    "ModernBERT": ("modernbert", SIZES | LABELS | dict(cls_token_id=1, sep_token_id=2)),
}
TRANSLATORS = {
    "T5": ("t5", T5),
    "BART": ("bart", SEQ2SEQ),
    "mBART": ("mbart", SEQ2SEQ),
    "Pegasus": ("pegasus", SEQ2SEQ),
    "Marian": ("marian", SEQ2SEQ | dict(pad_token_id=0, decoder_start_token_id=0)),
}
VISION = {
    "ViT": ("vit", SIZES | LABELS | dict(image_size=32, patch_size=8)),
    "PoolFormer": (
        "poolformer",
        LABELS | dict(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], patch_sizes=[3] * 4, strides=[2] * 4),
    ),
    "Swin 2": (
        "swinv2",
        LABELS
        | dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4)
        | dict(drop_path_rate=0.0),
    ),
    "BEiT, drop path": ("beit", SIZES | LABELS | dict(image_size=32, patch_size=8, drop_path_rate=0.1)),
    "BEiT, relative positions": (
        "beit",
        SIZES | LABELS | dict(image_size=32, patch_size=8, drop_path_rate=0.0, use_relative_position_bias=True),
    ),
    "DINO 2": ("dinov2", SIZES | LABELS | dict(image_size=32, patch_size=8)),
    "Swin": (
        "swin",
        LABELS
        | dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4)
        | dict(drop_path_rate=0.0),
    ),
    "ConvNeXt": ("convnext", LABELS | dict(patch_size=2, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1])),
    "ConvNeXt, drop path": (
        "convnext",
        LABELS | dict(patch_size=2, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], drop_path_rate=0.1),
    ),
    "ResNet": ("resnet", LABELS | dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
}
SPEECH = {
    "Wav2Vec2": (
        "wav2vec2",
        SIZES
        | LABELS
        | dict(conv_dim=[8, 8], conv_kernel=[10, 3], conv_stride=[5, 2], num_conv_pos_embeddings=4)
        | dict(num_conv_pos_embedding_groups=2, apply_spec_augment=False, classifier_proj_size=8),
    ),
}
ATTENTION, MLP = ["q_proj", "v_proj"], ["q_proj", "v_proj", "down_proj"]
METHODS: dict[str, peft.PeftConfig] = {
    "LoRA": peft.LoraConfig(target_modules=ATTENTION),
    "LoRA, all linear layers": peft.LoraConfig(target_modules="all-linear"),
    "rsLoRA": peft.LoraConfig(target_modules=ATTENTION, use_rslora=True),
    "LoRA on embeddings": peft.LoraConfig(target_modules=["embed_tokens"]),
    "LoRA and whole modules": peft.LoraConfig(target_modules=ATTENTION, modules_to_save=["lm_head"]),
    "DoRA": peft.LoraConfig(target_modules=ATTENTION, use_dora=True),
    "IA³": peft.IA3Config(target_modules=MLP, feedforward_modules=["down_proj"]),
    "VeRA": peft.VeraConfig(target_modules=["q_proj"], r=4),
    "AdaLoRA": peft.AdaLoraConfig(target_modules=ATTENTION, total_step=100),
    "LoHa": peft.LoHaConfig(target_modules=ATTENTION, r=4),
    "LoKr": peft.LoKrConfig(target_modules=ATTENTION, r=4),
    "OFT": peft.OFTConfig(target_modules=ATTENTION, oft_block_size=4),
    "BOFT": peft.BOFTConfig(target_modules=ATTENTION, boft_block_size=4),
    "HRA": peft.HRAConfig(target_modules=ATTENTION, r=4),
    "FourierFT": peft.FourierFTConfig(target_modules=ATTENTION, n_frequency=20),
    "RandLoRA": peft.RandLoraConfig(target_modules=["q_proj"], r=4),
    "VB-LoRA": peft.VBLoRAConfig(target_modules=ATTENTION, r=4, num_vectors=16, vector_length=4, topk=2),
    "SHiRA": peft.ShiraConfig(target_modules=ATTENTION, r=2),
    "C³A": peft.C3AConfig(target_modules=["q_proj"], block_size=4),
    "MiSS": peft.MissConfig(target_modules=ATTENTION, r=4),
    "RoAd": peft.RoadConfig(target_modules=ATTENTION, group_size=8),
    "LayerNorm tuning": peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "trainable tokens": peft.TrainableTokensConfig(token_indices=[3, 4], target_modules=["embed_tokens"]),
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def next_tokens(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, -ids.shape[1] :]
    return functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


def of_text(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(input_ids=ids).logits, ids[:, 0] % 3, reduction="none")


def translated(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


def of_signal(model: nn.Module, signal: torch.Tensor) -> torch.Tensor:
    target = (signal.flatten(1)[:, 0] > 0).long()
    return functional.cross_entropy(model(signal).logits, target, reduction="none")


def families() -> Iterator[dict]:
    """A row for each family."""
    for kinds, auto, loss, batch in (
        (CAUSAL, transformers.AutoModelForCausalLM, next_tokens, IDS),
        (CLASSES, transformers.AutoModelForSequenceClassification, of_text, IDS),
        (TRANSLATORS, transformers.AutoModelForSeq2SeqLM, translated, IDS),
        (VISION, transformers.AutoModelForImageClassification, of_signal, IMAGES),
        (SPEECH, transformers.AutoModelForAudioClassification, of_signal, SOUND),
    ):
        for name, (model_type, options) in kinds.items():
            torch.manual_seed(0)
            model = auto.from_config(transformers.AutoConfig.for_model(model_type, **options))
            yield {"name": name, **examined(model, loss, batch)}


def methods() -> Iterator[dict]:
    """A row for each of PEFT's methods, on a Llama."""
    for name, config in METHODS.items():
        torch.manual_seed(0)
        llama = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **GROUPED))
        yield {"name": name, **examined(peft.get_peft_model(llama, config), next_tokens, IDS)}


def examined(model: nn.Module, loss: Callable, batch: torch.Tensor) -> dict[str, object]:
    """How a model can be trained."""
    model.train()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:  # many adapters begin with zeros
                p.add_(0.05 * torch.randn_like(p))
    exact, said = by_autograd(model, loss, batch), {}
    for execution in ("loop", "book_keeping"):
        try:
            torch.manual_seed(1)
            sums, _ = clipped_gradients(model, loss, batch, MAX_GRAD_NORM, execution)
        except (ValueError, NotImplementedError) as error:
            said[execution] = str(error)
    if "loop" in said:
        return {"how": "refused", "reason": said["loop"]}
    if said:
        return {"how": "loop", "reason": said["book_keeping"]}
    difference = ((torch.cat([part.flatten() for part in sums.values()]) - exact).norm() / exact.norm()).item()
    return {"how": "fast" if difference < NEAR else "WRONG", "difference": difference}


def by_autograd(model: nn.Module, loss: Callable, batch: torch.Tensor) -> torch.Tensor:
    """The sum of the clipped gradients, of one example's loss after the other; all of one forward pass, whose random
    numbers are those that the other executions draw.
    """
    torch.manual_seed(1)
    learning = [p for p in model.parameters() if p.requires_grad]
    total = 0
    for each in loss(model, batch):
        options = dict(retain_graph=True, allow_unused=True, materialize_grads=True)
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(each, learning, **options)])
        total = total + gradient * (MAX_GRAD_NORM / gradient.norm()).clamp(max=1)
    return total


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")  # of tiny settings and slow torch.func, in place of rows
    record.sections("clipping.families", {"families": families, "methods": methods}, __doc__)
