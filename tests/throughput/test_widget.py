import pytest

from plpkg import catalog
from plpkg.throughput import decode, widget


def test_compute_and_read_out():
    result = widget.compute("llama-2-7b", 64, "5g", 33)
    assert result.split == decode("llama-2-7b", 64, link="5g")
    assert "Largest term: round trips, 1089.0 ms of 1126.0" in widget.read_out(result)


def test_what_does_not_fit_is_said():
    said = widget.read_out(widget.compute("llama-30b", 64, "5g", 0))
    assert said.endswith("roofline: 2.64 tokens/s. But 16.2 GB do not fit the 6 GB of iphone-13-pro-max.")


def test_a_link_brings_its_own_delay(monkeypatch):
    """And is drawn once, with it: a link with the delay of the one before is a state that nobody chose."""
    drawn, compute = [], widget.compute
    monkeypatch.setattr(widget, "compute", lambda **values: drawn.append(values) or compute(**values))
    explorer = widget.explorer()
    for link in ("5g-us-2024", "4g", "5g-published"):
        explorer.controls["link"].value = link
        assert explorer.values["rtt_ms"] == 1e3 * catalog.link(link).rtt_s
        assert explorer.result.split.breakdown()["round_trips"] == pytest.approx(33 * catalog.link(link).rtt_s)
    chosen = [("5g-published", 0), ("5g-us-2024", 47), ("4g", 1e3 * catalog.link("4g").rtt_s), ("5g-published", 0)]
    assert [(values["link"], values["rtt_ms"]) for values in drawn] == chosen


def test_a_delay_of_ones_own_stays_until_the_link_moves():
    explorer = widget.explorer()
    explorer.controls["rtt_ms"].value = 10
    assert "5g-published with RTT 10 ms" in explorer.text
    explorer.controls["rank"].value = 128
    assert "rank 128, 5g-published with RTT 10 ms" in explorer.text
