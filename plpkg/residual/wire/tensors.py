"""Tensors as bytes: raw little-endian values.

A tensor's shape follows from what was agreed and from the step that it belongs to, so a payload of any other size is
refused before it is read. Neither end sends or takes what is not a finite number.
"""

import numpy as np
import torch

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""Of the values on the wire."""


def pack(tensor: torch.Tensor, dtype: torch.dtype) -> bytes:
    """The tensor's values as raw bytes.

    Raises
    ------
    OverflowError
        A finite value is too large for this type.
    FloatingPointError
        A value is not finite.
    """
    narrowed = tensor.detach().to("cpu", dtype)
    if not _finite(narrowed):
        if not torch.isfinite(tensor).all():
            raise FloatingPointError(f"what was to be sent, of shape {tuple(tensor.shape)}, is not finite")
        name = next(name for name, each in PRECISIONS.items() if each == dtype)
        raise OverflowError(f"a value of {tensor.abs().max().item():g} is too large for {name}: take bf16 or fp32")
    return narrowed.contiguous().view(torch.uint8).numpy().tobytes()


def unpack(data: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of raw bytes, ``shape`` and ``dtype``.

    Raises
    ------
    ValueError
        The bytes are not as many as the shape needs, or no finite numbers.
    """
    expected = torch.Size(shape).numel() * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"a tensor of shape {tuple(shape)} has {expected} bytes, got {len(data)}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    values = torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
    if dtype.is_floating_point and not _finite(values):
        raise ValueError(f"what has come, of shape {tuple(shape)}, is not finite")
    return values


def _finite(values: torch.Tensor) -> bool:
    if values.dtype == torch.bfloat16:  # NumPy, which is faster for a message, has none
        return bool(torch.isfinite(values).all())
    return bool(np.isfinite(values.numpy()).all())
