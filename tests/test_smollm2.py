"""What needs the two published models: they are loaded once. Without them these tests are skipped: `plpkg fetch`."""

import json
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from typer.testing import CliRunner

from benchmarks.backbones import hands
from plpkg import catalog, questions, search, wheels
from plpkg.adapters import load_adapter, validate_adapter
from plpkg.backbones import UNKNOWN, fingerprint, load_backbone
from plpkg.cli import app
from plpkg.residual import PrivateLoraConfig, load

from rounding import assert_as_exact

pytestmark = pytest.mark.skipif(
    not all(map(wheels.is_fetched, ("smollm2", "minilm"))), reason="the published models were not fetched: plpkg fetch"
)

NOTES = {
    "bike.txt": "The bike is at Koller's workshop until Friday, ticket 88. He found a bent axle.\n",
    "dentist.txt": "Dr Oyelaran moved her practice to 12 Mill Lane. Next check on 14 May at half past nine.\n",
    "pool.md": "# Swimming\n\nMy locker at the pool is number 214. The code is the year of Mum's birth.\n",
    "walnuts.md": "# Allergies\n\nMy sister Ida cannot eat walnuts. For her cakes take almonds.\n",
}


@pytest.fixture(scope="module")
def smollm2():
    return load_backbone("smollm2")


@pytest.fixture(scope="module")
def reader():
    return load_backbone("smollm2-reader")


@pytest.fixture(scope="module")
def embed():
    return search.Embedder()


def test_it_is_the_published_model(smollm2):
    model, tokenizer = smollm2
    assert model.num_parameters() == 134_515_008
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.tie_word_embeddings
    assert (model.name_or_path, tokenizer.name_or_path) == ("smollm2", "smollm2")


def test_the_tokenizer_takes_digits_one_by_one_and_adds_nothing(smollm2):
    tokenizer = smollm2[1]
    assert tokenizer.convert_ids_to_tokens(tokenizer("In 2024")["input_ids"]) == ["In", "Ġ", "2", "0", "2", "4"]
    text = "  two spaces,\ttab\n\n 3½ · ١٢٣ · é 🙂\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_its_own_system_line_is_not_used(smollm2):
    asked = questions.prompt("A text.", "Which?", smollm2[1])
    assert asked.startswith(f"<|im_start|>system\n{questions.INSTRUCTION}<|im_end|>\n<|im_start|>user\nText: A text.\n")
    assert questions.token_ids(asked, smollm2[1]).count(smollm2[1].bos_token_id) == 3  # three turns


def test_the_reader_answers_in_a_few_words(reader):
    asked = [
        (NOTES["bike.txt"], "Until when is the bike at the workshop?", "Friday"),
        (NOTES["pool.md"], "Which number does my locker have?", "214"),
        (NOTES["walnuts.md"], "What must my sister not eat?", "walnuts"),
    ]
    given = questions.answers(*reader, [(text, question) for text, question, _ in asked])
    assert sum(questions.right(said, answer) for said, (_, _, answer) in zip(given, asked, strict=True)) >= 2


def test_the_reader_thinks_unknown_where_a_note_does_not_say_and_never_writes_it(reader):
    question = "Until when is the bike at the workshop?"
    says, *silent = questions.readings(*reader, [(text, question) for text in NOTES.values()])
    assert all(says.unknown < each.unknown for each in silent)
    assert UNKNOWN not in [each.answer for each in silent]


def test_the_reader_is_the_published_model_with_a_public_adapter_merged(smollm2, reader):
    folder, ids = catalog.data_path("smollm2-reader"), torch.arange(1, 40)[None]
    adapter = validate_adapter(folder, smollm2[0])  # it is one that the service takes
    merged = reader[0].state_dict()
    for path, each in adapter.factors.items():
        weight = smollm2[0].get_submodule(path).weight
        change = each.scale * each.up.double() @ each.down.double()
        assert_as_exact(merged[f"{path}.weight"], weight + change.float(), weight.double() + change)
    with torch.no_grad():
        beside = PeftModel.from_pretrained(load_backbone("smollm2")[0], folder).eval()
        assert_as_exact(reader[0](ids).logits, beside(ids).logits, beside.double()(ids).logits)
    assert fingerprint(reader[0]) != fingerprint(smollm2[0])
    assert not reader[0].training
    half, _ = load_backbone("smollm2-reader", dtype="auto")
    assert torch.equal(half.lm_head.weight, reader[0].lm_head.weight.bfloat16())


def test_recorded_answers_are_those_of_the_shipped_reader(reader):
    answers = catalog.measured("backbones_asking").set_index(["section", "method", "reads"])
    share = answers.loc[("handwritten", "smollm2-reader", "right note"), "share"].item()
    asked = hands.handwritten()
    given = questions.answers(*reader, [(note, question) for note, question, _ in asked])
    right = sum(questions.right(said, answer) for said, (_, _, answer) in zip(given, asked, strict=True))
    assert abs(right / len(asked) - share) <= 2 / 30  # a tie may break otherwise


def test_an_adapter_made_here_names_the_model_and_not_a_folder(smollm2, tmp_path):
    model = get_peft_model(smollm2[0], LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    try:
        model.save_pretrained(tmp_path)
    finally:
        model.unload()
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "smollm2"


def of_the_original(folder):
    """What training on the original would have saved: its name, and another fingerprint."""
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    if "backbone" in config:
        config["backbone"] = "0" * 64
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_an_adapter_of_the_original_loads_with_one_warning(smollm2, tmp_path):
    for name, config in (
        ("lora", LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")),
        ("m", PrivateLoraConfig(r_c2d=4, r_d2c=4)),
    ):
        model = get_peft_model(smollm2[0], config)
        try:
            model.save_pretrained(tmp_path / name)
        finally:
            model.unload()
        of_the_original(tmp_path / name)
    with pytest.warns(
        UserWarning, match="trained on HuggingFaceTB/SmolLM2-135M-Instruct; smollm2 is that model"
    ) as said:
        load_adapter(tmp_path / "lora", smollm2[0])
    assert sum("rounded to 4 bits" in str(warning.message) for warning in said) == 1
    with pytest.warns(UserWarning, match="rounded to 4 bits") as said:
        load(smollm2[0], tmp_path / "m").unload()
    assert sum("rounded to 4 bits" in str(warning.message) for warning in said) == 1


def test_vectors_do_not_depend_on_what_is_beside_them(embed):
    texts = [*NOTES.values(), "a", "word " * 1000]
    together = torch.from_numpy(embed(texts))
    alone = torch.from_numpy(embed(texts, batch=1))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)  # sums of 384 rounded products of about 1/384
    torch.testing.assert_close(together.norm(dim=1), torch.ones(len(texts)))


def test_one_sentence_of_a_page_is_found(folder, embed):
    rest = "We walked along the river until the rain came, and had soup. " * 5
    said, other = "I have called the dog Pilot, after the ferry.", "The neighbours' dog barks at night."
    page = f"{rest}\n{said}\n{rest}"
    (folder / "page.md").write_text(page)
    (folder / "night.md").write_text(other)
    question = "What is my dog called?"
    whole = embed([f"page\n{page}", f"night\n{other}"]) @ embed([question])[0]
    assert whole[0] < whole[1]
    assert said in search.Search(folder, embed, progress=False).find(question)[0].passage.text


@pytest.fixture
def folder(tmp_path, tmp_path_factory, monkeypatch):
    kept = tmp_path_factory.mktemp("vectors")
    monkeypatch.setattr(search, "_vectors_folder", lambda: kept)
    for name, text in NOTES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(*arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        return CliRunner().invoke(app, ["ask", *map(str, arguments)], catch_exceptions=False, **options)


def test_a_folder_is_asked_and_each_passage_is_shown_with_its_place(folder, reader, monkeypatch):
    monkeypatch.setattr("plpkg.ask.load_backbone", {"smollm2-reader": reader}.__getitem__)
    (folder / "scan.pdf").touch()
    lines = "Which number does my locker have?\n\nand who cannot eat walnuts?\n"
    result = run(folder, "--json", input=lines)
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert result.stderr == "not read (neither .txt nor .md): scan.pdf\n"
    assert (first["file"], first["line"]) == ("pool.md", 3)
    assert first["passage"] == NOTES["pool.md"].partition("\n\n")[2].strip()
    assert first.keys() == {"question", "answer", "passage", "file", "line", "score", "others", "doubtful"}
    assert [each["file"] for each in first["others"]] != [first["file"]]
    assert len(first["others"]) == 2
    assert second["question"] == "and who cannot eat walnuts?"
    assert "walnuts.md" in [second["file"], *(each["file"] for each in second["others"])]


def test_what_a_cloud_would_read_is_all_of_it(folder):
    result = run(folder, "Which number does my locker have?", "--split", "--model", "plpkg-small")
    assert result.exit_code == 0
    assert "as a cloud: " in result.stdout
    assert "My locker at the pool is number 214." in result.stdout.partition("as a cloud: ")[2]


def test_a_model_that_is_not_there_is_one_sentence(folder):
    result = run(folder, "Which?", "--model", "no-such-model")
    assert result.exit_code == 2
    assert "no model 'no-such-model'" in result.stderr
