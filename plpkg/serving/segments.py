"""Segmented gather matrix–vector product: one batch, and each run of its tokens through an adapter of its own.

Punica (arXiv 2310.18547, Section 4) writes, for segments of a batch that is sorted by adapter,

    y[start : stop] += scale_i · (x[start : stop] A_iᵀ) B_iᵀ

so that the backbone's own product runs once over the whole batch, and only the thin factors are read for each adapter.
Segments count tokens, not requests: a prompt is a segment as long as itself. Neighbours of one length whose factors lie
side by side are one batched product; what is left is a loop over blocks. (An idea that outlived its kernels: today's
GPU servers have it in Triton, as :mod:`plpkg.serving.kernel`.)

The gradient has the same form: with g = ∂L/∂y, ∂L/∂x is the segmented product of g with Bᵀ and Aᵀ in their places, and
∂L/∂A_i and ∂L/∂B_i sum over the tokens of adapter i alone. That is what trains many adapters in one batch.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch.nn.functional import pad

from plpkg.serving import kernel


class Segments(list):
    """Runs of tokens: tuples ``(start, stop, index)``, ``index=None`` where the backbone answers alone."""

    @cached_property
    def blocks(self) -> list[tuple[slice, slice, int]]:
        """Rows, indices and length of each run of adjoining segments of one length whose indices count up."""
        blocks: list[tuple[slice, slice, int]] = []
        for start, stop, index in self:
            length = stop - start
            if index is None or length == 0:
                continue
            rows, adapters = slice(start, stop), slice(index, index + 1)
            if blocks:
                rows_before, adapters_before, length_before = blocks[-1]
                if (rows_before.stop, adapters_before.stop, length_before) == (start, index, length):
                    rows = slice(rows_before.start, stop)
                    adapters = slice(adapters_before.start, index + 1)
                    blocks.pop()
            blocks.append((rows, adapters, length))
        return blocks


def add_sgmv(
    y: torch.Tensor, x: torch.Tensor, downs: torch.Tensor, ups: torch.Tensor, scales: torch.Tensor, segments: Segments
) -> None:
    """Add the segmented product to ``y`` in place, outside autograd; the factors are stacked, see :func:`sgmv`."""
    if x.is_cuda and kernel.AVAILABLE:
        return kernel.add_sgmv(y, x, downs, ups, scales, segments)
    for rows, adapters, length in segments.blocks:
        if rows.stop - rows.start == length:  # one segment: a product of matrices, which needs no batch
            index = adapters.start
            v = x[rows] @ downs[index].T  # (length, rank)
            y[rows].addmm_(v.mul_(scales[index]), ups[index].T)
        else:
            v = torch.bmm(x[rows].unflatten(0, (-1, length)), downs[adapters].mT)  # (adapters, length, rank)
            y[rows].unflatten(0, (-1, length)).baddbmm_(v.mul_(scales[adapters, None, None]), ups[adapters].mT)
    return None


class _Sgmv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, downs, ups, scales, segments):
        ctx.save_for_backward(x, downs, ups, scales)
        ctx.segments = segments
        y = x.new_zeros(len(x), ups.shape[1])
        add_sgmv(y, x, downs, ups, scales, segments)
        return y

    @staticmethod
    def backward(ctx, g):
        x, downs, ups, scales = ctx.saved_tensors
        dx = torch.zeros_like(x)
        d_downs = torch.zeros_like(downs)
        d_ups = torch.zeros_like(ups)
        add_sgmv(dx, g.contiguous(), ups.mT, downs.mT, scales, ctx.segments)
        for rows, adapters, length in ctx.segments.blocks:
            x_s = x[rows].unflatten(0, (-1, length))  # (adapters, length, hidden)
            g_s = g[rows].unflatten(0, (-1, length))  # (adapters, length, out)
            g_s = g_s * scales[adapters, None, None].to(g.dtype)
            d_downs[adapters] += torch.bmm(torch.bmm(g_s, ups[adapters]).mT, x_s)
            d_ups[adapters] += torch.bmm(g_s.mT, torch.bmm(x_s, downs[adapters].mT))
        return dx, d_downs, d_ups, None, None


def sgmv(
    x: torch.Tensor,
    downs: Sequence[torch.Tensor] | torch.Tensor,
    ups: Sequence[torch.Tensor] | torch.Tensor,
    scales: Sequence[float] | torch.Tensor,
    segments: Sequence[tuple[int, int, int | None]],
) -> torch.Tensor:
    """The product that every token's own adapter adds to a linear layer's output.

    Parameters
    ----------
    x
        ``(tokens, hidden)``, the layer's input.
    downs, ups
        A and B of each adapter, ``(rank_i, hidden)`` and ``(out, rank_i)``, in lists; or stacked, ``(adapters, rank,
        hidden)`` and ``(adapters, out, rank)``. Lists are stacked here, lower ranks filled up with zeros.
    scales
        The factor of each adapter's product: alpha / rank, or alpha / √rank.
    segments
        ``(start, stop, i)``: tokens ``start`` to ``stop`` belong to adapter ``i``, or to none with ``i=None``.
        In order, without overlap; tokens that none names belong to none.

    Returns
    -------
    torch.Tensor
        ``(tokens, out)``, zero where there is no adapter; differentiable by x, downs and ups.

    Raises
    ------
    ValueError
        Segments that overlap or leave the batch, an adapter that is not there, shapes that do not fit.
    """
    if not isinstance(segments, Segments):
        segments = Segments(map(tuple, segments))
    if not len(downs) == len(ups) == len(scales) > 0:
        raise ValueError(f"downs, ups and scales must be of one length, got {len(downs)}, {len(ups)}, {len(scales)}")
    hidden = x.shape[-1]
    out = ups[0].shape[0]
    for i, (down, up) in enumerate(zip(downs, ups, strict=True)):
        rank = len(down)
        if tuple(down.shape) != (rank, hidden) or tuple(up.shape) != (out, rank):
            shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
            raise ValueError(f"A and B of adapter {i} must be (rank, {hidden}) and ({out}, rank), got {shapes}")
    end = 0
    for start, stop, index in segments:
        is_there = index is None or 0 <= index < len(downs)
        if not (end <= start <= stop <= len(x) and is_there):
            raise ValueError(f"segment {(start, stop, index)} does not fit {len(x)} tokens, {len(downs)} adapters")
        end = stop
    if not isinstance(downs, torch.Tensor):
        rank = max(map(len, downs))
        downs = torch.stack([pad(down, (0, 0, 0, rank - len(down))) for down in downs])
    if not isinstance(ups, torch.Tensor):
        ups = torch.stack([pad(up, (0, downs.shape[1] - up.shape[1])) for up in ups])
    dtype = torch.promote_types(x.dtype, torch.float32)  # 1/3 has few digits in bfloat16
    scales = torch.as_tensor(scales, dtype=dtype, device=x.device)
    return _Sgmv.apply(x, downs, ups, scales, segments)
