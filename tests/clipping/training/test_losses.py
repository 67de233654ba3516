"""Losses: the own one of Hugging Face models, and functions of all kinds."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)

from plpkg.backbones import random_backbone
from plpkg.clipping import make_private
from plpkg.clipping.execution import EXECUTIONS

from rounding import assert_close, relative

C = 0.5
TERMS = 4096  # of a gradient through two layers, every sum in it shorter than this


def flat(gradients):
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def private(model, losses=None, **options):
    options = dict(noise_multiplier=0.0, max_grad_norm=C, sample_rate=0.5, batch_size=1) | options
    learning = [p for p in model.parameters() if p.requires_grad]
    return make_private(model, torch.optim.SGD(learning, lr=1.0), None, losses, **options)


def released(private, batch):
    """What a step takes from the parameters, and what it showed."""
    learning = [p for p in private.model.parameters() if p.requires_grad]
    before = flat(p.detach() for p in learning)
    shown, _ = private.step([batch])
    return before - flat(p.detach() for p in learning), shown


def clipped(model, losses):
    """The clipped sum of one loss an example, each of a forward pass of its own, by autograd alone."""
    learning, total = [p for p in model.parameters() if p.requires_grad], 0
    for loss in losses:
        gradient = flat(torch.autograd.grad(loss, learning, materialize_grads=True))
        total = total + gradient * min(1.0, C / max(gradient.norm().item(), 1e-30))
    return total


def llama():
    sizes = dict(hidden=32, intermediate=48, vocab=64, max_positions=32, num_heads=4, num_kv_heads=2)
    return random_backbone("llama", dtype=torch.float64, **sizes).train()


def lora():
    torch.manual_seed(0)
    return get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).double()


def bert():
    sizes = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, num_labels=3)
    still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    config = BertConfig(**sizes, **still, vocab_size=64, max_position_embeddings=16)
    return BertForSequenceClassification(config).double().train()


def bart():
    sizes = dict(d_model=16, vocab_size=64, encoder_layers=1, decoder_layers=1, max_position_embeddings=16)
    wide = dict(encoder_ffn_dim=24, decoder_ffn_dim=24, encoder_attention_heads=2, decoder_attention_heads=2)
    torch.manual_seed(0)
    config = BartConfig(**sizes, **wide, dropout=0.0, decoder_start_token_id=0)
    return BartForConditionalGeneration(config).double().train()


def texts():
    """The last has no labels at all, and of one only the first, which is nobody's next token."""
    ids = torch.randint(3, 64, (5, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :6] = labels[1, 4:] = labels[3, 1:] = labels[4] = -100
    return {"input_ids": ids, "labels": labels}


CLASSES = texts() | {"labels": torch.tensor([0, 2, 1, 1, 0])}


@pytest.mark.parametrize(("make", "batch"), [(llama, texts()), (lora, texts()), (bert, CLASSES)])
@pytest.mark.parametrize("execution", ["book_keeping", "ghost", "loop"])
def test_the_loss_of_a_model_with_labels(make, batch, execution):
    plain = make()
    outputs = [plain(**{key: value[i : i + 1] for key, value in batch.items()}) for i in range(5)]
    losses = [0 * output.logits.sum() if output.loss.isnan() else output.loss for output in outputs]
    got, shown = released(private(make(), execution=execution), batch)
    assert_close(got, clipped(plain, losses), TERMS)
    torch.testing.assert_close(shown, torch.stack(losses).detach(), rtol=relative(TERMS), atol=0)


def with_another_loss():
    model = llama()
    forward = model.forward

    def other(**inputs):
        output = forward(**inputs)
        output["loss"] = output.loss + 1
        return output

    model.forward, model.loss_function = other, lambda logits, labels, **_: logits.square().mean()
    return model


def experts(coefficient):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    more = dict(intermediate_size=24, num_local_experts=3, num_experts_per_tok=2, experts_implementation="batched_mm")
    config = MixtralConfig(**sizes, **more, output_router_logits=True, router_aux_loss_coef=coefficient)
    return MixtralForCausalLM(config).double().train()


@pytest.mark.parametrize(
    ("make", "batch", "message"),
    [
        (llama, {"input_ids": texts()["input_ids"]}, "losses=None takes the model's own loss, of batches with labels"),
        (with_another_loss, texts(), "the loss of LlamaForCausalLM for one example is .*: give losses"),
        (bart, texts(), "the loss of BartForConditionalGeneration .*: give losses"),
        (lambda: experts(0.5), texts(), r"the loss of MixtralForCausalLM .* \(a router's term, say\): give losses"),
    ],
)
def test_a_loss_that_is_not_of_logits_and_labels(make, batch, message):
    with pytest.raises(ValueError, match=message):
        private(make()).step([batch])


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch.func goes expert by expert
def test_a_router_s_term_of_each_example_by_a_function():
    """One example in a batch: the model's own loss is that example's."""
    batch = {name: rows[:1] for name, rows in texts().items()}
    plain = experts(0.5)
    got, _ = released(private(experts(0.5), lambda model, batch: model(**batch).loss[None]), batch)
    assert_close(got, clipped(plain, [plain(**batch).loss]), TERMS)


# Functions


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)


def numbers(count=6, dtype=torch.float64):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


def triplet(model, x):
    return functional.triplet_margin_loss(*(model(part) for part in (x, x.flip(1), x + 1)), reduction="none")


def cosine(model, x):
    signs = x[:, 0].sign()
    return functional.cosine_embedding_loss(model(x), model(x.flip(1)), signs, reduction="none")


def several_targets(model, x):
    return functional.binary_cross_entropy_with_logits(
        model(x), (x[:, :4] > 0).to(x), reduction="none", weight=x.new_tensor([1.0, 2.0, 0.5, 3.0])
    ).mean(1)


def ctc(model, x):
    steps = torch.stack([x, x.flip(1), x + 1, x - 1], 1)  # (batch, time, 6)
    scores = model(steps).log_softmax(2).transpose(0, 1)
    targets = 1 + (x[:, :2] > 0).long() + (x[:, 2:4] > 0).long()
    lengths = torch.full((len(x),), 4), 1 + (x[:, 4] > 0).long()
    return functional.ctc_loss(scores, targets, *lengths, reduction="none")


def checkpointed(use_reentrant):
    def losses(model, x):
        x = x.requires_grad_()  # which the reentrant kind asks for
        hidden = torch.utils.checkpoint.checkpoint(lambda x: model[:2](x), x, use_reentrant=use_reentrant)
        return (model(x) + model[2](hidden)).square().sum(1)

    return losses


def penalised(model, x):
    """A gradient penalty, which the loop alone takes."""
    x = x.detach().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.sum(1) + (slope.norm(dim=1) - 1).square()


OF = [triplet, cosine, several_targets, ctc, checkpointed(False), checkpointed(True)]


@pytest.mark.parametrize(
    ("losses", "execution"),
    [*((losses, execution) for losses in OF for execution in ["loop", *EXECUTIONS]), (penalised, "loop")],
)
def test_a_function_of_any_kind(losses, execution):
    plain, x = net(), numbers()
    got, shown = released(private(net(), losses, execution=execution), x.clone())
    losses = checkpointed(False) if losses is OF[-1] else losses  # autograd.grad refuses the reentrant kind
    each = [losses(plain, x[i : i + 1].clone())[0] for i in range(len(x))]
    assert_close(got, clipped(plain, each), TERMS)
    torch.testing.assert_close(shown, torch.stack(each).detach())


def test_a_gradient_within_the_loss_needs_the_loop():
    with pytest.raises(RuntimeError, match=r"where a loss has a gradient in it.*execution='loop'"):
        private(net(), penalised).step([numbers()])


def test_what_all_examples_share_may_be_as_long_as_the_batch():
    """A mask (seq, seq), a table, and one example alone (which once was taken for its length)."""
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(3)).double()

    def losses(model, x):
        return (model(x @ table) + model(table).mean()).square().sum(1)

    for count in (1, 5, 6):
        plain, x = net(), numbers(count)
        got, _ = released(private(net(), losses, execution="loop"), x)
        assert_close(got, clipped(plain, [losses(plain, x[i : i + 1])[0] for i in range(count)]), TERMS)
