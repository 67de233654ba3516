import pytest

from plpkg.throughput import decode, widget


def test_compute_and_read_out():
    result = widget.compute("llama-2-7b", 64, "5g", 33)
    assert result.split == decode("llama-2-7b", 64, link="5g")
    assert "Largest term: round trips, 1089.0 ms of 1126.0" in widget.read_out(result)


def test_what_does_not_fit_is_said():
    said = widget.read_out(widget.compute("llama-30b", 64, "5g", 0))
    assert said.endswith("roofline: 2.64 tokens/s. But 16.2 GB do not fit the 6 GB of iphone-13-pro-max.")


def test_a_link_brings_its_own_delay():
    explorer = widget.explorer()
    explorer.controls["link"].value = "5g-us-2024"
    assert explorer.values["rtt_ms"] == 47
    assert explorer.result.split.breakdown()["round_trips"] == pytest.approx(33 * 0.047)
