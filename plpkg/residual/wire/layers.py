"""The cloud's decoder layers, as the device calls them."""

import torch

from plpkg.residual.cut.device_part import DeviceCache, DevicePart
from plpkg.residual.wire.tensors import PRECISIONS, pack, unpack
from plpkg.residual.wire.wire import Wire
from plpkg.residual.wire.wire_pb2 import Part, Step
from plpkg.validation import whole_number

FIELDS_BYTES = 1024
"""What a message has beside its tensor, at most."""


class RemoteLayers:
    """Runs a step through the cloud's layers, and answers each exchange on the way.

    Parameters
    ----------
    part
        The device's.
    wire
        The connection with the cloud.
    """

    def __init__(self, part: DevicePart, wire: Wire) -> None:
        self.part, self.wire = part, wire
        self.dtype, self.width = PRECISIONS[wire.terms.precision], part.width

    def longest(self, batch: int, seq: int, positions: int) -> int:
        """The bytes of the longest message that the cloud has to send for a step, or for its way back."""
        ranks = max(self.wire.terms.r_c2d, self.wire.terms.r_d2c)
        each = max([ranks * count * seq for count in self.wire.terms.projections] + [self.width * positions])
        return batch * max(each, self.wire.terms.hidden * seq) * self.dtype.itemsize + FIELDS_BYTES

    def __call__(
        self, hidden: torch.Tensor, positions: int, *, cache: DeviceCache | None = None, train: int = 0, **fields
    ) -> torch.Tensor:
        """The final hidden states ``(batch, positions, width)`` of ``hidden (batch, seq, hidden)``.

        Parameters
        ----------
        positions
            How many of the last ones come back.
        cache
            Of a sequence that is read.
        train
            In so many parts the batch is learnt from: :meth:`.DevicePart.residual`.
        **fields
            More of the Step.
        """
        batch, seq = hidden.shape[:2]
        data = pack(hidden, self.dtype)
        self.wire.expect(self.longest(batch, seq, positions))
        self.wire.send(step=Step(batch=batch, seq=seq, hidden=data, positions=positions, train=train > 0, **fields))
        due = set(range(len(self.part.matrices)))
        while due:
            part = self.wire.receive("residual", round_trips=0)
            u = self.of(part, due, (batch, seq), self.wire.terms.r_c2d)
            answer = self.part.residual(part.group, u, train=train, cache=cache)
            self.wire.send(residual=Part(group=part.group, data=pack(answer, self.dtype)))
        final = self.wire.receive("final", round_trips=0)
        most = len(self.part.matrices) + 1  # each exchange, and the end
        self.wire.traffic.round_trips += whole_number("the cloud's round_trips", final.round_trips, 1, most)
        return unpack(final.hidden, (batch, positions, self.width), self.dtype).to(self.part.lm_head.weight)

    def of(self, part: Part, due: set[int], shape: tuple[int, int], rank: int) -> torch.Tensor:
        """What came for an exchange that was due, and is no more: each once, in the order of the cloud's layers."""
        if part.group not in due:
            raise ValueError(f"the cloud sent exchange {part.group} where one of {sorted(due)} was due")
        due.remove(part.group)
        return unpack(part.data, (self.wire.terms.projections[part.group], *shape, rank), self.dtype)
