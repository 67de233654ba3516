"""Random adapters to measure with."""

from collections.abc import Collection

import torch
from peft import LoraConfig

from plpkg.serving import Adapter, Factors, targets


def random_adapter(model, seed: int, rank: int, projections: Collection[str] | None = None) -> Adapter:
    """An adapter of some projections, or all, that moves each module's weights by a twentieth of their norm."""
    generator, factors = torch.Generator().manual_seed(seed), {}
    for name, (n_in, n_out) in targets(model).items():
        if projections and name.rpartition(".")[2] not in projections:
            continue
        down, up = torch.randn(rank, n_in, generator=generator), torch.randn(n_out, rank, generator=generator)
        size = 0.05 * model.get_submodule(name).weight.float().norm() / (up @ down).norm()
        factors[name] = Factors(down, up * size, 1.0)
    names = sorted({name.rpartition(".")[2] for name in factors})
    return Adapter.of(LoraConfig(r=rank, lora_alpha=rank, target_modules=names, task_type="CAUSAL_LM"), factors)
