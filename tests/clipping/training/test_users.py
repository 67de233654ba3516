"""Users instead of examples: sampled and clipped with all that is theirs, in one piece or in many."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from plpkg.backbones import random_backbone
from plpkg.clipping import clipped_gradients, make_private
from plpkg.clipping.clip import CLIPPINGS
from plpkg.clipping.execution import EXECUTIONS
from plpkg.clipping.training.accounting import epsilon_of

from rounding import assert_close, relative

USERS = ["ann", "bob", "ann", "cy", "ann", "bob", "dee"]
C = 0.5


def net(dtype=torch.float32):
    torch.manual_seed(0)
    convolution = nn.Conv1d(3, 8, 3, groups=1)
    return nn.Sequential(convolution, nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 4, 4)).to(dtype)


def squares(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(1)


def pictures(count=7, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(count, *shape, generator=generator, dtype=torch.float64) for shape in ((3, 6), (4,)))
    return x.to(dtype), y.to(dtype)


def language_model():
    sizes = dict(hidden=32, intermediate=48, vocab=64, max_positions=32, num_heads=4, num_kv_heads=2)
    return random_backbone("llama", options={"tie_word_embeddings": True}, **sizes).train()


def adapters():
    torch.manual_seed(0)
    return get_peft_model(language_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def ids():
    return {"input_ids": torch.randint(0, 64, (len(USERS), 9), generator=torch.Generator().manual_seed(2))}


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_every_execution_is_the_loop_over_users(clipping, assert_as_loop):
    assert_as_loop(net(), squares, pictures(), *EXECUTIONS, users=USERS, clipping=clipping)


@pytest.mark.parametrize("model", [language_model, adapters])
def test_tied_embeddings_and_adapters_of_users(model, assert_as_loop, lm_loss):
    assert_as_loop(model(), lm_loss, ids(), *EXECUTIONS, users=USERS)


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients])


def by_hand(model, batch, users, weights=None):
    """The sum of each user's clipped gradient, by autograd alone."""
    total = 0
    for user in dict.fromkeys(users):
        theirs = torch.tensor([name == user for name in users])
        loss = squares(model, [part[theirs] for part in batch]).sum() / (weights or {}).get(user, 1)
        gradient = flat(torch.autograd.grad(loss, list(model.parameters())))
        total = total + gradient * min(1.0, C / gradient.norm().item())
    return total


TERMS = 3 * 8 * 32 * 4 * len(USERS)  # of a gradient through the layers, all of one size here


@pytest.mark.parametrize("execution", ["loop", *EXECUTIONS])
def test_a_user_is_clipped_once(execution):
    model, batch = net(torch.float64), pictures(dtype=torch.float64)
    gradients, norms = clipped_gradients(model, squares, batch, C, execution, users=USERS)
    assert_close(flat(gradients.values()), by_hand(model, batch, USERS), TERMS)
    assert norms.shape == (4,)
    alone, _ = clipped_gradients(model, squares, batch, C, execution)
    assert (flat(alone.values()) - flat(gradients.values())).norm() > 0.1 * C


@pytest.mark.parametrize("of", [torch.stack, list])  # a list: as the rows of a data set have them
def test_users_by_tensors_in_any_order_of_their_numbers(of):
    model, batch = net(torch.float64), pictures(dtype=torch.float64)
    numbers = of([torch.tensor(number) for number in (70, 3, 70, 1, 70, 3, 2)])
    (expected, norms), (gradients, others) = (
        clipped_gradients(model, squares, batch, C, users=users) for users in (USERS, numbers)
    )
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert torch.equal(norms, others)


def made(limit=None, batch_size=7, users=USERS, criterion=None, dataset=None, **options):
    model = net(torch.float64)
    loader = DataLoader(TensorDataset(*dataset or pictures(dtype=torch.float64)), batch_size=batch_size)
    options = dict(noise_multiplier=0.0, max_grad_norm=C, max_physical_batch_size=limit, seed=3) | options
    criterion = criterion or (lambda output, y: (output - y).square().sum(1))
    return make_private(model, torch.optim.SGD(model.parameters(), lr=0.0), loader, criterion, users=users, **options)


def step(private):
    """What the optimizer gets in one step, from as many pieces as there are; and their sizes."""
    sizes = []
    for x, y in private.data_loader:
        private.optimizer.zero_grad()
        private.criterion(private.model(x), y).backward()
        private.optimizer.step()
        sizes.append(len(x))
        if private.steps:
            break
    return flat(p.grad for p in private.model.parameters()), sizes


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_pieces_of_users_are_the_whole(limit, clipping):
    whole, _ = step(made(clipping=clipping))
    pieces, sizes = step(made(limit, clipping=clipping))
    assert sum(sizes) == 7
    assert max(sizes) <= limit
    assert_close(pieces, whole, TERMS)


@pytest.mark.parametrize("limit", [None, 2])
def test_the_step_is_the_mean_over_users_of_their_mean_losses(limit):
    private = made(limit)
    gradient, _ = step(private)
    weights = {user: USERS.count(user) for user in USERS}
    expected = by_hand(net(torch.float64), pictures(dtype=torch.float64), USERS, weights) / 4
    assert_close(gradient, expected, TERMS)


def test_users_are_sampled_with_all_that_is_theirs():
    x, y = pictures(60, torch.float64)
    users = [f"user {i % 12}" for i in range(60)]
    private = made(batch_size=15, users=users, criterion=nn.MSELoss(), dataset=(x, y), noise_multiplier=1.0)
    whose = {tuple(row.flatten().tolist()): user for row, user in zip(x, users, strict=True)}
    given = [[whose[tuple(row.flatten().tolist())] for row in rows] for rows, _ in private.data_loader]
    assert all(names.count(name) == 5 for names in given for name in names)
    assert len({tuple(sorted(set(names))) for names in given}) > 1
    assert (private.expected_batch_size, private.mechanism.sample_rate) == (3.0, 0.25)


def test_the_epsilon_of_a_user():
    private = made(batch_size=2, noise_multiplier=1.0)
    step(private)
    assert private.epsilon(1e-5) == pytest.approx(epsilon_of(1.0, 1 / 4, private.steps, 1e-5), rel=relative(64))
    assert private.state_dict()["identity"]["users"] == 4


def without_a_loader():
    model = net()
    how = dict(noise_multiplier=1.0, max_grad_norm=C, sample_rate=0.5, expected_batch_size=2.0)
    make_private(model, torch.optim.SGD(model.parameters()), None, functional.mse_loss, users=USERS, **how)


def part_of_a_batch():
    private = made()
    x, y = next(iter(private.data_loader))
    private.criterion(private.model(x[:3]), y[:3]).backward()


REFUSED = [
    (lambda: clipped_gradients(net(), squares, pictures(), C, users=USERS[1:]), ValueError,
     "users must name whose each of 7 examples is, got 6"),
    (lambda: made(users=range(7)).load_state_dict(made().state_dict()), ValueError,
     "the state is of a training with users=4, now 7"),
    (without_a_loader, ValueError, "users and poisson_sampling=False need a data_loader"),
    (part_of_a_batch, RuntimeError, r"backward\(\) of 3 examples where the data_loader gave 7"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_users_that_do_not_fit_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
