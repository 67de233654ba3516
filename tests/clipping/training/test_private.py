"""Private training: the loop beside Opacus's, the noise, the samples, ε, resuming, and what is refused."""

import copy
import functools
import math

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from plpkg.backbones import random_backbone
from plpkg.clipping import clipped_gradients, make_private, plan
from plpkg.clipping.execution import EXECUTIONS
from plpkg.clipping.training.randomness import Randomness

from preloaded import Process
from rounding import assert_as_exact, relative, sampling_error

COUNT = 40


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.n, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(torch.relu(self.n(self.a(x))).mean(1))


def data(count=COUNT, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, 8, generator=generator)
    return TensorDataset(x.to(dtype), torch.randint(0, 4, (count,), generator=generator))


def parts(model=None, batch_size=10, criterion=None, lr=0.1, dataset=None, **loader):
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return (
        model,
        optimizer,
        DataLoader(dataset or data(), batch_size=batch_size, **loader),
        criterion or nn.CrossEntropyLoss(),
    )


def private(model=None, *, batch_size=10, criterion=None, dataset=None, workers=0, **options):
    options = dict(noise_multiplier=1.0, max_grad_norm=0.5, seed=0) | options
    return make_private(*parts(model, batch_size, criterion, dataset=dataset, num_workers=workers), **options)


def train(made, steps=3):
    """The loop that a non-private training has."""
    model, optimizer, criterion, loader = made
    sizes = []
    while len(sizes) < steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            sizes.append(len(x))
            if len(sizes) == steps:
                break
    return torch.cat([p.detach().flatten() for p in model.parameters()]), sizes


def drawn(**options):
    """A private training and its first batch."""
    made = private(**options)
    return made, *next(iter(made.data_loader))


def step(made, x, y):
    made.optimizer.zero_grad()
    made.criterion(made.model(x), y).backward()
    made.optimizer.step()


def drawn_noise(like, add, *how):
    """What is added to float32 tensors of these shapes."""
    noise = {name: torch.zeros(tensor.shape) for name, tensor in like.items()}
    add(noise, *how)
    return noise


@functools.cache
def exactly(steps):
    """What train(private(), steps) would give in float64, with float32's noise."""
    made = private(Net().double(), dataset=data(dtype=torch.float64))
    randomness = made.randomness
    add = randomness.add_noise

    def add_as_float32(sums, *how):
        for total, noise in zip(sums.values(), drawn_noise(sums, add, *how).values(), strict=True):
            total += noise

    randomness.add_noise = add_as_float32
    return train(made, steps)[0]


def script(model, optimizer, criterion, batches):
    """A training script that knows nothing of who made it private."""
    for x, y in batches:
        output = model(x)
        optimizer.zero_grad()
        loss = criterion(output, y)
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_script_under_opacus_and_here(execution, reduction, monkeypatch):
    def batches(dtype=torch.float32):
        return [batch for _ in range(2) for batch in DataLoader(data(dtype=dtype), batch_size=10)]

    def theirs(dtype):
        model, optimizer, loader, criterion = parts(Net().to(dtype), criterion=loss(), lr=0.5)
        made = PrivacyEngine(accountant="prv").make_private(
            module=model, optimizer=optimizer, data_loader=loader, criterion=criterion, noise_multiplier=0.0,
            max_grad_norm=0.1, grad_sample_mode="ghost", poisson_sampling=False, loss_reduction=reduction,
        )  # fmt: skip
        return script(*made[:3], batches(dtype))

    def factors(module):  # Opacus's own but for the 1e-6 that it adds to the norm
        return (module.max_grad_norm / module.get_norm_sample()).clamp(max=1.0)

    loss = functools.partial(nn.CrossEntropyLoss, reduction=reduction)
    monkeypatch.setattr(GradSampleModuleFastGradientClipping, "get_clipping_coef", factors)
    wanted, exact = theirs(torch.float32), theirs(torch.float64)
    model, optimizer, _, criterion = parts(criterion=loss(), lr=0.5)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    ours = make_private(
        model, optimizer, None, criterion, noise_multiplier=0.0, max_grad_norm=0.1, execution=execution,
        sample_rate=0.25, expected_batch_size=10,
    )  # fmt: skip
    got = script(ours.model, ours.optimizer, ours.criterion, batches())
    assert (wanted - before).norm() > 1e-2
    assert_as_exact(got - before, wanted - before, exact - before)


def test_epsilon_is_opacus_s():
    for name in ("prv", "rdp"):
        made = private(accountant=name)
        assert made.epsilon(1e-5) == 0
        train(made, 3)
        accountant = create_accountant(name)
        for _ in range(made.steps):
            accountant.step(noise_multiplier=1.0, sample_rate=0.25)
        assert made.epsilon(1e-5) == pytest.approx(accountant.get_epsilon(delta=1e-5))
        assert made.epsilon(1e-3) < made.epsilon(1e-7)
    assert private(noise_multiplier=0.0).epsilon(1e-5) == 0
    free = private(noise_multiplier=0.0)
    train(free, 1)
    assert free.epsilon(1e-5) == math.inf


def test_a_target_is_met_and_not_by_far():
    made = private(noise_multiplier=None, target_epsilon=3.0, target_delta=1e-3, epochs=2)
    train(made, 8)
    assert 3.0 - 0.01 <= made.epsilon(1e-3) <= 3.0  # the search's own tolerance


def test_the_step_is_the_clipped_sum_and_noise_over_the_expected_batch():
    model, optimizer, loader, criterion = parts(lr=1.0)
    made = make_private(model, optimizer, loader, criterion, noise_multiplier=2.0, max_grad_norm=0.5, seed=4)
    x, y = next(iter(made.data_loader))

    def losses(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def wanted(twin, x):
        sums, _ = clipped_gradients(twin, losses, (x, y), 0.5, "loop")
        return [p - (sums[name] + noise[name]) / 10 for name, p in twin.named_parameters()]

    noise = drawn_noise(dict(model.named_parameters()), made.randomness.add_noise, 2.0 * 0.5, 0)
    twins = wanted(Net(), x), wanted(Net().double(), x.double())
    made.criterion(model(x), y).backward()
    made.optimizer.step()
    assert_as_exact(model.parameters(), *twins)
    assert len(x) != 10  # the sample had another size


@pytest.mark.parametrize("secure", [False, True])
def test_the_noise_has_its_standard_deviation(secure):
    model = nn.Linear(100, 200)
    made = make_private(
        model, torch.optim.SGD(model.parameters(), lr=1.0), None, nn.MSELoss(), noise_multiplier=1.5, max_grad_norm=2.0,
        sample_rate=0.1, expected_batch_size=5, seed=None if secure else 1, secure=secure,
    )  # fmt: skip
    before = model.weight.detach().clone()
    steps = []
    for _ in range(3):
        made.criterion(model(torch.zeros(1, 100)), model.bias.detach()[None]).backward()  # a gradient of zero
        made.optimizer.step()
        made.optimizer.zero_grad()
        steps.append((before - model.weight.detach()) * 5)
        before = model.weight.detach().clone()
    n = model.weight.numel()
    for noise in steps:
        assert noise.std().item() == pytest.approx(3.0, rel=sampling_error(1 / 2, n))
        assert noise.mean().item() == pytest.approx(0, abs=sampling_error(3.0**2, n))
        share = (noise.abs() > 2 * 3.0).float().mean().item()
        assert share == pytest.approx(0.0455, abs=sampling_error(0.0455 * 0.9545, n))
    assert abs(torch.corrcoef(torch.stack(steps).flatten(1))[0, 1].item()) < sampling_error(1, n)


def test_samples_are_poisson():
    made = private(batch_size=10, seed=5)
    counts, sizes = torch.zeros(COUNT), []
    sampler = made.sampler
    for draw in range(2000):
        chosen = sampler.randomness.sample(COUNT, sampler.rate, draw)
        counts[chosen] += 1
        sizes.append(len(chosen))
    assert (counts / 2000 - 0.25).abs().max() < sampling_error(0.25 * 0.75, 2000)
    sizes = torch.tensor(sizes, dtype=torch.float)
    variance = COUNT * 0.25 * 0.75  # not the 0 of a shuffled epoch
    assert sizes.mean().item() == pytest.approx(10, abs=sampling_error(variance, 2000))
    assert sizes.var().item() == pytest.approx(variance, rel=sampling_error(2, 2000))


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("workers", [0, 2])
def test_pieces_of_a_sample_are_one_step(execution, workers):
    whole, sizes = train(private(execution=execution), 3)
    made = private(execution=execution, max_physical_batch_size=3, workers=workers)
    model, optimizer, criterion, loader = made
    pieces = []
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        pieces.append(len(x))
        if made.steps == 3:
            break
    assert max(pieces) <= 3
    assert sum(pieces) == sum(sizes)
    assert_as_exact(model.parameters(), whole, exactly(3))


def test_micro_batches_by_hand_add_up():
    whole, _ = train(private(), 1)
    made, x, y = drawn()
    for part in (slice(0, 2), slice(2, None)):
        made.criterion(made.model(x[part]), y[part]).backward()
    made.optimizer.step()
    assert_as_exact(made.model.parameters(), whole, exactly(1))


def test_two_samples_in_one_step_are_refused():
    made = private()
    batches = iter(made.data_loader)
    for place in range(2):
        x, y = next(batches)
        loss = made.criterion(made.model(x), y)
        if place == 0:
            loss.backward()
    with pytest.raises(RuntimeError, match=r"2 samples before one step\(\): an example may be in each"):
        loss.backward()


def test_an_empty_sample_is_a_step_of_noise():
    dataset = data(6)
    made = private(batch_size=1, dataset=dataset, seed=1)
    before = torch.cat([p.detach().flatten() for p in made.model.parameters()]).clone()
    drawn = [len(made.randomness.sample(6, 1 / 6, draw)) for draw in range(6)]
    assert 0 in drawn
    seen = 0
    for x, y in made.data_loader:
        assert len(x)
        step(made, x, y)
        seen += 1
    assert seen == sum(size > 0 for size in drawn)
    assert made.steps == 6
    assert len(made.accountant.history) == 1
    assert made.accountant.history[0][2] == 6
    assert not torch.equal(before, torch.cat([p.detach().flatten() for p in made.model.parameters()]))


def lm(seq=6, count=20):
    ids = torch.randint(1, 64, (count, seq), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[::3, 3:] = -100
    return TensorDataset(ids, labels)


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = random_backbone("llama", hidden=16, num_heads=2, intermediate=24, vocab=64, seed=0).train()

    def forward(self, ids):
        return self.inner(input_ids=ids, use_cache=False).logits[:, :-1].mT


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_a_sequence_is_the_mean_of_what_is_not_ignored(reduction):
    dataset = lm()
    made = private(Logits(), dataset=dataset, noise_multiplier=0.0, criterion=nn.CrossEntropyLoss(reduction=reduction))
    twin = Logits()

    def losses(model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1][:, 1:], reduction="none", ignore_index=-100)
        return loss.sum(1) / ((batch[1][:, 1:] != -100).sum(1) if reduction == "mean" else 1)

    ids, labels = next(iter(made.data_loader))
    rough, exact = (clipped_gradients(t, losses, (ids, labels), 0.5, "loop")[0] for t in (twin, Logits().double()))
    target = labels[:, 1:]
    loss = made.criterion(made.model(ids), target)
    assert loss.item() == pytest.approx(
        losses(twin, (ids, labels)).sum().item() / (len(ids) if reduction == "mean" else 1),
        rel=relative(16 + 64 + target.numel()),  # the hidden state, the vocabulary, the tokens
    )
    loss.backward()
    made.optimizer.step()
    scale = 10 if reduction == "mean" else 1
    gradients = [scale * made.model.get_parameter(name).grad for name in rough]
    assert_as_exact(gradients, rough.values(), exact.values())


def test_autocast_and_a_scheduler_and_adam():
    model = Net()
    optimizer = torch.optim.AdamW(
        [{"params": model.a.parameters(), "lr": 1e-2}, {"params": [*model.n.parameters(), *model.b.parameters()]}]
    )
    loader = DataLoader(data(), batch_size=10)
    made = make_private(
        model, optimizer, loader, nn.CrossEntropyLoss(), noise_multiplier=0.5, max_grad_norm=1.0, seed=0
    )
    assert made.optimizer is optimizer
    assert made.model is model
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for x, y in made.data_loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = made.criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] < 1e-2
    assert all(p.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        assert model.eval()(data()[:][0]).shape == (COUNT, 4)


def test_a_plan_as_execution():
    def losses(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    budgeted = plan(Net(), losses, data()[:10])
    plain, _ = train(private(), 2)
    planned, _ = train(private(execution=budgeted), 2)
    assert_as_exact(planned, plain, exactly(2))


def test_evaluation_between_forward_and_backward_changes_nothing():
    plain, _ = train(private(), 1)
    made, x, y = drawn()
    loss = made.criterion(made.model(x), y)
    with torch.no_grad():
        made.model(x[:1])
        made.model.eval()
        made.model(x[:2])
        made.model.train()
    loss.backward()
    made.optimizer.step()
    assert_as_exact(made.model.parameters(), plain, exactly(1))


RUN = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from plpkg.clipping import make_private

folder, kill_after = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 8), torch.randint(0, 4, (40,)))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
private = make_private(model, optimizer, DataLoader(data, batch_size=10), nn.CrossEntropyLoss(), noise_multiplier=1.0,
                       max_grad_norm=1.0, seed=7, max_physical_batch_size=4)
file = folder / "state.pt"
if file.exists():
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    private.load_state_dict(state["private"])
while private.steps < 10:
    for x, y in private.data_loader:
        before = private.steps
        optimizer.zero_grad()
        private.criterion(model(x), y).backward()
        if private.steps == kill_after:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if private.steps > before:
            parts = {"model": model, "optimizer": optimizer, "private": private}
            torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        if private.steps == 10:
            break
print(private.epsilon(1e-5), sum(p.double().sum().item() for p in model.parameters()))
"""


def test_a_killed_training_resumes_with_the_same_epsilon_and_weights(tmp_path):
    def run(folder, kill_after):
        folder.mkdir(exist_ok=True)
        with Process(RUN, str(folder), str(kill_after)) as process:
            return process.wait(), process.stdout.read()

    status, whole = run(tmp_path / "whole", -1)
    assert status == 0, whole
    assert run(tmp_path / "killed", 6)[0] == -9
    status, resumed = run(tmp_path / "killed", -1)
    assert status == 0, resumed
    assert resumed == whole


def test_a_state_of_another_training_is_refused():
    made = private()
    train(made, 1)
    state = made.state_dict()
    with pytest.raises(ValueError, match=r"noise_multiplier=1\.0, now 2\.0"):
        private(noise_multiplier=2.0).load_state_dict(state)
    with pytest.raises(ValueError, match="not the state of a private training"):
        made.load_state_dict({"steps": 1})
    x, y = next(iter(made.data_loader))
    made.criterion(made.model(x), y).backward()
    with pytest.raises(RuntimeError, match="a sample is half done"):
        made.state_dict()


class Stream(IterableDataset):
    def __iter__(self):
        yield from data()


BAD = [
    (dict(noise_multiplier=-1.0), "noise_multiplier must be at least 0, got -1.0"),
    (dict(noise_multiplier=None), "give noise_multiplier or target_epsilon, got noise_multiplier=None"),
    (dict(target_epsilon=1.0), "got noise_multiplier=1.0 and target_epsilon=1.0"),
    (dict(noise_multiplier=None, target_epsilon=0.0), "target_epsilon must be greater than 0, got 0.0"),
    (dict(noise_multiplier=None, target_epsilon=-2.0), "target_epsilon must be greater than 0, got -2.0"),
    (dict(noise_multiplier=None, target_epsilon=1.0), "target_epsilon needs target_delta and epochs"),
    (dict(noise_multiplier=None, target_epsilon=1.0, target_delta=2.0, epochs=1), "target_delta must be .*, got 2.0"),
    (dict(noise_multiplier=None, target_epsilon=500.0, target_delta=1e-5, epochs=1), "at most 100 .* got 500.0"),
    (dict(noise_multiplier=None, target_epsilon=1e-4, target_delta=1e-5, epochs=1), "no noise gives .*=0.0001"),
    (dict(criterion=nn.CrossEntropyLoss(weight=torch.ones(4))), "mean of CrossEntropyLoss with weights"),
    (dict(max_grad_norm=0.0), "max_grad_norm must be greater than 0, got 0.0"),
    (dict(max_grad_norm=-1.0), "max_grad_norm must be greater than 0, got -1.0"),
    (dict(execution="loop"), "execution must be one of .*, got 'loop'"),
    (dict(accountant="gdp"), "accountant must be one of 'prv', 'rdp', got 'gdp'"),
    (dict(max_physical_batch_size=0), "max_physical_batch_size must be a whole number of at least 1, got 0"),
    (dict(secure=True), "secure=True takes no seed, got seed=0"),
    (dict(sample_rate=0.5), "leave them out"),
    (dict(model=Net().eval()), "the model is in evaluation mode"),
    (dict(model=nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(5))), r"1 \(BatchNorm1d\) normalises each example"),
    (dict(dataset=Stream()), "needs examples by number, got the iterable Stream"),
    (dict(criterion=nn.CrossEntropyLoss(reduction="none")), None),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_gets_a_sentence(change, message):
    if message is None:
        private(**change)
        return
    with pytest.raises(ValueError, match=message):
        private(**change)


def test_parameters_that_the_optimizer_lacks_are_named():
    model = Net()
    rest = DataLoader(data(), batch_size=10), nn.CrossEntropyLoss()
    with pytest.raises(ValueError, match=r"the optimizer lacks n\.weight, n\.bias, b\.weight: give it these"):
        make_private(model, torch.optim.SGD(model.a.parameters(), lr=1), *rest, noise_multiplier=1.0, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="2 parameters that are not the model's"):
        make_private(
            model, torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()], lr=1), *rest,
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip
    with pytest.raises(ValueError, match="sample_rate and expected_batch_size must be given"):
        make_private(
            model, torch.optim.SGD(model.parameters(), lr=1), None, rest[1], noise_multiplier=1.0, max_grad_norm=1.0
        )


def test_a_criterion_that_reduces_is_refused():
    made, x, y = drawn(criterion=lambda output, target: nn.functional.cross_entropy(output, target))
    with pytest.raises(ValueError, match=f"the criterion gave one number for {len(x)} examples: it must not reduce"):
        made.criterion(made.model(x), y)
    made = private(criterion=lambda output, target: output[:2].sum(1))
    with pytest.raises(ValueError, match=rf"losses of shape \(2,\) for {len(x)} examples"):
        made.criterion(made.model(x), y)


def test_steps_out_of_order_are_refused():
    made = private()
    with pytest.raises(RuntimeError, match=r"step\(\) without criterion"):
        made.optimizer.step()
    x, y = next(iter(made.data_loader))
    loss = made.criterion(made.model(x), y)
    loss.backward()
    with pytest.raises(RuntimeError, match="needs a forward pass of the model in training mode, once for each"):
        loss.backward()
    with pytest.raises(RuntimeError, match="takes steps without a closure"):
        made.optimizer.step(lambda: 0.0)
    made.model.a.weight.grad = torch.ones_like(made.model.a.weight)
    with pytest.raises(RuntimeError, match=r"a\.weight has a gradient that was not clipped"):
        made.optimizer.step()
    made.optimizer.zero_grad()
    made.optimizer.step()
    before = made.model.a.weight.detach().clone()
    with pytest.raises(RuntimeError, match=f"was given {len(x)} examples where the data_loader's batch has 0 left"):
        made.criterion(made.model(x), y).backward()
    assert torch.equal(made.model.a.weight, before)
    assert made.steps == 1


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, "gpt2", "model must be a Module, got str"),
        (1, None, "optimizer must be a Optimizer, got NoneType"),
        (3, "mean", "criterion must be callable, got str"),
    ],
)
def test_what_is_no_model_optimizer_or_criterion(place, value, message):
    model = Net()
    given = [model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data(), batch_size=10), nn.CrossEntropyLoss()]
    given[place] = value
    with pytest.raises(TypeError, match=message):
        make_private(*given, noise_multiplier=1.0, max_grad_norm=1.0)


def test_validation_with_the_same_criterion():
    made = private()
    x, y = data(16).tensors
    made.model.eval()
    with torch.no_grad():
        validation = made.criterion(made.model(x), y)
        wanted = nn.functional.cross_entropy(made.model(x), y)
    made.model.train()
    assert validation.item() == wanted.item()


def test_zeroed_gradients_are_no_gradients():
    made = private()
    for _, (x, y) in zip(range(3), made.data_loader, strict=False):
        made.optimizer.zero_grad(set_to_none=False)
        made.criterion(made.model(x), y).backward()
        made.optimizer.step()
    assert made.steps == 3


def test_a_private_loss_is_not_to_be_reckoned_with():
    made, x, y = drawn()
    loss = made.criterion(made.model(x), y)
    for change in (lambda: loss / 4, lambda: loss + 1, lambda: 0.1 * loss, lambda: -loss):
        with pytest.raises(TypeError, match="goes backward as it is"):
            change()
    assert loss.detach().item() == pytest.approx(float(loss))


def test_a_sample_of_nobody_by_hand():
    model = Net()
    made = make_private(
        model, torch.optim.SGD(model.parameters(), 0.1), None, nn.CrossEntropyLoss(),
        noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, expected_batch_size=4, seed=0,
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    made.skip()
    assert made.epsilon(1e-5) > 0
    assert all((p != q).any() for p, q in zip(model.parameters(), before, strict=True))
    x, y = data(4).tensors
    made.optimizer.zero_grad()
    made.criterion(model(x), y).backward()
    with pytest.raises(RuntimeError, match="the sample is not empty"):
        made.skip()


def test_one_recorder_at_a_time():
    model, x = Net(), data(4).tensors[0]

    def loss(model, x):
        return model(x).sum(1)

    def nested(model, x):
        clipped_gradients(model, loss, x, 1.0)
        return loss(model, x)

    with pytest.raises(RuntimeError, match="the model is watched already"):
        clipped_gradients(model, nested, x, 1.0)
    made = private(model)
    for again in (lambda: clipped_gradients(model, loss, x, 1.0), lambda: private(model)):
        with pytest.raises(RuntimeError, match="the model is watched already"):
            again()
    made.remove()
    clipped_gradients(model, loss, x, 1.0)


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
    made = private(max_physical_batch_size=2, noise_multiplier=0.0)
    step(made, *next(iter(made.data_loader)))
    before, seen = [p.detach().clone() for p in made.model.parameters()], 0
    for x, y in made.data_loader:
        step(made, x, y)
        seen += len(x)
        if made.steps:
            break
    changes = [(p.detach() - b).flatten() for p, b in zip(made.model.parameters(), before, strict=True)]
    rounded = relative(1) * torch.cat([p.flatten() for p in before]).norm()
    moved = torch.cat(changes).norm()  # at a rate of 0.1, by the clipped sum over the expected 10 examples
    assert moved <= 0.01 * 0.5 * seen * (1 + relative(seen)) + rounded
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
    model = Net()
    model.a.requires_grad_(False)
    made, x, y = drawn(model=model)
    model.a.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"a\.weight learns, which was not there when make_private was called"):
        model(x)
    model.a.requires_grad_(False)
    step(made, x, y)
    made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    made.restart()
    with pytest.raises(RuntimeError, match="the optimizer has 5 parameters that learn, make_private saw 4"):
        made.optimizer.step()


def test_a_plain_backward_is_refused():
    made, x, y = drawn()
    with pytest.raises(RuntimeError, match=r"call criterion\(\.\.\.\)\.backward\(\)"):
        nn.functional.cross_entropy(made.model(x), y).backward()


@pytest.mark.filterwarnings("ignore:Using a target size")  # PyTorch only warns of what is refused here
def test_targets_that_broadcast_are_refused():
    made, x, y = drawn(model=nn.Sequential(nn.Flatten(), nn.Linear(40, 1)), criterion=nn.MSELoss())
    with pytest.raises(ValueError, match=rf"losses of shape \({len(x)}, {len(x)}\) from .*: it broadcast them"):
        made.criterion(made.model(x), y.float())


def test_a_sampler_is_not_silently_replaced():
    given = parts(sampler=SubsetRandomSampler(range(20)))
    with pytest.raises(ValueError, match="samples with a SubsetRandomSampler of its own"):
        make_private(*given, noise_multiplier=1.0, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="must have a batch_size"):
        private(batch_size=None)


def test_seeds_are_not_cut_to_32_bits():
    def noise_of(seed, draw=0):
        return drawn_noise({"w": torch.zeros(50)}, Randomness(seed).add_noise, 1.0, draw)["w"]

    drawn = [noise_of(seed) for seed in (1, 1 + 2**32, 1 + 2**64)]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0], noise_of(1))
    assert not torch.equal(drawn[0], noise_of(1, draw=1))
    for seed in ("abc", 1.5, -1, True):
        with pytest.raises(ValueError, match="seed must be a whole number of at least 0"):
            Randomness(seed)


def test_a_copy_of_the_model_is_an_ordinary_one():
    made, x, y = drawn()
    twin = copy.deepcopy(made.model)
    nn.functional.cross_entropy(twin(x), y).backward()
    assert all(p.grad is not None for p in twin.parameters())
    made.criterion(made.model(x), y).backward()
    made.optimizer.step()


def test_epochs_have_all_their_steps():
    """75 steps an epoch: 3 / (1/75) is 224.99… in floating point."""
    target = dict(noise_multiplier=None, target_epsilon=3.0, target_delta=1e-3, epochs=3)
    made = private(dataset=data(75), batch_size=1, **target)
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
    made, x, y = drawn()
    step(made, x, y)
    state = made.state_dict()
    before = copy.deepcopy(state)
    made.load_state_dict(state)
    for x, y in made.data_loader:
        step(made, x, y)
    assert state == before
