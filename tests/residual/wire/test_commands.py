"""The commands, in processes of their own: what a reader types."""

import contextlib
import gc
import io
import os
import re
import shutil
import signal
import subprocess
import sys

import certificate
import pytest
import torch
from peft import get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from plpkg import checkpoints
from plpkg.backbones import load_backbone, random_backbone
from plpkg.cli import app
from plpkg.residual import CloudServer, DeviceClient, PrivateLoraConfig
from plpkg.residual.wire.chat import answer_lines, lines_of
from plpkg.residual.wire.loading import adapted_model
from plpkg.residual.wire.training import texts

from preloaded import Process
from waiting import line_of

WIDTH = 32
WORDS = ["<unk>", "<s>", "my", "cat", "is", "called", "felix", "and", "sleeps", "all", "day"]
TARGETS = ["--target", "v_proj", "--target", "down_proj"]
LISTENING = r"^listening on (127\.0\.0\.1:\d+)"
PLPKG = "import sys; from plpkg.cli import app; app(sys.argv[1:])"
DEVICE = ["device", "--connect", "127.0.0.1:1"]
RUNNER = CliRunner(env={"COLUMNS": "400"})
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer that knows a few words."""
    path = tmp_path_factory.mktemp("model")
    random_backbone("llama", num_kv_heads=2, vocab=len(WORDS), hidden=WIDTH, intermediate=48).save_pretrained(path)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A folder with a certificate."""
    return certificate.written(tmp_path_factory.mktemp("tls")).parent


@contextlib.contextmanager
def serving(start, folder, *options):
    """A cloud that ``start`` runs with these arguments of ``plpkg``; gives its address, and ends it as Ctrl+C does."""
    command = ["cloud", "--model", str(folder), "--rank", "4", *TARGETS, "--listen", "127.0.0.1:0", *options]
    with start(command) as process:
        address = line_of(process.stdout, LISTENING)[1]
        try:
            yield address
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            assert process.wait() == 0, rest
        assert "round trips" in rest


@pytest.fixture(scope="module")
def secured(folder, tls):
    """What a reader types: ``plpkg cloud`` over TLS, with a token, for sequences of at most nine tokens."""

    def start(command):
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PLPKG_TOKEN": "secret"}
        return subprocess.Popen(
            [sys.executable, "-m", "plpkg", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )

    with serving(start, folder, "--tls", str(tls), "--tokens", "9") as address:
        yield address


@pytest.fixture(scope="module")
def cloud(folder):
    """On loopback, without TLS and without the seconds that imports take."""

    def start(command):
        return Process(PLPKG, *command)

    with serving(start, folder) as address:
        yield address


def chat_over_tls(address, folder, ca, lines, token="secret"):
    device = ["device", "--connect", address, "--model", str(folder), "--rank", "4", *TARGETS, "--ca", str(ca)]
    chat = ["chat", "--max-new-tokens", "2", "--temperature", "0"]
    return RUNNER.invoke(app, [*device, *chat], input=lines, env={"PLPKG_TOKEN": token})


def test_over_tls_with_a_token(secured, folder, tls, tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr("plpkg.residual.wire.connection.time.sleep", slept.append)
    result = chat_over_tls(secured, folder, tls / "cert.pem", "my cat\n")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.strip().splitlines()) == 1
    others = certificate.written(tmp_path / "others")
    for ca, token, message in (
        (tls / "cert.pem", "guessed", "no token, or a wrong one"),
        (others, "secret", "CERTIFICATE_VERIFY_FAILED"),
    ):
        result = chat_over_tls(secured, folder, ca, "my cat\n", token)
        assert result.exit_code == 2
        assert message in result.output
    assert not slept  # trying again would not help


def test_cloud_chat_and_train(cloud, folder, tmp_path):
    device = ["device", "--connect", cloud, "--model", str(folder)]
    text = tmp_path / "diary.txt"
    text.write_text("my cat is called felix and sleeps all day " * 20)
    options = ["--steps", "3", "--batch", "2", "--seq", "8", "--lr", "0.5"]
    result = RUNNER.invoke(
        app, [*device, "--rank", "4", *TARGETS, "train", str(text), str(tmp_path / "mine"), *options]
    )
    assert result.exit_code == 0, result.output
    pattern = r"Training\(3 steps, held out (\d\.\d{3}) to (\d\.\d{3}) bits per byte\)"
    before, after = re.fullmatch(pattern, result.stdout.strip()).groups()
    assert float(before) > float(after)
    chat = ["chat", "--max-new-tokens", "5", "--temperature", "0"]
    result = RUNNER.invoke(app, [*device, "--adapter", str(tmp_path / "mine"), *chat], input="my cat\n\nis called\n")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.strip().splitlines()) == 2
    result = RUNNER.invoke(app, [*device, "--rank", "5", *chat], input="my cat\n")
    assert result.exit_code == 2
    assert f"Error: {cloud} refuses: " in result.output
    assert "--rank 5 here, 4 on the cloud" in result.output
    assert (
        "--target k_proj, q_proj, v_proj of layers 0, 1 here, down_proj, v_proj of layers 0, 1 on the" in result.output
    )
    assert "Usage" not in result.output


def test_a_cloud_like_an_adapter_needs_no_list_of_targets(folder, tmp_path):
    """Its M stays where it is: the cloud has the configuration alone."""
    config = dict(rank=5, ladder=False, target_modules=["o_proj", "up_proj"], projection_seed=3)
    adapted_model(str(folder), None, "fp32", "cpu", **config)[0].save_pretrained(tmp_path / "mine")
    (tmp_path / "public").mkdir()
    shutil.copy(tmp_path / "mine" / "adapter_config.json", tmp_path / "public")
    command = ["cloud", "--model", str(folder), "--like", str(tmp_path / "public"), "--listen", "127.0.0.1:0"]
    with Process(PLPKG, *command) as process:
        address = line_of(process.stdout, LISTENING)[1]
        device = ["device", "--connect", address, "--model", str(folder), "--adapter", str(tmp_path / "mine")]
        chat = ["chat", "--max-new-tokens", "5", "--temperature", "0"]
        result = RUNNER.invoke(app, [*device, *chat], input="my cat\n")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.strip().splitlines()) == 1


@pytest.mark.parametrize("end", ["cloud", "device"])
def test_only_what_a_configuration_tells_can_be_alike(folder, tmp_path, end):
    adapted_model(str(folder), None, "fp32", "cpu", rank=4, init="given")[0].save_pretrained(tmp_path)
    like = ["--like", str(tmp_path)]
    message = "has an A and a B that its configuration does not tell (init='given'): --adapter reads them, and M"
    refused(folder, ["cloud", *like] if end == "cloud" else [*DEVICE, *like, "chat"], message)
    (tmp_path / "ladder").mkdir()
    adapted_model(str(folder), None, "fp32", "cpu", rank=3, ladder=True)[0].save_pretrained(tmp_path / "ladder")
    alike, _ = adapted_model(str(folder), None, "fp32", "cpu", rank=4, like=tmp_path / "ladder")
    assert (alike.peft_config["default"].peft_type, alike.peft_config["default"].r) == ("LADDER", 3)
    assert any(p.requires_grad for p in alike.parameters())  # a device may train it


def test_a_chat_says_that_the_cloud_is_silent_and_ends_with_a_line(folder, monkeypatch):
    def silent(client, *_, **__):
        client.on_silence(f"no answer for 12 s, trying for {client._connection.retry_s:.0f} more")
        raise KeyboardInterrupt

    monkeypatch.setattr("plpkg.residual.wire.chat.answer_lines", silent)
    result = RUNNER.invoke(app, [*DEVICE, "--model", str(folder), "--retry", "18", "chat"])
    assert result.exit_code == 130
    assert result.stderr == "\nno answer for 12 s, trying for 18 more\n\n\n"


def test_training_that_is_interrupted_says_how_it_goes_on(cloud, folder, tmp_path):
    """Ctrl+C, in a process of its own, some time after the first regular checkpoint."""
    text, out = tmp_path / "diary.txt", tmp_path / "mine"
    text.write_text("my cat is called felix and sleeps all day " * 20)
    device = ["device", "--connect", cloud, "--model", str(folder), "--rank", "4", *TARGETS]
    with Process(PLPKG, *device, "train", str(text), str(out), "--steps", "100000", "--seq", "8") as process:
        shown = ""
        while not re.search(r"[2-9]\d/100000", shown):
            shown += process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        shown = process.stdout.read()
        assert process.wait() == 130, shown
    assert "Traceback" not in shown
    steps = int(
        re.search(rf"{out / 'checkpoint.safetensors'} has (\d+) of 100000 steps: the same command goes on", shown)[1]
    )
    assert len(checkpoints.read(out / "checkpoint.safetensors")["log"]) == steps >= 20


@pytest.mark.parametrize(
    ("options", "draft", "trips"),
    [
        ((), "lookup", "a round trip"),
        (("--ladder",), "none", "10 round trips"),
        (("--ladder",), "backbone", "2 round trips"),  # a new ladder adds nothing: every guess is right
        (("--fold",), "public", "a round trip"),
    ],
)
def test_chat_with_guesses_says_what_they_saved(folder, monkeypatch, options, draft, trips):
    """The cloud is a process of its own; the tokens are the same as without guesses."""
    encoded = [type("Tokens", (), {"ids": torch.arange(2, 11)})]
    monkeypatch.setattr("plpkg.corpora.public", lambda split: [])
    monkeypatch.setattr("plpkg.corpora.encode", lambda documents, tokenizer: encoded)
    with serving(lambda command: Process(PLPKG, *command), folder, *options) as address:
        device = ["device", "--connect", address, "--model", str(folder), "--rank", "4", *TARGETS, *options]
        chat = ["chat", "--max-new-tokens", "10", "--temperature", "0"]
        plain, guessed = (
            RUNNER.invoke(app, [*device, *chat, "--draft", name], input="my cat\n") for name in ("none", draft)
        )
    for result in (plain, guessed):
        assert result.exit_code == 0, result.output
        assert "; 10 tokens, " in result.stderr
    assert guessed.stdout == plain.stdout
    assert trips in guessed.stderr
    assert ("guesses accepted" in guessed.stderr) == (draft != "none")


@pytest.mark.parametrize("command", ["cloud", "chat", "train"])
def test_each_process_is_left_with_its_part(folder, tmp_path, monkeypatch, command):
    """Every tensor that the command made and that is alive while it serves, chats or trains."""

    def alive():
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return {t.untyped_storage().data_ptr(): t for t in tensors if t.untyped_storage().nbytes()}

    def served(server):
        seen.update(alive=alive(), part=server.part)

    def used(client, *_, **__):
        seen.update(alive=alive(), part=client.part)

    before, seen = alive(), {}
    monkeypatch.setattr("plpkg.residual.wire.cloud.CloudServer.wait", served)
    monkeypatch.setattr("plpkg.residual.wire.chat.answer_lines", used)
    monkeypatch.setattr("plpkg.residual.wire.training.train", used)
    common = ["--model", str(folder), "--rank", "4"]
    text = tmp_path / "text.txt"
    text.write_text("my cat")
    rest = ["train", str(text), str(tmp_path / "out")] if command == "train" else ["chat"]
    cloud = ["cloud", *common, "--listen", "127.0.0.1:0"]
    result = RUNNER.invoke(app, cloud if command == "cloud" else [*DEVICE, *common, *rest])
    assert result.exit_code == 0, result.output
    parts = filter(None, (seen["part"], getattr(seen["part"], "public", None)))  # with which a cloud writes ahead
    held = {t.untyped_storage().data_ptr() for part in parts for t in (*part.parameters(), *part.buffers())}
    beside = [t for at, t in seen["alive"].items() if at not in held and at not in before]
    assert sum(t.numel() for t in beside) < WIDTH, [tuple(t.shape) for t in beside]
    assert held <= set(seen["alive"])


PEAK = """
import sys, threading
from plpkg.residual.wire.commands import client_of

new, settings = dict(rank=4), dict(first_k=1)

def anonymous():  # what the process holds that is in no file
    status = open("/proc/self/status").read()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024

def load(model):
    with client_of("127.0.0.1:1", model, None, new, settings) as (client, _, _):
        return {str(p.dtype) for p in client.part.parameters()}

def watch():
    while not done.wait(0.001):
        seen.append(anonymous())

load(sys.argv[1])  # what is loaded and compiled once
done, seen = threading.Event(), [anonymous()]
watching = threading.Thread(target=watch)
watching.start()
dtypes = load(sys.argv[2])
done.set()
watching.join()
print(max(seen) - seen[0], *dtypes)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells what a process holds")
def test_a_device_never_holds_the_layers_of_the_cloud(folder, tmp_path):
    wide = dict(num_layers=16, hidden=512, intermediate=2048, num_heads=8, vocab=len(WORDS), dtype=torch.bfloat16)
    large = shutil.copytree(folder, tmp_path / "large")
    random_backbone("llama", **wide).save_pretrained(large)
    size = (large / "model.safetensors").stat().st_size
    assert size > 1e8
    with Process(PEAK, str(folder), str(large)) as process:
        peak, dtype = line_of(process.stdout, r"^(\d+) (\S+)$").groups()
    assert dtype == "torch.float32"
    assert int(peak) < size / 2, f"{int(peak):,} bytes beside the file of {size:,}"


def test_chat_is_what_generate_gives_and_remembers_with_a_template(folder, capsys):
    base, tokenizer = load_backbone(folder)
    model = get_peft_model(base, PrivateLoraConfig(r_c2d=4, r_d2c=4))
    asked = []
    with (
        CloudServer(model, precision="fp32") as server,
        DeviceClient(server.address, model, precision="fp32") as client,
    ):
        answer_lines(client, tokenizer, iter(["my cat"]), 4)
        ids = torch.tensor([[1, *tokenizer("my cat")["input_ids"]]])
        answer = client.generate(ids, 4)[0, ids.shape[1] :]
        assert capsys.readouterr().out.strip() == tokenizer.decode(answer, skip_special_tokens=True).strip()
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }} and {% endfor %}"
        original = client.generate
        client.generate = lambda ids, *rest, **options: (asked.append(ids), original(ids, *rest, **options))[1]
        answer_lines(client, tokenizer, iter(["my cat", "", "sleeps"]), 3)
    assert len(asked) == 2
    first, second = (tokenizer.decode(ids[0]) for ids in asked)
    assert second.startswith(first)
    assert "sleeps" in second


def test_a_line_that_is_too_long_or_no_text_ends_nothing(secured, folder, tls):
    lines = b"my cat is called felix and sleeps all day\n\xff cat\nmy cat\n"
    result = chat_over_tls(secured, folder, tls / "cert.pem", lines)
    assert result.exit_code == 0, result.output
    assert "OUT_OF_RANGE: tokens would be 10, the cloud's limit is 9; the conversation begins anew" in result.stderr
    assert len(result.stdout.strip().splitlines()) == 2


def refused(folder, arguments, message):
    """A command ends with 2 and one message; ``--model`` stands where its options do."""
    at = 1 if arguments[0] == "cloud" else 3
    result = RUNNER.invoke(app, [*arguments[:at], "--model", str(folder), *arguments[at:]], input="my cat\n")
    assert result.exit_code == 2, result.output
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["cloud", "--listen", "0.0.0.0:0"],
            "0.0.0.0:0 is not a loopback address, which never leaves a machine: TLS (--",
        ),
        (["cloud", "--listen", "[::]:0"], "leaves a machine: TLS (--tls) and a token (PLPKG_TOKEN) needed"),
        (["cloud", "--listen", "here"], "an address must be host:port, got 'here'"),
        (["cloud", "--rank", "0"], "r_c2d must be"),
        (["cloud", "--dtype", "int4"], "dtype must be one of 'fp16', 'bf16', 'fp32', 'auto', got 'int4'"),
        (["cloud", "--first-k", "2"], "first_k must be between 0 and num_hidden_layers - 1=1"),
        (["cloud", "--sessions", "0"], "sessions must be"),
        (["device", "--connect", "example.org:1", "chat"], "leaves a machine: TLS (--ca) and a token (PLPKG_"),
        ([*DEVICE, "chat"], "Error: no connection to 127.0.0.1:1: Connection refused: no cloud is there"),
        ([*DEVICE, "--retry", "-1", "chat"], "retry_s must be at least 0, got -1.0"),
        (["cloud", "--like", "mine", "--adapter", "other"], "--like mine and --adapter other: take one of them"),
        (["cloud", "--like", "/no/such"], "/no/such holds no adapter: it has no adapter_config.json"),
        (["device", "--connect", "127.0.0.1:1", "--link", "pigeon", "chat"], "pigeon"),
        (["device", "--connect", "127.0.0.1:1", "train", "/no/such/file", "out"], "/no/such/file"),
        (["device", "--connect", "127.0.0.1:1", "train", "writer:nobody", "out"], "writer must be one of"),
        (["device", "--connect", "127.0.0.1:1", "--adapter", "/no/such", "chat"], "/no/such holds no adapter"),
        (["cloud", "--target", "embed_tokens"], "model.embed_tokens is a Embedding: only nn.Linear and Conv1D can be"),
        (["cloud", "--target", "norm"], "model.norm is a LlamaRMSNorm: only nn.Linear and Conv1D can be adapted"),
        ([*DEVICE, "--target", "embed_tokens", "chat"], "model.embed_tokens is a Embedding: only nn.Linear and"),
        pytest.param(["cloud", "--device", "cuda"], "device='cuda' cannot be used: ", marks=WITHOUT_CUDA),
        (["cloud", "--device", "foo"], "device='foo' cannot be used: "),
        (["cloud", "--device", ""], "device='' cannot be used: "),
        (["cloud", "--tls", "nosuch"], "No such file or directory: 'nosuch/cert.pem'"),
        ([*DEVICE, "--ca", "nosuch", "chat"], "No such file or directory: 'nosuch'"),
        ([*DEVICE, "chat", "--top-p", "2"], "top_p must be greater than 0 and at most 1, got 2.0"),
        ([*DEVICE, "chat", "--top-p", "2", "--temperature", "0"], "top_p must be greater than 0 and at most 1, got"),
        ([*DEVICE, "chat", "--temperature", "-1"], "temperature must be greater than 0, got -1.0"),
        ([*DEVICE, "chat", "--draft", "foo"], "draft must be one of 'none', 'lookup', 'public', 'backbone', got 'foo'"),
        ([*DEVICE, "chat", "--draft", "lookup", "--draft-tokens", "-1"], "draft_tokens must be a whole number of at"),
        (["cloud", "--fold"], "fold=True needs an adapter on the last layer's mlp.down_proj or mlp.c_proj"),
        (
            ["cloud", "--ladder", "--rank", "4", "--first-k", "1"],
            "a ladder needs every layer in the cloud, got first_k=1, last_k=0",
        ),
        (
            [*DEVICE, "--ladder", "--rank", "4", "--fold", "chat"],
            "fold=True needs a PrivateLoRA adapter and last_k=0, got LADDER",
        ),
        ([*DEVICE, "chat", "--max-new-tokens", "-1"], "max_new_tokens must be a whole number of at least 1, got -1"),
    ],
)
def test_a_command_says_what_is_wrong(folder, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    refused(folder, arguments, message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "files", "message"),
    [
        (["cloud", "--tls", "bad"], ["cert.pem"], "No such file or directory: 'bad/key.pem'"),
        (["cloud", "--tls", "bad"], ["cert.pem", "key.pem"], "cert.pem and key.pem in bad are not a certificate and"),
        ([*DEVICE, "--ca", "bad/ca.pem", "chat"], ["ca.pem"], "bad/ca.pem is not a certificate"),
        ([*DEVICE, "--ca", "bad", "chat"], ["ca.pem"], "Is a directory: 'bad'"),
        ([*DEVICE, "train", "bad/bin.txt", "out"], ["bin.txt"], "bad/bin.txt is not UTF-8: byte 4, in line 2"),
    ],
)
def test_a_command_names_a_bad_file(folder, tmp_path, monkeypatch, arguments, files, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").mkdir()
    for name in files:
        (tmp_path / "bad" / name).write_bytes(b"bad\n\xff\xfe")
    refused(folder, arguments, message)


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    """An adapter's folder."""
    path = tmp_path_factory.mktemp("adapter")
    adapted_model(str(folder), None, "fp32", "cpu", rank=4)[0].save_pretrained(path)
    return path


@pytest.mark.parametrize("command", [["cloud"], [*DEVICE, "chat"]])
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_model.safetensors", b"bad", "mine: the weights are 3 bytes, and no header"),
        ("adapter_model.safetensors", b"", "mine: the weights are 0 bytes, and no header"),
        ("adapter_model.safetensors", None, "mine holds no adapter: it has no adapter_model.safetensors"),
        ("adapter_config.json", None, "mine holds no adapter: it has no adapter_config.json"),
        ("adapter_config.json", b"{bad", "mine: adapter_config.json: not JSON: Expecting property name"),
        ("adapter_config.json", b"\xff", "mine: adapter_config.json: not UTF-8 at byte 0"),
        ("adapter_config.json", b"[]", "mine: adapter_config.json: not an object, but []"),
        ("adapter_config.json", b"{}", "mine holds a None adapter, not a PrivateLoRA one"),
        ("adapter_config.json", b'{"peft_type": "NEW"}', "mine holds a NEW adapter, not a PrivateLoRA one"),
        ("adapter_config.json", b'{"peft_type": "LORA"}', "LORA adapter, not a PrivateLoRA one"),
    ],
)
def test_a_damaged_adapter_is_named(folder, saved, tmp_path, command, file, content, message):
    mine = shutil.copytree(saved, tmp_path / "mine")
    (mine / file).unlink() if content is None else (mine / file).write_bytes(content)
    at = 1 if command[0] == "cloud" else 3
    refused(folder, [*command[:at], "--adapter", str(mine), *command[at:]], message)


@pytest.mark.parametrize("command", [["cloud"], [*DEVICE, "chat"]])
def test_a_saved_adapter_that_is_no_ladder_is_not_taken_for_one(folder, saved, tmp_path, command):
    at = 1 if command[0] == "cloud" else 3
    asked = [*command[:at], "--ladder", "--adapter", str(saved), *command[at:]]
    refused(folder, asked, "holds a PRIVATELORA adapter, but a ladder was asked for: leave --ladder out")
    adapted_model(str(folder), None, "fp32", "cpu", rank=4, ladder=True)[0].save_pretrained(tmp_path)
    model, _ = adapted_model(str(folder), tmp_path, "fp32", "cpu", rank=4, ladder=True)
    assert model.peft_config["default"].peft_type == "LADDER"


def test_help_says_what_the_cloud_is_told():
    text = " ".join(RUNNER.invoke(app, ["device", "--connect", "a:1", "chat", "--help"]).output.split())
    assert "All guesses reach the cloud" in text
    text = " ".join(RUNNER.invoke(app, ["device", "--connect", "a:1", "train", "--help"]).output.split())
    assert "embeddings, M's answers and gradients are. From these a cloud can read the text, and compute M." in text
    assert "stay" not in text
    assert "a new one with a random A" in " ".join(RUNNER.invoke(app, ["cloud", "--help"]).output.split())


def test_a_checkpoint_that_is_none_is_named(folder, tmp_path):
    (tmp_path / "checkpoint.safetensors").write_text("junk\n")
    (tmp_path / "diary.txt").write_text("my cat is called felix and sleeps all day " * 20)
    train = ["train", str(tmp_path / "diary.txt"), str(tmp_path), "--seq", "8"]
    message = "cannot be read (the weights are 5 bytes, and no header of 2 to 1,048,576): remove it to start anew"
    refused(folder, [*DEVICE, *train], message)


def test_training_text_comes_from_files_folders_and_writers(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"entry {i}")
    assert len(texts(str(tmp_path))) == 2
    assert len(texts(str(tmp_path), "validation")) == 1
    assert {d.name for d in texts("writer:seaborn")}.isdisjoint(d.name for d in texts("writer:seaborn", "validation"))


@pytest.mark.parametrize(
    ("text", "learnt"),
    [
        ("one. " * 10 + "\n\n" + "two. " * 10 + "\n\n" + "three. " * 2, "one. " * 10 + "\n\n" + "two. " * 10),
        ("a\n" * 50, "a\n" * 44 + "a"),
        ("a " * 50, "a " * 44 + "a"),
        ("word", "word"),
    ],
)
def test_the_end_of_one_file_is_held_out(tmp_path, text, learnt):
    """From a paragraph's beginning on, a line's, or a word's."""
    file = tmp_path / "diary.md"
    file.write_text(text)
    assert [d.text for d in texts(str(file))] == [learnt]
    assert "".join(d.text for d in texts(str(file), "validation")) == text.removeprefix(learnt)


def test_lines_are_asked_for_on_a_terminal_only(capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert list(lines_of(io.StringIO("a\nb"))) == ["a", "b"]
    assert capsys.readouterr().out == ""
    assert list(lines_of(Terminal("a\n"))) == ["a"]
    assert capsys.readouterr().out == "> > "
