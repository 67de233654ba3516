"""Users instead of examples: sampled and clipped with all that is theirs, in one piece or in many."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import TensorDataset

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


def made(limit=None, batch_size=7, users=USERS, dataset=None, **options):
    model = net(torch.float64)
    dataset = TensorDataset(*dataset or pictures(dtype=torch.float64))
    options = dict(noise_multiplier=0.0, max_grad_norm=C, max_physical_batch_size=limit, seed=3) | options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return make_private(model, optimizer, dataset, squares, batch_size=batch_size, users=users, **options)


def sampled_by_hand(**options):
    model = net(torch.float64)
    options = dict(noise_multiplier=0.0, max_grad_norm=C, sample_rate=0.5, batch_size=4.0) | options
    return make_private(model, torch.optim.SGD(model.parameters(), lr=0.0), None, squares, **options)


def step(private, *sample, **options):
    """What the optimizer gets in one step."""
    got = []
    hook = private.optimizer.register_step_pre_hook(lambda *_: got.extend(p.grad for p in private.model.parameters()))
    private.step(*sample or [private.sample()], **options)
    hook.remove()
    return flat(got)


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_pieces_of_users_are_the_whole(limit, clipping):
    private, whole = made(limit, clipping=clipping), step(made(clipping=clipping))
    sizes = [len(piece.indices) for piece in private.sample().pieces]
    assert sum(sizes) == 7
    assert max(sizes) <= limit
    assert_close(step(private), whole, TERMS)


WEIGHTS = {user: USERS.count(user) for user in USERS}


@pytest.mark.parametrize("limit", [None, 2])
def test_the_step_is_the_mean_over_users_of_their_mean_losses(limit):
    expected = by_hand(net(torch.float64), pictures(dtype=torch.float64), USERS, WEIGHTS) / 4
    assert_close(step(made(limit)), expected, TERMS)


@pytest.mark.parametrize("pieces", [[7], [5, 0, 2], [3, 2, 2]])
def test_users_of_samples_of_one_s_own(pieces):
    """In pieces of whole users."""
    order = torch.tensor([0, 2, 4, 1, 5, 3, 6])  # ann, bob, and the others
    batch, users = [part[order] for part in pictures(dtype=torch.float64)], [USERS[i] for i in order]
    given = list(zip(*(part.split(pieces) for part in batch), strict=True))
    private = sampled_by_hand()
    expected = by_hand(net(torch.float64), batch, users, WEIGHTS) / 4
    assert_close(step(private, given, users=users), expected, TERMS)
    assert not step(private, [], users=[]).any()


def test_users_are_sampled_with_all_that_is_theirs():
    x, y = pictures(60, torch.float64)
    users = [f"user {i % 12}" for i in range(60)]
    private = made(batch_size=15, users=users, dataset=(x, y), noise_multiplier=1.0)
    whose = {tuple(row.flatten().tolist()): user for row, user in zip(x, users, strict=True)}
    given = []
    for sample in private:
        given.append([whose[tuple(row.flatten().tolist())] for rows, _ in sample.batches() for row in rows])
        assert given[-1] == list(sample.users)
        assert private.step(sample).count == len(sample.users)
    assert all(names.count(name) == 5 for names in given for name in names)
    assert len({tuple(sorted(set(names))) for names in given}) > 1
    assert (private.expected_batch_size, private.mechanism.sample_rate) == (3.0, 0.25)


def test_the_epsilon_of_a_user():
    private = made(batch_size=2, noise_multiplier=1.0)
    step(private)
    assert private.epsilon(1e-5) == pytest.approx(epsilon_of(1.0, 1 / 4, private.steps, 1e-5), rel=relative(64))
    assert private.state_dict()["identity"]["users"] == 4


def with_and_without():
    private = sampled_by_hand()
    private.step([pictures(dtype=torch.float64)], users=USERS)
    private.step([])


def users_beside_a_sample():
    private = made()
    private.step(private.sample(), users=USERS)


REFUSED = [
    (lambda: clipped_gradients(net(), squares, pictures(), C, users=USERS[1:]), ValueError,
     "users must name whose each of 7 examples is, got 6"),
    (lambda: made(users=range(7)).load_state_dict(made().state_dict()), ValueError,
     "the state is of a training with users=4, now 7"),
    (lambda: sampled_by_hand(users=USERS), ValueError, "users and max_physical_batch_size are about a dataset"),
    (lambda: sampled_by_hand().step(2 * [pictures(dtype=torch.float64)], users=2 * USERS), ValueError,
     "user 'ann' has examples in two batches"),
    (with_and_without, RuntimeError, "users come with each step or with none"),
    (users_beside_a_sample, RuntimeError, "step was given users, and takes the sample that was drawn"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_users_that_do_not_fit_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
