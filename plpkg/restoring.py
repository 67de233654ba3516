"""What a saved state may be: modules and optimizers are judged, all of them, before one is loaded."""

from collections.abc import Mapping

import torch

from plpkg.untrusted import brief, misfits
from plpkg.validation import shown


def restore(what: str, parts: Mapping[str, object], states: object, steps: int) -> None:
    """Load saved states into modules, optimizers, and whatever has ``state_dict`` and ``load_state_dict``.

    An optimizer's settings stay those that it has here.

    Parameters
    ----------
    what
        What a message calls the states.
    parts
        By name; all states are judged before the first is loaded.
    states
        By the same names.
    steps
        How many the run has made.

    Raises
    ------
    ValueError
        A state is not what this part could have after so many steps: names, shapes, dtypes, settings, or numbers that
        are not finite. Nothing is loaded.
    """
    judge(what, parts, states, steps)
    for name, part in parts.items():
        groups = isinstance(part, torch.optim.Optimizer) and {"param_groups": part.state_dict()["param_groups"]}
        part.load_state_dict({**states[name], **groups} if groups else states[name])


def judge(what: str, parts: Mapping[str, object], states: object, steps: int) -> None:
    """The refusals of :func:`restore`, which loads nothing yet."""
    for name, part in parts.items():
        try:
            state, own = states[name], part.state_dict()
            if isinstance(part, torch.optim.Optimizer):
                reason = _misfit_optimizer(part, state, own, steps)
            else:
                reason = misfit_tensors(state, own)
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            reason = f"it is of another form: {shown(str(error))}"
        if reason:
            raise ValueError(f"{what}: {name} cannot be restored: {reason}"[:300])


def misfit_tensors(given: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> str:
    """Why tensors are not like a part's own, or ``""``: names, shapes, dtypes, finite numbers, counts from 0."""
    shapes = ({name: tuple(tensor.shape) for name, tensor in each.items()} for each in (given, own))
    if reasons := misfits(*shapes):
        return brief(reasons)
    for name, tensor in given.items():
        here = own[name]
        if tensor.dtype != here.dtype:
            return f"{shown(name)} is {tensor.dtype}, and must be {here.dtype}"
        if tensor.is_floating_point() and not tensor.isfinite().all() and here.isfinite().all():
            return f"{shown(name)} has values that are not finite"
        if (
            not (tensor.is_floating_point() or tensor.is_complex())
            and tensor.numel()
            and tensor.min() < 0 <= here.min()
        ):
            return f"{shown(name)} has {tensor.min().item()}, and counts from 0"
    return ""


def _misfit_optimizer(part: torch.optim.Optimizer, state: Mapping, own: Mapping, steps: int) -> str:
    """Why a state is not one that this optimizer could have after so many steps, or ``""``."""
    for given, here in zip(state["param_groups"], own["param_groups"], strict=True):
        for name in given.keys() | here.keys():
            same = type(given[name]) is type(here[name]) and given[name] == here[name]
            if not same and name not in ("lr", "initial_lr"):  # a schedule moves it
                return f"{name}={shown(given[name])}, here {shown(here[name])}"
    numbers = [i for group in own["param_groups"] for i in group["params"]]
    parameters = [p for group in part.param_groups for p in group["params"]]
    groups = [group for group in part.param_groups for _ in group["params"]]
    places = dict(zip(numbers, zip(parameters, groups, strict=True), strict=True))
    if steps and not state["state"] and _after_a_step(part, groups[0]):
        return f"it has no state after {steps} steps"
    for i, row in state["state"].items():
        parameter, group = places[i]
        example = _after_a_step(part, group)
        if example and row.keys() != example.keys():
            return f"parameter {i} has {', '.join(map(shown, row))}, and must have {', '.join(example)}"
        for name, value in row.items():
            if value is None and (not example or example[name] is None):
                continue
            if value is None:
                return f"{name} of parameter {i} is missing"
            number = torch.as_tensor(value)
            alone = name == "step" or (example and example[name].ndim == 0)
            if tuple(number.shape) != (() if alone else tuple(parameter.shape)):
                return f"{name} of parameter {i} has shape {tuple(number.shape)}"
            if not number.is_floating_point() and not (name == "step" and type(value) is int):
                return f"{name} of parameter {i} is {number.dtype}"
            if not number.isfinite().all():
                return f"{name} of parameter {i} is not finite"
            if name == "step" and not (0 <= number <= steps and number == number.round()):
                return f"step of parameter {i} is {shown(number.item())}, after {steps} steps"
            if name in SQUARES and number.numel() and number.min() < 0:
                return f"{name} of parameter {i} has negative squares"
    return ""


SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""What PyTorch's optimizers call means and sums of squares."""


def _after_a_step(optimizer: torch.optim.Optimizer, group: Mapping) -> dict[str, object]:
    """What such an optimizer keeps of a parameter, from a step with a small one; nothing if it cannot be had."""
    tiny = torch.nn.Parameter(torch.ones(2, 2))
    tiny.grad = torch.ones(2, 2)
    try:
        made = type(getattr(optimizer, "optimizer", optimizer))([{**group, "params": [tiny]}])
        made.step()
    except (TypeError, ValueError, RuntimeError):
        return {}
    return dict(made.state[tiny])
