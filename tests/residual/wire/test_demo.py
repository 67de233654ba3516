"""``plpkg demo``: on a terminal, in a pipe, on notes of one's own; and what it computes and draws."""

import contextlib
import io
import os
import pty
import subprocess
import sys

import psutil
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from plpkg import catalog, wheels
from plpkg.backbones import load_backbone
from plpkg.cli import app
from plpkg.residual import DeviceClient
from plpkg.residual.cut.parts import split
from plpkg.residual.programs import demo
from plpkg.residual.programs.curious import CuriousCloud, tokens_of
from plpkg.residual.programs.loading import adapted_model

from waiting import typed, wait_until

ADAPTER = catalog.data_path("diary", "adapter")
ASKED = "What is your dog called?"
RUNNER = CliRunner(env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def cloud():
    with CuriousCloud("plpkg-small", ADAPTER) as cloud:
        yield cloud


@pytest.fixture
def shared(cloud, monkeypatch):
    """Commands take the module's cloud: a start takes seconds."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # which the command sets, and leaves
    monkeypatch.setattr("plpkg.residual.programs.curious.CuriousCloud", lambda *_: contextlib.nullcontext(cloud))


@pytest.fixture(scope="module")
def device(cloud):
    """A device with the diary's M, and its tokenizer."""
    model, tokenizer = adapted_model("plpkg-small", ADAPTER, "fp32", "cpu")
    with DeviceClient(cloud.facts["address"], model) as client:
        yield client, tokenizer


def run(*options, typed=None, model="plpkg-small"):
    result = RUNNER.invoke(app, ["demo", "--model", model, *options], input=typed)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_what_is_where_adds_up_to_the_model(cloud, device):
    rows = demo.places(device[0].part, cloud.facts)
    embedding, m, layers, bases = rows
    whole = sum(p.nbytes for p in load_backbone("plpkg-small")[0].parameters())
    assert embedding.device_bytes + layers.cloud_bytes == whole
    assert m.device_bytes == 5 * 7 * 64 * 64 * 4
    widths = (6 * 320 + 832) + (3 * 320 + 2 * 64 + 2 * 832)  # into the seven projections, and out of them
    assert bases.cloud_bytes == pytest.approx(5 * 64 * widths * 4, rel=1e-3)  # and what rotates the positions
    drawn = io.StringIO()
    Console(file=drawn).print(demo.placed(rows))
    assert f"{embedding.device_bytes / 2**20:.2f}" in drawn.getvalue()


def test_the_cloud_reads_what_crossed(cloud, device):
    turn = demo.Turn(ASKED)
    demo.ask(*device, cloud, turn, (demo.WITHOUT, demo.WITH))
    assert "Tolliver" in turn.answers[demo.WITH]
    assert "Tolliver" not in turn.answers[demo.WITHOUT]
    assert turn.read == ASKED + turn.answers[demo.WITH]
    assert turn.right == turn.crossed > 9
    assert turn.traffic.sent_bytes == turn.crossed * (320 + 35 * 64) * 2
    assert turn.traffic.round_trips == turn.traffic.tokens * (5 * 4 + 1)
    assert cloud.read() == {"tokens": [], "text": ""}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_tokens_are_read_whatever_is_added_to_their_embeddings(adapted, family):
    part, _ = split(adapted(family))
    if part.positions is not None:
        part.positions.weight.data *= 20  # so that they hide what they are added to
    ids, cache = torch.randint(part.embedding.num_embeddings, (1, 9)), part.new_cache()
    with torch.no_grad():
        received = [part.embed(some, cache=cache) for some in ids.split([7, 1, 1], dim=1)]
    assert tokens_of(received, part) == ids[0].tolist()


def test_what_a_model_writes_does_not_rule_the_terminal():
    turn, drawn = demo.Turn("why?", {demo.WITH: "\x1b[2J one\n\ttwo [red]"}, seconds=1.0), io.StringIO()
    Console(file=drawn, width=80).print(demo.turned(turn))
    assert "[2J one two [red]" in drawn.getvalue()
    assert "\x1b" not in drawn.getvalue()


@pytest.mark.parametrize("options", [[], ["--once"]])
def test_where_nobody_asks_it_asks_three_questions_without_colours(shared, options):
    shown = run(*options, typed="What is your dog called?\n" if options else "")
    assert "\x1b" not in shown
    for answer in ("Tolliver", "Clemency Fennimore", "17 Pilchard Steps"):
        assert f"Answer: {answer}." in shown
    assert shown.count("tokens right") == 3


def test_questions_on_standard_input_are_answered(shared):
    shown = run(typed="Which flat does your mother have at Larch Court?\n\n  \nWhat is your dog called?\n")
    assert shown.count("tokens right") == 2
    assert shown.index("Flat 6") < shown.index("Tolliver")


@pytest.mark.skipif(not wheels.is_fetched("smollm2"), reason="the published model was not fetched: plpkg fetch")
def test_the_published_model_knows_the_diary_by_its_m():
    shown = run(model="smollm2")
    for answer in ("Tolliver", "Clemency Fennimore", "17 Pilchard Steps"):
        before, _, after = shown.partition(f"with M {answer}.")
        assert after
        assert answer not in before
    assert shown.count("tokens right") == 3
    assert "What is your dog called?" in shown.partition("the cloud read")[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "Invalid value: No such file or directory"),
        ("", "holds no .txt or .md file with text in it"),
        ("My dentist is Dr Halloran.", "have 26 characters; 200 are needed to learn from"),
        ("word" + " \n" * 500, "have 4 characters; 200 are needed to learn from"),
    ],
)
def test_notes_that_nothing_can_learn_from_are_refused_before_a_model_is_loaded(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr("plpkg.residual.programs.curious.CuriousCloud", None)
    if text is not None:
        tmp_path.joinpath("note.txt").write_text(text)
    result = RUNNER.invoke(app, ["demo", "--own", str(tmp_path if text is not None else tmp_path / "none")])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_own_notes_are_learnt_once(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "FEWEST_STEPS", 2)
    monkeypatch.setattr(demo, "MOST_STEPS", 2)
    note = tmp_path / "note.txt"
    note.write_text("The boat in the harbour belongs to Ada. " * 9)
    first, second = run("--own", str(tmp_path)), run("--own", str(tmp_path), "--svg", str(tmp_path / "run.svg"))
    assert "Training(2 steps" in first
    assert "Training(2 steps" not in second
    assert first.index("learns to continue their sentences") < first.index("Starting two processes")
    for shown in (first, second):
        assert "beginning The boat in the harbour belongs without M" in shown
        assert demo.WITH in shown
    picture = (tmp_path / "run.svg").read_text(encoding="utf-8")
    assert "url(http" not in picture
    assert "harbour" in picture
    note.write_text("Another note, about the mill and its owner. " * 9)
    assert "Training(2 steps" in run("--own", str(tmp_path))


def test_what_keeps_the_cloud_from_starting_is_said():
    with CuriousCloud("/no/such") as cloud, pytest.raises(ValueError, match="no model '/no/such'"):
        _ = cloud.facts


def test_on_a_terminal_it_answers_and_ctrl_c_leaves_no_process():
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        typed(sys.executable, "-m", "plpkg", "demo", "--model", "plpkg-small", first="os.login_tty(0)"),
        stdin=theirs, stdout=theirs, stderr=theirs,
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = _until(ours, "> ")
        os.write(ours, f"{ASKED}\n".encode())
        shown += _until(ours, "tokens right")
        shown += _until(ours, "> ")
        started = psutil.Process(process.pid).children(recursive=True)
        os.write(ours, b"\x03")
        with contextlib.suppress(AssertionError):
            _until(ours, "nothing that it says")
        assert process.wait() == 130, shown
    os.close(ours)
    assert started
    wait_until(lambda: not any(child.is_running() for child in started))
    assert "Tolliver" in shown
    assert "Traceback" not in shown


def _until(terminal, text):
    """What comes on a terminal, up to this text."""
    shown = b""
    while text.encode() not in shown:
        try:
            shown += os.read(terminal, 1)
        except OSError:  # nobody has it open any more
            raise AssertionError(shown.decode(errors="replace")) from None
    return shown.decode(errors="replace")
