"""Privacy in whatever order a training's calls come: noise is drawn once, steps are counted, an evaluation is none."""

import copy
import functools
import itertools
import math
import random

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from plpkg.clipping import clipped_gradients, make_private
from plpkg.clipping.training import loader
from plpkg.clipping.training.accounting import epsilon_of

COUNT, WIDTH, CLASSES = 64, 6, 3
DELTA = 1e-3


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(COUNT, WIDTH, generator=generator), torch.randint(0, CLASSES, (COUNT,), generator=generator)
    )


def model():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, CLASSES)


def private(net=None, *, batch_size=16, workers=0, dataset=None, criterion=None, collate=None, stay=False, **options):
    net = net or model()
    batches = DataLoader(
        dataset or data(), batch_size=batch_size, num_workers=workers, collate_fn=collate, persistent_workers=stay
    )
    options = dict(noise_multiplier=50.0, max_grad_norm=1.0) | options
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return make_private(net, optimizer, batches, criterion or nn.CrossEntropyLoss(), **options)


def released(made):
    """A step; gives what was released: the noisy gradients as one vector."""
    made.optimizer.zero_grad()
    x, y = next(iter(made.data_loader))
    made.criterion(made.model(x), y).backward()
    made.optimizer.step()
    return torch.cat([p.grad.flatten() for p in made.model.parameters()]).clone()


def nothing(output, target):
    """A loss whose gradient is zero: what is released is noise."""
    return 0 * output.sum(1)


NOISE = dict(criterion=nothing, noise_multiplier=1.0, accountant="rdp")


def rolled_back(made):
    state = made.state_dict()
    for _ in range(3):
        yield from (made for _ in range(3))
        made.load_state_dict(state)


def made_private_again(made):
    seed = made.randomness._seed
    for _ in range(3):
        yield from (made for _ in range(2))
        made.remove()  # the last gradients stay
        made = private(made.model, seed=seed, **NOISE)


def back_to_the_best_of_several(made):
    states = []
    for _ in range(3):
        yield made
        states.append(made.state_dict())
    made.load_state_dict(states[1])
    yield made
    made.load_state_dict(states[0])
    yield from (made for _ in range(4))


@functools.cache
def spent(steps):
    """The ε of so many steps, which add up however they are grouped."""
    return epsilon_of(1.0, 0.25, steps, DELTA, accountant="rdp")


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("way", [rolled_back, made_private_again, back_to_the_best_of_several])
def test_no_noise_is_released_twice_and_no_step_is_forgotten(way, seed):
    releases = []
    for made in way(private(seed=seed, **NOISE)):
        releases.append(released(made))
        assert sum(count for *_, count in made.accountant.history) == len(releases)
        assert made.epsilon(DELTA) == pytest.approx(spent(len(releases)))
    assert all((a - b).norm() > 0.01 for a, b in itertools.combinations(releases, 2))  # fresh noise gives about 0.4


def test_a_gradient_of_the_training_before_is_in_nobodys_way():
    made = private()
    released(made)
    made.remove()
    again = private(made.model)
    next(iter(again.data_loader))
    again.load_state_dict(again.state_dict())
    x, y = next(iter(again.data_loader))
    again.criterion(again.model(x), y).backward()
    again.optimizer.step()  # without zero_grad()
    assert again.steps == 1


def test_samples_are_drawn_anew_after_going_back():
    made = private(seed=0)
    state = made.state_dict()
    first = next(iter(made.data_loader))[0]
    released(made)
    made.load_state_dict(state)
    assert not torch.equal(next(iter(made.data_loader))[0], first)


def test_a_run_that_was_killed_goes_on_in_its_life():
    whole, killed = private(seed=3), private(seed=3)
    expected = [released(whole) for _ in range(6)]
    for i in range(3):
        assert torch.equal(released(killed), expected[i])
    state, weights = killed.state_dict(), killed.model.state_dict()
    resumed = private(seed=3)
    resumed.model.load_state_dict(weights)
    resumed.load_state_dict(state)
    for i in range(3, 6):
        assert torch.equal(released(resumed), expected[i])
    assert resumed.accountant.history == whole.accountant.history


def test_a_state_loaded_where_it_was_saved_changes_nothing():
    made, twin = private(seed=3), private(seed=3)
    for _ in range(2):
        released(made), released(twin)
    made.load_state_dict(made.state_dict())
    made.remove()
    again = private(made.model, seed=3)
    again.load_state_dict(made.state_dict())
    assert torch.equal(released(again), released(twin))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("lives"), "'lives' is missing"),
        (lambda state: state.update(lives=[]), "lives must be a list with one at least"),
        (lambda state: state["lives"][0].pop("number") or state["lives"][0].update(odd=1), "not a life"),
        (lambda state: state["lives"][0].update(spent=[(50.0, 2.0, 1)]), "the sampling rate .*2"),
        (lambda state: state["lives"][0].update(spent=[(-1.0, 0.25, 1)]), "σ .*-1"),
        (lambda state: state["lives"][0].update(steps=-1), "steps .*-1"),
        (lambda state: state["lives"][0].update(spent=[]), "0 have spent, of 1 steps"),
        (lambda state: state["lives"][0].update(steps=9), "1 have spent, of 9 steps"),
        (lambda state: state.update(steps=9), "none of the lives is .* with steps=9"),
        (lambda state: state.update(life=[1]), r"none of the lives is life=\[1\]"),
        (lambda state: state.update(identity=[1]), "not the state of a private training"),
        (lambda state: state.update(left=10**12), "left must be .*, got 1000000000000"),
        (lambda state: state.update(shuffling=None), "shuffling must be .*, got None"),
    ],
)
def test_a_state_that_cannot_be_is_refused(change, message):
    made = private()
    released(made)
    state = made.state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        private().load_state_dict(state)


def test_max_epsilon_counts_what_was_released_before():
    limit = epsilon_of(50.0, 0.25, 5, DELTA)
    made = private(max_epsilon=limit, target_delta=DELTA)
    state = made.state_dict()
    for _ in range(3):
        released(made)
    made.load_state_dict(state)
    taken = 0
    while not made.done:
        released(made)
        taken += 1
    assert taken == 2
    assert made.epsilon(DELTA) <= limit
    made.remove()
    with pytest.raises(ValueError, match=r"less than the first step spends, beside ε="):
        private(made.model, max_epsilon=limit, target_delta=DELTA)


# Functions of the step


@pytest.mark.parametrize("of", ["max_grad_norm", "noise_multiplier"])
def test_a_function_is_asked_once_a_step_and_what_it_said_is_what_is_done(of):
    asked = []

    def rule(step):
        asked.append(step)
        return 10.0 / 10 ** len(asked)  # another value each time

    made = private(max_physical_batch_size=3, seed=0, **{of: rule})
    asked.clear()
    for x, y in itertools.chain.from_iterable(itertools.repeat(made.data_loader)):
        made.criterion(made.model(x), y).backward()
        made.optimizer.step()
        if made.steps == 3:
            break
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("scale", [math.inf, math.nan, 0.0, -2.0])
def test_a_loss_is_scaled_by_a_finite_positive_number(scale):
    made = private()
    x, y = next(iter(made.data_loader))
    with pytest.raises(ValueError, match=f"the scale of a private loss must be .*, got {scale}"):
        made.criterion(made.model(x), y) * torch.tensor(scale)


def test_a_model_may_have_buffers_of_nothing():
    net = model()
    net.register_buffer("nothing", torch.empty(0))
    assert len(released(private(net))) == (WIDTH + 1) * CLASSES


def test_the_noise_fits_the_norm_that_was_clipped_to():
    C = {"now": 10.0}
    made = private(noise_multiplier=1.0, max_grad_norm=lambda step: C["now"], seed=0)
    x, y = next(iter(made.data_loader))
    made.criterion(made.model(100 * x), y).backward()
    clipped = {name: total.clone() for name, total in made.progress.sums.items()}
    C["now"] = 0.01
    made.optimizer.step()
    expected = {name: torch.zeros_like(total) for name, total in clipped.items()}
    made.randomness.add_noise(expected, 10.0, 0)
    for name, p in made.model.named_parameters():
        # One rounding of each sum, and of the mean.
        torch.testing.assert_close(p.grad * 16, clipped[name] + expected[name], rtol=1e-6, atol=1e-5)


def test_an_adaptive_rule_does_not_spend_more_than_it_may():
    sigma = {"now": 50.0}
    limit = epsilon_of(50.0, 0.25, 10, DELTA)
    made = private(noise_multiplier=lambda step: sigma["now"], max_epsilon=limit, target_delta=DELTA)
    released(made)
    sigma["now"] = 20.0
    while not made.done:
        released(made)
    assert made.epsilon(DELTA) <= limit
    assert made.steps < 10


# Loops over the data loader


@pytest.mark.parametrize(("workers", "stay"), [(0, False), (2, False), (2, True)])
def test_loops_side_by_side_draw_samples_of_their_own(workers, stay):
    made = private(seed=0, workers=workers, stay=stay)
    loops = [iter(made.data_loader) for _ in range(3)]
    pieces = []
    for _ in range(2):
        for loop in loops:
            x, y = next(loop)
            made.criterion(made.model(x), y).backward()
            pieces.append(made.progress.piece)
            made.optimizer.step()
    assert len({piece.draw for piece in pieces}) == len(pieces)
    assert made.steps == len(pieces)


def test_no_sample_is_drawn_twice_when_a_loop_was_left():
    made, draws = private(seed=0), []
    for _ in range(3):
        for x, y in itertools.islice(made.data_loader, 2):
            draws.append(made.progress.piece.draw)
            made.criterion(made.model(x), y).backward()
            made.optimizer.step()
    assert len(set(draws)) == 6


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_shuffled_epochs_that_are_left_are_all_spent(steps):
    made, seen = private(seed=0, poisson_sampling=False, dataset=TensorDataset(*data()[:12]), batch_size=4), []
    next(iter(made.data_loader))
    for batches in (itertools.islice(made.data_loader, steps), made.data_loader):
        for x, y in batches:
            seen += made.progress.piece.indices
            made.criterion(made.model(x), y).backward()
            made.optimizer.step()
    spent = sum(count for *_, count in made.accountant.history)
    assert spent >= max(map(seen.count, seen))  # each time that an example takes part is a mechanism


def evaluate(made):
    """What people write, in each of its forms."""
    made.model.eval()
    with torch.no_grad():
        for x, y in made.data_loader:
            made.criterion(made.model(x), y)
    made.model.train()


def test_shuffled_epochs_that_are_left_or_evaluated_stay_below_max_epsilon():
    limit = epsilon_of(2.0, 1.0, 2, DELTA, accountant="rdp") * 1.01
    limited = dict(accountant="rdp", max_epsilon=limit, target_delta=DELTA)
    made = private(poisson_sampling=False, noise_multiplier=2.0, **limited)
    for _ in range(4):
        evaluate(made)
        for x, y in itertools.islice(made.data_loader, 1):
            made.criterion(made.model(x), y).backward()
            made.optimizer.step()
    assert made.steps == 2
    assert made.done
    assert made.epsilon(DELTA) <= limit


def test_an_evaluation_takes_no_step_of_noise():
    made = private(batch_size=1, dataset=TensorDataset(*data()[:8]))  # a third of the samples are empty
    before = made.model.weight.clone()
    for _ in range(5):
        evaluate(made)
    assert torch.equal(made.model.weight, before)
    assert made.steps == 0
    assert made.epsilon(DELTA) == 0
    released(made)
    assert made.steps >= 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loop_without_gradients_is_an_evaluation_in_training_mode_too(mode):
    made = private(batch_size=1, dataset=TensorDataset(*data()[:8]))
    with mode():
        for x, _ in made.data_loader:
            made.model(x)
    assert made.steps == 0


def test_an_evaluation_in_the_middle_of_an_epoch_changes_nothing():
    plain, made = private(seed=0), private(seed=0)
    for each in (plain, made):
        for i, (x, y) in enumerate(each.data_loader):
            if each is made and i % 2:
                evaluate(made)
            each.criterion(each.model(x), y).backward()
            each.optimizer.step()
            if each is made:
                evaluate(made)
    assert made.steps == plain.steps == len(made.data_loader)
    assert made.accountant.history == plain.accountant.history


def test_a_loop_that_turns_to_training_by_itself_is_a_training():
    """As transformers' Trainer does, which calls ``model.train()`` in each step."""
    made = private(batch_size=1, dataset=TensorDataset(*data()[:8]), seed=0)
    trained = 0
    while made.steps < 400:
        made.model.eval()
        for x, y in made.data_loader:
            made.model.train()
            made.criterion(made.model(x), y).backward()
            made.optimizer.step()
            trained += 1
            made.model.eval()
    # An empty sample is a step of noise; those at the end of a loop are in nobody's training.
    chance = (1 - 1 / 8) ** 8
    deviation = math.sqrt(made.steps * chance * (1 - chance))
    assert made.steps - trained > made.steps * chance * 7 / 8 - 6 * deviation > 0
    assert sum(count for *_, count in made.accountant.history) == made.steps


# What puts examples together


def mixup(examples):
    x, y = default_collate(examples)
    share = np.random.default_rng(0).beta(0.4, 0.4)
    return share * x + (1 - share) * x.roll(1, 0), y


def centred(examples):
    x, y = default_collate(examples)
    return {"x": x - x.mean(0), "y": y}


def ranked(examples):
    x, _ = default_collate(examples)
    return x, x.sum(1).argsort().argsort() % CLASSES


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", [mixup, centred, ranked])
def test_a_collate_function_that_mixes_is_refused(collate, workers, monkeypatch):
    monkeypatch.setattr(loader, "FIRST", 1000)  # one look misses it where the other example is the right one
    made = private(collate=collate, workers=workers)
    with pytest.raises(ValueError, match="collate_fn mixes examples: beside others it makes something else"):
        list(itertools.chain.from_iterable(itertools.repeat(made.data_loader, 10)))


def noisy(examples):
    x, y = default_collate(examples)
    return x + torch.randn_like(x) + random.random() + torch.from_numpy(np.random.rand(*x.shape)), y


def by_size(examples):
    return default_collate(sorted(examples, key=lambda example: -example[0].sum().item()))


def padded(examples):
    """Texts of several lengths; it takes its examples apart, as tokenizers' ``pad`` does."""
    texts = [example[0][: 2 + int(example[1])] for example in examples]
    return {"x": nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=float("nan"))}


def end_to_end(examples):
    """Texts of several lengths without padding, and where each begins."""
    texts = [example[0][: 1 + int(example[1])] for example in examples]
    return torch.cat(texts), torch.tensor([0, *map(len, texts[:-1])]).cumsum(0)


class Drawing:
    """Draws from a generator of its own."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __call__(self, examples):
        x, y = default_collate(examples)
        return x * torch.from_numpy(self.generator.random(x.shape)), y


@pytest.mark.parametrize("collate", [default_collate, noisy, by_size, padded, end_to_end, Drawing()])
def test_a_collate_function_that_mixes_nothing_is_taken(collate, monkeypatch):
    monkeypatch.setattr(loader, "FIRST", 1000)
    for seed in range(4):
        made = private(collate=collate, seed=seed)
        assert len(list(made.data_loader)) == len(made.data_loader)


def test_a_look_at_the_collate_function_changes_no_draw():
    examples = [data()[i] for i in range(5)]
    drawn = []
    for collate in (noisy, private(collate=noisy).data_loader.collate_fn):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        drawn += [collate(examples)[0], torch.rand(1)]
    assert all(map(torch.equal, drawn[:2], drawn[2:]))


# What people write


@pytest.mark.parametrize(
    "write", [lambda loss: loss.mean().backward(), lambda loss: loss.sum().backward(retain_graph=True)]
)
def test_a_loss_that_is_averaged_and_whose_graph_is_retained_goes_backward(write):
    made, twin = private(seed=0), private(seed=0)
    x, y = next(iter(made.data_loader))
    next(iter(twin.data_loader))
    write(made.criterion(made.model(x), y))
    twin.criterion(twin.model(x), y).backward()
    assert all(torch.equal(made.progress.sums[name], total) for name, total in twin.progress.sums.items())


def test_a_loss_goes_backward_as_it_is():
    made = private()
    x, y = next(iter(made.data_loader))
    with pytest.raises(TypeError, match="goes backward as it is, to all that learns: call"):
        made.criterion(made.model(x), y).backward(create_graph=True)
    with pytest.raises(TypeError, match=r"gives no gradients of single tensors: call backward\(\)"):
        torch.autograd.grad(made.criterion(made.model(x), y), list(made.model.parameters()))
    with pytest.raises(TypeError, match="gradient_accumulation_steps=1 in a Trainer"):
        made.criterion(made.model(x), y) / 4


def test_a_gradient_within_the_loss_needs_the_loop():
    def penalised(made, x):
        x = x.requires_grad_()
        output = made.model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return made.criterion(output, (slope.norm(dim=1) - 1).square())

    def losses(output, penalty):
        return output.sum(1) + penalty

    net = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))
    made = private(net, criterion=losses)
    with pytest.raises(RuntimeError, match=r"where a loss has a gradient in it.*execution='loop'"):
        penalised(made, next(iter(made.data_loader))[0])
    made.remove()
    made = private(net, criterion=losses, execution="loop", max_grad_norm=1e6)
    x, total = next(iter(made.data_loader))[0], 0
    penalised(made, x).backward()
    x = x.detach().requires_grad_()
    output = net(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    total = output.sum() + (slope.norm() - 1).square()
    expected = torch.autograd.grad(total, list(net.parameters()))  # the last bias adds nothing to a slope
    for (name, _), gradient in zip(net.named_parameters(), expected, strict=True):
        torch.testing.assert_close(made.progress.sums[name], gradient)


@pytest.mark.parametrize(
    ("users", "message"),
    [
        (torch.zeros(COUNT, 1), r"of shape \(64,\), got \(64, 1\)"),
        (torch.tensor([0.0] * 63 + [float("nan")]), r"users\[63\]=nan is nobody"),
        ([None, *range(63)], r"users\[0\]=None is nobody"),
        (range(63), "each of 64 examples is, got 63"),
        (64, "each of 64 examples is, got 64"),
        ([[1]] * 64, r"users\[0\]=\[1\] is nobody"),
        ([(1, torch.ones(2))] * 64, r"users\[0\]=\(1, tensor.* is nobody"),
        ([object() for _ in range(64)], r"users\[0\]=<object .* is nobody"),
    ],
)
def test_users_that_nobody_can_tell_apart(users, message):
    with pytest.raises(ValueError, match=message):
        private(users=users)


def test_a_model_without_shapes_is_to_be_run_first():
    with pytest.raises(ValueError, match="weight has no shape yet: run the model once before"):
        private(nn.LazyLinear(CLASSES))


def test_a_forward_pass_that_nobody_saw():
    made = private()
    x, y = next(iter(made.data_loader))
    with pytest.raises(ValueError, match="the criterion was given what the model did not give: call the model"):
        made.criterion(made.model.forward(x), y)


def test_an_example_that_is_left_out_is_missed():
    made = private()
    x, y = next(iter(made.data_loader))
    made.criterion(made.model(x[1:]), y[1:]).backward()
    with pytest.raises(RuntimeError, match=r"before 1 examples .* have gone backward .*give them a loss of 0"):
        made.optimizer.step()


def test_training_goes_on_after_an_example_that_is_not_a_number():
    made = private(seed=0)
    loop = iter(made.data_loader)
    x, y = next(loop)
    x[0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"example 0 of .* is not finite: .* or call restart"):
        made.criterion(made.model(x), y).backward()
    made.restart()
    x, y = next(loop)
    made.criterion(made.model(x), y).backward()
    made.optimizer.step()
    assert made.steps == 1


# Any module


class Attending(nn.Module):
    """Reads a mask ``(seq, seq)`` and a table ``(rows, width)``, which all examples share."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.kind, self.attention = kind, nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, mask, table, rows):
        z = self.embed(x) + table[rows][:, None]
        z = z + self.attention(z, z, z, attn_mask=mask, need_weights=False)[0]
        return self.head((z + z.mean(0) if self.kind == "mixing" else z).mean(1))


def arguments(batch, seq, rows):
    generator = torch.Generator().manual_seed(2)
    x, table = torch.randn(batch, seq, WIDTH, generator=generator), torch.randn(rows, 8, generator=generator)
    mask = torch.triu(torch.full((seq, seq), -math.inf), 1)
    return x, mask, table, torch.randint(0, rows, (batch,), generator=generator)


def by_hand(net):
    return make_private(
        net, torch.optim.SGD(net.parameters(), lr=0.1), None, nn.CrossEntropyLoss(), sample_rate=0.5,
        expected_batch_size=4, noise_multiplier=0.0, max_grad_norm=0.5,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch.func goes example by example
@pytest.mark.parametrize(("batch", "seq", "rows"), [(4, 4, 7), (5, 4, 5), (5, 4, 7), (4, 6, 4), (2, 2, 2), (3, 1, 3)])
def test_what_all_examples_share_may_be_as_long_as_the_batch_or_not(batch, seq, rows):
    net = Attending("apart")
    x, mask, table, places = arguments(batch, seq, rows)
    y = torch.arange(batch) % CLASSES
    expected = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for i in range(batch):
        loss = nn.functional.cross_entropy(net(x[i : i + 1], mask, table, places[i : i + 1]), y[i : i + 1])
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name] += gradient * min(1, 0.5 / norm)
    made = by_hand(net)
    made.criterion(net(x, mask, table, places), y).backward()
    for name, total in expected.items():
        torch.testing.assert_close(made.progress.sums[name], total, rtol=1e-5, atol=1e-6)


def test_a_shared_argument_hides_no_mixing():
    net = Attending("mixing")
    with pytest.raises(ValueError, match="examples are mixed"):
        by_hand(net).criterion(net(*arguments(4, 4, 4)), torch.arange(4) % CLASSES).backward()


class Recurrent(nn.Module):
    """What no other execution takes: a fused kernel, and a weight that is used past its layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return nn.functional.linear(self.rnn(x[:, None])[0][:, 0] @ self.head.weight.T, torch.eye(CLASSES))


@pytest.mark.parametrize("options", [{}, {"clipping": "per_layer"}, {"users": [i % 20 for i in range(COUNT)]}])
def test_the_loop_trains_any_module(options):
    made = private(Recurrent(), execution="loop", noise_multiplier=0.0, seed=0, **options)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    inputs, targets, owners = [], [], []
    for x, y in made.data_loader:
        assert len(x) == 1
        made.criterion(made.model(x), y).backward()
        inputs.append(x)
        targets.append(y)
        owners += made.progress.piece.owners
        made.optimizer.step()
        if made.steps:
            break
    gradients = {name: p.grad * made.expected_batch_size for name, p in made.model.named_parameters()}
    made.remove()
    made.model.load_state_dict(before)
    users = owners if "users" in options else None

    def losses(net, batch):
        x, y, theirs = batch  # a user's loss is the mean over all that is theirs
        return nn.functional.cross_entropy(net(x), y, reduction="none") / theirs

    theirs = torch.tensor([owners.count(owner) if users else 1 for owner in owners])
    batch = torch.cat(inputs), torch.cat(targets), theirs
    sums, _ = clipped_gradients(
        made.model, losses, batch, 1.0, "loop", users=users, clipping=options.get("clipping", "flat")
    )
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, sums[name], rtol=1e-5, atol=1e-6)


def test_the_loop_takes_one_example_at_a_time():
    with pytest.raises(
        ValueError, match=r"execution='loop' takes one example at a time, got max_physical_batch_size=4"
    ):
        private(execution="loop", max_physical_batch_size=4)
    net = Recurrent()
    made = make_private(
        net, torch.optim.SGD(net.parameters(), lr=0.1), None, nn.CrossEntropyLoss(), sample_rate=0.25,
        expected_batch_size=16, noise_multiplier=1.0, max_grad_norm=1.0, execution="loop",
    )  # fmt: skip
    x, y = data()[:2]
    with pytest.raises(RuntimeError, match="execution='loop' takes one example at a time, got 2"):
        made.criterion(net(x), y).backward()


def test_the_loop_refuses_what_keeps_something_of_examples():
    class Keeps(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, CLASSES)
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, x):
            self.seen += x.detach().sum(0)
            return super().forward(x)

    made = private(Keeps(), execution="loop")
    with pytest.raises(ValueError, match="seen: the model changes this as it reads examples"):
        released(made)


class Bag(nn.Module):
    """Words without padding, and where each example's begin."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.head = nn.EmbeddingBag(20, 8), nn.Linear(8, CLASSES)

    def forward(self, words, offsets):
        return self.head(self.bag(words, offsets))


def bag(examples):
    words, labels = zip(*examples, strict=True)
    begins = torch.tensor([0, *map(len, words[:-1])]).cumsum(0)
    return torch.cat(words), begins, torch.tensor(labels)


def texts():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(0, 20, (2 + i % 5,), generator=generator), i % CLASSES) for i in range(16)]


def test_words_without_padding_are_nobody_s_rows():
    made = private(Bag(), dataset=texts(), batch_size=8, collate=bag)
    words, begins, _ = next(iter(made.data_loader))
    with pytest.raises(ValueError, match=r"or they are not along the first dimension of a tensor of shape .*'loop'"):
        made.model(words, begins)


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.inner = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.inner(self.attention(x, x, x, need_weights=False)[0].mean(1)))


def adapted(**options):
    torch.manual_seed(0)
    return get_peft_model(Attentive(), LoraConfig(r=2, init_lora_weights=False, **options)).train()


def sequences():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, 4, 8, generator=generator), torch.arange(16) % CLASSES)


MERGED = {
    "on an attention": dict(target_modules=["attention"]),
    "on parameters": dict(target_modules=[], target_parameters=["inner.weight"]),
}


@pytest.mark.parametrize("options", MERGED.values(), ids=MERGED)
def test_lora_that_is_merged_as_it_runs_is_named(options):
    with pytest.raises(ValueError, match=r"puts its weights into those of the layer below as it runs.*='loop' takes"):
        private(adapted(**options), dataset=sequences())


@pytest.mark.parametrize("kind", ["words without padding", *MERGED])
def test_the_loop_takes_what_is_flat_or_merged(kind):
    net, dataset = (adapted(**MERGED[kind]), sequences()) if kind in MERGED else (Bag(), texts())
    twin, collate = copy.deepcopy(net), None if kind in MERGED else bag
    made = private(
        net, dataset=dataset, batch_size=8, collate=collate, execution="loop", noise_multiplier=0.0, seed=0
    )  # fmt: skip
    learning = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    expected = {name: torch.zeros_like(p) for name, p in learning.items()}
    for *inputs, label in made.data_loader:
        loss = nn.functional.cross_entropy(twin(*inputs), label)
        parts = torch.autograd.grad(loss, list(learning.values()))
        norm = torch.cat([part.flatten() for part in parts]).norm()
        for name, part in zip(learning, parts, strict=True):
            expected[name] += part * min(1, 1 / norm)
        made.criterion(net(*inputs), label).backward()
        made.optimizer.step()
        if made.steps:
            break
    for name, p in net.named_parameters():
        if p.requires_grad:  # the expected size of a sample is 8
            torch.testing.assert_close(p.grad * 8, expected[name], rtol=1e-5, atol=1e-6)
