"""The sensitivity check: on steps whose answer is known, on the engine, and what it refuses."""

import itertools
import math
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from plpkg.clipping import clipped_gradients
from plpkg.clipping.checks.sensitivity import check_sensitivity
from plpkg.clipping.clip import GAMMA
from plpkg.clipping.execution import EXECUTIONS

from rounding import relative

C = 0.5
ROWS = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.1], [0.0, 2.0, 0.0], [-1.0, 0.0, 0.0]])
CLIPPED = [1.0, 0.2, 1.0, 1.0]  # the norms 5, 0.1, 2 and 1, of which no more than C counts, in C
ROUNDING = relative(2 * 3 + 4)  # two norms of rows of 3, the sum of 4 rows


def clipped_sum(rows, limit=C):
    norms = rows.norm(dim=1, keepdim=True)
    return (rows * (limit / norms).clamp(max=1)).sum(0)


def of_parts():
    """Parameters in another order each time, from a batch of any kind."""
    order = itertools.cycle([1, -1])

    def step(batch):
        total = clipped_sum(batch["rows"][0])
        return dict([("a", total[:1]), ("b", total[1:].reshape(2, 1))][:: next(order)])

    return step, {"rows": (ROWS, torch.arange(4)), "scale": 2.0}


def of_one_tensor():
    """Which each step changes in place."""
    buffer = torch.zeros(3, dtype=torch.float64)
    return lambda rows: buffer.copy_(clipped_sum(rows)), ROWS


@pytest.mark.parametrize("make", [lambda: (clipped_sum, ROWS), of_parts, of_one_tensor])
def test_a_clipped_sum(make):
    sensitivity = check_sensitivity(*make(), C)
    assert sensitivity.ok
    assert sensitivity.worst == pytest.approx(1, abs=ROUNDING)
    assert sensitivity.removed == pytest.approx(CLIPPED, abs=ROUNDING)
    assert sensitivity.alone == pytest.approx(CLIPPED, abs=ROUNDING)


def test_a_sum_that_is_not_clipped():
    sensitivity = check_sensitivity(lambda rows: rows.sum(0), ROWS, C)
    assert not sensitivity.ok
    assert sensitivity.worst == pytest.approx(10)
    assert sensitivity.worst_example == 0
    assert repr(sensitivity) == "Sensitivity(violated: at most 10 C, by example 0; C=0.5)"
    row = {"example": 1, "taken away (C)": sensitivity.removed[1], "alone (C)": sensitivity.alone[1]}
    assert sensitivity.rows()[1] == row
    assert "violated" in sensitivity._repr_html_()
    assert repr(check_sensitivity(clipped_sum, ROWS[1:2], C)) == "Sensitivity(ok: at most 0.2 C, by example 0; C=0.5)"


def test_a_scale_shows_only_where_not_all_are_clipped():
    """A loss divided by something of the whole batch: clipped to a small C, that is gone."""
    rows = torch.tensor([[10.0, 0.0]] + 9 * [[0.0, 1.0]])  # the long one makes all others short

    def sensitivity(limit):
        return check_sensitivity(lambda part: clipped_sum(part / part.norm(dim=1).sum(), limit), rows, limit)

    small, near, large = map(sensitivity, (0.01, 0.1, 10.0))
    assert (small.ok, near.ok, large.ok) == (True, False, True)
    assert small.all_clipped
    assert not large.all_clipped
    assert repr(small).endswith("C=0.01; all are clipped: try a larger C, too)")
    assert "try" not in repr(near) + repr(large)


def test_an_example_that_changes_what_others_count():
    """Alone, nobody moves the sum by more than C; but the last one switches the others' signs."""
    rows = torch.eye(5)

    def step(part):
        return clipped_sum(part) * (-1 if bool(part[:, 4].any()) and len(part) > 1 else 1)

    sensitivity = check_sensitivity(step, rows, C)
    assert max(sensitivity.alone) == pytest.approx(1)
    assert sensitivity.removed[4] == pytest.approx(math.sqrt(1 + 4 * 2**2))
    assert sensitivity.worst_example == 4
    assert sensitivity.worst == sensitivity.removed[4]


def test_a_mean_over_the_actual_batch():
    """Taken away, each moves little; it is alone that one shows what the division does."""
    sensitivity = check_sensitivity(lambda rows: 100 * clipped_sum(rows) / len(rows), torch.eye(100), C)
    assert sensitivity.removed == pytest.approx([math.sqrt(1 + 99 / 99**2)] * 100)
    assert sensitivity.worst == pytest.approx(100)


def test_what_is_tolerated():
    assert check_sensitivity(lambda rows: clipped_sum(rows) * (1 + 5e-5), ROWS, C).ok
    assert not check_sensitivity(lambda rows: clipped_sum(rows) * (1 + 5e-5), ROWS, C, tolerance=1e-5).ok
    assert not check_sensitivity(lambda rows: clipped_sum(rows) * 1.001, ROWS, C).ok


def test_one_example_is_compared_with_nothing():
    step = Mock(side_effect=clipped_sum)
    sensitivity = check_sensitivity(step, ROWS[:1], C)
    assert sensitivity.removed == sensitivity.alone == pytest.approx((1.0,))
    assert {len(call.args[0]) for call in step.call_args_list} == {1}


@pytest.mark.parametrize(
    ("ids", "first", "second"), [(torch.tensor([7, 3, 7, 3]), 7, 3), (["b", "a", "b", "a"], "b", "a")]
)
def test_users(ids, first, second):
    """Clipped by themselves, two examples of a user move the sum by up to 2 C; clipped together, by C."""
    by_example = check_sensitivity(clipped_sum, ROWS, C, users=ids)
    apart = [math.sqrt(0.6**2 + 1.8**2), math.sqrt(1 + 0.2**2)]  # (0.6, 0.8, 0) + (0, 1, 0); (0, 0, 0.2) + (−1, 0, 0)
    assert by_example.removed == pytest.approx(apart, abs=ROUNDING)
    assert by_example.alone == pytest.approx(apart, abs=ROUNDING)
    assert repr(by_example) == f"Sensitivity(violated: at most 1.897 C, by user {first}; C=0.5)"
    assert [row["user"] for row in by_example.rows()] == [first, second]

    def step(batch):
        rows, whose = batch
        return clipped_sum(torch.stack([rows[whose == user].sum(0) for user in whose.unique()]))

    together = check_sensitivity(step, (ROWS, torch.tensor([7, 3, 7, 3])), C, users=ids)
    assert together.ok
    assert together.worst == pytest.approx(1, abs=ROUNDING)


def test_one_user_is_compared_with_nothing():
    assert check_sensitivity(clipped_sum, ROWS[:2], C, users=["a", "a"]).removed == pytest.approx(
        [math.sqrt(1 + 0.2**2)], abs=ROUNDING
    )


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
@pytest.mark.parametrize("execution", ["loop", *EXECUTIONS])
def test_no_execution_exceeds_the_norm(execution, clipping):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Tanh(), nn.Linear(5, 7))
    ids = torch.randint(0, 7, (6, 4), generator=torch.Generator().manual_seed(1))

    def loss(model, ids):
        return nn.functional.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none").mean(1)

    def step(batch):
        return clipped_gradients(model, loss, batch, 0.05, execution, clipping=clipping)[0]

    largest = clipped_gradients(model, loss, ids, 0.05, "loop")[1].max().item()
    sensitivity = check_sensitivity(step, ids, 0.05)
    assert sensitivity.ok
    most = largest / (largest + GAMMA) if clipping == "automatic" else 1
    assert sensitivity.worst == pytest.approx(most, rel=sensitivity.tolerance)
    assert not check_sensitivity(step, ids, 0.04).ok


def restless():
    generator = torch.Generator().manual_seed(0)
    return lambda rows: clipped_sum(rows) + torch.randn(3, generator=generator)


@pytest.mark.parametrize(
    ("step", "batch", "options", "message"),
    [
        (clipped_sum, ROWS, {"max_grad_norm": 0.0}, "max_grad_norm must be greater than 0, got 0.0"),
        (clipped_sum, ROWS, {"tolerance": -1.0}, "tolerance must be at least 0, got -1.0"),
        (clipped_sum, ROWS[:0], {}, "at least one example, got 0"),
        (clipped_sum, ROWS, {"users": "abc"}, "whose each of 4 examples is, got 3"),
        (clipped_sum, ROWS, {"users": [math.nan] * 4}, r"users\[0\]=nan is nobody"),
        (clipped_sum, 3, {}, "no tensor in a int"),
        (restless(), ROWS, {}, r"another update .* with the same batch, \d.* C away"),
        (lambda rows: rows.tolist(), ROWS, {}, "a tensor, or a mapping of tensors, got list"),
        (lambda rows: {"a": rows.sum(0), "b": None}, ROWS, {}, "got NoneType, Tensor"),
        (lambda rows: {}, ROWS, {}, "got an empty mapping"),
        (lambda rows: rows.flatten(), ROWS, {}, "updates of 9 and of 12 numbers"),
    ],
)
def test_what_is_refused(step, batch, options, message):
    with pytest.raises(ValueError, match=message):
        check_sensitivity(step, batch, **({"max_grad_norm": C} | options))


def test_an_update_that_is_no_number():
    with pytest.raises(FloatingPointError, match="not finite"):
        check_sensitivity(lambda rows: rows.sum(0) / 0, ROWS, C)
