"""What the tests of this room share."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from plpkg.clipping import clipped_gradients


def _flat(gradients):
    return torch.cat([gradient.flatten().double() for gradient in gradients.values()])


@pytest.fixture(scope="session")
def flat():
    """Makes one vector of all gradients."""
    return _flat


@pytest.fixture(scope="session")
def deviation():
    """How far an execution's sum is from the loop's, in units of C; and the norms, relatively."""

    def deviate(model, loss, batch, execution, max_grad_norm=0.1, **options):
        wanted, norms = clipped_gradients(model, loss, batch, max_grad_norm, "loop", **options)
        got, others = clipped_gradients(model, loss, batch, max_grad_norm, execution, **options)
        assert list(got) == list(wanted)
        assert all(got[name].shape == wanted[name].shape for name in wanted)
        apart = (_flat(got) - _flat(wanted)).norm() / max_grad_norm
        return max(apart.item(), ((others - norms) / norms.clamp(min=1e-30)).abs().max().item())

    return deviate


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
