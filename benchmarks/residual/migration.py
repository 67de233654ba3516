"""A changed backbone: carry every M over to it, without training anew.

The cloud has updated its weights. The device still knows what its M added on texts of its own, or on public anchors:
for each token the pair of u = A·x, which it received, and v = M·u. On the updated backbone the same text brings
other u. The M that gives the same v for them, in the sense of least squares, has a closed form::

    M' = argmin Σ |M' u' - v|² + λ |M' - M|²   with the u' of the updated backbone,

so that where the anchors say nothing, M stays. What an exchange receives depends on the exchanges before it, hence
the M' are found in a few rounds, each with the u' of the round before. A and B have to be the same, which they are
if they come from a seed.

This is the package's own proposal for a problem that the publication leaves open. Left out: a change of hidden size,
layers or vocabulary.
"""

from collections.abc import Iterable

import torch
from peft import PeftModel

from plpkg.residual import PrivateLoraConfig, matrices
from plpkg.residual.attacks import exchanges
from plpkg.residual.methods import fingerprint_of_bases
from plpkg.residual.migrate import solve
from plpkg.validation import whole_number


@torch.no_grad()
def migrate(
    old: PeftModel,
    new: PeftModel,
    anchors: Iterable[torch.Tensor],
    *,
    ridge: float = 1e-3,
    rounds: int = 3,
    adapter_name: str = "default",
) -> dict[str, float]:
    """Set every M of ``new`` so that it adds what ``old`` added on the anchors.

    Parameters
    ----------
    old, new
        The personalised model on the backbone that was, and the updated backbone with an adapter of the same
        configuration, whose M are replaced.
    anchors
        ``(batch, seq)`` ids: the device's own text, or public text.
    ridge
        As in :func:`plpkg.residual.migrate.solve`.
    rounds
        How often every M is solved for, each time from what the M of the round before make of the anchors.
    adapter_name
        Which adapter, in both.

    Returns
    -------
    dict
        By module the relative error of what is added, Frobenius, in the last round.

    Raises
    ------
    ValueError
        The adapters differ in more than M, or what goes through one is not finite.
    """
    whole_number("rounds", rounds, 1)
    configs = [model.peft_config.get(adapter_name) for model in (old, new)]
    if not all(isinstance(config, PrivateLoraConfig) for config in configs):
        raise ValueError(f"both models need a PrivateLoRA adapter {adapter_name!r}")
    for field in ("r_c2d", "r_d2c", "late", "init", "projection_seed"):
        before, after = (getattr(config, field) for config in configs)
        if before != after:
            raise ValueError(f"{field} is {before!r} in the old adapter and {after!r} in the new one")
    anchors = list(anchors)
    before = exchanges(old, anchors, adapter_name)
    olds, news = (matrices(model, adapter_name) for model in (old, new))
    if olds.keys() != news.keys():
        raise ValueError(f"the adapters are in different modules: {sorted(olds.keys() ^ news.keys())}")
    if fingerprint_of_bases(old, adapter_name) != fingerprint_of_bases(new, adapter_name):
        raise ValueError(f"A and B of {adapter_name!r} differ: give the new model those of the old, as saved with it")
    kept = {name: m.weight.clone() for name, m in news.items()}
    try:
        for name, m in news.items():
            m.weight.copy_(olds[name].weight)
        for _ in range(rounds):
            received = exchanges(new, anchors, adapter_name)
            errors = {}
            for name, m in news.items():
                (_, wanted), (u, _) = before[name], received[name]
                solution = solve(u, wanted, olds[name].weight.cpu(), ridge)
                m.weight.copy_(solution.to(m.weight))
                errors[name] = ((u @ solution.T - wanted).norm() / wanted.norm().clamp(min=1e-12)).item()
    except BaseException:  # of Ctrl+C, too: all M are solved for, or none
        for name, m in news.items():
            m.weight.copy_(kept[name])
        raise
    return errors
