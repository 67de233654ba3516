"""What would breach privacy silently, after the beginning: each is refused by name, with a cure."""

import copy
import math
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from plpkg.backbones import random_backbone
from plpkg.clipping import clipped_gradients, make_private, mixing as guards
from plpkg.clipping.mixing import Guard
from plpkg.clipping.recorder import RowPass
from plpkg.clipping.training import processes

from preloaded import Process
from rounding import sampling_error


def training(model, criterion=None, **options):
    """A private training without a data loader, whose examples the test chooses."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    how = dict(noise_multiplier=0.0, max_grad_norm=0.5, sample_rate=0.1, expected_batch_size=4, seed=0) | options
    return make_private(model.train(), optimizer, None, criterion or nn.MSELoss(), **how)


def step(made, x, y=None):
    made.criterion(made.model(x), torch.zeros(len(x), 3) if y is None else y).backward()
    made.optimizer.step()


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def passes(monkeypatch):
    """The backward passes that looked at rows."""
    made, init = [], RowPass.__init__
    monkeypatch.setattr(RowPass, "__init__", lambda self, half: (made.append(self), init(self, half))[1])
    return made


def test_a_frozen_batch_norm_that_train_wakes():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].eval().requires_grad_(False)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    made = make_private(model, optimizer, None, nn.MSELoss(), noise_multiplier=0.0, max_grad_norm=0.5, sample_rate=0.1,
                        expected_batch_size=4)  # fmt: skip
    step(made, numbers(4, 6))
    model.eval()
    model(numbers(4, 6))
    model.train()
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\) normalises .* eval\(\) alone is undone by the next"):
        model(numbers(4, 6))
    model[1].eval()
    step(made, numbers(4, 6))


class Gated(nn.Module):
    """Mixes examples as soon as its gate opens."""

    def __init__(self):
        super().__init__()
        self.inner, self.gate = nn.Linear(6, 3), 0.0

    def forward(self, x):
        x = self.inner(x)
        return x + self.gate * (x - x.mean(0))


def test_a_gate_that_opens_with_the_first_step():
    made = training(Gated())
    step(made, numbers(4, 6))
    made.model.gate = 1e-3
    with pytest.raises(ValueError, match=r"inner \(Linear\): the losses of examples .* examples are mixed"):
        step(made, numbers(4, 6))


def test_a_gate_that_opens_later_is_seen_at_random(monkeypatch):
    made = training(Gated())
    for _ in range(guards.FIRST):
        step(made, numbers(4, 6))
    made.model.gate = 1.0
    monkeypatch.setattr(guards, "SELDOM", 1)
    with pytest.raises(ValueError, match="examples are mixed"):
        step(made, numbers(4, 6))


def test_one_step_in_fifty_is_looked_at():
    guard, losses, draws, seen = Guard(), torch.zeros(6, requires_grad=True), 20_000, []

    def passing(row_pass):
        seen.append(row_pass._half)
        return nullcontext()

    for _ in range(guards.FIRST):
        seen.clear()
        guard.verify(losses, passing)
        together = torch.stack(seen)
        assert all((together[:, i] != together[:, j]).any() for i in range(6) for j in range(i))  # all are told apart
    seen.clear()
    for _ in range(draws):
        guard.verify(losses, passing)
    assert len(seen) / draws == pytest.approx(1 / 50, abs=sampling_error(1 / 50 * 49 / 50, draws))
    assert {half.sum().item() for half in seen} == {3}
    seen.clear()
    Guard().verify(losses[:1], passing)
    assert not seen


def test_what_is_looked_at_again(passes):
    class Shapes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, x):
            return self.inner(x).mean(1)

    made = training(Shapes())

    def looks(x):
        for _ in range(20):  # without a reason each look is a matter of luck, of one in fifty
            passes.clear()
            step(made, x)
            if not passes:
                return False
        return True

    for count in (4, 4, 4):
        step(made, numbers(count, 5, 6))
    assert not looks(numbers(4, 5, 6))
    assert not looks(numbers(7, 5, 6))  # another number of examples is nothing new
    passes.clear()
    step(made, numbers(4, 2, 6))
    assert passes
    passes.clear()
    made.model.eval()
    made.model(numbers(4, 5, 6))
    made.model.train()
    step(made, numbers(4, 5, 6))
    assert passes


def test_a_function_written_in_the_call_is_not_a_new_one(passes):
    model, steps = nn.Linear(6, 3), 400

    def clipped(factors):
        clipped_gradients(model, lambda model, x: (factors[0] * model(x)).sum(1) * factors[1], numbers(4, 6), 1.0)

    for _ in range(steps):
        clipped((torch.ones(4, 3), 2.0))
    seldom = len(passes) - 2 * guards.FIRST  # two passes tell four examples apart
    assert 0 <= seldom / steps <= 1 / 50 + sampling_error(1 / 50, steps)


def test_losses_that_are_flattened_are_refused():
    """Four tokens of two examples, one and three, would be cut into two and two."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 5)

        def forward(self, x):
            return self.inner(x)

    made = training(Tokens(), nn.CrossEntropyLoss())
    x, y = numbers(2, 3, 6), torch.ones(2, 3, dtype=torch.long)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    with pytest.raises(ValueError, match=r"losses of shape \(4,\) for 2 examples.*transpose"):
        made.criterion(made.model(x)[mask], y[mask])


def test_parameters_that_make_private_did_not_see():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    made, x = training(model), numbers(4, 6)
    step(made, x)
    state = copy.deepcopy(model.state_dict())
    model[0].requires_grad_(True)
    with pytest.raises(
        RuntimeError, match=r"0\.weight learns, which was not there when make_private was called: freeze"
    ):
        model(x)
    model[0].requires_grad_(False)
    head = model[1]
    model[1] = nn.Linear(8, 3)
    with pytest.raises(RuntimeError, match=r"1\.weight learns, which was not there"):
        model(x)
    model[1] = head
    step(made, x)
    model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match=r"1\.weight learns, which was not there .* assign=True"):
        model(x)


def test_a_layer_that_is_frozen_later():
    made = training(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)))
    made.model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"0\.weight learns no more"):
        made.model(numbers(4, 6))


def test_another_optimizer_of_the_same_parameters():
    made = training(nn.Linear(6, 3))
    made.criterion(made.model(numbers(4, 6)), torch.zeros(4, 3)).backward()
    second = torch.optim.Adam(made.model.parameters())
    with pytest.raises(RuntimeError, match="a step of another Adam with parameters of a private training"):
        second.step()
    torch.optim.SGD(nn.Linear(2, 2).parameters()).step()
    made.optimizer.step()
    made.remove()
    second.step()


def test_a_parameter_of_nobody_s():
    temperature = nn.Parameter(torch.ones(1))
    made = training(nn.Linear(6, 3), lambda out, y: (out * temperature - y).square().sum(1))
    with pytest.raises(ValueError, match=r"a parameter of shape \(1,\) that is not the model's"):
        step(made, numbers(4, 6))


def test_a_buffer_that_keeps_something_of_examples():
    class Running(nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.inner, self.in_place = nn.Linear(6, 3), in_place
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.mean = self.mean.copy_(mean) if self.in_place else mean
            return self.inner(x - self.mean)

    for in_place in (False, True):
        made = training(Running(in_place))
        with pytest.raises(ValueError, match="mean: the model changes this as it reads examples"):
            made.model(numbers(4, 6))


class Kept(nn.Module):
    """Keeps something of the examples in ``how``, each time or the first time."""

    def __init__(self, how, once=False):
        super().__init__()
        self.inner, self.how, self.once, self.done = nn.Linear(6, 3), how, once, False
        self.register_buffer("mean", torch.zeros(6))
        self.codes = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x):
        if not (self.once and self.done):
            self.done = True
            self.how(self, x.detach()[0])
        return self.inner(x)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (lambda model, x: model.mean.copy_(x), "mean"),
        (lambda model, x: model.mean.data.copy_(x), "mean"),
        (lambda model, x: model.codes.data.mul_(0.9).add_(x), "codes"),
        (lambda model, x: model.mean.numpy().__iadd__(x.numpy()), "mean"),
        (lambda model, x: model.inner.bias.data.copy_(x[:3]), "inner.bias"),
    ],
)
@pytest.mark.parametrize("once", [True, False])
def test_what_the_model_keeps_of_an_example(how, name, once):
    made = training(Kept(how, once))
    with pytest.raises(ValueError, match=f"{name}: the model changes this as it reads examples"):
        made.model(numbers(4, 6))


def test_a_spectral_norm_that_stands_still_is_no_such_thing():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    step(training(model), numbers(4, 6))


class Before(nn.Module):
    """A linear layer after something that has no gradient."""

    def __init__(self, first):
        super().__init__()
        self.first, self.inner = first, nn.Linear(6, 3)

    def forward(self, x):
        return self.inner(self.first(x))


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
    made = training(Before(first))
    with pytest.raises(ValueError, match=r"examples are mixed, by inner \(Linear\) at the latest"):
        made.model(numbers(4, 6))


@pytest.mark.parametrize(
    "first", [lambda x: x + torch.randn_like(x), functional.dropout, lambda x: x.bfloat16().float()]
)
def test_random_numbers_and_rounding_mix_nothing(first):
    step(training(Before(first)), numbers(4, 6))


def test_a_frozen_batch_norm_that_has_no_statistics():
    model = nn.Sequential(nn.BatchNorm1d(6, affine=False, track_running_stats=False), nn.Linear(6, 3)).train()
    model[0].eval()
    with pytest.raises(ValueError, match=r"0 \(BatchNorm1d\) normalises each example by the others"):
        clipped_gradients(model, lambda model, x: model(x).sum(1), numbers(4, 6), 1.0)


def test_a_layer_without_parameters_that_is_replaced():
    made = training(Before(nn.Identity()))
    for _ in range(guards.FIRST):
        step(made, numbers(4, 6))
    made.model.first = nn.BatchNorm1d(6, affine=False)
    with pytest.raises(ValueError, match=r"first \(BatchNorm1d\) normalises each example by the others"):
        made.model(numbers(4, 6))


def test_a_hook_on_a_layer_that_comes_later():
    made = training(Before(nn.Identity()))
    for _ in range(guards.FIRST):
        step(made, numbers(4, 6))
    made.model.first.register_forward_hook(lambda module, args, x: x - x.mean(0))
    with pytest.raises(ValueError, match="examples are mixed"):
        made.model(numbers(4, 6))


def test_a_hook_on_a_gradient_that_comes_later():
    made = training(nn.Linear(6, 3))
    step(made, numbers(4, 6))
    made.model.bias.register_hook(lambda gradient: 10 * gradient)
    with pytest.raises(RuntimeError, match="bias has a gradient hook, which clipping would leave out"):
        made.model(numbers(4, 6))


def test_a_tensor_of_nobody_s_that_another_optimizer_steps():
    scale = torch.ones(1, requires_grad=True)
    made = training(nn.Linear(6, 3), lambda out, y: (out * scale - y).square().sum(1))
    step(made, numbers(4, 6))
    with pytest.raises(RuntimeError, match=r"another SGD with a tensor of shape \(1,\) that the private losses gave"):
        torch.optim.SGD([scale], lr=1.0).step()


def test_a_parameter_of_nobody_s_that_comes_later():
    scales = [1.0]
    made = training(nn.Linear(6, 3), lambda out, y: (out * scales[-1] - y).square().sum(1))
    for _ in range(guards.FIRST):
        step(made, numbers(4, 6))
    scales.append(nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"a parameter of shape \(1,\) that is not the model's"):
        step(made, numbers(4, 6))


@pytest.mark.parametrize("root", [nn.PReLU(), nn.Conv3d(2, 3, 1), nn.ConvTranspose1d(2, 3, 2)])
def test_a_model_that_is_a_layer_itself(root):
    x = numbers(4, 2, *(3,) * {nn.Conv3d: 3, nn.ConvTranspose1d: 1}.get(type(root), 0))

    def loss(model, x):
        return model(x).flatten(1).square().sum(1)

    expected, _ = clipped_gradients(root, loss, x, 0.5, "loop")
    made = training(root, lambda out, y: out.flatten(1).square().sum(1))
    step(made, x, torch.zeros(4))
    for name, p in root.named_parameters():
        torch.testing.assert_close(p.grad * 4, expected[name])  # one layer, float32: the order of a sum


def test_weights_in_the_order_of_channels_last():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3)).to(memory_format=torch.channels_last)
    made = training(model, noise_multiplier=1.0)
    step(made, numbers(4, 2, 4, 4))
    made.skip()
    assert made.steps == 2


def test_a_model_that_takes_whole_batches_only():
    def four(x):
        assert len(x) == 4
        return x

    step(training(Before(four)), numbers(4, 6))


@pytest.mark.parametrize("length", [1, 3, 4])
def test_positions_that_are_the_same_for_all(length, assert_as_loop):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(10, 6), nn.Embedding(8, 6)

        def forward(self, ids):
            return self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))

    ids = torch.randint(0, 10, (4, length), generator=torch.Generator().manual_seed(0))
    assert_as_loop(Positions(), lambda model, ids: model(ids).square().sum((1, 2)), ids, "book_keeping")


def test_an_optimizer_that_accelerate_has_wrapped():
    from accelerate import Accelerator

    model = nn.Linear(6, 3)
    wrapped = Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="AcceleratedOptimizer wraps an optimizer: give make_private the optimizer"):
        make_private(model, wrapped, None, nn.MSELoss(), noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1,
                     expected_batch_size=4)  # fmt: skip


def test_two_losses_in_turn_are_both_known(passes):
    model, steps = nn.Linear(6, 3), 200
    for _ in range(steps):
        clipped_gradients(model, lambda model, x: model(x).sum(1), numbers(4, 6), 1.0)
        clipped_gradients(
            model, lambda model, x: nn.MSELoss(reduction="none")(model(x), x[:, :3]).sum(1), numbers(4, 6), 1.0
        )
    seldom = len(passes) - 2 * 2 * guards.FIRST
    assert 0 <= seldom / (2 * steps) <= 1 / 50 + sampling_error(1 / 50, 2 * steps)


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
    class Repeated(nn.Module):
        """Takes what a layer gives for all as one."""

        def __init__(self):
            super().__init__()
            self.inner, self.shift = nn.Linear(6, 3), nn.Linear(2, 3)

        def forward(self, x):
            return self.inner(x) + self.shift(torch.ones(1, 2)).repeat(len(x), 1)

    made = training(Repeated())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"shift \(Linear\) gives the same for all examples"):
            made.model(numbers(4, 6))


def test_processes_that_come_later(monkeypatch):
    made = training(nn.Linear(6, 3))
    monkeypatch.setattr(processes, "_group", lambda: (0, 2))
    with pytest.raises(RuntimeError, match=r"1 process\(es\) when make_private was called, 2 now"):
        made.model(numbers(4, 6))


PARALLEL = """
import os
import sys

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from plpkg.clipping import make_private

folder, rank, count, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # accelerate asks for them; they are not used
distributed.init_process_group("gloo", init_method=f"file://{folder}/{how}{count}", rank=rank, world_size=count)
torch.manual_seed(rank)  # they begin apart, and get the parameters of process 0
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(40, 8, generator=generator).double(), torch.randint(0, 4, (40,), generator=generator)
loader, criterion = DataLoader(TensorDataset(x, y), batch_size=10), nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
options = dict(noise_multiplier=1.0, max_grad_norm=0.5, seed=3, max_physical_batch_size=3)
backward = lambda loss: loss.backward()
if how == "accelerate":
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == count
    backward = accelerator.backward
else:
    if count > 1:
        for wrapped in (DistributedDataParallel(model), fully_shard(nn.Sequential(nn.Linear(8, 4)))):
            try:
                make_private(wrapped.train(), torch.optim.SGD(wrapped.parameters()), loader, criterion, **options)
            except ValueError as error:
                assert "DistributedDataParallel averages" in str(error) or "FSDPModule shards" in str(error), error
            else:
                raise AssertionError(type(wrapped))
        try:
            make_private(model, optimizer, loader, criterion, **options | {"max_grad_norm": 0.5 + rank})
        except ValueError as error:
            assert "process 1 has other max_grad_norm than process 0" in str(error), error
        else:
            raise AssertionError("two clipping norms")
private = make_private(model, optimizer, loader, criterion, **options)
while private.steps < 6:
    for inputs, labels in private.data_loader:
        optimizer.zero_grad()
        backward(private.criterion(model(inputs), labels))
        optimizer.step()
torch.save([model.state_dict(), private.epsilon(1e-3), private.steps], f"{folder}/{how}{rank}of{count}")
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
    one, first, second = (torch.load(tmp_path / f"{how}{which}") for which in ("0of1", "0of2", "1of2"))
    assert one[1:] == first[1:] == second[1:]
    for name, value in one[0].items():
        assert torch.equal(first[0][name], second[0][name])
        torch.testing.assert_close(first[0][name], value)  # float64: the order of sums alone is another one
    assert math.isfinite(one[1])


def test_a_loader_that_reads_ahead_is_named():
    from accelerate import Accelerator

    model, data = nn.Linear(6, 3), TensorDataset(numbers(20, 6), torch.zeros(20, 3))
    loader = DataLoader(data, batch_size=5)
    made = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, nn.MSELoss(), noise_multiplier=1.0,
                        max_grad_norm=1.0, seed=0)  # fmt: skip
    ahead = Accelerator(cpu=True).prepare(made.data_loader)
    x, y = next(batch for batch in ahead if batch is not None)
    with pytest.raises(RuntimeError, match=r"accelerate's prepare\(data_loader\) does"):
        step(made, x, y)


def test_the_probe_draws_no_random_numbers_of_the_training():
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    torch.manual_seed(0)
    expected = functional.dropout(model[0](numbers(4, 6)), 0.5)
    made = training(model)
    torch.manual_seed(0)
    assert torch.equal(made.model(numbers(4, 6)), expected)
