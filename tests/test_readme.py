"""Every Python block of README, tour and the pages beside it runs, with what it takes from its reader in hand: a model,
texts, a loop. What their tables and shell blocks name is there.
"""

import inspect
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config
from typer.main import get_command

import plpkg
from plpkg import ROOMS, claims, cli, corpora, recorded
from plpkg.backbones import load_backbone, random_backbone
from plpkg.corpora import Writer

ROOT = Path(__file__).parents[1]
FROM = [f"docs/from/{path.name}" for path in sorted(ROOT.glob("docs/from/*.md"))]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/tour.md", "docs/epsilon.md", "docs/which.md")}
PAGES |= {name: (ROOT / name).read_text() for name in FROM}
README = PAGES["README.md"]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


BLOCKS = [block for text in PAGES.values() for block in blocks(text, "python")]
HUB = "Qwen/Qwen2.5-7B"


def of_any_room():
    """A model so small that a step takes no time, and the tokenizer of plpkg-small."""
    tokenizer = load_backbone("plpkg-small")[1]
    sizes = dict(num_layers=1, hidden=16, num_heads=2, intermediate=24, max_positions=512)
    return dict(model=random_backbone("llama", vocab=len(tokenizer), **sizes), tokenizer=tokenizer)


def ids(*shape):
    return torch.randint(8000, shape, generator=torch.Generator().manual_seed(0))


def for_retention():
    return dict(input_ids=ids(1, 100), question_ids=ids(1, 8), data=[("What is a list?", "A sequence.")] * 3)


def for_clipping():
    model, x, y = torch.nn.Linear(4, 2), torch.randn(200, 4), torch.zeros(200, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dict(model=model, optimizer=optimizer, dataset=torch.utils.data.TensorDataset(x, y))


def for_serving():
    config = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(of_any_room()["model"], config).save_pretrained("adapters/ann")
    file = Path("adapters/ann/adapter_config.json")  # in which Workers AI wants to read the family
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "llama"}))
    config = LoraConfig(r=2, target_modules=["q_proj"])
    return dict(input_ids=[1, 2, 3], other_ids=[4, 5], lora_config=config, batches=[ids(2, 8)], others=[ids(2, 8)])


def for_autonomy():
    early, late = ([corpora.Document(name, f"Dear diary, {name}. " * 25)] for name in ("early", "late"))
    return dict(early=early, late=late, x=ids(4, 5), y=ids(4), **of_any_room())  # the block imports clipping, too


GIVEN = dict(retention=for_retention, clipping=for_clipping, serving=for_serving, autonomy=for_autonomy)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: re.search(r"plpkg[ .]\S* ?\S* ?(\w+)", block)[1])
def test_a_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = of_any_room()
    for room, given in GIVEN.items():
        if re.search(rf"^from plpkg(\.| import .*){room}\b", block, flags=re.M):
            names |= given()
    if HUB in block:  # which no test asks
        Qwen2Config().save_pretrained(tmp_path / "hub")
        block = block.replace(HUB, str(tmp_path / "hub"))
    for name in ("anna", "bert"):
        (tmp_path / "letters" / name).mkdir(parents=True)
        for month in ("may", "june", "july"):
            (tmp_path / "letters" / name / f"{month}.md").write_text("Dear all.")
    short = Writer("numpy", {"test": (corpora.Document("short", "Return an array of zeros. " * 9),)})
    monkeypatch.setattr(corpora, "writer", {"numpy": short}.__getitem__)
    exec(compile(block, "docs/tour.md", "exec"), names)


def test_the_readme_is_short_and_counts_the_claims():
    assert len(README.encode()) <= 8000
    counts = claims.verdicts().sum()
    holds = "{} hold, {} hold within 10 %, {} hold in direction, and {} fail. The other {} are"
    assert f"prints {counts.sum()} claims" in README
    assert holds.format(*counts[:4], counts[4:].sum()) in README
    opening = "{} hold within 10 %, {} hold in direction, and {} fail; the other {} could not be decided"
    assert (
        opening.format(*counts[1:4], counts[4:].sum())
        in (ROOT / "notebooks" / "reports" / "00_start_here.ipynb").read_text()
    )


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(((?!https?:|#)[^)]+)\)", PAGES[page])
    assert links
    for link in links:
        assert (ROOT / page).parent.joinpath(link.partition("#")[0]).exists(), link


def test_every_room_has_its_row_and_its_place_in_the_floor_plan():
    plan = (ROOT / "CONTRIBUTING.md").read_text()
    for room, (number, _) in ROOMS.items():
        name = room.rpartition(".")[2]
        assert f"(notebooks/{number}_{name}.ipynb)" in README, room
        assert f"{name}/" in plan, room


def test_binder_is_sent_to_a_notebook_that_is_there():
    (path,) = re.findall(r"urlpath=voila/render/([\w/.]+)", README)
    assert (ROOT / path).is_file()


def commands(text):
    """What stands behind ``plpkg`` in shell blocks and in spans of code."""
    lines = "\n".join(blocks(text, "bash"))
    return re.findall(r"(?:^|/)plpkg (.*)", lines, flags=re.M) + re.findall(r"`plpkg ([^`]+)`", text)


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if commands(text)])
def test_commands_and_their_options_are_there(page):
    for line in commands(PAGES[page]):
        command = get_command(cli.app)
        known = {"--help"}
        for word in shlex.split(line, comments=True):
            if word.startswith("--"):
                assert word in known, line
            elif word in getattr(command, "commands", ()):
                command = command.commands[word]
                known |= {option for each in command.params for option in each.opts}
        assert command.name != get_command(cli.app).name, line


STAND_FOR = {
    "device": "residual.DeviceClient",
    "engine": "serving.Engine",
    "private": "clipping.training.private.Private",
    "read": "retention.reading.PrefillResult",
}
"""Objects of the pages' code, and what they are."""
FIRST = "|".join([*STAND_FOR, *(module.name for module in pkgutil.iter_modules(plpkg.__path__))])
NAMED = re.compile(rf"\b({FIRST})((?:\.\w+)+)(?:\(([^()]*)\))?")


@pytest.mark.parametrize("page", FROM)
def test_a_table_names_what_is_there(page):
    _, _, *rows = (line.strip("|").split("|") for line in PAGES[page].splitlines() if line.startswith("|"))
    assert 8 <= len(rows) <= 15
    named = 0
    for _, ours, _ in rows:
        for span in re.findall(r"`([^`]+)`", ours):
            for first, rest, arguments in NAMED.findall(span):
                value = pkgutil.resolve_name(f"plpkg.{STAND_FOR.get(first, first)}{rest}")
                named += 1
                for argument in re.findall(r"(\w+)=", arguments):
                    assert argument in inspect.signature(value).parameters, span
    assert named > 2


@pytest.mark.parametrize(("page", "most"), [*((name, 500) for name in FROM), ("docs/epsilon.md", 700)])
def test_a_page_is_short(page, most):
    without_code = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S)
    assert len(re.findall(r"\S*\w\S*", without_code)) <= most


def test_minutes_of_a_reader_are_those_of_their_notebooks():
    minutes = {number: int(each) for number, each in re.findall(r"^\| \[(\d\d) .*\| (\d+) \|$", README, flags=re.M)}
    rows = [row.split("|") for row in re.findall(r"^\| (?:an?|somebody) .*", PAGES["docs/which.md"], flags=re.M)]
    assert len(minutes) == 11
    assert len(rows) == 7
    for _, _, notebooks, total, *_ in rows:
        assert int(total) == sum(minutes[number] for number in re.findall(r"\[(\d\d)\]", notebooks)), notebooks


def test_what_an_epsilon_costs_is_what_was_recorded():
    rows = recorded.section("clipping_learning", "accuracy")
    untuned = rows.loc[rows["method"] == "none", "bits_per_byte"].iloc[0]
    rows = rows[rows["method"] == "LoRA r=8"]
    gains = (untuned - rows["bits_per_byte"]).groupby([rows["case"], rows["epsilon"].round()]).agg(list)
    whole = gains["not clipped"].iloc[0]
    told = {"∞, clipped": gains["clipped"].iloc[0]}
    told |= {f"{epsilon:.0f}": each for epsilon, each in gains["private"].items()}
    assert len(told) == 4
    for epsilon, left in told.items():
        shares = [f"{100 * some / all_of_it:.0f}" for some, all_of_it in zip(left, whole, strict=True)]
        assert f"\n| {epsilon} | {' and '.join(shares)} % |" in PAGES["docs/epsilon.md"], epsilon
