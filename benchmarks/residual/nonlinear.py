"""A function in the place of the matrix M, and its theft from what it answers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from benchmarks.residual.attackers import fit
from benchmarks.residual.defences import rms
from plpkg.residual.adapter import layers, matrices
from plpkg.residual.attacks import pairs, recover_m, relative_error


class NonlinearM(nn.Module):
    """One hidden layer where M stands: ``(…, r_c2d)`` to ``(…, r_d2c)``, zero at first as M is.

    Parameters
    ----------
    r_c2d, r_d2c
        Ranks, as of M.
    hidden
        Width of the hidden layer.
    seed
        Of its weights.
    """

    def __init__(self, r_c2d: int, r_d2c: int, hidden: int, seed: int = 0) -> None:
        super().__init__()
        self.in_features, self.out_features = r_c2d, r_d2c
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.inner = nn.Linear(r_c2d, hidden)
            self.outer = nn.Linear(hidden, r_d2c, bias=False)
        nn.init.zeros_(self.outer.weight)

    @property
    def weight(self) -> torch.Tensor:
        """A number of the right precision: no matrix stands for this function, so that merging it fails."""
        return self.inner.weight.new_zeros(())

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return self.outer(functional.gelu(self.inner(u)))


def make_nonlinear(model, hidden: int, *, adapter_name: str = "default", seed: int = 0) -> None:
    """Put a :class:`NonlinearM` in the place of every M of an adapter. PEFT saves it, but cannot load it."""
    matrices(model, adapter_name)  # refuses a model without this adapter
    for i, layer in enumerate(layers(model, adapter_name).values()):
        m = layer.privatelora_M[adapter_name]
        new = NonlinearM(m.in_features, m.out_features, hidden, seed + i)
        layer.privatelora_M[adapter_name] = new.to(m.weight.device, m.weight.dtype)


@dataclass(frozen=True)
class Stolen:
    """A copy of the function on a device.

    Attributes
    ----------
    pairs, held_out
        How many pairs it was learnt from, and how many tested on.
    relative_error, linear_error
        Of its outputs on the latter, and of the best matrix's.
    function
        ``(…, r_c2d)`` to ``(…, r_d2c)``, float64.
    """

    pairs: int
    held_out: int
    relative_error: float
    linear_error: float
    function: Callable[[torch.Tensor], torch.Tensor]


def steal_function(
    u: torch.Tensor, v: torch.Tensor, *, held_out=0.2, hidden=256, steps=1000, batch=256, lr=3e-3, seed=0
) -> Stolen:
    """Learn the device's function from its answers: least squares, and a :class:`NonlinearM` for what that leaves.

    Parameters
    ----------
    u, v
        ``(…, r_c2d)`` and ``(…, r_d2c)``: what the cloud sent and received, in order.
    held_out
        The share at the end that is kept for the test.
    hidden, steps, batch, lr
        Of the network, and of AdamW, whose rate falls to zero.
    seed
        Of weights and batches.
    """
    u, v = pairs(u, v)
    n = len(u) - round(len(u) * held_out)
    matrix = recover_m(u[:n], v[:n])
    rest = v - u @ matrix.T
    mean, std, scale = u[:n].mean(0), u[:n].std(0, correction=0) + 1e-12, rms(rest[:n]) + 1e-12
    x, y = ((u - mean) / std).float(), (rest / scale).float()
    student = NonlinearM(u.shape[1], v.shape[1], hidden, seed)
    generator = torch.Generator().manual_seed(seed)

    def loss() -> torch.Tensor:
        at = torch.randint(n, (batch,), generator=generator)
        return functional.mse_loss(student(x[at]), y[at])

    fit(student.parameters(), loss, steps, lr)

    @torch.no_grad()
    def function(asked: torch.Tensor) -> torch.Tensor:
        asked = asked.double()
        return asked @ matrix.T + scale * student(((asked - mean) / std).float())

    true = v[n:]
    copied, linear = (relative_error(estimate, true) for estimate in (function(u[n:]), u[n:] @ matrix.T))
    return Stolen(n, len(u) - n, copied, linear, function)
