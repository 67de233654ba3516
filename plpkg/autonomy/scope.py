"""Copies of a public model with parameters of a person's own where they are trained; all the rest is shared."""

import copy
from collections.abc import Mapping

import torch
from torch import nn

from plpkg.autonomy.nets import HeadSplit, plain
from plpkg.validation import one_of

SCOPES = ("head", "bias", "norm", "lora", "all")
"""The last layer, as in the AutLearn paper; all biases (TinyTL, Cai et al. 2020); what normalisations multiply and
add; adapters of low rank (Hu et al. 2021); everything."""


def personal_copy(
    model: nn.Module, scope: str, lora=None, seed: int = 0, state: Mapping[str, torch.Tensor] | None = None
) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A copy with parameters of its own where it is trained; all others share the public model's memory.

    Parameters
    ----------
    model
        The public model, which stays as it is; of one that is wrapped, what is within.
    scope
        One of :data:`SCOPES`. A head that is tied to the embedding is untied, or its input would change with it.
    lora, seed
        A ``peft.LoraConfig``, by default rank 8 on all linear layers; the seed of the first A.
    state
        Values with which what is trained begins: what a :class:`~plpkg.autonomy.Transfer` of the same scope kept.

    Returns
    -------
    The copy, in evaluation mode, and what is trained in it by name.

    Raises
    ------
    ValueError
        The model has nothing of the scope, or LoRA already; or the state is of something else.
    """
    one_of("scope", scope, SCOPES)
    model = plain(model)
    if scope == "lora":
        for name, module in model.named_modules():
            if hasattr(module, "lora_A"):
                remedy = "merge it before (merge_and_unload), or take scope='head'"
                raise ValueError(f"{name} carries LoRA already: {remedy}")
    memo = {}  # deepcopy takes from it what it need not copy
    if scope != "all":
        memo = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    personal = copy.deepcopy(model, memo).eval()
    trained = _adapted(personal, lora, seed) if scope == "lora" else _own(personal, scope)
    if not trained:
        raise ValueError(f"{type(model).__name__} has nothing to train of the scope {scope!r}")
    if state is not None:
        needed = {name: p.shape for name, p in trained.items()}
        given = {name: value.shape for name, value in state.items()}
        if given != needed:
            raise ValueError(f"the state has {sorted(state)}, and {scope!r} trains {sorted(trained)}, or other shapes")
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(state[name])
    return personal, trained


def _adapted(personal: nn.Module, lora, seed: int) -> dict[str, nn.Parameter]:
    """Put LoRA into the model."""
    from peft import LoraConfig, inject_adapter_in_model

    lora = copy.deepcopy(lora) if lora else LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]):  # PEFT draws A from the global state
        torch.manual_seed(seed)
        inject_adapter_in_model(lora, personal)
    trained = {name: p for name, p in personal.eval().named_parameters() if p.requires_grad}
    for p in trained.values():
        p.data = p.data.clone()  # a bias that PEFT trains was the public model's
    return trained


def _own(personal: nn.Module, scope: str) -> dict[str, nn.Parameter]:
    """Give the model parameters of its own where the scope has them."""
    head = HeadSplit(personal).name if scope == "head" else None
    norms = {name for name, module in personal.named_modules() if "norm" in type(module).__name__.lower()}
    chosen = {
        "head": lambda owner, attribute: f"{owner}.".startswith(f"{head}."),  # and what a parametrisation keeps in it
        "bias": lambda owner, attribute: "bias" in attribute,
        "norm": lambda owner, attribute: owner in norms,
        "all": lambda owner, attribute: True,
    }[scope]
    first_names = {}  # a tied parameter has several names
    trained = {}
    for name, p in list(personal.named_parameters(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        if not chosen(owner, attribute):
            continue
        first = first_names.setdefault(id(p), name)  # what is tied within the scope stays tied
        if first == name:
            trained[name] = p if scope == "all" else nn.Parameter(p.detach().clone())
        setattr(personal.get_submodule(owner), attribute, trained[first].requires_grad_())
    config = getattr(personal, "config", None)
    if head is not None and config is not None:
        config.tie_word_embeddings = False
    return trained
