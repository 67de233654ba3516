"""Private training: a step beside Opacus's, the noise, the samples, ε, resuming, and what is refused."""

import copy
import functools
import gc
import math
import multiprocessing
from collections import Counter

import pytest
import torch
from accelerate import Accelerator
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset

from plpkg.clipping import clipped_gradients, make_private
from plpkg.clipping.execution import EXECUTIONS
from plpkg.clipping.training.accounting import epsilon_of
from plpkg.clipping.training.randomness import Randomness

from preloaded import Process
from rounding import assert_as_exact, sampling_error
from waiting import PATIENCE_S

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


def private(model=None, dataset=..., losses=losses, *, lr=0.1, **options):
    """A private training; with a ``sample_rate`` it has no data set."""
    model = model or Net()
    options = dict(noise_multiplier=1.0, max_grad_norm=0.5, seed=0, batch_size=10) | options
    dataset = None if "sample_rate" in options else data() if dataset is ... else dataset
    return make_private(model, torch.optim.SGD(model.parameters(), lr=lr), dataset, losses, **options)


def flat(parameters):
    return torch.cat([p.detach().flatten() for p in parameters])


def train(private, steps=3):
    """All parameters after so many steps, and the samples' sizes."""
    sizes = []
    while private.steps < steps:
        sizes.append(private.step(private.sample()).count)
    return flat(private.model.parameters()), sizes


def released(private, *sample):
    """What the optimizer gets in a step, by parameter."""
    seen = {}
    parameters = dict(private.model.named_parameters())
    hook = private.optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.clone() for name, p in parameters.items() if p.requires_grad})
    )
    private.step(*sample or [private.sample()])
    hook.remove()
    return seen


def drawn_noise(like, add, *how):
    """What is added to float32 tensors of these shapes."""
    noise = {name: torch.zeros(tensor.shape) for name, tensor in like.items()}
    add(noise, *how)
    return noise


@functools.cache
def exactly(steps):
    """What train(private(), steps) would give in float64, with float32's noise."""
    made = private(Net().double(), data(dtype=torch.float64))
    add = made._randomness.add_noise

    def add_as_float32(sums, *how):
        for name, noise in drawn_noise(sums, add, *how).items():
            sums[name] += noise

    made._randomness.add_noise = add_as_float32
    return train(made, steps)[0]


@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("execution", ["loop", *EXECUTIONS])
def test_the_steps_of_opacus(execution, monkeypatch):
    def batches(dtype=torch.float32):
        return 2 * list(DataLoader(data(dtype=dtype), batch_size=10))

    def theirs(dtype):
        model = Net().to(dtype)
        model, optimizer, criterion, _ = PrivacyEngine(accountant="prv").make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=DataLoader(data(), 10),
            criterion=nn.CrossEntropyLoss(), noise_multiplier=0.0, max_grad_norm=0.1, grad_sample_mode="ghost",
            poisson_sampling=False,
        )  # fmt: skip
        for x, y in batches(dtype):
            output = model(x)
            optimizer.zero_grad()
            criterion(output, y).backward()
            optimizer.step()
        return flat(model.parameters())

    def factors(module):  # Opacus's own but for the 1e-6 that it adds to the norm
        return (module.max_grad_norm / module.get_norm_sample()).clamp(max=1.0)

    monkeypatch.setattr(GradSampleModuleFastGradientClipping, "get_clipping_coef", factors)
    wanted, exact, before = theirs(torch.float32), theirs(torch.float64), flat(Net().parameters())
    made = private(lr=0.5, execution=execution, noise_multiplier=0.0, max_grad_norm=0.1, sample_rate=0.25)
    for batch in batches():
        made.step([batch])
    assert (wanted - before).norm() > 1e-2
    assert_as_exact(flat(made.model.parameters()) - before, wanted - before, exact - before)


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


@pytest.mark.parametrize(("count", "batch_size", "epochs"), [(75, 1, 3), (43, 10, 2)])
def test_the_noise_for_a_target_meets_it_after_all_steps_of_all_epochs(count, batch_size, epochs):
    target = dict(noise_multiplier=None, target_epsilon=3.0, target_delta=1e-3, epochs=epochs)
    made, steps = private(dataset=data(count), batch_size=batch_size, **target), math.ceil(count / batch_size)
    spent = epsilon_of(made.noise_multiplier, 1 / steps, steps * epochs, 1e-3)
    assert 3.0 - 0.01 <= spent <= 3.0  # the search's own tolerance
    for sample in made:
        made.step(sample)
    assert made.steps == steps * epochs
    assert made.epsilon(1e-3) == spent
    assert list(made) == []


def test_the_step_is_the_clipped_sum_and_noise_over_the_expected_batch():
    made = private(lr=1.0, noise_multiplier=2.0, seed=4)
    sample = made.sample()
    x, y = data()[list(sample.indices)]

    def wanted(twin, x):
        sums, _ = clipped_gradients(twin, losses, (x, y), 0.5, "loop")
        return [p - (sums[name] + noise[name]) / 10 for name, p in twin.named_parameters()]

    noise = drawn_noise(dict(made.model.named_parameters()), made._randomness.add_noise, 2.0 * 0.5, 0)
    twins = wanted(Net(), x), wanted(Net().double(), x.double())
    alone = losses(Net(), (x, y)).detach()
    shown, count = made.step(sample)
    assert count == len(sample) == len(x) != 10
    torch.testing.assert_close(shown, alone)
    assert_as_exact(made.model.parameters(), *twins)


@pytest.mark.parametrize("randomness", [dict(seed=1), dict(seed=None, secure=True)], ids=["seed", "secure"])
def test_the_noise_has_its_standard_deviation(randomness):
    def nothing(model, x):
        return 0 * model(x).sum(1)

    model = nn.Linear(100, 200)
    made = private(
        model, losses=nothing, noise_multiplier=1.5, max_grad_norm=2.0, sample_rate=0.1, batch_size=5, **randomness
    )
    steps = [5 * released(made, [torch.ones(1, 100)])["weight"] for _ in range(3)]
    n = model.weight.numel()
    for noise in steps:
        assert noise.std().item() == pytest.approx(3.0, rel=sampling_error(1 / 2, n))
        assert noise.mean().item() == pytest.approx(0, abs=sampling_error(3.0**2, n))
        share = (noise.abs() > 2 * 3.0).float().mean().item()
        assert share == pytest.approx(0.0455, abs=sampling_error(0.0455 * 0.9545, n))
    assert abs(torch.corrcoef(torch.stack(steps).flatten(1))[0, 1].item()) < sampling_error(1, n)


@pytest.mark.parametrize("randomness", [dict(seed=5), dict(seed=None, secure=True)], ids=["seed", "secure"])
def test_samples_are_poisson(randomness):
    made, draws = private(**randomness), 2000
    samples = [made._samples.sample(draw).indices for draw in range(draws)]
    counts = Counter(index for sample in samples for index in sample)
    shares = torch.tensor([counts[index] / draws for index in range(COUNT)])
    assert (shares - 0.25).abs().max() < sampling_error(0.25 * 0.75, draws)
    sizes = torch.tensor([len(sample) for sample in samples], dtype=torch.float)
    variance = COUNT * 0.25 * 0.75  # not the 0 of a shuffled epoch
    assert sizes.mean().item() == pytest.approx(10, abs=sampling_error(variance, draws))
    assert sizes.var().item() == pytest.approx(variance, rel=sampling_error(2, draws))


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("workers", [0, 2])
def test_pieces_of_a_sample_are_one_step(execution, workers):
    whole, sizes = train(private())
    loader = DataLoader(data(), batch_size=10, num_workers=workers)
    made = private(dataset=loader, batch_size=None, execution=execution, max_physical_batch_size=3)
    sample = made.sample()
    assert max(len(piece.indices) for piece in sample.pieces) <= 3
    assert [len(x) for x, _ in sample.batches()] == [len(piece.indices) for piece in sample.pieces]
    got, pieces = train(made)
    assert pieces == sizes
    assert_as_exact(got, whole, exactly(3))


def test_workers_end_with_the_loop():
    def children():
        return {child.pid for child in multiprocessing.active_children()}

    before = children()
    made = private(dataset=DataLoader(data(), batch_size=10, num_workers=2), batch_size=None)
    for sample in made:
        made.step(sample)
        assert len(children() - before) == 2
    assert children() <= before
    assert sample.indices


def test_workers_end_when_a_training_is_forgotten(monkeypatch):
    """The garbage collector finds a training in a circle of references: its workers' queues must not close first."""
    gc.collect()  # of what tests before have left
    join, ended = multiprocessing.process.BaseProcess.join, []

    def patient(process, timeout=None):
        join(process, PATIENCE_S if timeout else None)
        ended.append(not process.is_alive())

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "join", patient)
    made = private(dataset=DataLoader(data(), batch_size=10, num_workers=2), batch_size=None)
    made.step(made.sample())
    del made
    gc.collect()
    assert ended == [True, True]


def test_own_batches_are_one_step():
    made, whole = private(), private(sample_rate=0.25)
    x, y = data()[list(made.sample().indices)]
    train(made, 1)
    whole.step([(x[:2], y[:2]), (x[2:], y[2:])])
    assert_as_exact(whole.model.parameters(), flat(made.model.parameters()), exactly(1))


def test_an_empty_sample_is_a_step_of_noise():
    made = private(batch_size=1, dataset=data(6), seed=1)
    sizes = []
    for sample in made:
        before = flat(made.model.parameters())
        sizes.append(made.step(sample).count)
        assert not torch.equal(before, flat(made.model.parameters()))
    assert 0 in sizes
    assert len(sizes) == made.steps == 6
    assert [steps for *_, steps in made.accountant.history] == [6]
    own = private(sample_rate=0.1)
    assert len(own.step([]).losses) == 0
    assert own.epsilon(1e-5) > 0


def test_a_loop_that_is_broken_off_goes_on_with_the_sample_that_was_not_used():
    made, used = private(epochs=2), []
    for sample in made:
        if len(used) == 2:
            break
        made.step(sample)
        used.append(sample)
    for again in made:
        assert again is sample or made.steps > 2
        made.step(again)
    assert made.steps == 8
    straight, _ = train(private(), 8)
    assert torch.equal(flat(made.model.parameters()), straight)


def test_without_epochs_a_loop_is_the_rest_of_an_epoch():
    made = private()
    train(made, 1)
    assert sum(1 for sample in made if made.step(sample)) == 3
    assert sum(1 for sample in made if made.step(sample)) == made.steps_per_epoch == 4


def test_nothing_is_left_between_two_steps():
    made = private()
    parameters, modules = list(made.model.parameters()), list(made.model.modules())
    made.step(made.sample())
    assert all(mine is now for mine, now in zip(parameters, made.model.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
    assert all(p.grad is None and p.requires_grad for p in parameters)
    assert not made.optimizer._optimizer_step_pre_hooks
    copy.deepcopy(made.model)


def test_adam_autocast_a_scheduler_and_a_rate_that_is_set():
    def under_autocast(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return losses(model, batch)

    model = Net()
    rest = [*model.n.parameters(), *model.b.parameters()]
    adam = torch.optim.AdamW([{"params": model.a.parameters(), "lr": 1e-2}, {"params": rest}])
    made = make_private(model, adam, data(), under_autocast, batch_size=10, noise_multiplier=0.5, max_grad_norm=1.0)
    assert made.model is model
    assert made.optimizer is adam
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
    for sample in made:
        made.step(sample)
        scheduler.step()
    assert scheduler.get_last_lr()[0] == 1e-2 * 0.5**4
    adam.param_groups[0]["lr"] = adam.param_groups[1]["lr"] = 0.0
    before = flat(model.parameters())
    adam.param_groups[0]["weight_decay"] = adam.param_groups[1]["weight_decay"] = 0.0
    made.step(made.sample())
    assert torch.equal(flat(model.parameters()), before)


RUN = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from plpkg.clipping import make_private

folder, kill_after = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 8), torch.randint(0, 4, (40,)))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

def losses(model, batch):
    if private.steps == kill_after:
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

private = make_private(model, optimizer, data, losses, batch_size=10, noise_multiplier=1.0, max_grad_norm=1.0, seed=7,
                       max_physical_batch_size=4, epochs=3)
file = folder / "state.pt"
if file.exists():
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    private.load_state_dict(state["private"])
for sample in private:
    private.step(sample)
    parts = {"model": model, "optimizer": optimizer, "private": private}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
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
    with pytest.raises(ValueError, match=r"noise_multiplier=1\.0, now 2\.0"):
        private(noise_multiplier=2.0).load_state_dict(made.state_dict())
    with pytest.raises(ValueError, match="not the state of a private training"):
        made.load_state_dict({"steps": 1})


def test_a_state_stays_as_it_was():
    made = private()
    train(made, 1)
    state = made.state_dict()
    before = copy.deepcopy(state)
    train(made, 4)
    made.load_state_dict(state)
    train(made, 2)
    assert state == before


class Stream(IterableDataset):
    def __iter__(self):
        yield from data()


def loader(**options):
    return dict(dataset=DataLoader(data(), **dict(batch_size=10) | options), batch_size=None)


BAD = [
    (dict(noise_multiplier=-1.0), "noise_multiplier must be at least 0, got -1.0"),
    (dict(noise_multiplier=None), "give noise_multiplier or target_epsilon, got noise_multiplier=None"),
    (dict(target_epsilon=1.0), "got noise_multiplier=1.0 and target_epsilon=1.0"),
    (dict(noise_multiplier=None, target_epsilon=0.0), "target_epsilon must be greater than 0, got 0.0"),
    (dict(noise_multiplier=None, target_epsilon=1.0), "target_epsilon needs target_delta and epochs"),
    (dict(noise_multiplier=None, target_epsilon=1.0, target_delta=2.0, epochs=1), "target_delta must be .*, got 2.0"),
    (dict(max_grad_norm=0.0), "max_grad_norm must be greater than 0, got 0.0"),
    (dict(execution="lop"), "execution must be one of 'loop', .*, got 'lop'"),
    (dict(accountant="gdp"), "accountant must be one of 'prv', 'rdp', got 'gdp'"),
    (dict(max_physical_batch_size=0), "max_physical_batch_size must be a whole number of at least 1, got 0"),
    (dict(execution="loop", max_physical_batch_size=4), "one example at a time, got max_physical_batch_size=4"),
    (dict(epochs=0), "epochs must be a whole number of at least 1, got 0"),
    (dict(secure=True), "secure=True takes no seed, got seed=0"),
    (dict(sample_rate=0.5, batch_size=None), "sample_rate and batch_size, the expected one, must be given"),
    (dict(sample_rate=0.5, users=[1]), "users and max_physical_batch_size are about a dataset"),
    (dict(sample_rate=1.5), "sample_rate must be greater than 0 and at most 1, got 1.5"),
    (dict(batch_size=None), "batch_size, the expected number of examples in a step, is missing"),
    (dict(batch_size=0), "batch_size must be a whole number of at least 1, got 0"),
    (dict(model=Net().eval()), "the model is in evaluation mode"),
    (dict(model=nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(5))), r"1 \(BatchNorm1d\) normalises each example"),
    (dict(losses=None), "losses=None takes the own loss of a Hugging Face model, and Net has none"),
    (dict(dataset=[]), "dataset has no examples"),
    (dict(dataset=Stream()), "dataset must give examples by number, .* got a Stream"),
    (dict(dataset={"x": [1]}), "dataset must give examples by number, .* got a dict"),
    (loader() | dict(batch_size=10), "the data loader has a batch_size, 10: leave batch_size=10 out"),
    (dict(dataset=DataLoader(Stream()), batch_size=None), "the data loader of a Stream"),
    (loader(sampler=SubsetRandomSampler(range(20))), "samples with a SubsetRandomSampler of its own"),
    (loader(sampler=RandomSampler(range(40), replacement=True)), "samples with a RandomSampler of its own"),
    (loader(batch_size=None), "must have a batch_size"),
    (loader(batch_size=50, drop_last=True), "the data loader gives no batch from 40 examples"),
    *((dict(seed=seed), "seed must be a whole number of at least 0") for seed in ("abc", 1.5, -1, True)),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_gets_a_sentence(change, message):
    with pytest.raises(ValueError, match=message):
        private(**change)


OTHERS = [
    (0, lambda _: "gpt2", TypeError, "model must be a Module, got str"),
    (1, lambda _: None, TypeError, "optimizer must be a Optimizer, got NoneType"),
    (3, lambda _: "mean", TypeError, "losses must be callable, got str"),
    (3, lambda _: nn.BCEWithLogitsLoss(), TypeError, "got the criterion BCEWithLogitsLoss: .* for sample in private"),
    (1, lambda model: Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters())), TypeError,
     "AcceleratedOptimizer wraps an optimizer: give make_private the optimizer"),
    (1, lambda model: torch.optim.LBFGS(model.parameters()), ValueError, "LBFGS asks for a closure"),
    (1, lambda model: torch.optim.SparseAdam(model.parameters()), ValueError, "SparseAdam asks for .* sparse"),
    (1, lambda model: torch.optim.SGD(model.a.parameters()), ValueError,
     r"the optimizer lacks n\.weight, n\.bias, b\.weight: give it these"),
    (1, lambda model: torch.optim.SGD([*model.parameters(), *nn.Linear(2, 2).parameters()]), ValueError,
     "2 parameters that are not the model's"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "other", "error", "message"), OTHERS)
def test_another_model_optimizer_or_criterion_is_refused(place, other, error, message):
    model = Net()
    given = [model, torch.optim.SGD(model.parameters()), data(), losses]
    given[place] = other(given[0])
    with pytest.raises(error, match=message):
        make_private(*given, batch_size=10, noise_multiplier=1.0, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda output, y: nn.functional.cross_entropy(output, y), r"of shape \({0},\), got \(\) \(a reduced loss\?"),
        (lambda output, y: output[:2].sum(1), r"of shape \({0},\), got \(2,\)"),
        (lambda output, y: output, r"of shape \({0},\), got \({0}, 4\)"),
        (lambda output, y: output.sum(1).tolist(), "must be a tensor with one loss an example, got list"),
        (lambda output, y: output.detach().sum(1), "do not depend on any parameter that learns"),
    ],
)
def test_losses_that_are_not_one_an_example(given, message):
    made = private(losses=lambda model, batch: given(model(batch[0]), batch[1]))
    sample = made.sample()
    with pytest.raises(ValueError, match=message.format(len(sample))):
        made.step(sample)


def test_losses_and_weights_of_a_criterion_are_its_own_business():
    """What a criterion's mean would have divided by is nobody's guess any more."""
    weight = torch.tensor([1.0, 2.0, 4.0, 0.5])

    def weighted(model, batch):
        return nn.functional.multi_margin_loss(model(batch[0]), batch[1], weight=weight, reduction="none")

    got = released(private(losses=weighted, noise_multiplier=0.0))
    sample = list(private().sample().indices)
    sums, _ = clipped_gradients(Net(), weighted, data()[sample], 0.5, "loop")
    for name, gradient in got.items():
        torch.testing.assert_close(gradient * 10, sums[name])


def test_seeds_are_not_cut_to_32_bits():
    def noise_of(seed, draw=0):
        return drawn_noise({"w": torch.zeros(50)}, Randomness(seed).add_noise, 1.0, draw)["w"]

    first = noise_of(1)
    assert torch.equal(first, noise_of(1))
    for other in (noise_of(1 + 2**32), noise_of(1 + 2**64), noise_of(1, draw=1)):
        assert not torch.equal(first, other)


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
    made = private(first(net), sample_rate=1 / 6)
    made._ledger.begin_with(released)
    after = private(then(net), sample_rate=1 / 6)
    assert after.epsilon(delta) == epsilon_of(1.0, 1 / 6, 7, delta)
    elsewhere = private(copy.deepcopy(net), sample_rate=1 / 6)
    assert elsewhere.epsilon(delta) == 0


def test_two_models_that_become_one_share_what_both_released():
    left, right = Net(), Net()
    for part, steps in ((left, 3), (right, 4)):
        private(part, sample_rate=1 / 6)._ledger.begin_with([(1.0, 1 / 6, steps)])
    both = private(nn.ModuleList([left, right]), sample_rate=1 / 6)
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
    private(model)
