"""Rotary positions, forwards and backwards: keys that wait unrotated can take new places.

In half precision keys are rotated by the model's own arithmetic: units that were never moved give what it gives.
"""

import inspect
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from transformers import DynamicCache

from plpkg.decoding import cache_argument
from plpkg.fingerprints import Stamp, stamp
from plpkg.training_loop import evaluating


class Rotary:
    """A model's own rotary positions, forwards and backwards, for keys ``(batch, num_kv_heads, n, head_dim)``.

    Attributes
    ----------
    steady
        Whether a position has the same angles whatever the text's length: not with LongRoPE or dynamic NTK.

    Raises
    ------
    ValueError
        The model has no rotary positions, or in another form than Llama's.
    """

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder()
        self._angles: Any = getattr(decoder, "rotary_emb", None)
        self._rotate: Any = getattr(sys.modules[type(decoder).__module__], "apply_rotary_pos_emb", None)
        takes = [] if self._rotate is None else list(inspect.signature(self._rotate).parameters)
        # GPT-J's function takes one tensor, and the sines first.
        if self._angles is None or takes[2:4] != ["cos", "sin"] or hasattr(self._angles, "layer_types"):
            raise ValueError(
                "positions='reassigned' needs rotary positions in the form that Llama has them, one table and one "
                f"function for all layers; {type(model).__name__} has none, or another form: take positions='original'"
            )
        # Where the frequencies depend on the longest text so far, positions alone do not give the angles.
        self.steady = getattr(self._angles, "rope_type", "default") not in ("dynamic", "longrope")
        self._last: dict[bool, tuple] = {}  # by direction: what every layer of a forward pass asks for
        try:
            self._halves = self._turns_halves()
        except RuntimeError as error:
            raise ValueError(
                f"positions='reassigned' needs one cosine for each number of a head that is rotated, which "
                f"{type(model).__name__} does not have: take positions='original'"
            ) from error

    def apply(self, keys: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Rotate keys to positions ``start``, ``start + 1``, …"""
        return self._turn(keys, *self._cos_sin(keys, start, back=False))

    def undo(self, keys: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The keys as they were before :meth:`apply`."""
        return self._turn(keys, *self._cos_sin(keys, start, back=True))

    def _cos_sin(self, keys: torch.Tensor, start: int, *, back: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines ``(1, n, width)`` that turn these keys, or turn them back."""
        n = keys.shape[-2]
        asked = (start, n, keys.dtype, keys.device)
        last_asked, cos, sin = self._last.get(back, (None, None, None))
        if self.steady and asked == last_asked:
            return cos, sin
        positions = torch.arange(start, start + n, device=keys.device)[None]
        cos, sin = self._angles(keys, positions)  # in the keys' precision, as in the model
        if back:
            cos = cos.float()
            sin = sin.float()
            square = cos.square() + sin.square()  # 1, but for rounding and variants that scale (YaRN, LongRoPE)
            cos = cos / square
            sin = -sin / square
        self._last[back] = (asked, cos, sin)
        return cos, sin

    def _turn(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]  # some models rotate a part of each head only
        part = keys[..., :width].to(cos.dtype)
        if self._halves and cos.dtype not in (torch.bfloat16, torch.float16):
            turned = _turn_halves(part, cos, sin)  # the same in a quarter of the time, but for the last bit
        else:  # the model's function turns queries and keys: here one head stands in for the queries
            turned = self._rotate(part[:, :1], part, cos, sin)[1]
        turned = turned.to(keys.dtype)
        if width == keys.shape[-1]:
            return turned
        return torch.cat([turned, keys[..., width:]], dim=-1)

    def _turns_halves(self) -> bool:
        """Whether the model's function pairs each number of a head's first half with one of the second, as Llama's."""
        with unset_fake_temporarily():  # numbers are needed, also where the cache itself is measured with fake ones
            keys = torch.arange(8.0).view(1, 1, 2, 4)
            cos, sin = torch.arange(1.0, 17.0).view(2, 1, 2, 4)  # no angle's, but told apart
            expected = self._rotate(keys, keys, cos, sin)[1]
            return torch.equal(_turn_halves(keys, cos, sin), expected)


def _turn_halves(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A head's halves (a, b) become (a cos − b sin, b cos + a sin)."""
    cos = cos[:, None]  # (1, 1, n, width): one for all heads
    sin = sin[:, None]
    half = keys.shape[-1] // 2
    turned = keys * cos
    turned[..., :half].addcmul_(keys[..., half:], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(keys[..., :half], sin[..., half:])
    return turned


_ROTATING: WeakKeyDictionary[nn.Module, tuple[Stamp, list[bool]]] = WeakKeyDictionary()
"""For each model, whether its layers rotate, and the stamp of the weights with which this was found."""

MOVED = 5
"""By how many positions two tokens are moved, to see what a layer does with it."""


def rotating(model: nn.Module, rotary: Rotary) -> list[bool]:
    """Whether each layer rotates its keys: some families leave out every fourth (SmolLM3, Llama-4).

    Two tokens are run at positions 0 and 1, and at 5 and 6. A layer whose keys are the same has no positions; where
    they are the same once both are turned back, it rotates as ``rotary`` does. A model is asked again when its weights
    have changed: a norm behind the rotation makes a difference once it has learnt (Hunyuan).

    Raises
    ------
    ValueError
        A layer does something else; the message names it.
    """
    current = stamp(model)
    found_with, rotates = _ROTATING.get(model, (None, []))
    if found_with != current:
        rotates = _ask(model, rotary)
        _ROTATING[model] = (current, rotates)
    return rotates


def _ask(model: Any, rotary: Rotary) -> list[bool]:
    if is_fake(next(model.parameters())):  # it has no numbers: where only sizes are measured, all rotate
        return [True] * model.config.get_text_config().num_hidden_layers
    found = []
    for i, (here, there) in enumerate(zip(_keys_at(model, 0), _keys_at(model, MOVED), strict=True)):
        tolerance = 0.05 if here.dtype.itemsize < 4 else 1e-3
        near = tolerance * here.float().norm()
        still = (there - here).float().norm()
        turned = (rotary.undo(there, MOVED) - rotary.undo(here)).float().norm()
        if min(still, turned) > near:
            raise ValueError(
                f"layer {i} of {type(model).__name__} does something else with positions than rotate its keys by the "
                "model's table: take positions='original'"
            )
        found.append(bool(turned <= still))
    return found


def _keys_at(model: Any, start: int) -> list[torch.Tensor]:
    """Each layer's keys ``(1, num_kv_heads, 2, head_dim)`` of two tokens at ``start`` and ``start + 1``."""
    device = torch.device("cpu" if model.device.type == "meta" else model.device)  # accelerate brings it to its weights
    ids = torch.tensor([[1, 2]], device=device)
    positions = torch.arange(start, start + 2, device=device)[None]
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad(), torch.autocast(device.type, enabled=False), evaluating(model):  # autocast would round
        model(input_ids=ids, position_ids=positions, **cache_argument(cache), use_cache=True)
    return [layer.keys for layer in cache.layers]
