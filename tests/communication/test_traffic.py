import pytest

from plpkg.catalog import Link
from plpkg.communication import Traffic

TRAFFIC = Traffic(uplink_bits=6_000, downlink_bits=1_000, round_trips=3, tokens=2)


def test_sums():
    assert TRAFFIC.total_bits == 7_000
    assert TRAFFIC.bits_per_token == 3_500
    assert TRAFFIC.share_of(Traffic(70_000, 0, 1)) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no share of what sends nothing: Traffic: 0 bit up"):
        TRAFFIC.share_of(Traffic(0, 0, 0))


def test_seconds_add_the_three_parts():
    seconds = TRAFFIC.seconds(Link("slow", 1_000, 2_000, 0.25))
    assert seconds == {"uplink": 6.0, "downlink": 0.5, "round_trips": 0.75}
    assert TRAFFIC.seconds("5g", rtt_s=0)["round_trips"] == 0
    with pytest.raises(ValueError, match=r"rtt_s must be at least 0, got -0\.01"):
        TRAFFIC.seconds("5g", rtt_s=-0.01)


def test_repr_and_table():
    assert repr(TRAFFIC) == "Traffic: 6 kbit up + 1 kbit down = 7 kbit, 3 round trips for 2 tokens"
    assert TRAFFIC.to_frame()["bits"].tolist() == [6_000, 1_000, 7_000]
    assert TRAFFIC.to_frame()["bits_per_token"].tolist() == [3_000, 500, 3_500]
    assert "bits_per_token" not in Traffic(6_000, 1_000, 3).to_frame()
