"""Tensors as bytes: raw little-endian values.

A tensor's shape follows from what was agreed and from the step that it belongs to, so a payload of any other size is
refused before it is read.
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
        A finite value is too large for float16.
    """
    narrowed = tensor.detach().to("cpu", dtype)
    if dtype == torch.bfloat16:  # NumPy has none
        return narrowed.contiguous().view(torch.int16).numpy().tobytes()
    values = narrowed.numpy()
    if dtype == torch.float16 and not np.isfinite(values).all() and torch.isfinite(tensor).all():
        raise OverflowError(f"a value of {tensor.abs().max().item():g} is too large for fp16: take bf16 or fp32")
    return values.tobytes()


def unpack(data: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of raw bytes, ``shape`` and ``dtype``.

    Raises
    ------
    ValueError
        The bytes are not as many as the shape needs.
    """
    expected = torch.Size(shape).numel() * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"a tensor of shape {tuple(shape)} has {expected} bytes, got {len(data)}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
