import json
import random

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.backbones import reader, reading
from benchmarks.backbones.pointing import Pointing
from benchmarks.notes import generator
from benchmarks.notes.generator import CHARACTERS_PER_TOKEN, KINDS
from plpkg import corpora, questions
from plpkg.backbones import load_backbone, random_backbone
from plpkg.corpora import ABSENT

from rounding import assert_as_exact, assert_close


@pytest.mark.parametrize("made", [reading.handwritten, reading.diary])
def test_a_text_among_others_and_without_its_own(made):
    alone = made()
    texts = {passage.text for passage in alone}
    for passage, among, absent in zip(
        alone, reading.among(alone, 4, "\n\n"), reading.absent(alone, 4, "\n\n"), strict=True
    ):
        assert passage.answer in passage.text
        assert sum(text in among.text for text in texts) == 4
        assert passage.text in among.text
        assert (among.question, among.answer) == (passage.question, passage.answer)
        assert absent.answer == ABSENT
        assert sum(text in absent.text for text in texts) == 4
        assert passage.answer.casefold() not in absent.text.casefold()


def test_the_sets_are_the_same_each_time_and_none_of_them_empty():
    first, again = reading.sets(3), reading.sets(3)
    for name, make in first.items():
        assert len(passages := make()) >= 3
        assert passages == again[name]()


RECIPE = reader.Recipe(rank=4, steps=4, tokens=200, questions=3, public=64)


def test_the_losses_are_those_of_the_answers_and_of_the_text():
    model, tokenizer = load_backbone("plpkg-small")
    rng = random.Random(0)
    readings = [generator.readings(rng, count, tokens=60) for count in (1, 3)]
    ids, roles, sources = reader.batch(readings, tokenizer)
    for row, role, source, each in zip(ids, roles, sources, readings, strict=True):
        whole = "".join(
            questions.prompt("" if i else p.text, p.question, tokenizer) + f" {p.answer}\n" for i, p in enumerate(each)
        )
        assert tokenizer.decode(row[role != reader.PADDING][1:]) == whole
        assert tokenizer.decode(row[role == reader.ANSWER]) == "".join(f" {p.answer}\n" for p in each)
        assert (source[role != reader.ANSWER] == -1).all()
        found = "".join(p.answer for p in each if p.text.count(p.answer) == 1)
        copied = tokenizer.decode(row[source[source >= 0]])  # where a sentence begins, without a blank
        assert copied.replace(" ", "") == found.replace(" ", "")

    chosen = roles == reader.ANSWER
    with torch.no_grad():
        found = reader.logits(model, ids, chosen)
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(ids).logits[:, :-1][chosen[:, 1:]]
    assert_close(found, expected, 2, expected.abs().max())  # one sum, rounded once to bfloat16


def test_attention_is_the_models_own_and_what_is_asked_of_it():
    eager = random_backbone("llama", num_layers=3, num_kv_heads=2, options={"attn_implementation": "eager"})
    model = random_backbone("llama", num_layers=3, num_kv_heads=2)
    ids, pointing = torch.arange(24).reshape(2, 12), Pointing(model, (1, 2))
    rows, tokens, sources = torch.tensor([0, 1, 1]), torch.tensor([11, 5, 7]), torch.tensor([0, 5, 3])
    with torch.no_grad():
        expected = eager(ids, output_attentions=True)
        with pointing.ask(rows, tokens, sources):
            assert_as_exact(model(ids).logits, expected.logits, eager.double()(ids).logits)
        model(ids)  # nobody asks
    shares = torch.cat([layer[rows, :, tokens, sources] for layer in expected.attentions[1:]], 1)
    torch.testing.assert_close(pointing.nats(), -shares.mean(1).log())


def test_each_stage_has_its_texts():
    recipe, documents = reader.Recipe(), corpora.public("train")[:20]

    def readings(*parts):
        steps = [round(part * recipe.steps) + i for part in parts for i in range(20)]
        return [each for step in steps for each in reader.passages(recipe, min(step, recipe.steps - 1), documents)]

    plain, alike, all_kinds = readings(0.0, 0.1), readings(0.2, 0.3), readings(0.4, 0.7, 0.95)
    kinds = [{passage.kind for each in stage for passage in each} for stage in (plain, alike, all_kinds)]
    assert kinds == [{"fact"}, {"fact"}, set(KINDS)]
    lengths = [max(len(each[0].text) for each in stage) for stage in (plain, alike, all_kinds)]
    assert max(lengths[:2]) < 200 * CHARACTERS_PER_TOKEN < 900 * CHARACTERS_PER_TOKEN < lengths[2]


def test_a_stopped_training_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    few = corpora.public("train")[:20]  # all of them would be encoded at each start
    monkeypatch.setattr(corpora, "public", lambda split: few)
    monkeypatch.setattr(reading, "shares", lambda *_, **__: {"all": 0.5})
    reader.train(RECIPE, tmp_path / "whole", 4)
    reader.train(RECIPE, tmp_path / "stopped", 2)
    reader.train(RECIPE, tmp_path / "stopped", 4)
    whole, stopped = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], stopped[name]) for name in whole | stopped)
    assert (tmp_path / "whole" / "log.csv").read_text() == (tmp_path / "stopped" / "log.csv").read_text()
    assert [row.split(",")[0] for row in (tmp_path / "whole" / "log.csv").read_text().splitlines()] == ["step", "4"]
    recipe = json.loads((tmp_path / "whole" / "recipe.json").read_text())
    assert {name: recipe[name] for name in vars(RECIPE)} == vars(RECIPE)
    with pytest.raises(ValueError, match="holds a run with seed=0, now 1"):
        reader.train(
            reader.Recipe(seed=1, **{k: v for k, v in vars(RECIPE).items() if k != "seed"}), tmp_path / "whole", 4
        )
