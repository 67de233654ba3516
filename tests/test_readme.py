"""Every Python block of README and tour runs, with what it takes from its reader in hand: a model, texts, a loop."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config

from plpkg import ROOMS, claims, corpora
from plpkg.backbones import load_backbone, random_backbone
from plpkg.corpora import Writer

ROOT = Path(__file__).parents[1]
README, TOUR = ((ROOT / name).read_text() for name in ("README.md", "docs/tour.md"))
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README + TOUR, flags=re.M | re.S)
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


@pytest.mark.parametrize("page", ["README.md", "docs/tour.md"])
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(((?!https?:|#)[^)]+)\)", (ROOT / page).read_text())
    assert len(links) > 10
    for link in links:
        assert (ROOT / page).parent.joinpath(link).exists(), link


def test_every_room_has_its_row_and_its_place_in_the_floor_plan():
    plan = (ROOT / "CONTRIBUTING.md").read_text()
    for room, (number, _) in ROOMS.items():
        name = room.rpartition(".")[2]
        assert f"(notebooks/{number}_{name}.ipynb)" in README, room
        assert f"{name}/" in plan, room


def test_binder_is_sent_to_a_notebook_that_is_there():
    (path,) = re.findall(r"urlpath=voila/render/([\w/.]+)", README)
    assert (ROOT / path).is_file()
