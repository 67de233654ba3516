"""Private training: the loop beside Opacus's, the noise, the samples, ε, resuming, and what is refused."""

import copy
import functools
import itertools
import math

import pytest
import torch
from accelerate import Accelerator
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset

from plpkg.backbones import random_backbone
from plpkg.clipping import clipped_gradients, make_private
from plpkg.clipping.execution import EXECUTIONS
from plpkg.clipping.training.accounting import epsilon_of
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


def losses(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def parts(model=None, batch_size=10, criterion=None, lr=0.1, dataset=None, **loader):
    model = model or Net()
    loader = DataLoader(dataset or data(), batch_size=batch_size, **loader)
    return model, torch.optim.SGD(model.parameters(), lr=lr), loader, criterion or nn.CrossEntropyLoss()


def private(model=None, *, batch_size=10, criterion=None, lr=0.1, dataset=None, loader=None, **options):
    """A private training; with an ``expected_batch_size`` it has no data loader."""
    model, optimizer, batches, criterion = parts(model, batch_size, criterion, lr, dataset, **loader or {})
    options = dict(noise_multiplier=1.0, max_grad_norm=0.5, seed=0) | options
    return make_private(model, optimizer, None if "expected_batch_size" in options else batches, criterion, **options)


def flat(parameters):
    return torch.cat([p.detach().flatten() for p in parameters])


def step(made, x, y):
    made.optimizer.zero_grad()
    made.criterion(made.model(x), y).backward()
    made.optimizer.step()


def train(made, steps=3):
    """All parameters after so many steps, and the sizes of the batches."""
    sizes = []
    while made.steps < steps:
        for x, y in made.data_loader:
            step(made, x, y)
            sizes.append(len(x))
            if made.steps == steps:
                break
    return flat(made.model.parameters()), sizes


def drawn(*model, **options):
    """A private training and its first batch."""
    made = private(*model, **options)
    return made, *next(iter(made.data_loader))


def drawn_noise(like, add, *how):
    """What is added to float32 tensors of these shapes."""
    noise = {name: torch.zeros(tensor.shape) for name, tensor in like.items()}
    add(noise, *how)
    return noise


@functools.cache
def exactly(steps):
    """What train(private(), steps) would give in float64, with float32's noise."""
    made = private(Net().double(), dataset=data(dtype=torch.float64))
    add = made.randomness.add_noise

    def add_as_float32(sums, *how):
        for name, noise in drawn_noise(sums, add, *how).items():
            sums[name] += noise

    made.randomness.add_noise = add_as_float32
    return train(made, steps)[0]


@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_script_under_opacus_and_here(execution, reduction, monkeypatch):
    def script(model, optimizer, criterion, dtype=torch.float32):
        """A training that knows nothing of who made it private."""
        for x, y in 2 * list(DataLoader(data(dtype=dtype), batch_size=10)):
            output = model(x)
            optimizer.zero_grad(set_to_none=False)  # zeros are no gradients that were not clipped
            criterion(output, y).backward()
            optimizer.step()
        return flat(model.parameters())

    def theirs(dtype):
        model, optimizer, loader, criterion = parts(Net().to(dtype), criterion=loss(), lr=0.5)
        made = PrivacyEngine(accountant="prv").make_private(
            module=model, optimizer=optimizer, data_loader=loader, criterion=criterion, noise_multiplier=0.0,
            max_grad_norm=0.1, grad_sample_mode="ghost", poisson_sampling=False, loss_reduction=reduction,
        )  # fmt: skip
        return script(*made[:3], dtype)

    def factors(module):  # Opacus's own but for the 1e-6 that it adds to the norm
        return (module.max_grad_norm / module.get_norm_sample()).clamp(max=1.0)

    loss = functools.partial(nn.CrossEntropyLoss, reduction=reduction)
    monkeypatch.setattr(GradSampleModuleFastGradientClipping, "get_clipping_coef", factors)
    wanted, exact, before = theirs(torch.float32), theirs(torch.float64), flat(Net().parameters())
    options = dict(noise_multiplier=0.0, max_grad_norm=0.1, sample_rate=0.25, expected_batch_size=10)
    model, optimizer, criterion, _ = private(criterion=loss(), lr=0.5, execution=execution, **options)
    got = script(model, optimizer, criterion)
    assert (wanted - before).norm() > 1e-2
    assert_as_exact(got - before, wanted - before, exact - before)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_epsilon_is_opacus_s(accountant):
    made, free, theirs = private(accountant=accountant), private(noise_multiplier=0.0), create_accountant(accountant)
    assert made.epsilon(1e-5) == free.epsilon(1e-5) == 0
    train(made)
    train(free, 1)
    for _ in range(made.steps):
        theirs.step(noise_multiplier=1.0, sample_rate=0.25)
    assert made.epsilon(1e-5) == pytest.approx(theirs.get_epsilon(delta=1e-5))
    assert made.epsilon(1e-3) < made.epsilon(1e-7)
    assert free.epsilon(1e-5) == math.inf


@pytest.mark.parametrize(("count", "batch_size", "epochs"), [(40, 10, 2), (75, 1, 3)])
def test_the_noise_for_a_target_meets_it_after_all_steps_of_all_epochs(count, batch_size, epochs):
    """Of 75 steps an epoch: 3 / (1/75) is 224.99… in floating point."""
    target = dict(noise_multiplier=None, target_epsilon=3.0, target_delta=1e-3, epochs=epochs)
    made, steps = private(dataset=data(count), batch_size=batch_size, **target), count // batch_size
    spent = epsilon_of(made.noise_multiplier, 1 / steps, steps * epochs, 1e-3)
    assert 3.0 - 0.01 <= spent <= 3.0  # the search's own tolerance


def test_the_step_is_the_clipped_sum_and_noise_over_the_expected_batch():
    made, x, y = drawn(lr=1.0, noise_multiplier=2.0, seed=4)

    def wanted(twin, x):
        sums, _ = clipped_gradients(twin, losses, (x, y), 0.5, "loop")
        return [p - (sums[name] + noise[name]) / 10 for name, p in twin.named_parameters()]

    noise = drawn_noise(dict(made.model.named_parameters()), made.randomness.add_noise, 2.0 * 0.5, 0)
    twins = wanted(Net(), x), wanted(Net().double(), x.double())
    step(made, x, y)
    assert_as_exact(made.model.parameters(), *twins)
    assert len(x) != 10  # the sample had another size


@pytest.mark.parametrize("randomness", [dict(seed=1), dict(seed=None, secure=True)], ids=["seed", "secure"])
def test_the_noise_has_its_standard_deviation(randomness):
    model, steps = nn.Linear(100, 200), []
    options = dict(noise_multiplier=1.5, max_grad_norm=2.0, sample_rate=0.1, expected_batch_size=5)
    made = private(model, criterion=nn.MSELoss(), lr=1.0, **options, **randomness)
    for _ in range(3):
        before = model.weight.detach().clone()
        step(made, torch.zeros(1, 100), model.bias.detach()[None])  # a gradient of zero
        steps.append((before - model.weight.detach()) * 5)
    n = model.weight.numel()
    for noise in steps:
        assert noise.std().item() == pytest.approx(3.0, rel=sampling_error(1 / 2, n))
        assert noise.mean().item() == pytest.approx(0, abs=sampling_error(3.0**2, n))
        share = (noise.abs() > 2 * 3.0).float().mean().item()
        assert share == pytest.approx(0.0455, abs=sampling_error(0.0455 * 0.9545, n))
    assert abs(torch.corrcoef(torch.stack(steps).flatten(1))[0, 1].item()) < sampling_error(1, n)


def test_samples_are_poisson():
    sampler, draws = private(seed=5).sampler, 2000
    samples = [sampler.randomness.sample(COUNT, sampler.rate, draw) for draw in range(draws)]
    shares = torch.tensor([*itertools.chain(*samples)]).bincount(minlength=COUNT) / draws
    assert (shares - 0.25).abs().max() < sampling_error(0.25 * 0.75, draws)
    sizes = torch.tensor([len(sample) for sample in samples], dtype=torch.float)
    variance = COUNT * 0.25 * 0.75  # not the 0 of a shuffled epoch
    assert sizes.mean().item() == pytest.approx(10, abs=sampling_error(variance, draws))
    assert sizes.var().item() == pytest.approx(variance, rel=sampling_error(2, draws))


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("workers", [0, 2])
def test_pieces_of_a_sample_are_one_step(execution, workers):
    whole, sizes = train(private())
    got, pieces = train(private(execution=execution, max_physical_batch_size=3, loader=dict(num_workers=workers)))
    assert max(pieces) <= 3
    assert sum(pieces) == sum(sizes)
    assert_as_exact(got, whole, exactly(3))


def test_micro_batches_by_hand_add_up_whatever_is_evaluated_before_backward():
    whole, _ = train(private(), 1)
    made, x, y = drawn()
    for part in (slice(0, 2), slice(2, None)):
        loss = made.criterion(made.model(x[part]), y[part])
        with torch.no_grad():
            made.model(x[:1])
            made.model.eval()
            made.model(x[:2])
            made.model.train()
        loss.backward()
    made.optimizer.step()
    assert_as_exact(made.model.parameters(), whole, exactly(1))


def test_an_empty_sample_is_a_step_of_noise():
    made = private(batch_size=1, dataset=data(6), seed=1)
    before = flat(made.model.parameters())
    sizes = [len(made.randomness.sample(6, 1 / 6, draw)) for draw in range(6)]
    assert 0 in sizes
    seen = 0
    for x, y in made.data_loader:
        assert len(x)
        step(made, x, y)
        seen += 1
    assert seen == sum(size > 0 for size in sizes)
    assert made.steps == 6
    assert [steps for *_, steps in made.accountant.history] == [6]
    assert not torch.equal(before, flat(made.model.parameters()))


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = random_backbone("llama", hidden=16, num_heads=2, intermediate=24, vocab=64, seed=0).train()

    def forward(self, ids):
        return self.inner(input_ids=ids, use_cache=False).logits[:, :-1].mT


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_a_sequence_is_the_mean_of_what_is_not_ignored(reduction):
    ids = torch.randint(1, 64, (20, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[::3, 3:] = -100
    options = dict(dataset=TensorDataset(ids, labels), noise_multiplier=0.0)
    made, ids, labels = drawn(Logits(), criterion=nn.CrossEntropyLoss(reduction=reduction), **options)
    twin, target, means = Logits(), labels[:, 1:], reduction == "mean"

    def summed(model, batch):
        return losses(model, batch).sum(1) / ((batch[1] != -100).sum(1) if means else 1)

    rough, exact = (clipped_gradients(t, summed, (ids, target), 0.5, "loop")[0] for t in (twin, Logits().double()))
    loss = made.criterion(made.model(ids), target)
    assert loss.item() == pytest.approx(
        summed(twin, (ids, target)).sum().item() / (len(ids) if means else 1),
        rel=relative(16 + 64 + target.numel()),  # the hidden state, the vocabulary, the tokens
    )
    loss.backward()
    made.optimizer.step()
    gradients = [made.model.get_parameter(name).grad * (10 if means else 1) for name in rough]
    assert_as_exact(gradients, rough.values(), exact.values())


def test_autocast_and_a_scheduler_and_adam():
    model, _, loader, criterion = parts()
    rest = [*model.n.parameters(), *model.b.parameters()]
    adam = torch.optim.AdamW([{"params": model.a.parameters(), "lr": 1e-2}, {"params": rest}])
    made = make_private(model, adam, loader, criterion, noise_multiplier=0.5, max_grad_norm=1.0, seed=0)
    same, optimizer, criterion, batches = made
    assert same is model
    assert optimizer is adam
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
    for x, y in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    assert adam.param_groups[0]["lr"] < 1e-2
    assert all(p.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        assert model.eval()(data()[:][0]).shape == (COUNT, 4)


RUN = """
import sys
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
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


def test_going_back_to_a_state_forgets_what_came_after_and_leaves_the_state_as_it_was():
    made = private(max_physical_batch_size=2)
    train(made, 1)
    state = made.state_dict()
    before = copy.deepcopy(state)
    x, y = next(iter(made.data_loader))
    made.criterion(made.model(x), y).backward()
    made.load_state_dict(state)
    assert not made.progress.sums
    train(made, 4)
    assert state == before


class Stream(IterableDataset):
    def __iter__(self):
        yield from data()


BAD = [
    (dict(noise_multiplier=-1.0), "noise_multiplier must be at least 0, got -1.0"),
    (dict(noise_multiplier=None), "give noise_multiplier or target_epsilon, got noise_multiplier=None"),
    (dict(target_epsilon=1.0), "got noise_multiplier=1.0 and target_epsilon=1.0"),
    (dict(noise_multiplier=None, target_epsilon=0.0), "target_epsilon must be greater than 0, got 0.0"),
    (dict(noise_multiplier=None, target_epsilon=1.0), "target_epsilon needs target_delta and epochs"),
    (dict(noise_multiplier=None, target_epsilon=1.0, target_delta=2.0, epochs=1), "target_delta must be .*, got 2.0"),
    (dict(criterion=nn.CrossEntropyLoss(weight=torch.ones(4))), "mean of CrossEntropyLoss with weights"),
    (dict(max_grad_norm=0.0), "max_grad_norm must be greater than 0, got 0.0"),
    (dict(execution="lop"), "execution must be one of 'loop', .*, got 'lop'"),
    (dict(accountant="gdp"), "accountant must be one of 'prv', 'rdp', got 'gdp'"),
    (dict(max_physical_batch_size=0), "max_physical_batch_size must be a whole number of at least 1, got 0"),
    (dict(secure=True), "secure=True takes no seed, got seed=0"),
    (dict(sample_rate=0.5), "leave them out"),
    (dict(expected_batch_size=None), "sample_rate and expected_batch_size must be given"),
    (dict(model=Net().eval()), "the model is in evaluation mode"),
    (dict(model=nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(5))), r"1 \(BatchNorm1d\) normalises each example"),
    (dict(dataset=Stream()), "needs examples by number, got the iterable Stream"),
    (dict(loader=dict(sampler=SubsetRandomSampler(range(20)))), "samples with a SubsetRandomSampler of its own"),
    (dict(loader=dict(sampler=RandomSampler(range(40), replacement=True))), "samples with a RandomSampler of its own"),
    (dict(batch_size=None), "must have a batch_size"),
    *((dict(seed=seed), "seed must be a whole number of at least 0") for seed in ("abc", 1.5, -1, True)),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_gets_a_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        private(**change)


OTHERS = [
    (0, lambda _: "gpt2", TypeError, "model must be a Module, got str"),
    (1, lambda _: None, TypeError, "optimizer must be a Optimizer, got NoneType"),
    (3, lambda _: "mean", TypeError, "criterion must be callable, got str"),
    (1, lambda model: Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters())), TypeError,
     "AcceleratedOptimizer wraps an optimizer: give make_private the optimizer"),
    (1, lambda model: torch.optim.SGD(model.a.parameters()), ValueError,
     r"the optimizer lacks n\.weight, n\.bias, b\.weight: give it these"),
    (1, lambda model: torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()]), ValueError,
     "2 parameters that are not the model's"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "other", "error", "message"), OTHERS)
def test_another_model_optimizer_or_criterion_is_refused(place, other, error, message):
    given = [*parts()]
    given[place] = other(given[0])
    with pytest.raises(error, match=message):
        make_private(*given, noise_multiplier=1.0, max_grad_norm=1.0)


@pytest.mark.filterwarnings("ignore:Using a target size")  # PyTorch only warns of what is refused here
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(criterion=nn.functional.cross_entropy), "gave one number for {0} examples: it must not reduce"),
        (dict(criterion=lambda output, target: output[:2].sum(1)), r"losses of shape \(2,\) for {0} examples"),
        (
            dict(model=nn.Sequential(nn.Flatten(), nn.Linear(40, 1)), criterion=nn.MSELoss()),
            r"losses of shape \({0}, {0}\) from .*: it broadcast them",
        ),
    ],
)
def test_a_criterion_that_does_not_give_one_loss_an_example(change, message):
    made, x, y = drawn(**change)
    with pytest.raises(ValueError, match=message.format(len(x))):
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


def test_an_example_counts_once_in_a_step():
    made = private()
    batches = iter(made.data_loader)
    x, y = next(batches)
    with pytest.raises(RuntimeError, match=f"was given {2 * len(x)} examples where"):
        made.criterion(made.model(torch.cat([x, x])), torch.cat([y, y])).backward()
    made.criterion(made.model(x[:2]), y[:2]).backward()
    with pytest.raises(RuntimeError, match=f"before {len(x) - 2} examples of the data_loader's batch have gone"):
        made.optimizer.step()
    made.criterion(made.model(x[2:]), y[2:]).backward()
    x, y = next(batches)
    with pytest.raises(RuntimeError, match=r"2 samples before one step\(\): an example may be in each"):
        made.criterion(made.model(x), y).backward()


def test_a_plain_backward_is_refused():
    made, x, y = drawn()
    with pytest.raises(RuntimeError, match=r"call criterion\(\.\.\.\)\.backward\(\)"):
        nn.functional.cross_entropy(made.model(x), y).backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_validation_with_the_same_criterion(reduction):
    made, (x, y) = private(criterion=nn.CrossEntropyLoss(reduction=reduction)), data(16).tensors
    made.model.eval()
    with torch.no_grad():
        wanted = nn.functional.cross_entropy(made.model(x), y, reduction=reduction)
        assert torch.equal(made.criterion(made.model(x), y), wanted)


def test_a_sample_of_nobody_by_hand():
    made = private(sample_rate=0.1, expected_batch_size=4)
    made.skip()
    assert made.epsilon(1e-5) > 0
    assert all((p != q).any() for p, q in zip(made.model.parameters(), Net().parameters(), strict=True))
    x, y = data(4).tensors
    made.criterion(made.model(x), y).backward()
    with pytest.raises(RuntimeError, match="the sample is not empty"):
        made.skip()


def test_one_recorder_at_a_time():
    model, x = Net(), data(4).tensors[0]

    def loss(model, x):
        return model(x).sum(1)

    def nested(model, x):
        clipped_gradients(model, loss, x, 1.0)
        return loss(model, x)

    def refused(call):
        with pytest.raises(RuntimeError, match="the model is watched already"):
            call()

    refused(lambda: clipped_gradients(model, nested, x, 1.0))
    made = private(model)
    refused(lambda: clipped_gradients(model, loss, x, 1.0))
    refused(lambda: private(model))
    made.remove()
    clipped_gradients(model, loss, x, 1.0)


def test_leaving_in_the_middle_of_a_sample_forgets_it():
    made, x, y = drawn(max_physical_batch_size=2, noise_multiplier=0.0)
    step(made, x, y)
    before = flat(made.model.parameters())
    after, sizes = train(made, 1)
    seen = sum(sizes)
    # At a rate of 0.1, by the clipped sum over the expected 10 examples, and each parameter is rounded.
    assert (after - before).norm() <= 0.01 * 0.5 * seen * (1 + relative(seen)) + relative(1) * before.norm()
    twin = private()
    samples = [len(next(iter(twin.data_loader))[0]) for _ in range(2)]
    assert seen == samples[1]  # the first was begun and left, and is not drawn again


def test_a_parameter_that_the_optimizer_gets_later_is_refused():
    model = Net()
    model.a.requires_grad_(False)
    made = private(model)
    made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(RuntimeError, match="the optimizer has 5 parameters that learn, make_private saw 4"):
        made.optimizer.step()


def test_seeds_are_not_cut_to_32_bits():
    def noise_of(seed, draw=0):
        return drawn_noise({"w": torch.zeros(50)}, Randomness(seed).add_noise, 1.0, draw)["w"]

    first = noise_of(1)
    assert torch.equal(first, noise_of(1))
    for other in (noise_of(1 + 2**32), noise_of(1 + 2**64), noise_of(1, draw=1)):
        assert not torch.equal(first, other)


def test_a_copy_of_the_model_is_an_ordinary_one():
    made, x, y = drawn()
    twin = copy.deepcopy(made.model)
    nn.functional.cross_entropy(twin(x), y).backward()
    assert all(p.grad is not None for p in twin.parameters())
    step(made, x, y)


def test_an_epoch_after_a_break_is_whole():
    made = private()
    for _ in range(3):
        for x, y in itertools.islice(made.data_loader, 4):
            step(made, x, y)
    assert made.steps == 3 * 4


def head_only(net):
    net.requires_grad_(False)
    net.b.requires_grad_(True)
    return net.b


def with_adapter(net):
    return get_peft_model(net, LoraConfig(r=2, target_modules=["a"]))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (lambda net: net, lambda net: net),
        (lambda net: net, nn.Sequential),
        (head_only, lambda net: net.requires_grad_(True)),
        (lambda net: net, head_only),
        (lambda net: net, with_adapter),
    ],
    ids=["again", "around it", "the head, then all", "all, then the head", "an adapter on it"],
)
def test_epsilon_follows_the_parameters(first, then):
    net, delta = Net(), 1e-5
    released = [(1.0, 1 / 6, 7)]  # as a training of part of the model, on features that no loader gives, would have
    made = private(first(net), expected_batch_size=10, sample_rate=1 / 6)
    made._ledger.begin_with(released)
    made.remove()
    after = private(then(net), expected_batch_size=10, sample_rate=1 / 6)
    assert after.epsilon(delta) == epsilon_of(1.0, 1 / 6, 7, delta)
    elsewhere = private(copy.deepcopy(net), expected_batch_size=10, sample_rate=1 / 6)
    assert elsewhere.epsilon(delta) == 0


def test_two_models_that_become_one_share_what_both_released():
    left, right = Net(), Net()
    for part, steps in ((left, 3), (right, 4)):
        private(part, expected_batch_size=10, sample_rate=1 / 6)._ledger.begin_with([(1.0, 1 / 6, steps)])
    both = private(nn.ModuleList([left, right]), expected_batch_size=10, sample_rate=1 / 6)
    assert both.epsilon(1e-5) == pytest.approx(epsilon_of(1.0, 1 / 6, 7, 1e-5), abs=0.02)  # prv's own error, twice
    assert both.epsilon(1e-5) > epsilon_of(1.0, 1 / 6, 4, 1e-5)


def test_what_was_spent_elsewhere_can_be_given():
    made = private(spent=[(2.0, 0.1, 30)])
    assert made.epsilon(1e-5) == epsilon_of(2.0, 0.1, 30, 1e-5)
    before = made.epsilon(1e-5)
    train(made, 2)
    assert made.epsilon(1e-5) > before


@pytest.mark.parametrize("spent", [[(1.0, 0.1)], [(-1.0, 0.1, 3)], [(1.0, 1.5, 3)], [(1.0, 0.1, 0)]])
def test_what_cannot_have_been_spent_is_refused(spent):
    model = Net()
    with pytest.raises(ValueError, match=r"spent must be|σ must be|the sampling rate must be|count must be"):
        private(model, spent=spent)
    private(model)  # nothing of the first is left on it
