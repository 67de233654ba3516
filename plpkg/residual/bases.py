r"""A and B that know where to go: from the gradient, so that a small M learns what a larger adapter would.

With random A and B, M changes W within two random subspaces only. With :math:`G = \partial L / \partial W = U S V^T`
over some text, the largest first step of an M of these ranks is the one along the first singular vectors:

.. math:: A = V^T_{:r_{c2d}}, \quad B = U_{:r_{d2c}}, \quad \partial L / \partial M = B^T G A^T = S

(LoRA-SB, arXiv 2411.19557, begins with a gradient as well; it also sets its M from it, here M stays zero.) The cloud
has to be given A and B: they tell it the directions of that text's gradient. In training over the wire it sees the
layer's inputs and the gradients of their outputs anyway; a device that only generates gives something away with them,
unless the gradient is that of other people's text.

Left out: bases that follow the gradient during training.
"""

import hashlib
from collections.abc import Iterable

import torch
from peft import PeftModel
from torch import nn
from transformers.pytorch_utils import Conv1D

from plpkg.residual.adapter import PrivateLoraConfig, PrivateLoraLayer, layers
from plpkg.validation import whole_number


def fingerprint_of_bases(model: nn.Module, adapter_name: str) -> str:
    """What identifies every A and B of an adapter: their signs, which are the same in every precision."""
    digest = hashlib.sha256()
    for layer in layers(model, adapter_name).values():
        for buffers in (layer.privatelora_A, layer.privatelora_B):
            digest.update(torch.signbit(buffers[adapter_name]).cpu().numpy().tobytes())
    return digest.hexdigest()


def from_gradients(model: PeftModel, batches: Iterable[torch.Tensor], *, adapter_name: str = "default") -> None:
    """Set every A and B of an adapter from the gradient of the language model's loss over some text.

    They are as large as the Gaussian ones, so that the same learning rate does. The gradients of all adapted weights
    are in memory meanwhile.

    Parameters
    ----------
    model
        Adapted with ``PrivateLoraConfig(init="given")``, every M still zero.
    batches
        ``(batch, seq)`` ids: some of ``plpkg.corpora.batches``, which has no end (``itertools.islice``).
    adapter_name
        Which adapter.

    Raises
    ------
    ValueError
        No such adapter, one that has learnt already, a rank above what a weight has, or no text.
    """
    config = model.peft_config.get(adapter_name)
    if not isinstance(config, PrivateLoraConfig) or config.init != "given":
        raise ValueError(f"the model needs an adapter {adapter_name!r} of PrivateLoraConfig(init='given')")
    adapted = list(layers(model, adapter_name).values())
    for layer in adapted:
        if layer.privatelora_M[adapter_name].weight.any():
            raise ValueError(f"the M of {layer.module} is not zero: it was learnt for other A and B")
        for name, rank in (("r_c2d", config.r_c2d), ("r_d2c", config.r_d2c)):
            whole_number(name, rank, 1, min(layer.in_features, layer.out_features), f"the rank of {layer.module}")
    for layer, gradient in zip(adapted, _gradients(model, adapted, batches), strict=True):
        u, _, vh = torch.linalg.svd(gradient.float(), full_matrices=False)
        b = u[:, : config.r_d2c] * (layer.out_features / config.r_d2c) ** 0.5
        for buffers, value in ((layer.privatelora_A, vh[: config.r_c2d]), (layer.privatelora_B, b)):
            buffers[adapter_name] = value.to(buffers[adapter_name]).contiguous()


def _gradients(model: PeftModel, adapted: list[PrivateLoraLayer], batches: Iterable) -> list[torch.Tensor]:
    """Of each layer's weight ``(out_features, in_features)``, summed; the model is left as it was."""
    parameters = list(model.parameters())
    before = [(p.requires_grad, p.grad) for p in parameters]
    weights = [layer.get_base_layer().weight for layer in adapted]
    try:
        for p in parameters:
            p.requires_grad_(False)
            p.grad = None
        for weight in weights:
            weight.requires_grad_(True)
        for ids in batches:
            ids = ids.to(model.device)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if weights[0].grad is None:
            raise ValueError("no batches: there is no gradient")
        conv = [isinstance(layer.get_base_layer(), Conv1D) for layer in adapted]
        return [weight.grad.T if turned else weight.grad for weight, turned in zip(weights, conv, strict=True)]
    finally:
        for p, (requires_grad, gradient) in zip(parameters, before, strict=True):
            p.requires_grad_(requires_grad)
            p.grad = gradient
