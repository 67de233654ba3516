"""What an attacker found: each ends in a sentence, or is exact. See also test_order_of_calls and test_late."""

import copy
import functools
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import TensorDataset
from transformers import TrainerCallback, TrainingArguments

from plpkg.backbones import random_backbone
from plpkg.clipping import PrivateTrainer, clipped_gradients, make_private
from plpkg.clipping.training.accounting import epsilon_of

WIDTH, CLASSES, C = 6, 3, 0.5


def data(count=24):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(count, WIDTH, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)
    return TensorDataset(x, y)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def each(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def private(model=None, losses=each, optimizer=torch.optim.SGD, dataset=None, **options):
    model = model or net()
    options = dict(noise_multiplier=0.0, max_grad_norm=C, seed=0, batch_size=8) | options
    return make_private(model, optimizer(model.parameters(), lr=1.0), dataset or data(), losses, **options)


def by_autograd(model, losses, batch):
    """The sum of the clipped gradients, by name; each example by itself."""
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in learning.items()}
    for i in range(len(batch[1])):
        loss = losses(model, [part[i : i + 1].clone() for part in batch]).sum()
        found = torch.autograd.grad(loss, list(learning.values()), materialize_grads=True)
        norm = torch.cat([gradient.flatten() for gradient in found]).norm()
        for name, gradient in zip(learning, found, strict=True):
            sums[name] += gradient * min(1.0, C / max(norm.item(), 1e-30))
    return sums


def assert_exact(made, losses=each, twin=None):
    """A step of SGD at rate 1 is the clipped sum over the expected size, by autograd."""
    twin = twin or copy.deepcopy(made.model)
    batch = data()[list(made.sample().indices)]
    wanted = by_autograd(twin, losses, batch)
    made.step(made.sample())
    for (name, p), (_, before) in zip(made.model.named_parameters(), twin.named_parameters(), strict=True):
        if name in wanted:
            torch.testing.assert_close(before - p, wanted[name] / 8, rtol=1e-5, atol=1e-6)  # of float32 at a size of 1


def test_autocast_around_a_step():
    made = private()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="put it inside of that, not around"):
        made.step(made.sample())
    given = private(losses=None, per_example=lambda batch: {})
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="put it inside of that, not around"):
        given.step(given.sample())
    assert_exact(made)


def test_two_that_go_on_with_one_state():
    first = private(noise_multiplier=1.0)
    second = private(first.model, noise_multiplier=1.0)
    first.step(first.sample())
    second.load_state_dict(first.state_dict())
    first.step(first.sample())
    with pytest.raises(RuntimeError, match="another training has gone on from step 1 of this one's state"):
        second.step(second.sample())


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_private_training_is_not_copied(how):
    with pytest.raises(TypeError, match=r"whose noise would come twice: save its state_dict\(\)"):
        how(private())


def test_max_epsilon_where_others_spend_meanwhile():
    limit = epsilon_of(2.0, 1 / 3, 12, 1e-3, accountant="rdp")
    limited = private(noise_multiplier=2.0, max_epsilon=limit, target_delta=1e-3, accountant="rdp")
    other = private(limited.model, noise_multiplier=2.0)
    for _ in range(6):
        other.step(other.sample())
    while not limited.done:
        limited.step(limited.sample())
    assert limited.steps < 12
    assert limited.epsilon(1e-3) <= limit


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.abs().max()


def with_a_hook(model, batch):
    output = model(batch[0])
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / gradient.abs().max())
    return functional.cross_entropy(output, batch[1], reduction="none")


def with_a_function(model, batch):
    return functional.cross_entropy(Halved.apply(model(batch[0])), batch[1], reduction="none")


@pytest.mark.parametrize("losses", [with_a_hook, with_a_function])
def test_mixing_between_the_output_and_the_losses(losses):
    """A look sees nothing where the batch's largest is in both batches: of 24 looks one in four sees nothing each."""

    def run():
        for _ in range(8):
            made = private(losses=losses)
            for sample in made:
                made.step(sample)

    with pytest.raises(ValueError, match="mixed on the way back: beside other examples the same one has another grad"):
        run()


def test_a_gradient_from_before_of_what_is_frozen_now():
    model = net()
    each(model, data()[:4]).sum().backward()
    model[0].requires_grad_(False)
    model[2].zero_grad()
    made = private(model)
    with pytest.raises(RuntimeError, match=r"0\.weight has a gradient that was not clipped"):
        made.step(made.sample())


def keeps_in_a_buffer(model, batch):
    model.class_inv_freq.mul_(0.9).add_(batch[0].mean(0) * 0.1)
    return each(model, batch)


def test_what_keeps_something_of_examples_under_another_name():
    model = net()
    model.register_buffer("class_inv_freq", torch.zeros(WIDTH))
    made = private(model, keeps_in_a_buffer)
    with pytest.raises(ValueError, match="class_inv_freq: the model changes this as it reads examples"):
        made.step(made.sample())

    def per_example(batch):
        with torch.no_grad():
            model[0].weight += batch[0].mean()
        return {name: torch.zeros(len(batch[0]), *p.shape) for name, p in model.named_parameters()}

    given = private(model, None, per_example=per_example)
    with pytest.raises(ValueError, match=r"0\.weight: the model changes this as it reads examples"):
        given.step(given.sample())


def test_epsilon_of_a_model_whose_weights_were_assigned():
    model = net()
    made = private(model, noise_multiplier=1.0)
    made.step(made.sample())
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    around = private(nn.Sequential(model), noise_multiplier=1.0)
    assert around.epsilon(1e-3) == made.epsilon(1e-3) > 0


def test_a_hook_on_what_stands_in_a_parameter_s_place():
    model, seen = net(), []
    model[0].register_forward_hook(
        lambda module, *_: module.weight.register_hook(lambda g: seen.append(g.norm())) and None
    )
    made = private(model, execution="loop")
    with pytest.raises((ValueError, RuntimeError), match="gradient hook, which would see what is not clipped"):
        made.step(made.sample())
    assert not seen


def test_fused_optimizers_and_layouts():
    def shaped():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 3, (2, 1)), nn.Flatten(), nn.Linear(6, CLASSES)
        ).to(memory_format=torch.channels_last)

    fused, plain = (
        private(shaped(), optimizer=functools.partial(torch.optim.Adam, fused=how)) for how in (True, False)
    )
    for made in (fused, plain):
        for sample in made:
            made.step(sample)
    for one, other in zip(fused.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # Adam's steps of 1, rounded in another order


def with_a_teacher(model, batch):
    """Its own weights, by functional_call, as constants."""
    teacher = functional_call(model, {name: p.detach() for name, p in model.named_parameters()}, (batch[0] + 1,))
    return (model(batch[0]) - teacher).square().sum(1)


def with_a_frozen_layer(model, batch):
    model[0].requires_grad_(False)
    first = model(batch[0])
    model[0].requires_grad_(True)
    return functional.cross_entropy(first, batch[1], reduction="none") + model(batch[0]).square().sum(1)


def in_place(model, batch):
    return functional.cross_entropy(model(batch[0].mul_(3)), batch[1], reduction="none")


@pytest.mark.parametrize("execution", ["book_keeping", "ghost", "loop"])
@pytest.mark.parametrize("losses", [with_a_teacher, with_a_frozen_layer])
def test_weights_that_are_constants_in_a_part_of_the_losses(losses, execution):
    assert_exact(private(losses=losses, execution=execution), losses)


@pytest.mark.parametrize("options", [{}, dict(max_physical_batch_size=1)])
def test_a_batch_that_the_losses_change(options):
    assert_exact(private(losses=in_place, **options), in_place)


def test_cached_parametrizations():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 5)), nn.Tanh(), nn.Linear(5, CLASSES))
    made = private(model)
    with parametrize.cached(), pytest.raises(RuntimeError, match=r"parametrize\.cached\(\) goes inside of the losses"):
        made.step(made.sample())


@dataclass
class Boxed:
    value: torch.Tensor


@pytest.mark.parametrize("box", [Boxed, lambda tensor: {tensor}, lambda tensor: tensor + 0j])
def test_outputs_that_are_not_opened(box):
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x), box(super().forward(x + 1))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer(WIDTH, CLASSES)

        def forward(self, x):
            return self.layer(x)[0]

    made = private(Model())
    with pytest.raises(NotImplementedError, match="within which no gradient can be followed"):
        made.step(made.sample())


def other_forward(model):
    layer = model[0]
    layer.forward = lambda x: functional.linear(2 * x, layer.weight, layer.bias)


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(2 * x)


def other_class(model):
    model[0].__class__ = Doubled


@pytest.mark.parametrize("change", [other_forward, other_class])
def test_a_layer_that_is_another_one_after_make_private(change):
    made = private()
    made.step(made.sample())
    change(made.model)
    twin = net()
    twin.load_state_dict(made.model.state_dict())
    change(twin)
    assert_exact(made, twin=twin)


class LayerDrop(nn.Module):
    def forward(self, x):
        return x * (random.random() + 0.5)


def test_going_on_with_numbers_of_python():
    def begun():
        return private(nn.Sequential(net(), LayerDrop()), noise_multiplier=1.0)

    random.seed(0)
    whole = begun()
    for _ in range(2):
        whole.step(whole.sample())
    state, weights, numbers = whole.state_dict(), copy.deepcopy(whole.model.state_dict()), random.getstate()
    whole.step(whole.sample())
    resumed = begun()
    resumed.model.load_state_dict(weights)
    resumed.load_state_dict(state)
    random.setstate(numbers)
    resumed.step(resumed.sample())
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


def test_a_state_that_is_loaded_within_a_step():
    made = private(losses=lambda model, batch: made.load_state_dict(made.state_dict()))
    with pytest.raises(RuntimeError, match="a state is loaded between two steps"):
        made.step(made.sample())
    assert made.steps == 0


def llama():
    return random_backbone("llama", hidden=16, intermediate=24, vocab=32, max_positions=16, num_heads=2).train()


def texts():
    ids = torch.randint(0, 32, (12, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


class Raw(TrainerCallback):
    """Gradients of its own, before the Trainer lets its optimizer step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        batch = torch.stack([row["input_ids"] for row in texts()])
        model(input_ids=batch, labels=batch).loss.backward()


def test_gradients_of_a_callback_are_not_applied(tmp_path):
    weights = []
    for callbacks in ([], [Raw()]):
        quiet = dict(report_to=[], disable_tqdm=True, logging_strategy="no", save_strategy="no", use_cpu=True)
        trainer = PrivateTrainer(
            llama(), TrainingArguments(str(tmp_path), max_steps=3, per_device_train_batch_size=4, **quiet),
            private=functools.partial(make_private, noise_multiplier=1.0, max_grad_norm=C, seed=0),
            train_dataset=texts(), callbacks=callbacks,
        )  # fmt: skip
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(*weights)


def test_clipped_gradients_are_not_under_autocast_either():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="put it inside of that"):
        clipped_gradients(net(), each, data()[:4], C)
