"""Checks of each private step: model, optimizer and settings are those that ``make_private`` was called with."""

import torch

from plpkg.clipping.guard.mixing import modules_of
from plpkg.validation import shown


def check_identity(saved: dict, now: dict) -> None:
    """Refuse the state of a training with other settings.

    Raises
    ------
    ValueError
        The message names them.
    """
    if saved == now:
        return
    different = [
        f"{name}={shown(saved.get(name))}, now {value!r}" for name, value in now.items() if saved.get(name) != value
    ]
    raise ValueError(f"the state is of a training with {'; '.join(different)}")


def check_model(model: torch.nn.Module, learning: dict[str, torch.nn.Parameter]) -> None:
    """Refuse a model in which other parameters learn than in the beginning.

    Raises
    ------
    RuntimeError
        The message names one.
    """
    known = {id(p) for p in learning.values()}
    there = set()
    for module in modules_of(model):
        there.update(id(p) for p in module._parameters.values() if p is not None and p.requires_grad)
    if known == there:
        return
    now = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    new = [name for key, name in now.items() if key not in known]
    gone = [name for name, p in learning.items() if id(p) not in now]
    what = f"{new[0]} learns, which was not there" if new else f"{gone[0]} learns no more"
    raise RuntimeError(
        f"{what} when make_private was called: freeze, unfreeze and replace layers, and load with assign=True, "
        "before; or call make_private again, and go on with load_state_dict(state_dict())"
    )


def check_optimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, learning: dict[str, torch.nn.Parameter]
) -> None:
    """Refuse an optimizer with other parameters than in the beginning, or with gradients that nobody clipped.

    Raises
    ------
    RuntimeError
        The message names the parameter with a gradient.
    """
    known = {id(p) for p in learning.values()}
    stepped = learned(optimizer)
    if stepped != known:
        raise RuntimeError(
            f"the optimizer has {len(stepped)} parameters that learn, make_private saw {len(known)}: freeze "
            "and unfreeze before make_private"
        )
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and p.grad.any():  # zero_grad(set_to_none=False) leaves zeros
                name = next((name for name, each in model.named_parameters() if each is p), "a parameter")
                raise RuntimeError(
                    f"{name} has a gradient that was not clipped: no backward() beside private.step, which gives the "
                    "optimizer its gradients; optimizer.zero_grad() drops this one"
                )


def learned(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the parameters that an optimizer changes."""
    learning = set()
    for group in optimizer.param_groups:
        learning.update(id(p) for p in group["params"] if p.requires_grad)
    return learning
