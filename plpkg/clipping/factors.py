"""A per-sample gradient as a sum of outer products: its norm and its weighted sum without building it.

The gradient of a matrix W for one example is the sum over positions t of g_t ⊗ a_t, with a_t what the layer read
and g_t the loss's gradient at its output (Goodfellow, arXiv 1510.01799; for sequences Li et al., arXiv 2110.05679).
One of the two sides may be one-hot: an embedding reads token ids. Convolutions are sums over patches, in groups.

Three ways to its squared norm:

* ``gram``: Σ_{t,s} ⟨g_t, g_s⟩⟨a_t, a_s⟩, 2·T²·(p + d) operations for each example;
* ``instantiate``: build the (p, d) matrix, 2·T·p·d operations; exact where ``gram`` loses digits to cancellation;
* one-hot rows: add up the columns that belong to one id, T·d operations.

A parameter that is used several times is several of these: positions are concatenated, and an embedding tied to a
linear head adds the cross term 2·Σ_{t,s} g^head_s[id_t]·⟨a_s, g^emb_t⟩ (phantom clipping, arXiv 2310.15526).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch._subclasses.fake_tensor import is_fake

CHUNK_BYTES = 64 * 2**20
"""Temporaries of a norm stay below this, however large the batch (one example's are the least)."""
CANCELLATION = 0.03
"""A norm² below this share of Σ_{t,s}|⟨g_t, g_s⟩⟨a_t, a_s⟩| says that ``gram`` subtracted nearly equal numbers.

Float32 rounds each term by about 1e-7, so that the norm keeps six digits. It implies the milder test against
Σ_t‖g_t‖²‖a_t‖², a part of that sum, and also sees activations with a mean in common."""


class Norm(StrEnum):
    """A way to a squared norm: see the module."""

    GRAM = "gram"
    INSTANTIATE = "instantiate"


@dataclass(frozen=True)
class Outer:
    """The gradients Σ_t rows_t ⊗ cols_t of one use of a parameter, an example each.

    Attributes
    ----------
    rows
        ``(batch, groups, positions, R)``, or token ids ``(batch, positions)``: one-hot rows of length ``num_rows``.
    cols
        ``(batch, groups, positions, C)``.
    shape
        The parameter's; ``groups·R·C`` numbers, in this order.
    """

    rows: torch.Tensor
    cols: torch.Tensor
    shape: torch.Size

    @property
    def one_hot(self) -> bool:
        return not self.rows.is_floating_point()

    @property
    def positions(self) -> int:
        return self.cols.shape[2]

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.one_hot else self.rows.shape[3]

    def examples(self, index) -> "Outer":
        """The gradients of some of the examples."""
        return replace(self, rows=self.rows[index], cols=self.cols[index])

    def of_users(self, members: torch.Tensor) -> "Outer":
        """The gradients of users, their examples' positions side by side; ``members`` is of :func:`members_of`."""
        # Where a user has fewer examples than the most, -1 picks the last one of the batch: its columns are zeros here,
        # so that it adds nothing, to whatever ids.
        there = (members >= 0).to(self.cols)[:, :, None, None, None]
        cols = self.cols[members] * there  # (users, most, groups, positions, C)
        rows = self.rows[members]  # (users, most, groups, positions, R), or ids (users, most, positions)
        side_by_side = rows.flatten(1) if self.one_hot else rows.transpose(1, 2).flatten(2, 3)
        return replace(self, rows=side_by_side, cols=cols.transpose(1, 2).flatten(2, 3))

    def norms_squared(self, rule: Norm | str) -> torch.Tensor:
        """‖Σ_t rows_t ⊗ cols_t‖² by ``gram`` or ``instantiate``, one-hot rows by their ids; and the sum of the absolute
        values of the terms that were added up for it: ``(2, batch)``."""
        rule = Norm(rule)
        if self.one_hot:
            bytes_per_example = 2 * self.cols[0].nbytes if len(self.cols) else 0
            return _in_chunks(Outer._by_id, [self], bytes_per_example)
        groups = self.cols.shape[1]
        if self.positions == 1 and groups == 1:  # ‖g ⊗ a‖ = ‖g‖·‖a‖
            norms = _lengths(self.rows) * _lengths(self.cols)
            return norms.square().expand(2, -1)
        if rule is Norm.GRAM:
            grams = 2 * groups * self.positions**2
            return _in_chunks(Outer._by_gram, [self], grams * self.cols.dtype.itemsize)
        return _in_chunks(_by_instance, [self], self._gradient_bytes)

    @property
    def _gradient_bytes(self) -> int:
        """The size of one example's gradient."""
        return self.shape.numel() * self.cols.dtype.itemsize

    def inner(self, other: "Outer") -> torch.Tensor:
        """⟨this gradient, the other's⟩ for each example, and the sum of its terms' absolute values: ``(2, batch)``."""
        if other.one_hot and not self.one_hot:
            return other.inner(self)
        our_cols = self.cols.to(_wide(self.cols))
        their_cols = other.cols.to(_wide(other.cols))
        cols = our_cols @ their_cols.mT  # (batch, groups, our positions, their positions), as `rows`
        if not self.one_hot:
            rows = self.rows.to(cols.dtype) @ other.rows.to(cols.dtype).mT
        elif other.one_hot:
            equal = self.rows[:, None, :, None] == other.rows[:, None, None, :]
            rows = equal.to(cols.dtype)
        else:  # a one-hot row times another row is its number at that id
            theirs = other.rows[:, 0]  # (batch, their positions, R)
            ids = self.rows[:, None, :].expand(-1, theirs.shape[1], -1)  # (batch, their positions, our positions)
            rows = theirs.gather(2, ids).mT[:, None].to(cols.dtype)
        terms = cols.mul_(rows)
        return torch.stack([terms.sum((1, 2, 3)), terms.abs_().sum((1, 2, 3))])

    def instantiate(self) -> torch.Tensor:
        """The gradients themselves, ``(batch, *shape)``."""
        cols = self.cols.to(_wide(self.cols))
        batch = len(cols)
        if self.one_hot:
            ids = self.rows[:, :, None].expand(-1, -1, cols.shape[3])  # (batch, positions, C)
            dense = cols.new_zeros(batch, *self.shape)
            return dense.scatter_add_(1, ids, cols[:, 0])
        products = self.rows.to(cols.dtype).mT @ cols  # (batch, groups, R, C)
        return products.reshape(batch, *self.shape)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Σ_i weights_i · gradient_i in the parameter's shape; ``weights`` is ``(batch,)``."""
        cols = self.cols.to(_wide(self.cols))
        weights = weights.to(cols.dtype)[:, None, None, None]
        if self.one_hot:
            weighted = (cols * weights).reshape(-1, cols.shape[3])  # (batch·positions, C)
            return cols.new_zeros(self.shape).index_add_(0, self.rows.flatten(), weighted)
        rows = self.rows.to(cols.dtype)
        if rows.numel() < cols.numel():  # the smaller side is the cheaper one to scale
            rows = rows * weights
        else:
            cols = cols * weights
        groups = cols.shape[1]
        if groups == 1:
            total = rows.flatten(0, 2).mT @ cols.flatten(0, 2)
        else:
            total = torch.einsum("bgtr,bgtc->grc", rows, cols)
        return total.reshape(self.shape)

    def projected(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """⟨left_i ⊗ right_i, the first example's gradient⟩ for each i; of shapes ``(count, groups·R)`` and
        ``(count, C)``.
        """
        rows = self.rows[0]  # (groups, positions, R), or ids (positions,)
        cols = self.cols[0].to(_wide(self.cols))
        left = left.to(cols)
        if self.one_hot:
            of_rows = left[:, None, rows]
        else:
            groups = len(rows)
            of_rows = torch.einsum("gtr,ngr->ngt", rows.to(cols.dtype), left.unflatten(1, (groups, -1)))
        of_cols = torch.einsum("gtc,nc->ngt", cols, right.to(cols))
        return (of_rows * of_cols).sum((1, 2))  # (count, groups, positions)

    def _by_gram(self) -> torch.Tensor:
        return self.inner(self)

    def _by_id(self) -> torch.Tensor:
        """Add up the columns of each id; different ids are orthogonal."""
        ids, order = self.rows.sort(1)
        cols = self.cols[:, 0].to(_wide(self.cols))
        cols = cols.gather(1, order[:, :, None].expand_as(cols))  # (batch, positions, C), equal ids side by side
        is_first = torch.ones_like(ids)
        is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        rank = is_first.cumsum(1) - 1  # (batch, positions): of the id within its example
        sums = torch.zeros_like(cols).scatter_add_(1, rank[:, :, None].expand_as(cols), cols)
        return square(sums).expand(2, -1)


def norms_squared(uses: Sequence[Outer], rule: Norm | str) -> torch.Tensor:
    """‖Σ_uses Σ_t rows_t ⊗ cols_t‖² of a parameter with all its uses, ``(batch,)``.

    Parameters
    ----------
    uses
        At least one, of one parameter.
    rule
        ``gram`` or ``instantiate``; where ``gram`` cancels (:data:`CANCELLATION`) it is computed again by the other.
    """
    rule = Norm(rule)
    merged = _concatenated(uses)
    if len(merged) > 1 and (rule is Norm.INSTANTIATE or not _are_of_one_shape(merged)):
        return _instantiated_norms(merged)
    total, mass = _sum_of_terms(merged, rule)
    if is_fake(total):
        return total
    doubtful = (total < CANCELLATION * mass).nonzero().flatten()
    if len(doubtful):
        exact = _instantiated_norms([use.examples(doubtful) for use in merged])
        total = total.index_copy(0, doubtful, exact.to(total.dtype))
    return total


def _sum_of_terms(uses: Sequence[Outer], rule: Norm) -> torch.Tensor:
    """‖Σ_u G_u‖² = Σ_u ‖G_u‖² + 2·Σ_{u<v} ⟨G_u, G_v⟩, and its terms' absolute values: ``(2, batch)``."""
    both = uses[0].norms_squared(rule)
    for use in uses[1:]:
        both = both + use.norms_squared(rule)
    for place, use in enumerate(uses):
        for other in uses[:place]:
            both = both + 2 * use.inner(other)
    return both


def _instantiated_norms(uses: Sequence[Outer]) -> torch.Tensor:
    return _in_chunks(_by_instance, uses, uses[0]._gradient_bytes)[0]


def instantiate(uses: Sequence[Outer]) -> torch.Tensor:
    """The gradients of a parameter with all its uses, ``(batch, *shape)``."""
    total, *others = [use.instantiate() for use in _concatenated(uses)]
    for other in others:
        total += other
    return total


def _by_instance(*uses: Outer) -> torch.Tensor:
    return square(instantiate(uses)).expand(2, -1)


def _concatenated(uses: Sequence[Outer]) -> list[Outer]:
    """Uses of one kind become one use with more positions."""
    merged = []
    for one_hot in (False, True):
        alike = [use for use in uses if use.one_hot is one_hot]
        if len(alike) > 1 and _are_of_one_shape(alike):
            positions = 1 if one_hot else 2  # the dimension
            rows = torch.cat([use.rows for use in alike], positions)
            cols = torch.cat([use.cols for use in alike], 2)
            merged.append(Outer(rows, cols, alike[0].shape))
        else:
            merged += alike
    return merged


def _are_of_one_shape(uses: Sequence[Outer]) -> bool:
    """Whether uses agree in groups and rows; of one parameter, convolutions may differ in their groups."""
    shapes = {(use.cols.shape[1], use.num_rows) for use in uses}
    return len(shapes) == 1


def _in_chunks(norm: Callable[..., torch.Tensor], uses: Sequence[Outer], bytes_per_example: int) -> torch.Tensor:
    """``norm(*uses)`` of a few examples at a time, so that its temporaries stay small."""
    step = max(1, CHUNK_BYTES // max(1, bytes_per_example))
    batch = len(uses[0].cols)
    parts = []
    for start in range(0, max(1, batch), step):
        chunk = [use.examples(slice(start, start + step)) for use in uses]
        parts.append(norm(*chunk))
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def members_of(owners: torch.Tensor) -> torch.Tensor:
    """The numbers of each user's examples, ``(users, most)``, filled up with -1; ``owners`` is ``(batch,)``."""
    users = int(owners.max()) + 1
    groups = [(owners == user).nonzero().flatten() for user in range(users)]
    return torch.nn.utils.rnn.pad_sequence(groups, batch_first=True, padding_value=-1)


def square(gradients: torch.Tensor) -> torch.Tensor:
    """‖·‖² of each example of ``(batch, …)``, without a copy of the squares.

    Row by row first: PyTorch adds up a long float32 norm in few lanes, and loses two digits over 10⁵ numbers.
    """
    # (batch, 1, …), so that a row is left also of (batch, n); one number an example is a row of its own.
    rows = gradients[:, None] if gradients.ndim > 1 else gradients[:, None, None]
    lengths = torch.linalg.vector_norm(rows, dim=-1).flatten(1)
    return lengths.double().square().sum(1).to(gradients.dtype)


def _lengths(vectors: torch.Tensor) -> torch.Tensor:
    """‖·‖ of each example of ``(batch, …)``."""
    return torch.linalg.vector_norm(vectors.flatten(1), dim=1, dtype=_wide(vectors))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """Half precision is added up in float32: a norm that is rounded down would let an example through."""
    return torch.promote_types(tensor.dtype, torch.float32)
