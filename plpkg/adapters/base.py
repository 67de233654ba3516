"""A model as the base of an adapter: its linear modules, and the fingerprint of its weights."""

import functools
from typing import Any

import torch

from plpkg.adapters.file import Base, Module
from plpkg.backbones import fingerprint
from plpkg.files.untrusted import shown


def targets(model: Any) -> dict[str, tuple[int, int]]:
    """The modules that can be adapted: ``(in, out)`` of the linear ones in the model's body, by path; not the head."""
    return {path: (each.num_in, each.num_out) for path, each in base_of(model).modules.items()}


def base_fingerprint(model: Any) -> str | None:
    """A language model's fingerprint; None in float16 or quantised, where it would be another's."""
    is_language_model = hasattr(getattr(model, "config", None), "to_dict")
    if not is_language_model or getattr(model, "is_quantized", False) or model.dtype == torch.float16:
        return None
    return fingerprint(model)


def base_of(model: Any) -> Base:
    """The base that a model is; ValueError if it is no language model, or has an adapter."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"a Hugging Face causal language model is needed, got {shown(model)}")
    named = dict(model.named_modules())
    tuned = [path for path, module in named.items() if isinstance(module, BaseTunerLayer)]
    if isinstance(model, PeftModel) or tuned:
        where = f", in {tuned[0]}" if tuned else ""
        raise ValueError(f"this {type(model).__name__} has an adapter already{where}: take the base without it")
    config = model.config
    calculate = functools.partial(base_fingerprint, model)
    return Base(_linear_modules(model), [*named], config.model_type, config._name_or_path, calculate)


def _linear_modules(model: Any) -> dict[str, Module]:
    """The linear modules of a model's body, by path: neither its head, nor the routers of its experts."""
    from transformers.pytorch_utils import Conv1D

    body = set(model.base_model.modules()) - {model.get_output_embeddings()}
    modules = {}
    for path, module in model.named_modules():
        forward = type(module).forward  # a router is a Linear with a forward of its own
        if module not in body or forward not in (torch.nn.Linear.forward, Conv1D.forward):
            continue
        weight = module.weight
        if isinstance(module, Conv1D):  # GPT-2's, whose weight is (in, out)
            num_in, num_out = weight.shape
        else:
            num_in, num_out = module.in_features, module.out_features
        dtype = weight.dtype if weight.is_floating_point() else model.dtype  # quantised: what it computes in
        modules[path] = Module(num_in, num_out, dtype)
    return modules
