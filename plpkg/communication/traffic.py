"""The traffic of a split model, seen from the device: bits up, bits down, round trips."""

from dataclasses import dataclass

from plpkg import results
from plpkg.catalog import Link, link as find_link
from plpkg.validation import number


@dataclass(frozen=True)
class Traffic(results.Tabular):
    """The traffic of ``tokens`` tokens.

    Attributes
    ----------
    uplink_bits, downlink_bits
        Payload from the device to the cloud, and back; headers are counted by
        :func:`~plpkg.communication.on_the_wire`.
    round_trips
        How many times one side sends and has to wait for the other's answer.
    tokens
        Tokens of every sequence of the batch together.
    """

    uplink_bits: int
    downlink_bits: int
    round_trips: int
    tokens: int = 1

    @property
    def total_bits(self) -> int:
        """Payload of both directions."""
        return self.uplink_bits + self.downlink_bits

    @property
    def bits_per_token(self) -> float:
        """``total_bits`` over ``tokens``."""
        return self.total_bits / self.tokens

    def share_of(self, other: "Traffic") -> float:
        """``total_bits`` as a share of another traffic's: 0.02 means 98 % less."""
        if not other.total_bits:
            raise ValueError(f"there is no share of what sends nothing: {other}")
        return self.total_bits / other.total_bits

    def seconds(self, link: str | Link, rtt_s: float | None = None) -> dict[str, float]:
        """Seconds on a link: ``uplink``, ``downlink`` and ``round_trips``, which add up.

        Parameters
        ----------
        link
            A :class:`~plpkg.catalog.Link` or its catalog name.
        rtt_s
            Round-trip time in seconds; ``None`` takes the link's own.

        Notes
        -----
        Serial: a message leaves when the one before it has arrived, since nearly every message of
        these protocols depends on the one before it. Two that are under way at once (``late``)
        share the round trip, and the link sends one after the other.
        """
        link = find_link(link)
        rtt_s = link.rtt_s if rtt_s is None else number("rtt_s", rtt_s)
        return {
            "uplink": self.uplink_bits / link.uplink_bits_per_s,
            "downlink": self.downlink_bits / link.downlink_bits_per_s,
            "round_trips": self.round_trips * rtt_s,
        }

    def rows(self) -> list[dict]:
        directions = {"uplink": self.uplink_bits, "downlink": self.downlink_bits, "total": self.total_bits}
        rows = [{"direction": name, "bits": n, "bytes": n / 8} for name, n in directions.items()]
        if self.tokens != 1:
            rows = [row | {"bits_per_token": row["bits"] / self.tokens} for row in rows]
        return rows

    def __repr__(self) -> str:
        tokens = f" for {self.tokens} tokens" if self.tokens != 1 else ""
        trips = f"{self.round_trips} round trip{'s' if self.round_trips != 1 else ''}"
        return (
            f"Traffic: {results.bits(self.uplink_bits)} up + {results.bits(self.downlink_bits)} down "
            f"= {results.bits(self.total_bits)}, {trips}{tokens}"
        )
