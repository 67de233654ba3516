import pytest

from plpkg.throughput import decode, widget


def test_compute_and_read_out():
    result = widget.compute("llama-2-7b", 64, "5g", 33)
    assert result.split == decode("llama-2-7b", 64, link="5g")
    assert "Largest term: round trips, 1089.0 ms of 1126.0" in widget.read_out(result)


def test_a_link_brings_its_own_delay():
    explorer = widget.explorer()
    explorer.controls["link"].value = "5g-us-2024"
    assert explorer.values["rtt_ms"] == 47
    assert explorer.result.split.breakdown()["round_trips"] == pytest.approx(33 * 0.047)
