"""Privacy in whatever order a training's calls come: noise is drawn once, steps are counted, samples are used once."""

import copy
import functools
import itertools
import math
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from plpkg.clipping import clipped_gradients, make_private
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


def entropy(model, batch):
    return nn.functional.cross_entropy(model(*batch[:-1]), batch[-1], reduction="none")


def private(net=None, dataset=..., losses=entropy, *, collate=None, **options):
    net = net or model()
    options = dict(noise_multiplier=50.0, max_grad_norm=1.0) | options
    if "sample_rate" not in options:
        dataset = data() if dataset is ... else dataset
        dataset = DataLoader(dataset, batch_size=options.pop("batch_size", 16), collate_fn=collate)
    else:
        dataset = None
    learning = [p for p in net.parameters() if p.requires_grad]
    return make_private(net, torch.optim.SGD(learning, lr=0.1), dataset, losses, **options)


def seen_by_the_optimizer(made, *sample):
    """What was released in a step: the noisy gradients, by name."""
    gradients = {}
    parameters = dict(made.model.named_parameters())

    def keep(*_):
        gradients.update({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})

    hook = made.optimizer.register_step_pre_hook(keep)
    made.step(*sample or [made.sample()])
    hook.remove()
    return gradients


def released(made):
    """The same as one vector."""
    return torch.cat([gradient.flatten() for gradient in seen_by_the_optimizer(made).values()])


def nothing(model, batch):
    """A loss whose gradient is zero: what is released is noise."""
    return 0 * model(batch[0]).sum(1)


NOISE = dict(losses=nothing, noise_multiplier=1.0, accountant="rdp")


def rolled_back(made):
    state = made.state_dict()
    for _ in range(3):
        yield from (made for _ in range(3))
        made.load_state_dict(state)


def made_private_again(made):
    seed = made._randomness._seed
    for _ in range(3):
        yield from (made for _ in range(2))
        made = private(made.model, seed=seed, **NOISE)


def two_at_a_time(made):
    """Both were made before the first step."""
    other = private(made.model, seed=made._randomness._seed, **NOISE)
    for _ in range(4):
        yield made
        yield other


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
@pytest.mark.parametrize("way", [rolled_back, made_private_again, two_at_a_time, back_to_the_best_of_several])
def test_no_noise_is_released_twice_and_no_step_is_forgotten(way, seed):
    releases = []
    for made in way(private(seed=seed, **NOISE)):
        releases.append(released(made))
        assert sum(count for *_, count in made.accountant.history) == len(releases)
        assert made.epsilon(DELTA) == pytest.approx(spent(len(releases)))
    assert all((a - b).norm() > 0.01 for a, b in itertools.combinations(releases, 2))  # fresh noise gives about 0.4


def test_samples_are_drawn_anew_after_going_back():
    made = private(seed=0)
    state, first = made.state_dict(), made.sample()
    released(made)
    made.load_state_dict(state)
    assert made.sample().indices != first.indices


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
    again = private(made.model, seed=3)
    again.load_state_dict(made.state_dict())
    assert torch.equal(released(again), released(twin))


def test_max_epsilon_counts_what_was_released_before():
    limit = epsilon_of(50.0, 0.25, 5, DELTA)
    made = private(max_epsilon=limit, target_delta=DELTA)
    state = made.state_dict()
    for _ in range(3):
        released(made)
    made.load_state_dict(state)
    taken = 0
    while not made.done:
        taken += sum(1 for sample in made if made.step(sample))
    assert taken == 2
    assert made.epsilon(DELTA) <= limit
    with pytest.raises(RuntimeError, match=r"a step beyond the 2 that max_epsilon allows"):
        made.step(made.sample())
    with pytest.raises(ValueError, match=r"less than the first step spends, beside ε="):
        private(made.model, max_epsilon=limit, target_delta=DELTA)


# Functions of the step


def test_schedules_of_noise_and_of_c():
    sigmas, norms = [3.0, 2.0, 1.0], [0.1, 0.2, 0.4]
    made, seen = private(noise_multiplier=sigmas.__getitem__, max_grad_norm=norms.__getitem__), []
    made._randomness.add_noise = lambda sums, std, draw: seen.append((std, [part.clone() for part in sums.values()]))
    samples = []
    for _ in range(3):
        samples.append(made.step(made.sample()).count)
    for (std, sums), sigma, norm, count in zip(seen, sigmas, norms, samples, strict=True):
        assert std == pytest.approx(sigma * norm)
        size = torch.cat([part.flatten() for part in sums]).norm().item()
        assert 0 < size <= count * norm * (1 + 1e-5)  # a sum of so many, rounded
    assert made.accountant.history == [(sigma, 1 / 4, 1) for sigma in sigmas]


@pytest.mark.parametrize("of", ["max_grad_norm", "noise_multiplier"])
def test_a_function_is_asked_once_a_step_and_what_it_said_is_what_is_done(of):
    asked = []

    def rule(step):
        asked.append(step)
        return 10.0 / 10 ** len(asked)  # another value each time

    made = private(max_physical_batch_size=3, seed=0, **{of: rule})
    asked.clear()
    for _ in range(3):
        made.step(made.sample())
    assert asked == [0, 1, 2]


def test_a_schedule_is_resumed_where_it_was():
    def begun(scale=1.0):
        return private(noise_multiplier=lambda step: scale / (1 + step))

    made, resumed = begun(), begun()
    released(made), released(made)
    resumed.load_state_dict(made.state_dict())
    assert resumed.noise_multiplier == made.noise_multiplier == 1 / 3
    with pytest.raises(ValueError, match=r"noise_multiplier=0\.33.*, now 0\.66"):
        begun(2.0).load_state_dict(made.state_dict())


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


def test_one_c_for_each_layer():
    net = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    made = private(net, max_grad_norm=[0.3, 0.4], clipping="per_layer", noise_multiplier=0.0)
    assert made.layers == ["0", "2"]
    assert made.mechanism.clip.sensitivity == pytest.approx(0.5)
    batch = data()[list(made.sample().indices)]
    sums, _ = clipped_gradients(net, entropy, batch, [0.3, 0.4], "loop", clipping="per_layer")
    for name, gradient in seen_by_the_optimizer(made).items():
        torch.testing.assert_close(gradient * 16, sums[name], rtol=1e-5, atol=1e-6)


REFUSED = [
    (dict(noise_multiplier=lambda step: -1.0), "noise_multiplier must be at least 0, got -1.0"),
    (dict(noise_multiplier=lambda step: None), "noise_multiplier must be at least 0, got None"),
    (dict(max_grad_norm=lambda step: -1.0), "max_grad_norm must be greater than 0, got -1.0"),
    (dict(max_grad_norm=lambda step: None), "max_grad_norm must be greater than 0, got None"),
    (dict(max_grad_norm=[1.0, 1.0], clipping="per_layer"), "max_grad_norm has 2 norms for 1 layers"),
    (dict(max_grad_norm=[1.0, 1.0]), r"max_grad_norm=\[1\.0, 1\.0\]: one for each layer needs clipping='per_layer'"),
    (dict(max_epsilon=1.0), r"max_epsilon=1\.0 needs a target_delta"),
    (dict(max_epsilon=0.1, target_delta=1e-5, noise_multiplier=0.5), "less than the first step spends"),
    (dict(max_epsilon=0.0, target_delta=1e-5), "max_epsilon must be greater than 0"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_schedules_norms_and_budgets_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        private(**options)


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


# Wrong orders, wrappers, hooks, threads, and exceptions in the middle


def by_hand(net=None, losses=entropy, **options):
    options = dict(noise_multiplier=0.0, max_grad_norm=0.5, sample_rate=0.5, batch_size=4) | options
    return private(net, losses=losses, **options)


def unchanged(made, call, error, message):
    """It ends in a sentence; nothing is spent or changed, nothing is left, and the training goes on."""
    before, steps = [p.clone() for p in made.model.parameters()], made.steps
    parameters = list(made.model.parameters())
    with pytest.raises(error, match=message):
        call()
    assert made.steps == steps
    assert all(map(torch.equal, before, made.model.parameters()))
    assert all(mine is now for mine, now in zip(parameters, made.model.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in made.model.modules())
    assert all(p.grad is None and p.requires_grad and not p._backward_hooks for p in made.model.parameters())
    made.step(made.sample() if made._samples else [data()[:3]])
    assert made.steps == steps + 1


def a_used_one(made):
    sample = made.sample()
    made.step(sample)
    return sample


def another_piece(made):
    sample = made.sample()
    other = copy.copy(sample)
    object.__setattr__(other, "pieces", sample.pieces * 2)
    return other


def exchanged(made):
    sample = private(seed=5).sample()
    mine = copy.copy(made.sample())
    object.__setattr__(mine, "pieces", sample.pieces)
    return mine


def later_one(made):
    return made._samples.sample(made.steps + 1)


def older_than_a_state(made):
    state, sample = made.state_dict(), made.sample()
    made.load_state_dict(state)
    return sample


NOT_THE_ONE = "this sample is not the one of step"
SAMPLES = {
    "used": (a_used_one, NOT_THE_ONE),
    "of another run": (lambda made: private(seed=0).sample(), NOT_THE_ONE),
    "a copy with more": (another_piece, NOT_THE_ONE),
    "exchanged": (exchanged, NOT_THE_ONE),
    "too early": (later_one, NOT_THE_ONE),
    "drawn before a state was loaded": (older_than_a_state, NOT_THE_ONE),
    "batches": (lambda made: [data()[:3]], r"was given a list, and takes the sample that was drawn: for sample in"),
    "a batch": (lambda made: data()[:3], "was given a tuple"),
    "none": (lambda made: None, "was given a NoneType"),
}


@pytest.mark.parametrize(("sample", "message"), SAMPLES.values(), ids=SAMPLES)
def test_a_sample_is_used_once_and_in_order(sample, message):
    made = private(seed=0)
    given = sample(made)
    unchanged(made, lambda: made.step(given), RuntimeError, message)


def test_a_sample_cannot_be_written_to():
    sample = private().sample()
    for name in ("number", "pieces", "indices"):
        with pytest.raises(AttributeError):
            setattr(sample, name, ())
    assert sample.users is None


def test_users_are_not_given_to_a_sample_of_the_package():
    made = private()
    unchanged(made, lambda: made.step(made.sample(), users=[1]), RuntimeError, "was given users")


OWN = {
    "a batch alone": (lambda made: made.step(data()[:3]), RuntimeError, "takes a list of batches, .* got a tuple"),
    "sample()": (lambda made: made.sample(), RuntimeError, r"you sample yourself: call private\.step\(pieces\)"),
    "a loop": (lambda made: list(made), RuntimeError, "you sample yourself"),
    "tensors apart": (lambda made: made.step([(torch.ones(3, 6), torch.ones(2))]), ValueError, "one first dimension"),
    "a user in two batches": (
        lambda made: made.step([data()[:2], data()[2:4]], users=["a", "b", "b", "c"]), ValueError, "user 'b' has"),
    "too few users": (lambda made: made.step([data()[:2]], users=["a"]), ValueError, "each of 2 examples is, got 1"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), OWN.values(), ids=OWN)
def test_own_batches_in_a_wrong_shape(call, error, message):
    made = by_hand()
    unchanged(made, lambda: call(made), error, message)


def test_users_in_each_step_or_in_none():
    made = by_hand()
    made.step([data()[:3]], users=["a", "b", "a"])
    with pytest.raises(RuntimeError, match="users come with each step or with none"):
        made.step([data()[:3]])


def test_own_users_are_clipped_once():
    x, y = data()[:6]
    made, names = by_hand(max_grad_norm=0.1), list("aababb")
    got = seen_by_the_optimizer(by_hand(max_grad_norm=0.1), [(x, y)])  # examples
    users = {}
    hook = made.optimizer.register_step_pre_hook(
        lambda *_: users.update({n: p.grad.clone() for n, p in made.model.named_parameters()})
    )
    made.step([(x, y)], users=names)
    hook.remove()
    sums, _ = clipped_gradients(model(), lambda net, batch: entropy(net, batch) / 3, (x, y), 0.1, "loop", users=names)
    for name, gradient in users.items():
        torch.testing.assert_close(gradient * 4, sums[name], rtol=1e-5, atol=1e-7)
        assert not torch.equal(gradient, got[name])


OLD = ["criterion", "data_loader", "skip", "paced", "remove", "restart"]


@pytest.mark.parametrize("name", OLD)
def test_a_loop_of_the_old_form_ends_in_a_sentence_that_shows_the_new_one(name):
    with pytest.raises(AttributeError, match=r"a step is a call, for sample in private: private\.step\(sample\)"):
        getattr(private(), name)


def test_unpacked_as_before():
    with pytest.raises(RuntimeError, match=r"was not used: for sample in private: private\.step\(sample\)"):
        _, _, _, _ = private()


def raw_backward(made):
    entropy(made.model, data()[:3]).sum().backward()
    made.step(made.sample())


def test_a_gradient_of_the_user_s_is_not_released():
    made = private()
    with pytest.raises(RuntimeError, match=r"weight has a gradient that was not clipped: no backward\(\) beside"):
        raw_backward(made)
    made.optimizer.zero_grad(set_to_none=False)  # zeros are none
    made.step(made.sample())


def in_the_losses(act):
    """A losses function that does something beside."""

    def losses(model, batch):
        act(model, batch)
        return entropy(model, batch)

    return losses


def nested(net, batch):
    clipped_gradients(net, entropy, batch, 1.0)


def raises(error):
    def act(net, batch):
        raise error

    return act


def moves(net, batch):
    with torch.no_grad():
        net.weight += batch[0].sum()


def keeps(net, batch):
    net.bias.data.copy_(batch[0][0, :CLASSES])


def breaks(net, batch):
    net.broken = True


def backward_within(net, batch):
    entropy(net, batch).sum().backward()


IN_THE_MIDDLE = {
    "another clipping": (nested, RuntimeError, "is in a private step, or another call that clips: one at a time"),
    "an error": (raises(KeyError("x")), KeyError, "x"),
    "an interrupt": (raises(KeyboardInterrupt()), KeyboardInterrupt, None),
    "a loss that is no number": (breaks, FloatingPointError, "the gradient of example 0 of .* is not finite"),
    "a backward": (backward_within, RuntimeError, r"saw a backward pass that clips nothing"),
    "weights that move": (moves, ValueError, "weight: the model changes this as it reads examples"),
    "weights that keep an example": (keeps, ValueError, "bias: the model changes this|examples are mixed"),
}  # fmt: skip


@pytest.mark.parametrize("execution", ["book_keeping", "ghost", "loop"])
@pytest.mark.parametrize(("act", "error", "message"), IN_THE_MIDDLE.values(), ids=IN_THE_MIDDLE)
def test_what_happens_in_the_middle(act, error, message, execution):
    if execution == "loop" and act is backward_within:
        pytest.skip("there it gives nothing away")
    acts = [True]

    def losses(model, batch):
        if acts:
            act(model, batch)
        found = entropy(model, batch)
        return found * math.nan if model.__dict__.pop("broken", False) else found

    made = private(losses=losses, execution=execution)
    steps = made.steps

    def call():
        try:
            made.step(made.sample())
        finally:
            acts.clear()
            with torch.no_grad():
                made.model.load_state_dict(model().state_dict())

    assert steps == 0
    unchanged(made, call, error, message)


def test_a_step_within_a_step():
    made = private(losses=in_the_losses(lambda net, batch: made.step(made.sample())))
    with pytest.raises(RuntimeError, match="a step within a step, or of another thread: one at a time"):
        made.step(made.sample())
    assert made.steps == 0


@pytest.mark.parametrize("call", ["step", "evaluation"])
def test_another_thread(call):
    errors = []

    def elsewhere():
        try:
            made.step(made.sample()) if call == "step" else made.model(data()[:2][0])
        except RuntimeError as error:
            errors.append(str(error))

    def meanwhile(net, batch):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    made = private(losses=in_the_losses(meanwhile))
    made.step(made.sample())
    assert made.steps == 1
    assert errors
    assert "one at a time" in errors[0] or "another thread may run it when that is over" in errors[0]


def test_an_optimizer_s_step_that_fails_has_been_spent():
    made = private()

    def fails(*_):
        raise OSError("a full disk")

    hook = made.optimizer.register_step_pre_hook(fails)
    with pytest.raises(OSError, match="a full disk"):
        made.step(made.sample())
    assert made.steps == 1
    assert made.epsilon(DELTA) > 0
    hook.remove()
    made.step(made.sample())
    assert made.steps == 2


# Who sees a raw gradient


def deep():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def checkpointed(use_reentrant):
    def losses(model, batch):
        x = batch[0].requires_grad_()
        hidden = torch.utils.checkpoint.checkpoint(lambda x: model[1](model[0](x)), x, use_reentrant=use_reentrant)
        return nn.functional.cross_entropy(model[2](hidden), batch[1], reduction="none") + 0 * model(x).sum(1)

    return losses


@pytest.mark.parametrize("execution", ["book_keeping", "per_sample", "fast", "ghost", "loop"])
@pytest.mark.parametrize(
    "losses", [entropy, checkpointed(False), checkpointed(True)], ids=["plain", "new", "reentrant"]
)
def test_no_raw_gradient_reaches_a_parameter_or_what_waits_for_it(losses, execution):
    net, seen = deep(), []
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in net.parameters()]  # of AccumulateGrad, kept alive
    for node in nodes:
        node.register_hook(lambda *_: seen.append("after"))
        node.register_prehook(lambda *_: seen.append("before"))
    made = private(net, losses=losses, execution=execution)
    grads = []
    made.optimizer.register_step_pre_hook(lambda *_: grads.append([p.grad is not None for p in net.parameters()]))
    made.step(made.sample())
    assert not seen
    assert grads == [[True] * 4]
    entropy(net, data()[:2]).sum().backward()
    assert seen  # the hooks work


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("execution", ["book_keeping", "loop"])
def test_hooks_on_what_learns_are_refused(hook, execution):
    made, seen = private(execution=execution), []
    handle = getattr(made.model.bias, hook)(seen.append)
    with pytest.raises(ValueError, match="bias has a gradient hook, which would see what is not clipped"):
        made.step(made.sample())
    assert not seen
    handle.remove()
    made.step(made.sample())


class Aside(nn.Module):
    """Reads its weight past its modules."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.aside = [self.layer.weight]

    def forward(self, x):
        return self.layer(x) + x @ self.aside[0].T


@pytest.mark.parametrize("execution", ["book_keeping", "loop"])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_parameter_that_is_read_past_its_module(execution, hidden):
    net = Aside()
    node, seen = net.layer.weight.view_as(net.layer.weight).grad_fn.next_functions[0][0], []
    node.register_hook(lambda *_: seen.append(1))

    def losses(model, batch):
        x = batch[0].requires_grad_()
        run = (lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)) if hidden else model
        return nn.functional.cross_entropy(run(x), batch[1], reduction="none")

    made = private(net, losses=losses, execution=execution)
    past = "layer.weight is used past the model's modules|not in the model's modules|used outside of the layer"
    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=past):
        made.step(made.sample())
    assert not seen
    assert made.steps == 0


def test_a_tensor_of_nobody_s_keeps_the_gradient_that_it_had():
    scale = torch.ones(1, requires_grad=True)
    made = private(losses=lambda model, batch: entropy(model, batch) * scale)
    made.step(made.sample())
    assert scale.grad is None
    scale.register_hook(lambda gradient: None)
    with pytest.raises(ValueError, match=r"a tensor of shape \(1,\) with a gradient hook"):
        made.step(made.sample())


def test_memory_of_a_parameter_that_is_set_anew():
    """``.data`` is another tensor after ``model.to``: what is clipped is what the optimizer steps."""
    made = private(seed=0, noise_multiplier=0.0)
    for p in made.model.parameters():
        p.data = p.data.clone()
    batch = data()[list(made.sample().indices)]
    sums, _ = clipped_gradients(model(), entropy, batch, 1.0, "loop")
    for name, gradient in seen_by_the_optimizer(made).items():
        torch.testing.assert_close(gradient * 16, sums[name], rtol=1e-5, atol=1e-6)


def test_a_model_in_evaluation_mode():
    made = private()
    made.model.eval()
    with pytest.raises(RuntimeError, match=r"in evaluation mode: call model\.train\(\) before private\.step"):
        made.step(made.sample())
    made.model.train()
    made.step(made.sample())


def test_an_evaluation_between_two_steps_changes_nothing():
    plain, made = private(seed=0), private(seed=0)
    for _ in range(3):
        plain.step(plain.sample())
        made.step(made.sample())
        made.model.eval()
        with torch.no_grad():
            made.model(data()[:][0])
        made.model.train()
    assert all(map(torch.equal, plain.model.parameters(), made.model.parameters()))


def test_a_parameter_that_the_optimizer_gets_or_loses():
    made = private()
    made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(RuntimeError, match="the optimizer has 3 parameters that learn, make_private saw 2"):
        made.step(made.sample())
    del made.optimizer.param_groups[-1]
    made.step(made.sample())
    made.optimizer.param_groups[0]["params"] = [made.model.weight]
    with pytest.raises(RuntimeError, match="the optimizer has 1 parameters that learn"):
        made.step(made.sample())


def test_a_model_without_shapes_or_with_buffers_of_nothing():
    with pytest.raises(ValueError, match="weight has no shape yet: run the model once before"):
        private(nn.LazyLinear(CLASSES))
    net = model()
    net.register_buffer("nothing", torch.empty(0))
    assert len(released(private(net))) == (WIDTH + 1) * CLASSES


def test_losses_of_a_model_that_was_not_called():
    made = private(losses=lambda model, batch: model.forward(batch[0]).sum(1))
    with pytest.raises(ValueError, match="the losses function must call the model"):
        made.step(made.sample())


def test_an_example_that_is_left_out_is_missed():
    made = private(losses=lambda model, batch: entropy(model, [part[1:] for part in batch]))
    with pytest.raises(ValueError, match=r"the losses must be one an example|rows|batch of"):
        made.step(made.sample())


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


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch.func goes example by example
@pytest.mark.parametrize(
    ("batch", "seq", "rows"), [(4, 4, 7), (5, 4, 5), (5, 4, 7), (4, 6, 4), (2, 2, 2), (3, 1, 3), (1, 5, 5)]
)
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
    made = by_hand(net, lambda net, batch: entropy(net, (batch[0], mask, table, batch[1], batch[2])))
    got = seen_by_the_optimizer(made, [(x, places, y)])
    for name, total in expected.items():
        torch.testing.assert_close(4 * got[name], total, rtol=1e-5, atol=1e-6)


def test_a_shared_argument_hides_no_mixing():
    x, mask, table, places = arguments(4, 4, 4)
    made = by_hand(Attending("mixing"), lambda net, batch: entropy(net, (batch[0], mask, table, batch[1], batch[2])))
    with pytest.raises(ValueError, match="examples are mixed"):
        made.step([(x, places, torch.arange(4) % CLASSES)])


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
    sample = made.sample()
    batch, users = data()[list(sample.indices)], sample.users
    gradients = seen_by_the_optimizer(made)
    theirs = torch.tensor([options["users"].count(user) for user in users]) if users else torch.ones(len(sample))

    def losses(net, batch):  # a user's loss is the mean over all that is theirs
        return entropy(net, batch[:2]) / batch[2]

    sums, _ = clipped_gradients(
        Recurrent(), losses, (*batch, theirs), 1.0, "loop", users=users, clipping=options.get("clipping", "flat")
    )
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient * made.expected_batch_size, sums[name], rtol=1e-5, atol=1e-6)


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
    made = private(Bag(), texts(), batch_size=8, collate=bag)
    with pytest.raises(ValueError, match=r"or they are not along the first dimension of a tensor of shape .*'loop'"):
        made.step(made.sample())


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
        private(adapted(**options), sequences())


@pytest.mark.parametrize("kind", ["words without padding", *MERGED])
def test_the_loop_takes_what_is_flat_or_merged(kind):
    net, dataset = (adapted(**MERGED[kind]), sequences()) if kind in MERGED else (Bag(), texts())
    twin, collate = copy.deepcopy(net), default_collate if kind in MERGED else bag
    made = private(net, dataset, batch_size=8, collate=collate, execution="loop", noise_multiplier=0.0, seed=0)
    learning = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    expected = {name: torch.zeros_like(p) for name, p in learning.items()}
    for *inputs, label in made.sample().batches():
        loss = nn.functional.cross_entropy(twin(*inputs), label)
        parts = torch.autograd.grad(loss, list(learning.values()))
        norm = torch.cat([part.flatten() for part in parts]).norm()
        for name, part in zip(learning, parts, strict=True):
            expected[name] += part * min(1, 1 / norm)
    for name, gradient in seen_by_the_optimizer(made).items():
        torch.testing.assert_close(gradient * 8, expected[name], rtol=1e-5, atol=1e-6)  # the expected size is 8
