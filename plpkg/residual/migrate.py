"""The M that answers on an updated backbone what it answered before.

The cloud has updated its weights. The device still knows what its M added on a text: for each token the pair of
u = A·x, which it received, and v = M·u. On the updated backbone the same text brings other u, and the M that gives the
same v for them, in the sense of least squares, has a closed form::

    M' = argmin Σ |M' u' - v|² + λ |M' - M|²   with the u' of the updated backbone,

so that where the text says nothing, M stays. ``benchmarks/residual/migration.py`` carries every M of an adapter over.

This is the package's own proposal for a problem that the publication leaves open.
"""

import torch

from plpkg.validation import number


def solve(u: torch.Tensor, v: torch.Tensor, prior: torch.Tensor, ridge: float) -> torch.Tensor:
    """The M ``(r_d2c, r_c2d)`` nearest to ``v`` from ``u``, drawn to ``prior``.

    Parameters
    ----------
    u, v
        ``(tokens, r_c2d)`` and ``(tokens, r_d2c)``.
    prior
        ``(r_d2c, r_c2d)``.
    ridge
        How strongly, relative to the mean square of u; with 0 only where u leaves M open.
    """
    if u.shape[0] != v.shape[0] or prior.shape != (v.shape[1], u.shape[1]):
        raise ValueError(f"u {tuple(u.shape)}, v {tuple(v.shape)} and a prior {tuple(prior.shape)} do not fit together")
    number("ridge", ridge)
    u = u.double()
    prior = prior.double()
    missing = v.double() - u @ prior.T  # (tokens, r_d2c): what the prior does not give
    if ridge == 0 or not u.any():
        return prior + torch.linalg.lstsq(u, missing, driver="gelsd").solution.T
    gram = u.T @ u  # (r_c2d, r_c2d)
    strength = ridge * gram.trace() / len(gram)  # λ
    identity = torch.eye(len(gram)).to(gram)
    correction = torch.linalg.solve(gram + strength * identity, u.T @ missing)
    return prior + correction.T
