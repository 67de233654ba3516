import pytest
import torch
from peft import get_peft_model
from torch.nn import functional

from benchmarks.residual.nonlinear import NonlinearM, make_nonlinear, steal_function
from plpkg.residual import PrivateLoraConfig, split
from plpkg.residual.attacks import relative_error
from plpkg.residual.cost import device_cost
from tests.residual.conftest import IDS, backbone, normal, precise

from direct import Direct
from rounding import assert_as_exact, relative


def test_a_nonlinear_m_starts_at_zero_and_learns_what_no_matrix_can():
    m, u = NonlinearM(6, 4, 32, seed=1), normal(3, 50, 6)
    assert m(u).shape == (3, 50, 4)
    assert not m(u).any()
    target = u[..., :4].abs()
    optimizer = torch.optim.Adam(m.parameters(), lr=0.03)
    for _ in range(200):
        optimizer.zero_grad()
        functional.mse_loss(m(u), target).backward()
        optimizer.step()
    matrix = torch.linalg.lstsq(u.flatten(0, 1), target.flatten(0, 1)).solution
    assert relative_error(u @ matrix, target) > 0.8  # six columns and 150 rows explain 4 % of any square by chance
    assert relative_error(m(u).detach(), target) < relative_error(u @ matrix, target) / 2
    assert torch.equal(NonlinearM(6, 4, 32, seed=1).inner.weight, NonlinearM(6, 4, 32, seed=1).inner.weight)
    assert not torch.equal(NonlinearM(6, 4, 32, seed=1).inner.weight, NonlinearM(6, 4, 32, seed=2).inner.weight)


def test_nonlinear_ms_stand_where_matrices_stood():
    model = get_peft_model(backbone(), PrivateLoraConfig(r_c2d=5, r_d2c=3)).eval()
    with torch.no_grad():
        public = model(IDS).logits
    make_nonlinear(model, 8)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, public)
    modules = [module for module in model.modules() if isinstance(module, NonlinearM)]
    assert len(modules) == 12
    assert len({module.inner.weight.sum().item() for module in modules}) == 12
    for module in modules:
        module.outer.weight.data = normal(3, 8, seed=7)
    device, cloud = split(model, 1)
    cloud.connect(Direct(device))
    with torch.no_grad():
        expected, exact = (each(IDS).logits for each in (model, precise(model)))
        assert_as_exact(device.logits(cloud(device.embed(IDS))), expected, exact)
        with pytest.raises(AssertionError, match="apart"):
            assert_as_exact(public, expected, exact)
    model(IDS).logits.sum().backward()
    assert all(module.inner.weight.grad is not None for module in modules)
    assert device_cost(device).up_bytes_per_token == 2 * (32 + 9 * 3)
    with pytest.raises(RuntimeError):
        model.merge_adapter()


def test_a_function_is_stolen_from_its_answers():
    u, function = normal(2000, 6), NonlinearM(6, 4, 32, seed=1)
    function.outer.weight.data = normal(4, 32)
    with torch.no_grad():
        v = function(2 * u).half()
    stolen = steal_function(u.half(), v, hidden=64, steps=500)
    assert (stolen.pairs, stolen.held_out) == (1600, 400)
    assert stolen.relative_error < stolen.linear_error / 3
    fresh = normal(5, 100, 6, seed=9)
    assert relative_error(stolen.function(fresh), function(2 * fresh).detach()) < stolen.linear_error / 3
    again = steal_function(u.half(), v, hidden=64, steps=500)
    assert (again.relative_error, again.linear_error) == (stolen.relative_error, stolen.linear_error)


def test_a_theft_is_tested_on_what_came_later():
    u = normal(1000, 4)
    v = u @ normal(4, 4, seed=1)
    assert steal_function(u, v, steps=0).relative_error < torch.linalg.cond(u) * relative(4)
    v[800:] = normal(200, 4, seed=2)
    stolen = steal_function(u, v, steps=100)
    assert stolen.relative_error > 1  # worse than no answer
