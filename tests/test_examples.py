"""The examples, each run with small arguments: what it prints and what it writes, found again by other means."""

import ast
import importlib
import math
import re
import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from plpkg import autonomy, catalog, clipping, corpora, questions, residual, scoring
from plpkg.backbones import load_backbone, random_backbone

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
SMALL = "plpkg-small"
DIARY = catalog.data_path("diary", "adapter")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run an example in an empty folder: the lines that it prints."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments, model=SMALL):
        path = FOLDER / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments), "--model", str(model)])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def stranger(tmp_path):
    """A model in a folder that this package does not know, of a family with positions added to its embeddings."""
    _, tokenizer = load_backbone(SMALL)
    model = random_backbone("gpt2", vocab=len(tokenizer), max_positions=512, seed=3)
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(20)  # so large that who forgets them reads other tokens
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "stranger")
    return tmp_path / "stranger"


def greedy(model, tokenizer, prompt, tokens):
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    written = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(written, skip_special_tokens=True), len(written)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_says_its_command_and_comes_by_the_front_door(path):
    source = path.read_text("utf-8")
    assert len(source.splitlines()) < 60
    tree = ast.parse(source)
    commands = re.findall(r"^ +python (\S+) --\w+ \S", ast.get_docstring(tree), flags=re.M)
    assert commands == [f"examples/{path.name}"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("plpkg."):
            module = importlib.import_module(node.module)
            public = getattr(module, "__all__", ["load_backbone"])
            assert {name.name for name in node.names} <= set(public)


def table(tmp_path, rows=40):
    file = tmp_path / "my.csv"
    texts = [f"Note {i}, which is about the {['cat', 'dog', 'car'][i % 3]}." for i in range(rows)]
    pd.DataFrame({"id": range(rows), "note": texts}).to_csv(file, index=False)
    return file, texts


def test_private_training_prints_its_epsilon_and_saves_what_peft_loads(run, tmp_path):
    file, texts = table(tmp_path)
    options = ["--csv", file, "--column", "note", "--epsilon", 5, "--epochs", 2, "--out", "mine"]
    losses, training, promise = run("train_privately", *options)
    before, after = map(float, re.findall(r"(\d\.\d{3}) (?:before|after)", losses))
    steps, rows, sigma = re.fullmatch(r"(\d+) steps, (\d+) rows learnt, noise multiplier (\S+)", training).groups()
    epsilon, delta, out = re.search(r"epsilon (\S+) spent at delta (\S+) .* in (\S+)", promise).groups()
    assert (int(rows), int(steps), float(delta), out) == (36, 2 * math.ceil(36 / 8), 1e-3, "mine")
    expected = clipping.accounting.epsilon_of(float(sigma), 1 / math.ceil(36 / 8), int(steps), 1e-3)
    assert float(epsilon) == pytest.approx(expected, abs=2e-4)
    assert 4.9 < float(epsilon) <= 5
    model, tokenizer = load_backbone(SMALL)
    held_out = texts[::10]
    assert scoring.score(model, tokenizer, held_out).bits_per_byte == pytest.approx(before, abs=6e-4)
    loaded = PeftModel.from_pretrained(model, tmp_path / "mine")
    assert scoring.score(loaded, tokenizer, held_out).bits_per_byte == pytest.approx(after, abs=6e-4)
    assert after != before


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # PEFT says so of every GPT-2
def test_any_model_is_trained_and_delta_is_below_one_over_the_rows(run, tmp_path, stranger):
    file, _ = table(tmp_path, rows=600)
    promise = run("train_privately", "--csv", file, "--column", "note", "--epochs", 1, model=stranger)[-1]
    assert f"at delta {540**-1.1:.4g} " in promise


def test_a_csv_that_cannot_be_learnt_is_refused_in_a_sentence(run, tmp_path):
    file, texts = table(tmp_path)
    few, gaps = tmp_path / "few.csv", tmp_path / "gaps.csv"
    pd.DataFrame({"id": range(5), "note": texts[:5]}).to_csv(few, index=False)
    pd.DataFrame({"id": range(40), "note": [*texts[:7], " ", *texts[8:39], ""]}).to_csv(gaps, index=False)
    for given, column, said in (
        (file, "text", f"error: {file} has no column 'text'; it has id, note"),
        (few, "note", f"error: {few} has 5 rows, and at least 20 are needed"),
        (gaps, "note", f"error: {gaps} has empty cells in the column 'note': 2, the first in row 8"),
        (tmp_path / "none.csv", "note", f"error: [Errno 2] No such file or directory: '{tmp_path / 'none.csv'}'"),
    ):
        with pytest.raises(SystemExit) as refused:
            run("train_privately", "--csv", given, "--column", column)
        assert refused.value.code == said


def adapter(folder, seed):
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(load_backbone(SMALL)[0], config).save_pretrained(folder, save_embedding_layers=False)


def test_every_adapter_of_the_batch_answers_as_if_alone(run, tmp_path):
    for seed, name in enumerate(("mine", "yours")):
        adapter(tmp_path / name, seed)
    prompt = "The cat is called"
    first, *answers, tokens, sizes = run("serve_my_adapter", "mine", "yours", "--prompt", prompt, "--tokens", 8)
    assert first == f"prompt: {prompt}"
    expected, written = {}, 0
    for name in ("no adapter", "mine", "yours"):
        model, tokenizer = load_backbone(SMALL)
        if name != "no adapter":
            model = PeftModel.from_pretrained(model, tmp_path / name).eval()
        text, count = greedy(model, tokenizer, prompt, 8)
        expected[name] = " ".join(text.split())
        written += count
    assert dict(line.split(": ", 1) for line in answers) == expected
    assert len(set(expected.values())) == 3
    assert tokens.startswith(f"measured: {written} tokens for 3 requests in one batch")
    files = [file for name in ("mine", "yours") for file in (tmp_path / name).glob("adapter_*")]
    assert sizes.endswith(f"all adapters together {sum(file.stat().st_size for file in files) / 1e6:.2f} MB")


def test_an_adapter_of_another_model_is_refused_in_a_sentence(run):
    with pytest.raises(SystemExit) as refused:
        run("serve_my_adapter", catalog.data_path("people", "ann"))
    assert re.fullmatch(r"error: [^\n]+", refused.value.code)


TEXT = "The key is under the blue pot. The train leaves at seven. " * 8


def test_a_text_is_read_within_the_budget_and_without_one_as_a_whole(run, tmp_path):
    Path("long.txt").write_text(TEXT, "utf-8")
    lines = run("read_long_text", "long.txt", "--question", "Where is the key?", "--budget", 24, "--heads", "--compare")
    model, tokenizer = load_backbone(SMALL)
    seen = len(tokenizer(TEXT)["input_ids"])
    heads = "tokens in each KV head, chosen by trained heads"
    assert (lines[1], lines[4]) == (f"kept 24 of {seen} {heads}", f"kept {seen} of {seen} {heads}")
    config = model.config
    token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim / 2**20  # float32
    full = f"{seen * token:.1f} MiB (computed)"
    for line, kept in ((lines[2], 24), (lines[5], seen)):
        assert line == f"cache {kept * token:.1f} MiB (measured), of all tokens {full}"
    prompt = questions.prompt(TEXT, "Where is the key?", tokenizer)
    answer, _ = greedy(model, tokenizer, prompt, questions.LONGEST)
    assert lines[6] == f"answer: {questions.first_line(answer)}"


def test_a_model_without_heads_reads_by_a_rule_and_says_that_it_has_none(run, stranger):
    Path("long.txt").write_text(TEXT, "utf-8")
    lines = run("read_long_text", "long.txt", "--budget", 24, model=stranger)
    assert lines[1].endswith("chosen by SnapKV")
    with pytest.raises(SystemExit, match=r"error: [^\n]+$"):
        run("read_long_text", "long.txt", "--heads", model=stranger)


def crossing(lines):
    answer, crossed, read, *text = lines
    up, down, trips = re.fullmatch(r"crossed: (\S+) kB up, (\S+) kB down, (\d+) round trips .*", crossed).groups()
    right, tokens = map(int, re.search(r"read (\d+) of (\d+) tokens", read).groups())
    return answer.removeprefix("answer: "), (float(up), float(down), int(trips)), (right, tokens), "\n".join(text)


QUESTION = "My dog is called"


def test_the_divided_model_answers_as_the_whole_and_the_cloud_reads_it(run):
    lines = run("split_model", "--question", QUESTION, "--tokens", 6, "--adapter", DIARY)
    answer, (up, _, trips), (right, tokens), read = crossing(lines)
    backbone, tokenizer = load_backbone(SMALL)
    model = residual.load(backbone, DIARY)
    expected, written = greedy(model, tokenizer, QUESTION, 6)
    assert answer == expected.strip()
    asked = len(tokenizer(QUESTION)["input_ids"])
    assert right == tokens == asked + written - 1
    assert read.startswith(QUESTION)
    device, _ = residual.split(model)
    assert trips == written * (len(device.matrices) + 1)
    rank, _ = device.ranks
    payload = 2 * tokens * (backbone.config.hidden_size + sum(map(len, device.matrices)) * rank) / 1000  # fp16, kB
    assert payload < up < 1.5 * payload + 1


def test_any_model_can_be_divided_and_its_positions_are_no_secret(run, stranger):
    answer, _, (right, tokens), _ = crossing(run("split_model", "--tokens", 4, "--question", QUESTION, model=stranger))
    model, tokenizer = load_backbone(stranger)
    assert answer == greedy(model, tokenizer, QUESTION, 4)[0].strip()
    assert right == tokens


def counts(line):
    return tuple(
        map(int, re.search(r"of (\d+) words (\d+) are the first suggestion, (\d+) among three", line).groups())
    )


def test_a_night_of_learning_suggests_more_words_and_is_saved(run, tmp_path):
    Path("notes").mkdir()
    for name in ("a.txt", "b.md"):
        Path("notes", name).write_text("Gregor feeds the green parrot before breakfast. " * 40, "utf-8")
    lines = run("learn_overnight", "notes", "--scope", "lora", "--steps", 12, "--out", "mine")
    before, after, loaded = map(counts, lines)
    assert before[0] == after[0]
    assert after[2] > before[2]
    assert loaded == after
    assert before == counted(load_backbone(SMALL), "notes")
    saved = PeftModel.from_pretrained(load_backbone(SMALL)[0], tmp_path / "mine").eval()
    assert after == counted((saved, load_backbone(SMALL)[1]), "notes")


def counted(loaded, folder):
    """The same count, token by token, and by decoding."""
    model, tokenizer = loaded
    begins = [bool(re.match(r" [^\W\d_]", tokenizer.decode(i))) for i in range(model.config.vocab_size)]
    words = first = three = 0
    for writer in corpora.text_folder(folder, shares=(1, 0, 0)):
        for document in corpora.encode(writer.split("train"), tokenizer):
            ids = document.ids[int(0.9 * len(document)) :]
            for start in range(0, len(ids) - 1, 64):
                with torch.no_grad():
                    scores = model(ids[None, start : start + 64]).logits[0]
                for place, right in enumerate(ids[start + 1 : start + 65].tolist()):
                    if begins[right]:
                        likely = [i for i in scores[place].argsort(descending=True).tolist() if begins[i]][:3]
                        words, first, three = words + 1, first + (likely[0] == right), three + (right in likely)
    return words, first, three


def test_the_last_layer_alone_is_saved_as_autonomy_loads_it(run, tmp_path):
    Path("notes").mkdir()
    Path("notes", "a.txt").write_text("Gregor feeds the green parrot before breakfast. " * 60, "utf-8")
    _, after, loaded = map(counts, run("learn_overnight", "notes", "--scope", "head", "--steps", 4, "--out", "mine"))
    assert loaded == after
    assert autonomy.load(load_backbone(SMALL)[0], tmp_path / "mine").scope == "head"
