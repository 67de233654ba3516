"""Data parallelism: each process draws its share of every Poisson sample, and one of them adds the noise.

An example belongs to the process of its number modulo theirs. Process 0 adds the noise to its sum; then the sums of all
are added up. So with one seed the processes compute together what one would, and the ε is the whole's.
"""

import torch
from torch import distributed, nn


class Processes:
    """The processes of ``torch.distributed``'s default group; one where there is none.

    Attributes
    ----------
    rank, count
        This process's number, and how many there are.
    """

    def __init__(self) -> None:
        self.rank, self.count = _group()

    def share(self, indices: list[int]) -> list[int]:
        """Those of some examples that this process takes."""
        return [index for index in indices if index % self.count == self.rank]

    def check(self) -> None:
        """Refuse a group that is another than in the beginning.

        Raises
        ------
        RuntimeError
            Processes came or went, which would train apart.
        """
        rank, count = _group()
        if (rank, count) != (self.rank, self.count):
            raise RuntimeError(
                f"{self.count} process(es) when make_private was called, {count} now: begin the process group before"
            )

    def agree(self, model: nn.Module, what: dict) -> None:
        """Begin alike: everybody gets the parameters and buffers of process 0.

        Raises
        ------
        ValueError
            The processes do not train with the same settings.
        """
        if self.count == 1:
            return
        shapes = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
        everybodys: list = [None] * self.count
        distributed.all_gather_object(everybodys, what | {"parameters": shapes})
        for rank, theirs in enumerate(everybodys):
            different = [key for key, value in everybodys[0].items() if theirs[key] != value]
            if different:
                raise ValueError(f"process {rank} has other {', '.join(different)} than process 0")
        for tensor in (*model.parameters(), *model.buffers()):
            distributed.broadcast(tensor.detach(), src=0)

    def sum(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The sums over all processes, in the same tensors."""
        if self.count > 1:
            under_way = [distributed.all_reduce(part, async_op=True) for part in parts.values()]
            for work in under_way:
                if work is not None:  # as it is to who is not in the group
                    work.wait()
        return parts


def _group() -> tuple[int, int]:
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def check_whole(model: nn.Module) -> None:
    """Refuse a model that another wrapper has spread over processes or devices.

    Raises
    ------
    ValueError
        Its name, and what to give instead.
    """
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        sharded = kinds & {"FSDPModule", "FullyShardedDataParallel"}
        if sharded:
            raise ValueError(f"{sharded.pop()} shards parameters, and an example's gradient with them: not supported")
        wrapped = kinds & {"DistributedDataParallel", "DataParallel"}
        if wrapped:
            raise ValueError(
                f"{wrapped.pop()} averages gradients before they are clipped: give the model itself (.module); its "
                "clipped sums are added up over all processes"
            )
