"""What the tests of this room share."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from plpkg.clipping import clipped_gradients

from rounding import assert_as_exact


def _flat(gradients):
    return torch.cat([gradient.flatten().double() for gradient in gradients.values()])


@pytest.fixture(scope="session")
def flat():
    """Makes one vector of all gradients."""
    return _flat


@pytest.fixture(scope="session")
def assert_as_loop():
    """Executions give the loop's sum, and its norms relatively.

    The loop's float32 has a distance from its float64, which measures rounding; between two results in float64 it is
    as much smaller as the eps (but not if a model is ``mixed``: if it computes parts in float32 all the same).
    """

    def check(model, loss, batch, *executions, max_grad_norm=0.1, mixed=False, **options):
        dtype, loops = next(model.parameters()).dtype, {}
        for precision in (torch.float32, torch.float64):  # in this order: float32's weights are float64's as well
            model.to(precision)
            loops[precision] = clipped_gradients(model, loss, _to(batch, precision), max_grad_norm, "loop", **options)
        (rough, rough_norms), (exact, norms) = loops.values()
        wanted, wanted_norms = loops[dtype]
        grow = 1 if mixed else torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
        rough, sizes = _flat(rough), norms.clamp(min=1e-30)
        relative = rough_norms / sizes
        for execution in executions:
            try:
                got, others = clipped_gradients(
                    model.to(dtype), loss, _to(batch, dtype), max_grad_norm, execution, **options
                )
                assert list(got) == list(wanted)
                assert all(got[name].shape == wanted[name].shape for name in wanted)
                assert_as_exact(rough + (_flat(got) - _flat(wanted)) * grow, rough, _flat(exact))
                assert_as_exact(relative + (others - wanted_norms) / sizes * grow, relative, norms / sizes)
            except Exception as error:
                error.add_note(f"execution={execution!r}")
                raise

    return check


def _to(batch, dtype):
    """Its numbers in a dtype; ids stay ids."""
    return tree_map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)


@pytest.fixture(scope="session")
def lm_loss():
    """The mean cross-entropy of each sequence's next tokens."""

    def loss(model, batch):
        logits = model(**batch, use_cache=False).logits
        losses = functional.cross_entropy(logits[:, :-1].mT, batch["input_ids"][:, 1:], reduction="none")
        return losses.mean(1)

    return loss


@pytest.fixture(scope="session")
def still():
    """Sets every dropout to zero: the loop would draw other masks."""

    def stop(model):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return stop
