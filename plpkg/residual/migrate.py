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

from plpkg.residual.adapter import matrices
from plpkg.residual.bases import fingerprint_of_bases
from plpkg.residual.methods import PrivateLoraConfig
from plpkg.validation import number, whole_number


@torch.no_grad()
def exchanges(
    model: PeftModel, anchors: Iterable[torch.Tensor], adapter_name: str = "default"
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What each M received and answered on a text.

    Parameters
    ----------
    model
        With its adapter; through a cloud, a device has the same from its own part.
    anchors
        ``(batch, seq)`` ids.
    adapter_name
        Which adapter.

    Returns
    -------
    dict
        By module: u ``(tokens, r_c2d)`` and v ``(tokens, r_d2c)``, float64.
    """
    every = matrices(model, adapter_name)
    if adapter_name not in model.active_adapters:
        raise ValueError(f"the adapter {adapter_name!r} is not active, but {model.active_adapters}: set_adapter first")
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def keep(name: str):
        def hook(_, arguments, output):
            pair = (arguments[0], output)
            seen.setdefault(name, []).append(tuple(t.detach().double().flatten(0, -2).cpu() for t in pair))

        return hook

    training = model.training
    model.eval()  # without dropout
    handles = [m.register_forward_hook(keep(name)) for name, m in every.items()]
    try:
        for ids in anchors:
            model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        if training:
            model.train()
        for handle in handles:
            handle.remove()
    if not seen:
        raise ValueError(
            f"nothing went through any M of {adapter_name!r}: there are no anchors, or it is merged or switched off"
        )
    exchanged = {name: tuple(torch.cat(parts) for parts in zip(*pairs, strict=True)) for name, pairs in seen.items()}
    for name, pair in exchanged.items():
        if not all(each.isfinite().all() for each in pair):
            raise ValueError(f"what goes through the M of {name} is not finite")
    return exchanged


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
    u, v, prior = u.double(), v.double(), prior.double()
    missing = v - u @ prior.T
    if number("ridge", ridge) == 0 or not u.any():
        return prior + torch.linalg.lstsq(u, missing, driver="gelsd").solution.T
    gram = u.T @ u
    strength = ridge * gram.trace() / len(gram)
    return prior + torch.linalg.solve(gram + strength * torch.eye(len(gram)).to(gram), u.T @ missing).T


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
