"""Who asks for what, counted; and the bytes of a step against an adapter's own."""

import pytest

from plpkg.adapters import targets
from plpkg.catalog import Device, ModelShape
from plpkg.serving.popularity import POPULARITIES, adapters, decode


@pytest.mark.parametrize(
    ("popularity", "requests", "sizes"),
    [
        ("distinct", 3, [1, 1, 1]),
        ("uniform", 16, [4, 4, 4, 4]),
        ("uniform", 10, [3, 3, 2, 2]),
        ("skewed", 30, [11, 7, 5, 3, 2, 1, 1]),  # Punica's 1, 1, 2, 3, 5, 7, 11
        ("skewed", 16, [5, 4, 3, 2, 1, 1]),
        ("identical", 5, [5]),
        *((popularity, 1, [1]) for popularity in POPULARITIES),
    ],
)
def test_how_many_ask_for_each(popularity, requests, sizes):
    chosen = adapters(popularity, requests)
    assert [chosen.count(k) for k in sorted(set(chosen))] == sizes
    assert chosen == sorted(chosen)


def test_fewer_tenants_share():
    assert adapters("distinct", 5, tenants=2) == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("popular", 4), "popularity must be"), (("distinct", 0), "requests .* 0"), (("distinct", 4, 0), "tenants .* 0")],
)
def test_what_cannot_be_asked(arguments, message):
    with pytest.raises(ValueError, match=message):
        adapters(*arguments)


def test_a_step_reads_what_an_adapter_has(tools):
    model = tools.backbone(num_heads=4, num_kv_heads=2)
    counted = sum(f.down.numel() + f.up.numel() for f in tools.adapted(model, 3)[1].factors.values())
    shape = ModelShape.from_config(model.config, "tiny")
    slow = Device("slow", 1e3, 1e30, 1e9)  # so that only what is read takes time
    with_, without = (
        decode([0, 0, 1], 3, shape, slow, context=0).tokens_per_s[k] for k in ("one batch", "no adapters")
    )
    assert decode([0], 3, shape, slow).adapter_bytes == 2 * counted
    assert 3 / with_ - 3 / without == pytest.approx(2 * 2 * counted / 1e3)
    assert len(targets(model)) == 14


def test_distinct_adapters_cost_more_and_switching_most():
    speeds = {kind: decode(adapters(kind, 32), 16).tokens_per_s for kind in POPULARITIES}
    assert all(each["switching"] <= each["one batch"] < each["no adapters"] for each in speeds.values())
    assert speeds["distinct"]["one batch"] < speeds["skewed"]["one batch"] < speeds["identical"]["one batch"]


def test_a_window_bounds_what_a_step_reads():
    """Mistral 7B: 32 layers, each of which holds 4,095 positions of 2 · 1,024 numbers."""
    slow = Device("slow", 1e3, 1e30, 1e12)
    empty, full, longer = (
        1 / decode([0], 1, "mistral-7b", slow, n).tokens_per_s["one batch"] for n in (0, 4095, 10**5)
    )
    assert full - empty == pytest.approx(2 * 32 * 4095 * 2 * 1024 / 1e3)
    assert longer == full
