"""The table of claims says what its sources say: figures, verdicts, tests and functions that it names.

What takes more than a second is computed by ``make claims`` alone, but for a few.
"""

import ast
import functools
import inspect
import math
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import claims as bench
from plpkg import claims
from plpkg.cli import app

ROOT = Path(__file__).parents[1]
ROWS = claims.table().to_dict("records")
HOWS = ("computed", "recorded", "tested", "none")
ALSO = {"error_of_the_clouds_m", "tokens_read", "two_layers_mib"}
"""Those of the slower ones that are quick enough for a test."""


def of(how):
    return [row for row in ROWS if row["how"] == how]


def function_of(row):
    return row["from"].partition("(")[0]


def test_there_are_many_each_with_a_name_a_claim_and_a_source():
    ids = [row["id"] for row in ROWS]
    assert len(ids) == len(set(ids)) >= 60
    assert set(claims.SYSTEMS) == {row["system"] for row in ROWS}
    for row in ROWS:
        assert re.fullmatch(r"[a-z0-9-]+", row["id"])
        assert row["notebook"] == claims.SYSTEMS[row["system"]]
        assert len(list((ROOT / "notebooks").glob(f"{row['notebook']}_*.ipynb"))) == 1
        assert row["how"] in HOWS
        assert row["claim"].endswith(".")
        assert row["source"]
        assert row["reported"]
        assert bool(row["from"]) == (row["how"] != "none")
        assert (row["ours"] == row["ours"]) == (row["how"] in ("computed", "recorded"))
        assert row["why"] or row["verdict"] == "holds", row["id"]
    text = (ROOT / "data" / "claims.csv").read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w)])/(tmp|work|home|root)\b", text)


def test_recorded_figures_are_what_their_rows_give():
    wrong = {row["id"]: bench.figures(row) for row in of("recorded") if not bench.same(row, bench.figures(row))}
    assert not wrong


def is_computed(row, name):
    figure = bench.figures(row)
    if bench.TOLERANCE[name]:  # measured here and now: the verdict has to be the same
        return claims.verdict_on(row | dict(zip(("ours", "low", "high"), figure, strict=True))) == row["verdict"]
    return bench.same(row, figure)


@pytest.mark.parametrize("system", claims.SYSTEMS)
def test_computed_figures_are_their_functions(system):
    wrong = []
    for row in of("computed"):
        name, arguments = re.fullmatch(r"(\w+)\((.*)\)", row["from"]).groups()
        inspect.signature(bench.COMPUTED[name]).bind(*filter(None, arguments.split(", ")))
        quick = name not in bench.SLOW - ALSO  # the others: make claims
        if row["system"] == system and quick and not is_computed(row, name):
            wrong.append((row["id"], bench.figures(row)))
    assert not wrong


@functools.cache
def names_in(path):
    return {node.name for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body if hasattr(node, "name")}


def test_tests_that_are_named_are_there():
    for row in of("tested"):
        path, _, name = row["from"].partition("::")
        assert name.startswith("test_"), row["id"]
        assert name in names_in(path), row["id"]


def test_verdicts_are_the_rules():
    for row in ROWS:
        assert row["verdict"] == claims.verdict_on(row), row["id"]


def test_reported_figures_are_the_published_tables():
    for row in ROWS:
        if row["published"]:
            _, first, last, half = claims._criterion(row["reported"])
            assert first - half <= round(bench.published(row["published"]), 9) <= last + half, row["id"]


@pytest.mark.parametrize(
    ("reported", "holds_if", "ours", "low", "high", "verdict"),
    [
        ("27.8", "", 27.75, "", "", "holds"),
        ("27.8", "", 27.74, "", "", "holds within 1 %"),
        ("27.8", "", 25.1, "", "", "holds within 10 %"),
        ("27.8", "", 25.0, "", "", "fails"),
        ("27.8", "", 25.0, 22.0, 28.0, "undecided here"),
        ("27.8", "", 26.0, 22.0, 30.0, "holds within 7 %"),
        ("-0.9", "", -0.85, "", "", "holds"),
        ("0", "", 0.4, "", "", "holds"),
        ("0", "", 0.6, "", "", "fails"),
        ("5,080.85", "", 5080.85, "", "", "holds"),
        ("20 to 30", "", 30, "", "", "holds"),
        ("20 to 30", "", 33, "", "", "holds within 10 %"),
        ("20 to 30", "", 17, "", "", "fails"),
        ("0 to 30", "", -1, "", "", "fails"),
        ("> 95", "", 95.01, "", "", "holds"),
        ("> 95", "", 95, "", "", "fails"),
        ("< 2", "", 1, 0.5, 1.5, "holds"),
        ("< 2", "", 1, -1, 3, "undecided here"),
        ("< 2", "", 3, 2.5, 3.5, "fails"),
        ("none", "= 1", 1.4, "", "", "fails"),
        ("none", "= 1", 1.04, "", "", "holds within 4 %"),
        ("none", "> 1", 1.4, "", "", "holds"),
        ("none", "> 0", 1.4, 0.0, 3.0, "undecided here"),
        ("12", "> 1", 6, "", "", "holds in direction"),
        ("12", "> 1", 0.9, "", "", "fails"),
        ("12", "another scale", 12, "", "", "not comparable at this scale"),
        ("none", "another scale", 0.9, 0.8, 1.0, "not comparable at this scale"),
    ],
)
def test_the_rule(reported, holds_if, ours, low, high, verdict):
    row = dict(how="recorded", reported=reported, holds_if=holds_if, ours=ours, low=low, high=high)
    assert claims.verdict_on(row) == verdict


def test_the_rule_without_figures():
    assert claims.verdict_on(dict(how="none")) == "not testable here"
    assert claims.verdict_on(dict(how="tested", holds_if="passes")) == "holds"
    assert claims.verdict_on(dict(how="tested", holds_if="fails")) == "fails"
    with pytest.raises(ValueError, match="no figure, limit or range: 'OOM'"):
        claims.verdict_on(dict(how="computed", reported="OOM", holds_if="", ours=1, low="", high=""))


def copied(monkeypatch, tmp_path, figures=()):
    """A copy of the table's part about serving and throughput, with some other figures; its file and that text."""
    rows = claims.table()
    rows = rows[rows["system"].isin(["serving", "throughput"])].reset_index(drop=True)
    monkeypatch.setattr(bench, "FILE", tmp_path / "claims.csv")
    bench.write(rows)
    text = bench.FILE.read_text()
    for name, figure in dict(figures).items():
        rows.loc[rows["id"] == name, "ours"] = figure
    monkeypatch.setattr(claims, "table", lambda: rows.copy())
    return bench.FILE, text


def test_a_figure_that_is_not_its_sources_is_found(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["claims", "--quick"])
    copied(monkeypatch, tmp_path)
    with pytest.raises(SystemExit, match="0"):
        bench.main()
    assert "recorded by python -m benchmarks.serving.popularity |" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["claims", "--quick"])
    copied(monkeypatch, tmp_path, {"speed-7b": 27.79, "flat": 1.0})
    with pytest.raises(SystemExit, match="1"):
        bench.main()
    said = capsys.readouterr().out
    ours = {row["id"]: f"{row['ours']:.{bench.DIGITS}g}" for row in ROWS}
    assert f"speed-7b: 27.79 in the file, {ours['speed-7b']} now, of speed(llama-2-7b)" in said
    assert f"flat: 1 in the file, {ours['flat']} now, of serving_popularity" in said
    assert said.count(" in the file, ") == 2
    for row in claims.table().to_dict("records"):
        if row["id"] in ("speed-7b", "flat"):
            assert not bench.same(row, bench.figures(row))


def test_written_it_is_the_table_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["claims", "--quick", "--write"])
    file, text = copied(monkeypatch, tmp_path, {"speed-7b": 27.79, "flat": 1.0})
    file.unlink()
    bench.main()
    assert file.read_text() == text
    assert set(text.splitlines()) <= set((ROOT / "data" / "claims.csv").read_text(encoding="utf-8").splitlines())
    assert "2 figures written" in capsys.readouterr().out


@pytest.mark.parametrize(
    "source",
    [
        "serving_cold gaps | every row | p99_ms",  # three rows, and no word on what to make of them
        "serving_cold gaps | case == 'nothing' | p99_ms",
        "serving_cold nothing | every row | p99_ms",
        "serving_cold gaps | case == 'warm' | p99_ms | mean",
        "serving_cold gaps | case == 'warm' | p99_ms | over case == 'blocking' | minus case == 'warm'",
    ],
)
def test_rows_that_give_no_one_figure_are_refused(source):
    with pytest.raises(ValueError, match=r"has no section|values where one is wanted|cannot make that"):
        bench.selected(source)


def test_samples_have_the_interval_of_their_mean():
    ours, low, high = bench.selected("residual_baselines gain | method == 'counts' | gain | by case")
    rows = bench.catalog.measured("residual_baselines").query("section == 'gain' and method == 'counts'")
    means = rows.groupby("case")["gain"].mean()
    assert ours == pytest.approx(means.mean())
    assert high - ours == pytest.approx(bench.recorded.half_width(means)) == ours - low
    text = "residual_baselines gain | method == 'counts' | gain | by case | {} method == 'none'"
    assert bench.selected(text.format("minus"))[0] == pytest.approx(ours)  # none gains nothing
    assert math.isnan(bench.selected("throughput | positions == 1 | ratio")[1])


def test_the_tables_front_door():
    assert list(claims.table("service")["system"].unique()) == ["service"]
    with pytest.raises(ValueError, match=r"system must be one of 'communication', .*, got 'chat'"):
        claims.table("chat")
    counts = claims.verdicts()
    assert list(counts.index) == list(claims.SYSTEMS)
    assert list(counts.columns) == list(claims.VERDICTS)
    assert counts.to_numpy().sum() == len(ROWS)
    assert counts.loc["service", "fails"] == sum(r["system"] == "service" and r["verdict"] == "fails" for r in ROWS)


def test_the_command_fits_eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert CliRunner(charset="ascii").invoke(app, ["claims"]).exit_code == 0  # a terminal that has few letters
    said = CliRunner().invoke(app, ["claims"])
    assert said.exit_code == 0
    assert max(map(len, said.output.splitlines())) <= 80
    words = " ".join(said.output.split())
    assert all(f"{name} (notebook {number})" in words for name, number in claims.SYSTEMS.items())
    one = CliRunner().invoke(app, ["claims", "service"])
    assert "service (notebook 07)" in one.output
    assert "residual" not in one.output
    assert f"{(claims.table('service')['verdict'] == 'fails').sum()} fails" in one.output
    unknown = CliRunner().invoke(app, ["claims", "chat"])
    assert unknown.exit_code == 2
    assert "system must be one of" in unknown.output


def test_a_part_shows_claims_in_full_with_units():
    part = claims.Part("full-width-token", "quadratic-space")
    first, second = part.rows()
    claim = "Full activations of a 7B model take 4.19 Mbit a token."
    assert first == {"claim": claim, "reported": "4.19 Mbit", "here": "4.194 Mbit", "verdict": "holds", "why": ""}
    assert second["reported"] == "none"
    assert second["why"] == "The square is in it beside a linear part."
    assert second["claim"] in part._repr_html_()
    assert repr(part) == "2 claims: 1 holds, 1 holds within 3 %"
    with pytest.raises(ValueError, match=r"id must be .* got 'full'"):
        claims.Part("full")
