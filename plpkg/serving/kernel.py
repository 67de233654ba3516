"""SGMV on a GPU, in Triton: one small kernel, a segmented product, launched twice.

For each segment i of a batch that is sorted by adapter (Punica, arXiv 2310.18547, Section 4), the first launch
*shrinks*, v = scale_i · x A_iᵀ, and the second one *expands*, y += v B_iᵀ. A program makes one tile of the result: some
tokens of one segment times some columns. A table tells it which tokens and whose factors, so no program is without
work, and none waits for another. Sums are fp32 (fp64 where the input is), never TF32; v is rounded to the input's
dtype once, as by the loop in :mod:`plpkg.serving.segments`.

Left out are Punica's Split-K, so that one program reads all of A_i, up to rank 64: with n short segments a shrink uses
n of the GPU's hundred-odd multiprocessors; autotuning; and q, k and v in one launch. It is checked in Triton's
interpreter and compiled for two GPUs, but not run on any in CI.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

AVAILABLE = find_spec("triton") is not None
"""Whether Triton is installed: ``pip install 'plpkg[gpu]'``."""


@cache
def _jitted() -> Any:  # on first use: Triton takes half a second to import, and reads TRITON_INTERPRET then
    global tl, triton
    import triton  # pyright: ignore[reportMissingImports] (for GPUs only)
    import triton.language as tl  # pyright: ignore[reportMissingImports] (the same)

    @triton.jit
    def segmented_product(
        y, x, w, scales, table, width, inner, y_row, y_col, x_row, x_col, w_adapter, w_row, w_col,
        EXPAND: tl.constexpr, PRODUCT: tl.constexpr, SUM: tl.constexpr,
        BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        # This program's entry of the table: its first token, the end of the segment, the adapter's index.
        entry = table + 3 * tl.program_id(0)
        start = tl.load(entry)
        stop = tl.load(entry + 1)
        index = tl.load(entry + 2).to(tl.int64)

        rows = (start + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]  # int64: x may have over 2³¹ elements
        cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
        valid_rows = rows < stop
        valid_cols = cols < width
        valid = valid_rows & valid_cols
        x_rows = x + rows * x_row
        w_cols = w + index * w_adapter + cols * w_row  # a column of the result is a row of the adapter's factor
        tile = y + rows * y_row + cols * y_col

        total = tl.zeros((BLOCK_T, BLOCK_N), dtype=SUM)
        for k in range(0, inner, BLOCK_K):
            terms = (k + tl.arange(0, BLOCK_K)).to(tl.int64)
            valid_terms = terms < inner
            a = tl.load(x_rows + terms[None, :] * x_col, mask=valid_rows & valid_terms[None, :], other=0.0)
            b = tl.load(w_cols + terms[:, None] * w_col, mask=valid_cols & valid_terms[:, None], other=0.0)
            total = tl.dot(a.to(PRODUCT), b.to(PRODUCT), total, input_precision="ieee", out_dtype=SUM)
        if EXPAND:
            total += tl.load(tile, mask=valid, other=0.0).to(SUM)
        else:
            total *= tl.load(scales + index)
        tl.store(tile, total.to(y.dtype.element_ty), mask=valid)

    return segmented_product


def _constants(dtype: torch.dtype, width: int, inner: int, expand: bool, block: int) -> dict:
    """The constants that the kernel is compiled for.

    A tensor core takes no less than 16 × 16, so small ranks are padded by mask.
    """
    sums = tl.float64 if dtype == torch.float64 else tl.float32
    product = getattr(tl, str(dtype).removeprefix("torch."))
    if triton.knobs.runtime.interpret:  # pyright: ignore[reportAttributeAccessIssue] (added as it loads)
        product = sums  # the interpreter holds bf16 as integers, and would multiply those
    return {
        "EXPAND": expand,
        "PRODUCT": product,
        "SUM": sums,
        "BLOCK_T": block,
        "BLOCK_N": min(_power_of_two(width), 64),
        "BLOCK_K": min(_power_of_two(inner), 128 // dtype.itemsize),
    }


def _power_of_two(size: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _table(segments: list, device: torch.device) -> tuple[torch.Tensor, int]:
    """``(blocks, 3)``: each block of tokens' start, its segment's stop and index; and a block's length, 16 or 64."""
    tables = vars(segments).setdefault("tables", {}) if hasattr(segments, "__dict__") else {}
    if device not in tables:  # made once for a batch, not for every layer
        runs = [run for run in segments if run[2] is not None]
        block = 16 if all(stop - start <= 16 for start, stop, _ in runs) else 64
        blocks = []
        for start, stop, index in runs:
            blocks += [(first, stop, index) for first in range(start, stop, block)]
        tables[device] = (torch.tensor(blocks, dtype=torch.int32, device=device), block)
    return tables[device]


def add_sgmv(y, x, downs, ups, scales, segments) -> None:
    """Add to ``y`` ``(tokens, out)`` in place, outside autograd; arguments as in :func:`plpkg.serving.segments.sgmv`.

    ``downs`` and ``ups`` are stacked, all tensors of one dtype and any strides. ``scales`` in a list are copied to the
    device at every call, a float32 tensor that is there is not.
    """
    if len({t.dtype for t in (y, x, downs, ups)}) > 1:
        raise ValueError(f"y, x, downs, ups must be of one dtype, got {y.dtype}, {x.dtype}, {downs.dtype}, {ups.dtype}")
    kernel = _jitted()
    table, block = _table(segments, x.device)
    if not len(table):  # nobody has an adapter
        return
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    scales = torch.as_tensor(scales, dtype=sums, device=x.device).contiguous()
    v = x.new_empty(len(x), downs.shape[1])  # (tokens, rank)
    with torch.cuda.device_of(x):  # Triton launches on the current one
        for target, source, w in ((v, x, downs), (y, v, ups)):  # shrink, then expand
            _, width, inner = w.shape  # (adapters, width, inner)
            constants = _constants(x.dtype, width, inner, expand=target is y, block=block)
            strides = (*target.stride(), *source.stride(), *w.stride())
            columns = -(-width // constants["BLOCK_N"])
            kernel[len(table), columns](target, source, w, scales, table, width, inner, *strides, **constants)
