"""The checkers of notebook 04's exercises."""

from collections.abc import Iterator

import torch

from plpkg.retention.watch import Units
from plpkg.show.exercise import Verdict, check_function, check_number


def peak_units(answer: object) -> Verdict:
    """Llama-3.1's published setting (b = 16,384, B = 1,024, 100 local tokens): the most units that a head holds."""
    return check_number(
        answer,
        expected=17_408,
        unit="units",
        tolerance=0,
        explanation="16,384 that were kept and a chunk of 1,024.",
        hints={
            16_384: "that is what is left after a cut; attention comes before it.",
            16_484: "that is what is left at the end, with the local tokens.",
            17_508: "when the local tokens run, the last chunk has been cut already.",
            131_072: "that would be the full cache of a 128K prompt.",
            18_884: "the stabilizers are among the units that are kept, not beside them.",
            19_908: "the stabilizers are among the units that are kept, not beside them.",
        },
        hint="A chunk first attends to what is kept and to itself; only then is the cache cut.",
    )


def labels(function: object) -> Verdict:
    """``labels(q, k)``: ``(kv_heads, prompt)`` from ``(heads, answer, d)`` and ``(kv_heads, prompt, d)``."""
    generator = torch.Generator().manual_seed(0)

    def logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:  # (kv_heads, group, answer, prompt)
        answer = q.shape[1]
        prompt = k.shape[1]
        keys = torch.cat([k, k[:, :1].expand(-1, answer, -1)], dim=1)  # the answer's own units, which have no label
        units = Units(0, query=q[None], keys=keys[None], scaling=q.shape[-1] ** -0.5)
        return torch.cat(list(units.logits()), dim=3)[0, ..., :prompt]

    def cases() -> Iterator[tuple]:
        for heads, kv_heads, answer, prompt, d in ((4, 2, 3, 5, 4), (6, 2, 2, 7, 16)):
            q = torch.randn(heads, answer, d, generator=generator)
            k = torch.randn(kv_heads, prompt, d, generator=generator)
            yield (q, k), logits(q, k).amax(dim=(1, 2))

    def hint(got: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> str:
        paid = logits(q, k)
        if len(got) == len(q) != len(k):
            return "a KV head has one label for a unit: the highest of the query heads that share it"
        if got.shape[-1] == q.shape[1] != k.shape[1]:
            return "the units of the prompt have labels, and not the tokens of the answer"
        for wrong, reason in _mistakes(paid, q, k):
            if torch.allclose(got, wrong, atol=1e-4):
                return reason
        return ""

    return check_function(
        function,
        cases(),
        "the highest logit over the answer's tokens and the query heads that share the KV head.",
        hint,
    )


def _mistakes(paid: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> list[tuple[torch.Tensor, str]]:
    """Wrong labels ``(kv_heads, prompt)``, and what to say of each.

    Parameters
    ----------
    paid
        ``(kv_heads, group, answer, prompt)`` logits.
    q, k
        ``(heads, answer, d)`` and ``(kv_heads, prompt, d)``.
    """
    root = q.shape[-1] ** 0.5
    kv_heads = len(k)
    group = len(q) // kv_heads
    by_repeat = (q @ k.repeat(group, 1, 1).mT / root).amax(1)  # (heads, prompt), keys taken in another order
    by_head = paid.amax(2).flatten(0, 1)  # (heads, prompt)
    mean = "the highest logit is wanted, not the mean"
    shared = "a KV head serves neighbouring query heads, 0 and 1, say, then 2 and 3: repeat_interleave, not repeat"
    return [
        (paid.amax((1, 2)) * root, "the logits are scaled by one over the root of d"),
        (paid.amax((1, 2)) / root, "the logits are scaled by one over the root of d, and not by one over d"),
        (paid.mean((1, 2)), mean),
        (paid.amax(1).mean(1), mean),
        (paid.amax(2).mean(1), mean),
        (paid.mean(1).amax(1), mean),
        (paid.mean(2).amax(1), mean),
        (paid.sum((1, 2)), "the highest logit is wanted, not the sum"),
        (paid.abs().amax((1, 2)), "the highest logit is wanted, with its sign"),
        (paid.softmax(-1).amax((1, 2)), "the logit is wanted, before the softmax"),
        (by_repeat.unflatten(0, (kv_heads, -1)).amax(1), shared),
        (by_repeat.unflatten(0, (-1, kv_heads)).amax(0), shared),
        (by_head.unflatten(0, (-1, kv_heads)).amax(0), shared),
        (paid[:, 0].amax(1), "all query heads that share a KV head count, not the first alone"),
        (paid[:, :, -1].amax(1), "all tokens of the answer count, not the last alone"),
        (paid[:, :, 0].amax(1), "all tokens of the answer count, not the first alone"),
    ]
