r"""A and B that know where to go: from the gradient, so that a small M learns what a larger adapter would.

With random A and B, M changes W within two random subspaces only. With :math:`G = \partial L / \partial W = U S V^T`
over some text, the largest first step of an M of these ranks is the one along the first singular vectors:

.. math:: A = V^T_{:r_{c2d}}, \quad B = U_{:r_{d2c}}, \quad \partial L / \partial M = B^T G A^T = S

(LoRA-SB, arXiv 2411.19557, begins with a gradient as well; it also sets its M from it, here M stays zero.) For a
ladder, whose M adds to the final hidden state h, :math:`G_l = \sum_t \partial L / \partial h_t \, x_{l,t}^T` is that of
a matrix from layer l's input to there: no backward pass through the layers.

The cloud has to be given A and B: they tell it the directions of that text's gradient. In training over the wire it
sees the layer's inputs and the gradients of their outputs anyway; a device that only generates gives something away
with them, unless the gradient is that of other people's text.

Left out: bases that follow the gradient during training.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from peft import PeftModel
from peft.tuners._buffer_dict import BufferDict
from torch import nn
from transformers.pytorch_utils import Conv1D

from plpkg.residual.adapter import PrivateLoraLayer, as_places, layers, plain, weight_of
from plpkg.residual.ladder import LadderNorm, LadderTap, taps
from plpkg.residual.methods import LadderConfig, PrivateLoraConfig
from plpkg.validation import whole_number


def from_gradients(
    model: PeftModel, batches: Iterable[torch.Tensor], *, adapter_name: str = "default"
) -> dict[str, float]:
    """Set every A and B of an adapter from the gradient of the language model's loss over some text.

    They are as large as the Gaussian ones, so that the same learning rate does. The gradients of all adapted weights
    are in memory meanwhile.

    Parameters
    ----------
    model
        Adapted with ``PrivateLoraConfig(init="given")`` or ``LadderConfig(init="given")``, every M still zero.
    batches
        ``(batch, seq)`` ids: some of ``plpkg.corpora.batches``, which has no end (``itertools.islice``).
    adapter_name
        Which adapter.

    Returns
    -------
    dict
        By module the norm of S: of the gradient of its M, or of its part of a ladder's.

    Raises
    ------
    ValueError
        No such adapter, one that has learnt already, a rank above what a weight has, no text, or a gradient that is
        zero (of texts of one token) or not finite. Then A and B are as they were.
    """
    config = model.peft_config.get(adapter_name)
    if not isinstance(config, PrivateLoraConfig | LadderConfig) or config.init != "given":
        raise ValueError(f"the model needs an adapter {adapter_name!r} with init='given', of this room")
    if isinstance(config, LadderConfig):
        (norm,) = (module for module in model.modules() if isinstance(module, LadderNorm))
        adapted = taps(model, adapter_name)
        ranks = {"r": config.r}
        every_m = {"the ladder": norm.ladder_M[adapter_name]}
        gradients = _gradients_of_rungs(model, adapted, norm, batches)
    else:
        adapted = list(layers(model, adapter_name).values())
        ranks = {"r_c2d": config.r_c2d, "r_d2c": config.r_d2c}
        every_m = {layer.module: layer.privatelora_M[adapter_name] for layer in adapted}
        gradients = _gradients(model, adapted, batches)
    for name, m in every_m.items():
        output = m if isinstance(m, nn.Linear) else m.down  # a GatedM's, zero at first as well
        if output.weight.any():
            raise ValueError(f"the M of {name} is not zero: it was learnt for other A and B")
    for layer, gradient in zip(adapted, gradients, strict=True):  # all of them, before any A or B is set
        for name, rank in ranks.items():
            whole_number(name, rank, 1, min(gradient.shape), f"the rank of {layer.module}")
        if not gradient.any() or not gradient.isfinite().all():
            raise ValueError(f"the gradient of {layer.module} is zero or not finite: it has no directions")
    norms = {}
    for layer, gradient in zip(adapted, gradients, strict=True):
        u, s, vh = torch.linalg.svd(gradient.float(), full_matrices=False)
        if isinstance(layer, LadderTap):
            _set(layer.ladder_A, adapter_name, vh[: ranks["r"]])
        else:
            as_large = (layer.out_features / ranks["r_d2c"]) ** 0.5  # as a Gaussian B of variance 1 / r_d2c
            _set(layer.privatelora_A, adapter_name, vh[: ranks["r_c2d"]])
            _set(layer.privatelora_B, adapter_name, u[:, : ranks["r_d2c"]] * as_large)
        norms[layer.module] = s[: min(ranks.values())].norm().item()
    return norms


def _set(buffers: BufferDict, adapter_name: str, value: torch.Tensor) -> None:
    """Replace an adapter's A or B, in its own type and place."""
    buffers[adapter_name] = value.to(buffers[adapter_name]).contiguous()


@contextlib.contextmanager
def _frozen(model: PeftModel, learning: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Nothing requires a gradient but ``learning``; afterwards the model is as it was."""
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    try:
        for p, _, _ in before:
            p.requires_grad_(False)
            p.grad = None
        for p in learning:
            p.requires_grad_(True)
        yield
    finally:
        for p, requires_grad, gradient in before:
            p.requires_grad_(requires_grad)
            p.grad = gradient


def _gradients(model: PeftModel, adapted: list[PrivateLoraLayer], batches: Iterable) -> list[torch.Tensor]:
    """Of each layer's weight ``(out_features, in_features)``, summed."""
    weights = [plain(layer.module, weight_of(layer)) for layer in adapted]
    with _frozen(model, weights):
        for ids in batches:
            ids = ids.to(model.device)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients = []
        for layer, weight in zip(adapted, weights, strict=True):
            if weight.grad is None:
                raise ValueError(
                    f"no gradient has come to {layer.module}: no batches, or it reads none of their tokens"
                )
            is_turned = isinstance(layer.get_base_layer(), Conv1D)  # (in_features, out_features)
            gradients.append(weight.grad.T if is_turned else weight.grad)
        return gradients


def _gradients_of_rungs(
    model: PeftModel, adapted: list[LadderTap], norm: LadderNorm, batches: Iterable
) -> list[torch.Tensor]:
    """Of a matrix from each layer's input to the final hidden state, ``(hidden, in_features)``, summed."""
    final: list[torch.Tensor] = []
    inputs: dict[LadderTap, torch.Tensor] = {}

    def keep(tap: LadderTap, arguments: tuple) -> None:
        inputs[tap] = arguments[0].detach()

    def begin_here(_, arguments: tuple) -> tuple:
        final[:] = [arguments[0].detach().requires_grad_()]
        return tuple(final)

    handles = [tap.register_forward_pre_hook(keep) for tap in adapted] + [norm.register_forward_pre_hook(begin_here)]
    sums: dict[LadderTap, torch.Tensor] = {}
    try:
        with _frozen(model):
            for ids in batches:
                ids = ids.to(model.device)
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                (delta,) = torch.autograd.grad(loss, final)  # (batch, seq, hidden)
                for tap, x in inputs.items():
                    x = as_places(x, tuple(delta.shape[:-1]))  # (batch, seq, in_features)
                    sums[tap] = sums.get(tap, 0) + delta.flatten(0, 1).T @ x.flatten(0, 1)
    finally:
        for handle in handles:
            handle.remove()
    if not sums:
        raise ValueError("no gradient has come to the final norm: no batches")
    return [sums[tap] for tap in adapted]
