"""Who asks for whose adapter, and what a step of decoding costs then: bytes and operations, *computed*.

``LAWS`` defines every popularity once, for notebooks 06 and 07, and each name means one law everywhere. A batch's four
are Punica's (arXiv 2310.18547, Section 6), whose skewed one, called Zipf-1.5 there, is geometric: 1, 1, 2, 3, 5, 7 …
The requests of a service come one after the other, and draw a tenant: ``even`` or ``zipf``, never "uniform" or
"skewed".

A step reads the backbone once whatever the batch, an adapter once for all of its requests, and each request's keys
and values; it takes as long as the slower of reading and computing. Left out: prefill, and all other time.
"""

import math
from dataclasses import dataclass

from plpkg import catalog
from plpkg.results import Tabular
from plpkg.validation import one_of, whole_number

LAWS = {
    "distinct": "each request has its own adapter, as long as there are tenants",
    "identical": "all requests have the same adapter",
    "uniform": "⌈√n⌉ adapters share n requests equally (Punica)",
    "skewed": "adapters have 1, 1, 2, 3, 5, 7 … requests, ⌊1.5^k⌋, and one more what is left (Punica)",
    "even": "each request draws a tenant, and all are equally likely",
    "zipf": "each request draws a tenant, and the k-th is 1/k as likely as the first (S-LoRA, arXiv 2311.03285)",
}
POPULARITIES = ("distinct", "uniform", "skewed", "identical")
"""A batch's, from the most adapters to the fewest."""
ARRIVALS = ("distinct", "even", "zipf", "identical")
"""A service's, in the same order."""


def adapters(popularity: str, requests: int, tenants: int | None = None) -> list[int]:
    """The adapter of each request of a batch by one of ``POPULARITIES``, most popular first.

    With fewer tenants than adapters some of them share one.
    """
    count = whole_number("requests", requests, 1)
    one_of("popularity", popularity, POPULARITIES)
    sizes = {"distinct": [1] * count, "identical": [count], "uniform": [], "skewed": []}[popularity]
    if popularity == "uniform":
        groups = math.isqrt(count - 1) + 1
        sizes = [(k + 1) * count // groups - k * count // groups for k in range(groups)]
    while sum(sizes) < count:
        sizes.append(min(int(1.5 ** len(sizes)), count - sum(sizes)))
    chosen: list[int] = []
    for k, size in enumerate(sorted(sizes, reverse=True)):
        chosen += [k] * size
    if tenants is None:
        return chosen
    whole_number("tenants", tenants, 1)
    return [k % tenants for k in chosen]


@dataclass(frozen=True)
class Decoding(Tabular):
    """A batch of ``requests`` that decodes with ``distinct`` adapters.

    ``tokens_per_s`` is by how it is served: without adapters, in one batch (segments), or switching, with a batch for
    each adapter in turn; ``resident`` such adapters fit beside the backbone and the batch's keys and values.
    """

    requests: int
    distinct: int
    adapter_bytes: float
    resident: int
    tokens_per_s: dict[str, float]

    def rows(self) -> list[dict]:
        return [{"served": served, "tokens_per_s": speed} for served, speed in self.tokens_per_s.items()]

    def __repr__(self) -> str:
        speeds = ", ".join(f"{served} {speed:,.0f}" for served, speed in self.tokens_per_s.items())
        return f"Decoding({self.requests} requests, {self.distinct} adapters; tokens/s: {speeds})"


def decode(chosen: list[int], rank: int, model="llama-2-7b", device="a100-80gb-sxm", context: int = 1024) -> Decoding:
    """A decoding step of a 16-bit model with adapters of one rank on all projections.

    ``chosen`` is each request's adapter, ``context`` the positions of each; model and device are the catalog's.
    """
    shape = catalog.model(model)
    processor = catalog.device(device)
    width = shape.num_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    queries_and_outputs = 2 * (shape.hidden + width)  # in and out of each projection
    keys_and_values = 2 * (shape.hidden + kv_width)
    feed_forward = 3 * (shape.hidden + shape.intermediate)
    sides = queries_and_outputs + keys_and_values + feed_forward
    adapter = whole_number("rank", rank, 1) * sides * shape.num_layers
    backbone = shape.parameters
    if not shape.tied_embeddings:  # of an embedding alone, only the rows of the tokens are read
        backbone -= shape.vocab * shape.hidden
    past = 2 * kv_width * shape.cached_positions(context)

    def seconds(requests: int, distinct: int) -> float:
        read = 2 * (backbone + distinct * adapter + requests * past)
        operations = 2 * requests * (backbone + bool(distinct) * adapter)
        return max(read / processor.memory_bandwidth_bytes_per_s, operations / processor.flops_per_s)

    n = len(chosen)
    sizes = [chosen.count(k) for k in set(chosen)]
    times = {
        "no adapters": seconds(n, 0),
        "one batch": seconds(n, len(sizes)),
        "switching": sum(seconds(size, 1) for size in sizes),
    }
    free = processor.memory_bytes - 2 * (shape.parameters + n * past)
    resident = max(0, int(free // (2 * adapter)))
    speeds = {served: n / time for served, time in times.items()}
    return Decoding(n, len(sizes), 2.0 * adapter, resident, speeds)
