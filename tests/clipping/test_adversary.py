"""Models and loops made to fool the clipping: each is computed exactly, or refused by name. Never silently wrong."""

import copy
from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset
from transformers import BertConfig, BertForMaskedLM

from plpkg.backbones import random_backbone
from plpkg.clipping import clipped_gradients, make_private
from plpkg.clipping.execution import EXECUTIONS
from plpkg.clipping.training.randomness import Randomness

from rounding import relative

BATCH = 4


class Net(nn.Module):
    """A layer, and what is done with it."""

    def __init__(self, layer, forward):
        super().__init__()
        self.layer, self.body = layer, forward

    def forward(self, x):
        return self.body(self.layer, x)


def loss(model, x):
    return model(x).sin().flatten(1).sum(1)


def numbers(*shape):
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(0))


def refused(layer, forward, x, error=ValueError):
    with pytest.raises(error) as caught:
        clipped_gradients(Net(layer, forward), loss, x, 1.0)
    return str(caught.value)


def test_positions_without_a_batch_that_are_as_many():
    """Inputs of another length than the positions: shapes of the batch's tensors do not give it away."""
    said = refused(
        nn.Embedding(9, 6), lambda layer, x: x[:, :-1] + layer(torch.arange(x.shape[1] - 1)), numbers(BATCH + 1, 6)
    )
    assert "layer (Embedding): the loss of example 0 depends on row 1 of what it gave, of shape (4, 6)" in said


def test_a_sequence_of_one_that_comes_first():
    said = refused(nn.Linear(6, 6), lambda layer, x: layer(x[None])[0], numbers(6))
    assert "of what it gave, of shape (4, 4, 6): examples are mixed, or the rows are not the examples" in said


def test_a_batch_in_another_order():
    said = refused(nn.Linear(6, 6), lambda layer, x: layer(x[[2, 0, 3, 1]])[[1, 3, 0, 2]], numbers(6))
    assert "examples are mixed, or the rows are not the examples" in said


def test_rows_of_the_weight_that_are_as_many():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 1))
    with pytest.raises((ValueError, NotImplementedError), match="parametrizations"):
        clipped_gradients(Net(layer, lambda layer, x: layer(x)), loss, numbers(6), 1.0)


def test_normalising_by_the_batch_in_passing():
    said = refused(
        nn.Linear(6, 6), lambda layer, x: functional.batch_norm(layer(x), None, None, training=True), numbers(6)
    )
    assert "layer (Linear): the loss of example 0 depends on row" in said


def test_losses_of_the_same_code_that_compute_different_things():
    def make(mixes):
        return lambda model, x: (model(x) - mixes * model(x).mean(0)).square().sum(1)

    model = nn.Linear(6, 3)
    clipped_gradients(model, make(0), numbers(6), 1.0)
    with pytest.raises(ValueError, match="examples are mixed"):
        clipped_gradients(model, make(1), numbers(6), 1.0)


def test_examples_that_are_mixed_but_for_the_first_and_the_last():
    def inner(layer, x):
        y = layer(x)
        return torch.cat([y[:1], y[1:-1] - y[1:-1].mean(0), y[-1:]])

    assert "examples are mixed" in refused(nn.Linear(6, 6), inner, numbers(6))


def test_peft_s_layers_that_cannot_be_followed():
    for config, reason in (
        (LoraConfig(use_dora=True, target_modules="all-linear"), "DoraLinearLayer.* use LoRA without DoRA"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PromptEmbedding.* same row to all examples"),
    ):
        model = get_peft_model(random_backbone("llama"), config).train()
        ids = torch.randint(0, 50, (BATCH, 5))
        with pytest.raises(ValueError, match=reason):
            clipped_gradients(model, lambda model, ids: model(input_ids=ids).logits.sum((1, 2)), ids, 1.0)


class Twice(nn.Module):
    """A bias that the head has as well, as BERT's."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.bias = self.head.bias

    def forward(self, x):
        return self.head(x)


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
    assert_as_loop(Net(make(), lambda layer, x: layer(x)), loss, numbers(*shape), execution)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_bert_s_head_and_its_bias(execution, assert_as_loop, still):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=48)
    model = still(BertForMaskedLM(BertConfig(**sizes, vocab_size=64, max_position_embeddings=16)).train())
    ids = torch.randint(0, 64, (BATCH, 9))

    def masked(model, ids):
        return functional.cross_entropy(model(input_ids=ids).logits.mT, ids, reduction="none").mean(1)

    assert_as_loop(model, masked, ids, execution)


def test_what_cannot_be_followed_is_refused():
    said = refused(Box(6, 3), lambda layer, x: layer(x).value, numbers(6), NotImplementedError)
    assert "layer (Box) gave a Boxed without tensors that can be followed" in said
    said = refused(Counting(), lambda layer, x: layer(x), numbers(6), NotImplementedError)
    assert "Counting gives something else when it is run again" in said
    model = Net(nn.Linear(6, 3), lambda layer, x: layer(x))
    model.layer.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ValueError, match=r"layer\.weight has a gradient hook"):
        clipped_gradients(model, loss, numbers(6), 1.0)


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


def test_one_recorder_at_a_time():
    model = nn.Linear(6, 3)

    def nested(model, x):
        clipped_gradients(model, loss, x, 1.0)
        return loss(model, x)

    with pytest.raises(RuntimeError, match="the model is watched already"):
        clipped_gradients(model, nested, numbers(6), 1.0)
    made = private(model)
    with pytest.raises(RuntimeError, match="the model is watched already"):
        clipped_gradients(model, loss, numbers(6), 1.0)
    with pytest.raises(RuntimeError, match="the model is watched already"):
        private(model)
    made.remove()
    clipped_gradients(model, loss, numbers(6), 1.0)


def data(count=40):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def private(model=None, loader=None, criterion=None, **options):
    model = model or nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    loader = loader or DataLoader(data(), batch_size=10)
    options = dict(noise_multiplier=0.0, max_grad_norm=0.1, seed=3) | options
    return make_private(model, optimizer, loader, criterion or nn.CrossEntropyLoss(), **options)


def drawn(**options):
    """A private training and its first batch."""
    made = private(**options)
    return made, *next(iter(made.data_loader))


def step(made, x, y):
    made.optimizer.zero_grad()
    made.criterion(made.model(x), y).backward()
    made.optimizer.step()


def moved(made, before):
    changes = [(p.detach() - b).flatten() for p, b in zip(made.model.parameters(), before, strict=True)]
    return 10 * torch.cat(changes).norm()


def weights(made):
    return [p.detach().clone() for p in made.model.parameters()]


def test_a_batch_counts_once():
    made, x, y = drawn()
    with pytest.raises(RuntimeError, match=f"was given {2 * len(x)} examples where"):
        made.criterion(made.model(torch.cat([x, x])), torch.cat([y, y])).backward()


def test_a_part_of_a_batch_is_not_a_step():
    made, x, y = drawn()
    made.criterion(made.model(x[:2]), y[:2]).backward()
    with pytest.raises(RuntimeError, match=f"before {len(x) - 2} examples of the data_loader's batch have gone"):
        made.optimizer.step()


def test_leaving_in_the_middle_of_a_sample_forgets_it():
    made = private(max_physical_batch_size=2)
    for x, y in made.data_loader:
        made.criterion(made.model(x), y).backward()
        made.optimizer.step()
        break
    before, seen = weights(made), 0
    for x, y in made.data_loader:
        step(made, x, y)
        seen += len(x)
        if made.steps:
            break
    rounded = relative(10) * torch.cat([p.flatten() for p in before]).norm()  # a step's weights, times 10 in moved()
    assert moved(made, before) <= 0.1 * seen * (1 + relative(seen)) + rounded
    twin = private()
    x, y = next(iter(twin.data_loader))
    assert len(x) == seen


def test_going_back_to_a_state_forgets_what_came_after():
    made = private(max_physical_batch_size=2)
    state = made.state_dict()
    x, y = next(iter(made.data_loader))
    made.criterion(made.model(x), y).backward()
    made.load_state_dict(state)
    assert not made.progress.sums


def test_what_learns_may_not_change_afterwards():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(data(), batch_size=10)
    made = make_private(model, optimizer, loader, nn.CrossEntropyLoss(), noise_multiplier=0.0, max_grad_norm=0.1)
    model[0].requires_grad_(True)
    x, y = next(iter(made.data_loader))
    made.criterion(model(x), y).backward()
    with pytest.raises(RuntimeError, match="the optimizer has 4 parameters that learn, make_private saw 2"):
        optimizer.step()


def test_a_plain_backward_is_refused():
    made, x, y = drawn()
    with pytest.raises(RuntimeError, match=r"call criterion\(\.\.\.\)\.backward\(\)"):
        functional.cross_entropy(made.model(x), y).backward()


@pytest.mark.filterwarnings("ignore:Using a target size")  # PyTorch only warns of what is refused here
def test_targets_that_broadcast_are_refused():
    made, x, y = drawn(model=nn.Linear(6, 1), criterion=nn.MSELoss())
    with pytest.raises(ValueError, match=rf"losses of shape \({len(x)}, {len(x)}\) from .*: it broadcast them"):
        made.criterion(made.model(x), y.float())


def test_a_sampler_is_not_silently_replaced():
    loader = DataLoader(data(), batch_size=10, sampler=SubsetRandomSampler(range(20)))
    with pytest.raises(ValueError, match="samples with a SubsetRandomSampler of its own"):
        private(loader=loader)
    with pytest.raises(ValueError, match="must have a batch_size"):
        private(loader=DataLoader(data(), batch_size=None))


def test_seeds_are_not_cut_to_32_bits():
    like = {"w": torch.zeros(50)}
    drawn = [Randomness(seed).noise(like, 1.0, 0)["w"] for seed in (1, 1 + 2**32, 1 + 2**64)]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0], Randomness(1).noise(like, 1.0, 0)["w"])
    assert not torch.equal(drawn[0], Randomness(1).noise(like, 1.0, 1)["w"])
    for seed in ("abc", 1.5, -1, True):
        with pytest.raises(ValueError, match="seed must be a whole number of at least 0"):
            Randomness(seed)


def test_a_copy_of_the_model_is_an_ordinary_one():
    made = private()
    twin = copy.deepcopy(made.model)
    x, y = next(iter(made.data_loader))
    functional.cross_entropy(twin(x), y).backward()
    assert all(p.grad is not None for p in twin.parameters())
    made.criterion(made.model(x), y).backward()
    made.optimizer.step()


def test_epochs_have_all_their_steps():
    """75 steps an epoch: 3 / (1/75) is 224.99… in floating point."""
    loader = DataLoader(data(75), batch_size=1)
    made = private(loader=loader, noise_multiplier=None, target_epsilon=3.0, target_delta=1e-3, epochs=3)
    accountant = copy.deepcopy(made.accountant)
    accountant.history = [(made.noise_multiplier, 1 / 75, 225)]
    assert accountant.get_epsilon(delta=1e-3) <= 3.0


def test_an_epoch_after_a_break_is_whole():
    made, lengths = private(), []
    for _ in range(3):
        count = 0
        for x, y in made.data_loader:
            step(made, x, y)
            count += 1
            if count == 4:
                break
        lengths.append(count)
    assert lengths == [4, 4, 4]


def test_loading_a_state_leaves_it_as_it_was():
    made = private(noise_multiplier=1.0)
    for x, y in made.data_loader:
        step(made, x, y)
        break
    state = made.state_dict()
    before = copy.deepcopy(state)
    made.load_state_dict(state)
    for x, y in made.data_loader:
        step(made, x, y)
    assert state == before
