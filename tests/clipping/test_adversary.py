"""Models and loops made to fool the clipping: each is computed exactly, or refused by name. Never silently wrong."""

from dataclasses import dataclass

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch import nn
from torch.nn import functional

from plpkg.backbones import random_backbone
from plpkg.clipping import clipped_gradients
from plpkg.clipping.execution import EXECUTIONS

from rounding import relative

BATCH = 4


class Net(nn.Module):
    """A layer, and what is done with it."""

    def __init__(self, layer, forward):
        super().__init__()
        self.layer, self.body = layer, forward

    def forward(self, x):
        return self.body(self.layer, x)


def plain(layer, x):
    return layer(x)


def loss(model, x):
    return model(x).sin().flatten(1).sum(1)


def numbers(*shape):
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(0))


def test_losses_of_the_same_code_that_compute_different_things():
    def make(mixes):
        return lambda model, x: (model(x) - mixes * model(x).mean(0)).square().sum(1)

    model = nn.Linear(6, 3)
    clipped_gradients(model, make(0), numbers(6), 1.0)
    with pytest.raises(ValueError, match="examples are mixed"):
        clipped_gradients(model, make(1), numbers(6), 1.0)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PromptEmbedding.* same row to all examples"),
    ],
)
def test_peft_s_layers_that_cannot_be_followed(config, reason):
    model = get_peft_model(random_backbone("llama"), config).train()
    ids = torch.randint(0, 50, (BATCH, 5))
    with pytest.raises(ValueError, match=reason):
        clipped_gradients(model, lambda model, ids: model(input_ids=ids).logits.sum((1, 2)), ids, 1.0)


class Twice(nn.Sequential):
    """A bias that the head has as well, as BERT's."""

    def __init__(self):
        super().__init__(nn.Linear(6, 3))
        self.bias = self[0].bias


@dataclass
class Boxed:
    value: torch.Tensor


class Box(nn.Linear):
    def forward(self, x):
        return Boxed(super().forward(x))


class ScaleNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True) * self.weight


class Convolution(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, 2 * weight, bias)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(6)), 0

    def forward(self, x):
        self.calls += 1
        return x * self.weight * self.calls


def wrapped():
    layer = nn.Linear(6, 3)
    inner = layer.forward
    layer.forward = lambda x: 2 * inner(x)
    return layer


def hooked():
    layer = nn.Linear(6, 3)
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    ("make", "shape"),
    [(Twice, (5, 6)), (ScaleNorm, (5, 6)), (lambda: Convolution(6, 3, 2), (6, 5)), (wrapped, (5, 6)), (hooked, (5, 6))],
    ids=["a bias owned twice", "ScaleNorm", "_conv_forward", "an instance's forward", "a hook on the output"],
)
def test_exact_where_a_rule_could_be_taken_for_granted(make, shape, execution, assert_as_loop):
    torch.manual_seed(0)
    assert_as_loop(Net(make(), plain), loss, numbers(*shape), execution)


def hooked_gradient():
    layer = nn.Linear(6, 3)
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    return layer


def stepped_in_the_backward_pass():
    layer = nn.Linear(6, 3)
    layer.bias.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad))
    return layer


def mixed_but_for_the_first_and_the_last(layer, x):
    y = layer(x)
    return torch.cat([y[:1], y[1:-1] - y[1:-1].mean(0), y[-1:]])


REFUSED = {
    "one that comes first": (nn.Linear(6, 6), lambda layer, x: layer(x[None])[0], ValueError,
                             r"layer \(Linear\) gave a tensor of shape \(1, 4, 6\)"),
    "in another order": (nn.Linear(6, 6), lambda layer, x: layer(x[[2, 0, 3, 1]])[[1, 3, 0, 2]], ValueError,
                         "examples are mixed"),
    "normalised": (nn.Linear(6, 6), lambda layer, x: functional.batch_norm(layer(x), None, None, training=True),
                   ValueError, r"layer \(Linear\): the losses of examples .* depend on row"),
    "mixed but for two": (nn.Linear(6, 6), mixed_but_for_the_first_and_the_last, ValueError, "examples are mixed"),
    "a box": (Box(6, 3), lambda layer, x: layer(x).value, NotImplementedError,
              r"layer \(Box\) gave a Boxed, within which no gradient can be followed"),
    "a counter": (Counting(), plain, NotImplementedError, "Counting gives something else when it is run again"),
    "an optimizer in the backward pass": (
        stepped_in_the_backward_pass(), plain, ValueError, r"layer\.bias has a gradient hook",
    ),
    "a hook on a gradient": (hooked_gradient(), plain, ValueError, r"layer\.weight has a gradient hook"),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "body", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_is_refused(layer, body, error, message):
    with pytest.raises(error, match=message):
        clipped_gradients(Net(layer, body), loss, numbers(6), 1.0)


def test_half_precision_in_a_layer_that_is_built():
    layer = nn.PReLU(6).bfloat16()
    model = Net(layer, lambda layer, x: layer(x.bfloat16()).float())
    for execution in EXECUTIONS:
        sums, norms = clipped_gradients(model, loss, numbers(6)[:1], 1e-3, execution)
        assert sums["layer.weight"].dtype == torch.float32
        assert sums["layer.weight"].norm().item() == pytest.approx(1e-3, rel=relative(2 * 6))  # two norms of 6
        assert norms.item() > 1e-3


def test_an_interrupt_leaves_nothing_frozen():
    class Stuck(nn.Linear):
        def forward(self, x):
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(6, 6), Stuck(6, 3))
    with pytest.raises(KeyboardInterrupt):
        clipped_gradients(model, loss, numbers(6), 1.0)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("called", [lambda model, x: model.forward(x), lambda model, x: model.layer(x)])
def test_a_loss_that_goes_past_the_model(called):
    def past(model, x):
        return called(model, x).square().sum(1)

    model = Net(nn.Linear(6, 3), plain)
    with pytest.raises(ValueError, match="must call the model"):
        clipped_gradients(model, past, numbers(6), 1.0)
    assert clipped_gradients(model, past, numbers(6), 1.0, "loop")[1].all()


@pytest.mark.parametrize("execution", ["loop", *EXECUTIONS])
def test_a_buffer_that_keeps_something_of_examples(execution):
    def centred(layer, x):
        layer.mean.lerp_(x.detach().mean(0), 0.1)
        return layer(x - layer.mean.clone())

    layer = nn.Linear(6, 3)
    layer.register_buffer("mean", torch.zeros(6))
    with pytest.raises(ValueError, match=r"layer\.mean: the model changes this as it reads examples"):
        clipped_gradients(Net(layer, centred), loss, numbers(6), 1.0, execution)
