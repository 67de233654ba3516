"""What would breach privacy silently, after the beginning: each is refused by name, with a cure."""

import copy
import math
from contextlib import ExitStack, nullcontext
from itertools import permutations

import pytest
import torch
from torch import nn
from torch.nn import functional

from plpkg.backbones import random_backbone
from plpkg.clipping import clipped_gradients, make_private
from plpkg.clipping.guard import mixing as guards
from plpkg.clipping.guard.mixing import Guard, RowPass
from plpkg.clipping.training import processes

from preloaded import Process
from rounding import sampling_error

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def squares(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(1)


def training(model, losses=squares, **options):
    """A private training whose examples the test chooses."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    how = dict(noise_multiplier=0.0, max_grad_norm=0.5, sample_rate=0.1, batch_size=4, seed=0) | options
    return make_private(model, optimizer, None, losses, **how)


def step(private, x=X, y=None):
    return private.step([(x, torch.zeros(len(x), 3) if y is None else y)])


def first_steps(private):
    for _ in range(guards.FIRST):
        step(private)


class Net(nn.Module):
    """A linear layer, what comes before it, and what comes after it."""

    def __init__(self, first=None, last=None):
        super().__init__()
        self.first, self.inner, self.last = first or nn.Identity(), nn.Linear(6, 3), last or nn.Identity()

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


@pytest.fixture
def passes(monkeypatch):
    """The backward passes that looked at rows."""
    made, init = [], RowPass.__init__
    monkeypatch.setattr(RowPass, "__init__", lambda self, half: (made.append(self), init(self, half))[1])
    return made


def test_a_frozen_batch_norm_that_train_wakes():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].eval().requires_grad_(False)
    private = training(model)
    step(private)
    model.eval()
    model(X)
    model.train()
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\) normalises .* eval\(\) alone is undone by the next"):
        step(private)
    model[1].eval()
    step(private)


def test_a_gate_that_opens_with_the_first_step():
    gate = [0.0]
    private = training(Net(last=lambda x: x + gate[0] * (x - x.mean(0))))
    step(private)
    gate[0] = 1e-3
    with pytest.raises(ValueError, match=r"inner \(Linear\): the losses of examples .* examples are mixed"):
        step(private)


def test_a_gate_that_opens_later_is_seen_at_random(monkeypatch):
    gate = [0.0]
    private = training(Net(last=lambda x: x + gate[0] * (x - x.mean(0))))
    first_steps(private)
    gate[0] = 1.0
    monkeypatch.setattr(guards, "SELDOM", 1)
    with pytest.raises(ValueError, match="examples are mixed"):
        step(private)


def test_one_step_in_fifty_is_looked_at():
    guard, losses, draws, seen = Guard(), torch.zeros(6, requires_grad=True), 20_000, []

    def passing(row_pass):
        seen.append(row_pass._half)
        return nullcontext()

    def looked_at(times=1, losses=losses, guard=guard):
        seen.clear()
        for _ in range(times):
            guard.verify(losses, passing)
        return seen

    for _ in range(guards.FIRST):
        together = torch.stack(looked_at())
        assert all((together[:, i] & ~together[:, j]).any() for i, j in permutations(range(6), 2))
    assert len(looked_at(draws)) / draws == pytest.approx(1 / 50, abs=sampling_error(1 / 50 * 49 / 50, draws))
    assert {half.sum().item() for half in seen} == {3}
    assert not looked_at(losses=losses[:1], guard=Guard())


@pytest.mark.parametrize("count", [2, 3, 4, 5, 20, 21, 64])
def test_of_any_two_examples_each_goes_backward_without_the_other(count):
    halves = []
    Guard().verify(
        torch.zeros(count, requires_grad=True), lambda row_pass: (halves.append(row_pass._half), nullcontext())[1]
    )
    members = torch.stack(halves).double()  # (halves, batch)
    without = members.T @ (1 - members)  # in how many halves one is, and the other is not
    assert (without + torch.eye(count) >= 1).all()
    assert all(0 < half.sum() < count for half in halves)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("reads_others", ["the first", "the last"])
def test_one_example_alone_that_reads_another(count, reads_others):
    """Mixing in one direction: each of many trainings refuses its first step, whichever halves are drawn."""

    def peek(x):
        mixed = x.clone()
        reader, read = (0, 1) if reads_others == "the first" else (-1, -2)
        mixed[reader] = x[reader] + 0.01 * x[read]
        return mixed

    for _ in range(10):
        with pytest.raises(ValueError, match="examples are mixed"):
            step(training(Net(last=peek)), torch.randn(count, 6))


def test_what_is_looked_at_again(passes):
    model = nn.Linear(6, 3)
    private = training(model, lambda model, x: model(x).mean(1).square().sum(1))

    def looked(*shape):
        passes.clear()
        private.step([torch.randn(*shape)])
        return bool(passes)

    def always(*shape):  # without a reason each look is a matter of luck, of one in fifty
        return all(looked(*shape) for _ in range(20))

    for _ in range(3):
        looked(4, 5, 6)
    assert not always(4, 5, 6)
    assert not always(7, 5, 6)  # another number of examples is nothing new
    assert looked(4, 2, 6)
    model.register_forward_hook(lambda *_: None)
    assert looked(4, 5, 6)


def of_factors():
    factors = torch.ones(4, 3), 2.0
    return lambda model, x: (factors[0] * model(x)).sum(1) * factors[1]


def of_a_sum():
    return lambda model, x: model(x).sum(1)


def of_squares():
    return lambda model, x: nn.MSELoss(reduction="none")(model(x), x[:, :3]).sum(1)


@pytest.mark.parametrize("losses", [[of_factors], [of_a_sum, of_squares]], ids=["one loss", "two in turn"])
def test_a_function_written_in_the_call_is_not_a_new_one(losses, passes):
    model, steps = nn.Linear(6, 3), 400
    for place in range(steps):
        clipped_gradients(model, losses[place % len(losses)](), X, 1.0)
    seldom = len(passes) - 4 * guards.FIRST * len(losses)  # four passes tell each of four examples from each other
    assert 0 <= seldom / steps <= 1 / 50 + sampling_error(1 / 50, steps)


def test_losses_that_are_flattened_are_refused():
    """Four tokens of two examples, one and three."""
    x, mask = torch.randn(2, 3, 6), torch.tensor([[True, False, False], [True, True, True]])

    def losses(model, batch):
        x, y, mask = batch
        return functional.cross_entropy(model(x)[mask], y[mask], reduction="none")

    private = training(nn.Linear(6, 5), losses)
    with pytest.raises(ValueError, match=r"one an example, of shape \(2,\), got \(4,\)"):
        private.step([(x, torch.ones(2, 3, dtype=torch.long), mask)])


CHANGES = [
    (lambda model, _: setattr(model, "first", nn.BatchNorm1d(6, affine=False)),
     ValueError, r"first \(BatchNorm1d\) normalises each example by the others"),
    (lambda model, _: model.first.register_forward_hook(lambda module, args, x: x - x.mean(0)),
     ValueError, "examples are mixed"),
    (lambda model, _: model.inner.bias.register_hook(lambda gradient: 10 * gradient),
     ValueError, r"inner\.bias has a gradient hook, which would see what is not clipped"),
    (lambda model, _: model.inner.bias.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad)),
     ValueError, r"inner\.bias has a gradient hook, which would see what is not clipped"),
    (lambda model, _: model.inner.requires_grad_(False),
     RuntimeError, r"inner\.weight learns no more"),
    (lambda model, _: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
     RuntimeError, r"inner\.weight learns, which was not there .* assign=True"),
    (lambda _, patch: patch.setattr(processes, "_group", lambda: (0, 2)),
     RuntimeError, r"1 process\(es\) when make_private was called, 2 now"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), CHANGES)
def test_what_changes_after_the_first_steps(change, error, message, monkeypatch):
    private = training(Net())
    first_steps(private)
    change(private.model, monkeypatch)
    with pytest.raises(error, match=message):
        step(private)
    assert private.steps == guards.FIRST


def test_a_layer_that_is_unfrozen_or_replaced_for_a_while():
    model = Net(nn.Linear(6, 6).requires_grad_(False))
    private, inner = training(model), model.inner
    model.first.requires_grad_(True)
    with pytest.raises(
        RuntimeError, match=r"first\.weight learns, which was not there when make_private was called: freeze"
    ):
        step(private)
    model.first.requires_grad_(False)
    model.inner = nn.Linear(6, 3)
    with pytest.raises(RuntimeError, match=r"inner\.weight learns, which was not there"):
        step(private)
    model.inner = inner
    step(private)


@pytest.mark.parametrize("steps", [0, guards.FIRST])
def test_a_parameter_of_nobody_s(steps):
    scales = [1.0]
    private = training(nn.Linear(6, 3), lambda model, batch: (model(batch[0]) * scales[-1]).square().sum(1))
    for _ in range(steps):
        step(private)
    scales.append(nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"a parameter of shape \(1,\) that is not in the model's modules"):
        step(private)


class Kept(nn.Module):
    """Keeps something of the examples in ``how``, each time or the first time."""

    def __init__(self, how, once):
        super().__init__()
        self.inner, self.how, self.left = nn.Linear(6, 3), how, 1 if once else math.inf
        self.register_buffer("mean", torch.zeros(6))
        self.codes = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x):
        if self.left:
            self.left -= 1
            self.how(self, x.detach()[0])
        return self.inner(x)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (lambda model, x: model.mean.copy_(x), "mean"),
        (lambda model, x: setattr(model, "mean", x.clone()), "mean"),
        (lambda model, x: model.mean.data.copy_(x), "mean"),
        (lambda model, x: model.codes.data.mul_(0.9).add_(x), "codes"),
        (lambda model, x: model.mean.numpy().__iadd__(x.numpy()), "mean"),
        (lambda model, x: model.inner.bias.data.copy_(x[:3]), "inner.bias"),
    ],
)
@pytest.mark.parametrize("once", [True, False])
def test_what_the_model_keeps_of_an_example(how, name, once):
    with pytest.raises(ValueError, match=f"{name}: the model changes this as it reads examples"):
        step(training(Kept(how, once)))


@pytest.mark.parametrize(
    "first",
    [
        lambda x: x - x.detach().mean(0),
        lambda x: (x - x.mean(0)) / (1 + x.std(0, correction=0)),
        lambda x: 0.7 * x + 0.3 * x.roll(1, 0),
        lambda x: x / x.abs().max(),
    ],
)
def test_numbers_of_others_without_a_gradient(first):
    x = X[X.abs().amax(1).argsort()]  # the first has not the largest number
    with pytest.raises(ValueError, match=r"examples are mixed, by inner \(Linear\) at the latest"):
        step(training(Net(first)), x)


def whole_batches(x):
    assert len(x) == 4
    return x


STILL = nn.utils.spectral_norm(nn.Linear(6, 6)).requires_grad_(False)


@pytest.mark.parametrize(
    "first",
    [lambda x: x + torch.randn_like(x), functional.dropout, lambda x: x.bfloat16().float(), whole_batches, STILL],
)
def test_what_mixes_nothing_is_taken(first):
    """Random numbers, rounding, a model that takes whole batches only, a spectral norm that stands still."""
    step(training(Net(first)))


def test_a_frozen_batch_norm_that_has_no_statistics():
    model = Net(nn.BatchNorm1d(6, affine=False, track_running_stats=False).eval())
    with pytest.raises(ValueError, match=r"first \(BatchNorm1d\) normalises each example by the others"):
        clipped_gradients(model, lambda model, x: model(x).sum(1), X, 1.0)


def test_a_tensor_of_nobody_s_gets_no_gradient():
    scale = torch.ones(1, requires_grad=True)
    private = training(nn.Linear(6, 3), lambda model, batch: (model(batch[0]) * scale).square().sum(1))
    step(private)
    assert scale.grad is None


@pytest.mark.parametrize(
    ("root", "shape"),
    [(nn.PReLU(), (4, 2)), (nn.Conv3d(2, 3, 1), (4, 2, 3, 3, 3)), (nn.ConvTranspose1d(2, 3, 2), (4, 2, 3))],
)
def test_a_model_that_is_a_layer_itself(root, shape):
    def losses(model, x):
        return model(x).flatten(1).square().sum(1)

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    expected, _ = clipped_gradients(root.double(), losses, x, 0.5, "loop")
    before = {name: p.detach().clone() for name, p in root.named_parameters()}
    training(root, losses).step([x])
    for name, p in root.named_parameters():
        # One layer, float64: the order of a sum. A step is 0.1 times the mean of four examples.
        torch.testing.assert_close((before[name] - p.detach()) * 4 / 0.1, expected[name])


def test_weights_in_the_order_of_channels_last():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3)).to(memory_format=torch.channels_last)
    private = training(model, noise_multiplier=1.0)
    step(private, torch.randn(4, 2, 4, 4))
    private.step([])
    assert private.steps == 2


def test_rotary_tables_that_follow_the_length_are_no_such_buffer():
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
    sizes = dict(hidden=16, num_heads=2, intermediate=24, vocab=32, max_positions=8)
    model = random_backbone("llama", **sizes, options=dict(rope_parameters=rope)).train()

    def loss(model, ids):
        return model(input_ids=ids, use_cache=False).logits.square().mean((1, 2))

    for seq in (6, 12, 6):
        gradients, _ = clipped_gradients(model, loss, torch.ones(3, seq, dtype=torch.long), 1.0)
        assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_what_is_refused_once_is_refused_again():
    """What a layer gives for all is taken as one."""
    shift = nn.Linear(2, 6)
    model = Net(lambda x: x + shift(torch.ones(1, 2)).repeat(len(x), 1))
    model.shift = shift
    private = training(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"shift \(Linear\) gives the same for all examples"):
            step(private)


PARALLEL = """
import os, sys

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from plpkg.clipping import make_private

folder, rank, count, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # accelerate asks for them; they are not used
distributed.init_process_group("gloo", init_method=f"file://{folder}/{how}{count}", rank=rank, world_size=count)
net = lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
losses = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(40, 8, generator=generator).double(), torch.randint(0, 4, (40,), generator=generator)
options = dict(noise_multiplier=1.0, max_grad_norm=0.5, seed=3, max_physical_batch_size=3)


def private(model, optimizer=None, examples=40, **more):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(x[:examples], y[:examples])
    return make_private(model, optimizer, data, losses, **dict(batch_size=10) | options | more)


if count > 1:
    wrappers = {"FSDPModule shards": fully_shard, "DistributedDataParallel averages": DistributedDataParallel}
    if how == "accelerate":
        from accelerate import Accelerator

        accelerator, model = Accelerator(cpu=True), net()
        assert accelerator.num_processes == count
        wrappers["DistributedDataParallel averages"] = accelerator.prepare
        with pytest.raises(TypeError, match="AcceleratedOptimizer wraps an optimizer"):
            private(model, accelerator.prepare(torch.optim.SGD(model.parameters())))
    for message, wrap in wrappers.items():
        with pytest.raises(ValueError, match=message):
            private(wrap(net()))
    with pytest.raises(ValueError, match="process 1 has other max_grad_norm than process 0"):
        private(net(), max_grad_norm=0.5 + rank)
results = []
few = dict(epochs=6, examples=5, batch_size=1)  # a process often has none
by_users = dict(epochs=6, examples=10, batch_size=2, users=[i % 5 for i in range(10)])
for how_many in (dict(epochs=2), by_users, few):
    torch.manual_seed(rank)  # they begin apart, and get the parameters of process 0
    training = private(net(), **how_many)
    shares = [(sample.indices, training.step(sample).count) for sample in training]
    results.append((training.model.state_dict(), training.epsilon(1e-3), training.steps, shares))
torch.save(results, f"{folder}/{how}{rank}of{count}")
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["torch", "accelerate"])
def test_two_processes_are_one(how, tmp_path):
    """Gloo stands in for several GPUs; one seed draws the same samples, of which each takes its share."""
    for count in (1, 2):
        with ExitStack() as stack:
            arguments = [(str(tmp_path), str(rank), str(count), how) for rank in range(count)]
            for process in [stack.enter_context(Process(PARALLEL, *each)) for each in arguments]:
                assert process.wait() == 0, process.stdout.read()
    runs = (torch.load(tmp_path / f"{how}{which}") for which in ("0of1", "0of2", "1of2"))
    for one, first, second in zip(*runs, strict=True):
        assert one[1:3] == first[1:3] == second[1:3]
        assert math.isfinite(one[1])
        for name, value in one[0].items():
            assert torch.equal(first[0][name], second[0][name])
            torch.testing.assert_close(first[0][name], value)  # float64: the order of sums alone is another one
        for (whole, _), *shares in zip(one[3], first[3], second[3], strict=True):
            assert sorted(whole) == sorted(sum((indices for indices, _ in shares), ()))
            assert all(len(indices) == count for indices, count in shares)
    empty = {(not mine, not theirs) for (_, mine), (_, theirs) in zip(first[3], second[3], strict=True)}
    assert len(empty) == 4  # of the few examples the one, the other, both or none have had some


def test_the_probe_draws_no_random_numbers_of_the_training():
    model, given = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), []

    def losses(model, batch):
        given.append(model(batch[0]))
        return given[-1].square().sum(1)

    torch.manual_seed(0)
    expected = functional.dropout(model[0](X), 0.5)
    after = torch.get_rng_state()
    private = training(model, losses)
    torch.manual_seed(0)
    step(private)
    assert torch.equal(given[0], expected)
    assert torch.equal(torch.get_rng_state(), after)
