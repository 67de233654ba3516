"""The cloud's decoder layers, as the device calls them."""

import torch

from plpkg.residual.cut.device_part import DeviceCache, DevicePart
from plpkg.residual.wire.connection import Wire
from plpkg.residual.wire.tensors import PRECISIONS, pack, unpack
from plpkg.residual.wire.wire_pb2 import Part, Step
from plpkg.validation import whole_number

FIELDS_BYTES = 1024
"""The most that a message has beside its tensor."""


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
        self.part = part
        self.wire = wire
        self.dtype = PRECISIONS[wire.terms.precision]
        self.width = part.width

    def longest(self, batch: int, seq: int, positions: int) -> int:
        """The bytes of the longest message that the cloud has to send for a step, or for its way back."""
        terms = self.wire.terms
        rank = max(terms.r_c2d, terms.r_d2c)
        exchanges = [count * seq * rank for count in terms.projections]
        final_states = positions * self.width
        embedding_gradient = seq * terms.hidden
        return batch * max(*exchanges, final_states, embedding_gradient) * self.dtype.itemsize + FIELDS_BYTES

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
            The number of chunks whose gradients are kept apart (:meth:`.DevicePart.residual`); 0: no training.
        **fields
            More of the Step.
        """
        batch, seq = hidden.shape[:2]
        data = pack(hidden, self.dtype)
        self.wire.expect(self.longest(batch, seq, positions))
        self.wire.send(step=Step(batch=batch, seq=seq, hidden=data, positions=positions, train=train > 0, **fields))
        due = set(range(len(self.part.matrices)))
        while due:
            exchange = self.wire.receive("residual", round_trips=0)
            u = self.unpacked(exchange, due, (batch, seq), self.wire.terms.r_c2d)
            v = self.part.residual(exchange.group, u, train=train, cache=cache)
            self.wire.send(residual=Part(group=exchange.group, data=pack(v, self.dtype)))
        final = self.wire.receive("final", round_trips=0)
        most = len(self.part.matrices) + 1  # each exchange, and the end
        self.wire.traffic.round_trips += whole_number("the cloud's round_trips", final.round_trips, 1, most)
        states = unpack(final.hidden, (batch, positions, self.width), self.dtype)
        return states.to(self.part.lm_head.weight)  # its type and place

    def unpacked(self, exchange: Part, due: set[int], batch_and_seq: tuple[int, ...], rank: int) -> torch.Tensor:
        """The tensor ``(projections, batch, seq, rank)`` of an exchange, which must be ``due`` and is taken off it.

        Each comes once, in the order of the cloud's layers.
        """
        if exchange.group not in due:
            raise ValueError(f"the cloud sent exchange {exchange.group} where one of {sorted(due)} was due")
        due.remove(exchange.group)
        shape = (self.wire.terms.projections[exchange.group], *batch_and_seq, rank)
        return unpack(exchange.data, shape, self.dtype)
