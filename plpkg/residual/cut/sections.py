"""Sections of a Hugging Face decoder: some of its layers, as a decoder of their own; and whether it can be cut at all.

No list of classes says which decoders can be: each is tried. It must be its layers and a norm behind them, nothing
before, nothing else after; what the device makes of its states must be the model's own logits.
"""

import copy
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from plpkg.residual.cut.cloud_part import OwnInEachThread, run_layers
from plpkg.residual.cut.device_part import DevicePart
from plpkg.residual.ladder import NORMS, named
from plpkg.training_loop import logits_of

LAYERS = ("layers", "h")
"""Names of the list of layers in Hugging Face's decoders."""

POSITIONS = ("wpe", "embed_positions")
"""Names, in GPT-2's and OPT's decoders, of the embedding of positions that they add to their input."""

MULTIPLIER = "embedding_multiplier"
"""Name of the number that Granite's decoder multiplies its input with, before the first layer."""


class Sections:
    """Cuts sections out of a decoder.

    Parameters
    ----------
    decoder
        The decoder, which stays as it is.
    adapter_name
        The adapter that is active in the sections.

    Attributes
    ----------
    count
        How many layers it has.
    norm
        Its final norm.
    """

    def __init__(self, decoder: Any, adapter_name: str) -> None:
        self.decoder = decoder
        self.adapter_name = adapter_name
        self._layers_name = named(decoder, LAYERS)
        self._norm_name = named(decoder, NORMS)
        self.count = len(self.layers(decoder))
        self.norm: nn.Module = getattr(decoder, self._norm_name)

    def layers(self, section: nn.Module) -> Any:
        """A section's layers."""
        return getattr(section, self._layers_name)

    def section(self, start: int, stop: int, *, norm: bool) -> Any:
        """The layers from ``start`` to ``stop``, with ``norm`` the final norm as well; ``None`` if there are none."""
        if start >= stop:
            return None
        part = self._copied(range(start, stop), norm=norm)
        if start and hasattr(part, MULTIPLIER):
            setattr(part, MULTIPLIER, 1.0)  # the first section has multiplied
        for module in part.modules():  # they are copies: what is active in the model stays so
            if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper):
                module._active_adapter = [self.adapter_name]
                module._disable_adapters = False
        return part

    def _copied(self, layers: range, *, norm: bool) -> Any:
        """A decoder of the same class with some of the layers, without embedding, sharing the tensors."""
        decoder = self.decoder
        # The same tensors in new modules: their numbers within the KV cache change.
        shared = {id(tensor): tensor for tensor in (*decoder.parameters(), *decoder.buffers())}
        with torch.device("meta"):
            part = type(decoder)(_config_of(decoder, layers))
        chosen = nn.ModuleList(copy.deepcopy(self.layers(decoder)[i], dict(shared)) for i in layers)
        _number(chosen)
        setattr(part, self._layers_name, chosen)
        setattr(part, self._norm_name, copy.deepcopy(self.norm, dict(shared)) if norm else nn.Identity())
        if getattr(decoder, "rotary_emb", None) is not None:  # Granite's hybrids may have none
            part.rotary_emb = OwnInEachThread(copy.deepcopy(decoder.rotary_emb))
        part.set_input_embeddings(None)
        for name in POSITIONS:
            if hasattr(decoder, name):
                setattr(part, name, _Nothing())
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            if tensor.is_meta and id(tensor) not in shared:
                raise ValueError(f"{type(decoder).__name__} has {name} beside its layers: it cannot be cut here")
        return part.train(decoder.training)

    def require_nothing_else(self) -> None:
        """Refuse a decoder that is more than its layers and a norm: without layers, it is what stands beside them.

        Nor may it change the tokens' embeddings before the first layer.
        """
        kind = type(self.decoder).__name__
        embedding = self.decoder.get_input_embeddings()
        part = self._copied(range(self.count - 1, self.count), norm=False)
        device = part.device
        setattr(part, self._layers_name, nn.ModuleList())
        setattr(part, self._norm_name, nn.LeakyReLU(3.0))  # three times what is negative
        part.eval().set_input_embeddings(embedding)
        place = torch.zeros(1, 1, dtype=torch.long, device=device)
        ids = place + embedding.num_embeddings - 1
        with torch.no_grad():
            own = part(input_ids=ids, position_ids=place, use_cache=False).last_hidden_state
            if not torch.equal(own, run_layers(part, embedding(ids), None, place, None)):
                raise ValueError(f"{kind} changes its tokens' embeddings before the first layer: it cannot be cut here")
        if hasattr(part, MULTIPLIER):
            setattr(part, MULTIPLIER, 1.0)  # the first layers keep it
        hidden = -torch.ones(1, 1, part.config.hidden_size, device=device)
        final = run_layers(part, hidden, None, place, None)
        if not torch.equal(final, 3 * hidden):
            raise ValueError(f"{kind} is more than its layers and a norm: it cannot be cut here")

    def last_layer_adds(self, projection: Any, layer: nn.Module) -> bool:
        """Whether the last layer adds what its projection gives to its output as it is.

        Then both have the same gradient. ``layer`` is the last one of a section, with ``projection`` in it; a copy of
        the layer alone is tried.
        """
        part = self.section(self.count - 1, self.count, norm=False)
        copied = self.layers(part)[0]
        (path,) = (name for name, module in layer.named_modules() if module is projection)
        given: list[torch.Tensor] = []

        def keep(_, inputs, output: torch.Tensor) -> torch.Tensor:
            given.append(output.detach().requires_grad_())
            return given[-1].clone()  # Falcon adds to it in place

        copied.get_submodule(path).register_forward_hook(keep)
        for module in copied.modules():
            if isinstance(module, BaseTunerLayer):
                module._disable_adapters = True  # a late one waits for the layer before
        weight = projection.get_base_layer().weight
        places = torch.arange(2, device=weight.device)[None]
        with torch.inference_mode(False), torch.enable_grad():
            hidden = torch.linspace(-1, 1, 2 * part.config.hidden_size).reshape(1, 2, -1).to(weight)
            final = run_layers(part.eval(), hidden, None, places, None)
            if len(given) != 1:  # it is called more than once, or never
                return False
            (gradient,) = torch.autograd.grad(final, given, hidden, allow_unused=True)
        return gradient is not None and torch.equal(gradient.flatten(), hidden.flatten())


def _config_of(decoder: Any, layers: range):
    """The configuration of a decoder that has only these layers."""
    config = copy.deepcopy(decoder.config)
    config.num_hidden_layers = len(layers)
    kinds = getattr(decoder.config, "layer_types", None)
    if kinds is not None:
        try:
            config.layer_types = [kinds[i] for i in layers]
        except AttributeError:  # Jamba's follow from the layers' numbers
            name = type(decoder).__name__
            raise ValueError(f"the kinds of {name}'s layers cannot be chosen: it cannot be cut here") from None
    return config


def _number(layers: nn.ModuleList) -> None:
    """Let each layer know its number in the section, which is its place in the KV cache."""
    for number, layer in enumerate(layers):
        for module in layer.modules():
            for name in ("layer_idx", "layer_id"):
                if hasattr(module, name):
                    setattr(module, name, number)


class _Nothing(nn.Module):
    """Adds nothing where a decoder adds its position embedding: the device has done so."""

    def forward(self, *_, **__) -> torch.Tensor:
        return torch.zeros(())  # without dimensions, so that it changes no type, and fits on any device


def require_own_logits(whole: Any, device: DevicePart) -> None:
    """Refuse a model that makes other logits of its decoder's states than the device will."""
    weight = device.lm_head.weight
    head = whole.get_output_embeddings()
    hidden = torch.linspace(-1, 1, device.embedding.embedding_dim)[None, None].to(weight)
    whole = copy.copy(whole)  # with the head of the adapter that was asked for
    whole._modules = {name: device.lm_head if each is head else each for name, each in whole._modules.items()}
    with torch.no_grad():
        own = logits_of(whole, hidden)
        ours = device.head(hidden)
    if (own - ours).abs().max() > 8 * torch.finfo(weight.dtype).eps * own.abs().max():
        raise ValueError(
            f"{type(whole).__name__} changes its logits by more than a known scale or cap: it cannot be cut"
        )
