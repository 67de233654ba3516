"""Executions of whole models against the loop: families, ties, adapters, checkpointing, and architectures at random."""

import gc
import warnings
import weakref

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from plpkg.backbones import FAMILIES, random_backbone
from plpkg.clipping import clipped_gradients
from plpkg.clipping.batches import batch_size, examples
from plpkg.clipping.execution import EXECUTIONS, Choice
from plpkg.residual import PrivateLoraConfig

from rounding import assert_as_exact, relative

SEQ, VOCAB = 9, 64
CONSISTENT = relative(2 * VOCAB + SEQ**2)  # two sides of a Gram matrix, at most as long as VOCAB; then its sum


def text(batch=4, seq=SEQ, vocab=VOCAB):
    ids = torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def backbone(family="llama", dtype=torch.float32, **options):
    sizes = dict(hidden=32, intermediate=48, vocab=64, max_positions=32, num_heads=4)
    kv_heads = 4 if family == "gpt2" else 2
    return random_backbone(family, num_kv_heads=kv_heads, dtype=dtype, options=options, **sizes).train()


def lora(family="llama", **config):
    config |= dict(r=4, target_modules="all-linear", fan_in_fan_out=family == "gpt2", init_lora_weights=False)
    torch.manual_seed(0)
    return get_peft_model(backbone(family), LoraConfig(**config)).train()


MODELS = {
    **{family: lambda family=family: backbone(family) for family in FAMILIES},
    **{f"{family}, tied": lambda f=family: backbone(f, tie_word_embeddings=True) for family in ("llama", "gpt2")},
    **{f"{family}, LoRA": lambda f=family: lora(f) for family in FAMILIES},
    "llama, LoRA with biases and a trained head": lambda: lora(modules_to_save=["lm_head"]),
    "llama, PrivateLoRA's M": lambda: get_peft_model(backbone(), PrivateLoraConfig(r_c2d=5, r_d2c=3)).train(),
}


@pytest.mark.parametrize("name", MODELS)
def test_language_models(name, assert_as_loop, lm_loss, still):
    assert_as_loop(still(MODELS[name]()), lm_loss, text(), *EXECUTIONS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_gradient_checkpointing(reentrant, assert_as_loop, lm_loss, still):
    for model in (backbone(tie_word_embeddings=True), lora()):
        model.activation_checkpointing_enable({"use_reentrant": reentrant} if reentrant else None)
        if reentrant:
            model.enable_input_require_grads()
        assert_as_loop(still(model), lm_loss, text(), *EXECUTIONS)


def test_a_weight_used_past_its_layer_is_refused_by_name():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 6)

        def forward(self, ids):
            return functional.linear(self.table(ids), self.table.weight).flatten(1)

    model, ids = Net(), torch.randint(0, 8, (4, 5))
    for execution in EXECUTIONS:
        with pytest.raises(NotImplementedError, match=r"^table\.weight: used outside of the layer that owns it"):
            clipped_gradients(model, linear_loss, ids, 1.0, execution)
        assert model.table.weight.grad is None
        assert model.table.weight.requires_grad
    sums, norms = clipped_gradients(model, linear_loss, ids, 1.0, "loop")
    assert norms.shape == (4,)
    assert sums["table.weight"].norm() <= 4


def linear_loss(model, x):
    return model(x).square().sum(1)


@pytest.mark.parametrize("execution", ["loop", *EXECUTIONS])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("size", [1e4, 1e-4, 0.0])
def test_no_sample_counts_for_more_than_c_and_small_ones_stay(size, clipping, execution):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.tensor([[size, 0, 0]])
    gradients, norms = clipped_gradients(model, linear_loss, x, 0.5, execution, clipping=clipping)
    moved = torch.cat([g.flatten() for g in gradients.values()]).norm()
    assert moved == pytest.approx(min(0.5, norms.item()), rel=relative(2 * 8))  # two norms of 8 numbers


@pytest.mark.parametrize("execution", ["loop", *EXECUTIONS])
def test_the_model_is_left_as_it_was_by_an_exception_too(execution):
    model, given = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), []
    model[0].bias.requires_grad_(False)
    model[2].bias.grad = torch.ones(2)
    weights = {name: p.clone() for name, p in model.named_parameters()}

    def assert_as_before():
        assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["0.bias"]
        assert [name for name, p in model.named_parameters() if p.grad is not None] == ["2.bias"]
        assert torch.equal(model[2].bias.grad, torch.ones(2))
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def broken(model, x):
        out = model(x)
        given.append(weakref.ref(out))
        raise KeyError("no such loss")

    with pytest.raises(KeyError):
        clipped_gradients(model, broken, torch.randn(5, 3), 1.0, execution)
    gc.collect()
    assert given[0]() is None
    assert_as_before()
    gradients, _ = clipped_gradients(model, linear_loss, torch.randn(5, 3), 1.0, execution)
    assert list(gradients) == ["0.weight", "2.weight", "2.bias"]
    assert_as_before()


@pytest.mark.parametrize("execution", ["loop", *EXECUTIONS])
def test_an_empty_batch_gives_zeros(execution, lm_loss):
    model, batch = backbone(), {"input_ids": torch.zeros(0, 5, dtype=torch.long)}
    gradients, norms = clipped_gradients(model, lm_loss, batch, 1.0, execution)
    assert norms.shape == (0,)
    assert {name: g.shape for name, g in gradients.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert not any(g.any() for g in gradients.values())


def test_half_precision_sums_are_consistent_with_their_norms(lm_loss, still, flat):
    """What is added up has the norm that it was clipped by, although bfloat16 rounds both passes."""
    model = still(backbone(dtype=torch.bfloat16))
    for execution in EXECUTIONS:
        for place in range(3):
            one = examples(text(), slice(place, place + 1))
            gradients, norms = clipped_gradients(model, lm_loss, one, 0.1, execution)
            assert norms.item() > 0.1
            assert all(g.dtype == torch.float32 for g in gradients.values())
            assert flat(gradients).norm().item() == pytest.approx(0.1, rel=CONSISTENT)


def test_autocast(lm_loss, still, flat):
    model = still(backbone())

    def half(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return lm_loss(model, batch)

    exact, norms = clipped_gradients(model, lm_loss, text(), 0.1, "loop")
    rough, rough_norms = clipped_gradients(model, half, text(), 0.1, "loop")
    for execution in EXECUTIONS:
        gradients, others = clipped_gradients(model, half, text(), 0.1, execution)
        # Whatever its order, a sum is rounded to bfloat16: errors are alike, √2 apart, more for some of four norms.
        assert_as_exact(others / norms, rough_norms / norms, torch.ones_like(norms), times=4)
        assert_as_exact(flat(gradients), flat(rough), flat(exact), times=4)
        one, _ = clipped_gradients(model, half, examples(text(), slice(0, 1)), 0.1, execution)
        assert flat(one).norm().item() == pytest.approx(0.1, rel=CONSISTENT)


with warnings.catch_warnings(category=Warning, action="ignore"):  # from Python 3.14 on a FutureWarning
    TRACED = torch.jit.trace(nn.Linear(3, 2), torch.ones(4, 3))
BAD = [
    (dict(max_grad_norm=0), "max_grad_norm must be greater than 0, got 0"),
    (dict(max_grad_norm=float("nan")), "max_grad_norm must be greater than 0, got nan"),
    (dict(execution="fastest"), "execution must be one of 'loop', .*, got 'fastest'"),
    (dict(clipping="none"), "clipping must be one of .*, got 'none'"),
    (dict(batch=[torch.ones(2, 3), torch.ones(3)]), r"in common, got shapes \[\(2, 3\), \(3,\)\]"),
    (dict(batch={"x": "text"}), "got no tensor in a dict"),
    (dict(loss_per_example=lambda m, x: m(x).sum()), r"of shape \(4,\), got \(\) \(a reduced loss\?"),
    (dict(loss_per_example=lambda m, x: m(x)), r"of shape \(4,\), got \(4, 2\)"),
    (dict(loss_per_example=lambda m, x: m(x).detach().sum(1)), "do not depend on any parameter"),
    (dict(loss_per_example=lambda m, x: 1.0), "got float"),
    (dict(loss_per_example=lambda m, x: m(x).sum(1) * 1j), r"must be real numbers, got torch\.complex64"),
    (dict(model=nn.Linear(3, 2, dtype=torch.complex64)), "weight is complex: let its real and imaginary parts"),
    (dict(model=nn.Linear(3, 2, device="meta")), "weight is on the device meta, without numbers"),
    (dict(model=TRACED), r"the model is compiled by torch\.jit"),
    (dict(model=nn.Sequential(TRACED)), r"^0 \(.*compiled by torch\.jit"),
    (dict(model=nn.Linear(3, 2).requires_grad_(False)), "no parameter of the model has requires_grad=True"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_gets_a_sentence(change, message):
    good = dict(model=nn.Linear(3, 2), loss_per_example=linear_loss, batch=torch.randn(4, 3), max_grad_norm=1.0)
    with pytest.raises(ValueError, match=message):
        clipped_gradients(**good | dict(execution="ghost") | change)


@pytest.mark.parametrize("execution", ["loop", *EXECUTIONS])
def test_a_gradient_that_is_not_finite_is_named(execution):
    x = torch.randn(4, 3)
    x[2] = torch.inf
    with pytest.raises(FloatingPointError, match="example 2 of 4 is not finite"):
        clipped_gradients(nn.Linear(3, 2), linear_loss, x, 1.0, execution)


def test_batches_are_trees_of_tensors():
    batch = {"a": torch.arange(6).reshape(3, 2), "b": (torch.arange(3), ["name", torch.ones(3)])}
    assert batch_size(batch) == 3
    part = examples(batch, slice(1, 2))
    assert part["a"].tolist() == [[2, 3]]
    assert part["b"][1][0] == "name"
    assert part["b"][0].tolist() == [1]


LAYERS = {
    "linear": lambda width: nn.Linear(width, width),
    "conv": lambda width: nn.Conv1d(width, width, 3, padding=1, groups=2),
    "group": lambda width: nn.GroupNorm(2, width),
    "norm": nn.LayerNorm,
    "rms": nn.RMSNorm,
}


class Random(nn.Module):
    """A net of layers drawn from those with rules, some of them used again, one of them tied to the head."""

    def __init__(self, kinds, width, tied):
        super().__init__()
        self.table = nn.Embedding(11, width, padding_idx=0)
        self.layers = nn.ModuleList(LAYERS[kind](width) for kind in kinds)
        self.head = nn.Linear(width, 11, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def call(self, layer, x):
        channels_first = isinstance(layer, (nn.Conv1d, nn.GroupNorm))
        return (layer(x.mT).mT if channels_first else layer(x)).tanh() + x

    def forward(self, ids, order):
        x = self.table(ids)
        for place, reentrant in order:
            layer = self.layers[place % len(self.layers)]
            x = self.call(layer, x) if reentrant is None else checkpoint(self.call, layer, x, use_reentrant=reentrant)
        return self.head(x)


CALLS = strategies.tuples(strategies.integers(0, 5), strategies.sampled_from([None, False, True]))
"""A layer's number, and whether it is called in a checkpoint, and one that is reentrant."""

LINEAR = dict(kinds=["linear"], half=3, batch=4, seq=3, tied=False, clipping="flat", seed=0)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    kinds=strategies.lists(strategies.sampled_from([*LAYERS]), min_size=1, max_size=4),
    order=strategies.lists(CALLS, max_size=6),
    half=strategies.integers(1, 6),
    batch=strategies.integers(1, 5),
    seq=strategies.integers(2, 9),  # torch's GroupNorm refuses one value a group
    tied=strategies.booleans(),
    clipping=strategies.sampled_from(["flat", "automatic", "per_layer"]),
    seed=strategies.integers(0, 99),
)
@example(order=[(0, None), (0, False), (0, False), (0, None)], **LINEAR)
@example(order=[(0, None), (0, True), (0, True), (0, None)], **LINEAR)
def test_random_architectures(kinds, order, half, batch, seq, tied, clipping, seed, assert_as_loop):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Random(kinds, 2 * half, tied).double()
        ids = torch.randint(0, 11, (batch, seq))

    def loss(model, ids):
        return functional.cross_entropy(model(ids, order).mT, ids.roll(1, 1), reduction="none").mean(1)

    assert_as_loop(model, loss, ids, *EXECUTIONS, max_grad_norm=0.3, clipping=clipping)


@pytest.mark.parametrize("misspelt", [("grams", "factors"), ("gram", "factor")])
def test_a_misspelt_choice_is_refused(misspelt):
    with pytest.raises(ValueError, match="is not a valid"):
        Choice(*misspelt)
