"""The commands, in processes of their own: what a reader types."""

import contextlib
import gc
import io
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import certificate
import pytest
import torch
from peft import get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch._subclasses.fake_tensor import is_fake
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from plpkg.backbones import load_backbone, random_backbone
from plpkg.cli import app
from plpkg.files import checkpoints
from plpkg.residual import PrivateLoraConfig
from plpkg.residual.programs.chat import _Printed, answer_lines, lines_of
from plpkg.residual.programs.loading import adapted_model
from plpkg.residual.programs.training import texts

from preloaded import Process
from waiting import line_of, typed

WIDTH = 32
WORDS = [
    "<unk>",
    "<s>",
    "my",
    "cat",
    "is",
    "called",
    "felix",
    "and",
    "sleeps",
    "all",
    "day",
    "abcdef",
]  # the last for StopStringCriteria
DIARY = "my cat is called felix and sleeps all day " * 20
NEW = "--rank 4 --target v_proj --target down_proj"
GREEDY = "chat --temperature 0 --max-new-tokens"
LISTENING = r"^listening on (127\.0\.0\.1:\d+)"
PLPKG = "import sys; from plpkg.cli import app; app(sys.argv[1:])"
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


def run(line, said="my cat\n", **environment):
    """``plpkg line``, in this process, with this input."""
    return RUNNER.invoke(app, shlex.split(line), input=said, env=environment)


def answers(result):
    """The lines of a chat that ended well."""
    assert result.exit_code == 0, result.output
    return result.stdout.strip().splitlines()


def saved(path, folder, rank=4, **config):
    """A new adapter, saved in a folder."""
    adapted_model(str(folder), None, "fp32", "cpu", rank=rank, **config)[0].save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A folder with a certificate."""
    return certificate.written(tmp_path_factory.mktemp("tls")).parent


def process(command):
    """Without the seconds that imports take."""
    return Process(PLPKG, *command)


@contextlib.contextmanager
def serving(folder, options="", start=process, number=signal.SIGINT):
    """A cloud that ``start`` runs with these arguments of ``plpkg``; gives its address, and ends it by a signal."""
    with start(shlex.split(f"cloud --model {folder} {NEW} --listen 127.0.0.1:0 {options}")) as process:
        address = line_of(process.stdout, LISTENING)[1]
        try:
            yield address
        finally:
            process.send_signal(number)
            rest = process.stdout.read()
            assert process.wait() == 0, rest
        assert "round trips" in rest


@pytest.fixture(scope="module")
def secured(folder, tls):
    """What a reader types: ``plpkg cloud`` over TLS, with a token, for sequences of at most nine tokens."""

    def start(command):
        return subprocess.Popen(
            typed(sys.executable, "-m", "plpkg", *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PLPKG_TOKEN": "secret"},
        )

    with serving(folder, f"--tls {tls} --tokens 9", start) as address:
        yield address


@pytest.fixture(scope="module")
def cloud(folder):
    """On loopback, without TLS."""
    with serving(folder) as address:
        yield address


def chat_over_tls(address, folder, ca, lines="my cat\n", token="secret"):
    line = f"device --connect {address} --model {folder} {NEW} --ca {ca} {GREEDY} 2"
    return run(line, lines, PLPKG_TOKEN=token)


def test_over_tls_with_a_token(secured, folder, tls, tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr("plpkg.residual.wire.connection.time.sleep", slept.append)
    assert len(answers(chat_over_tls(secured, folder, tls / "cert.pem"))) == 1
    others = certificate.written(tmp_path / "others")
    for ca, token, message in (
        (tls / "cert.pem", "guessed", "no token, or a wrong one"),
        (others, "secret", "CERTIFICATE_VERIFY_FAILED"),
    ):
        result = chat_over_tls(secured, folder, ca, token=token)
        assert result.exit_code == 2
        assert message in result.output
    assert not slept  # trying again would not help


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_a_cloud_as_ctrl_c_does(number, folder):
    """The first process of a container would not notice a signal without a handler."""
    with serving(folder, number=number):
        pass


def test_a_line_that_is_too_long_or_no_text_ends_nothing(secured, folder, tls):
    lines = b"my cat is called felix and sleeps all day\n\xff cat\nmy cat\n"
    result = chat_over_tls(secured, folder, tls / "cert.pem", lines)
    assert len(answers(result)) == 2
    assert "OUT_OF_RANGE: tokens would be 10, the cloud's limit is 9; the conversation begins anew" in result.stderr


def test_cloud_chat_and_train(cloud, folder, tmp_path):
    device, text, mine = f"device --connect {cloud} --model {folder}", tmp_path / "diary.txt", tmp_path / "mine"
    text.write_text(DIARY)
    (line,) = answers(run(f"{device} {NEW} train {text} {mine} --steps 3 --batch 2 --seq 8 --lr 0.5"))
    pattern = r"Training\(3 steps, held out (\d\.\d{3}) to (\d\.\d{3}) bits per byte\)"
    before, after = re.fullmatch(pattern, line).groups()
    assert float(before) > float(after)
    assert len(answers(run(f"{device} --adapter {mine} {GREEDY} 5", "my cat\n\nis called\n"))) == 2
    result = run(f"{device} --rank 5 {GREEDY} 5")
    assert result.exit_code == 2
    for message in (
        f"Error: {cloud} refuses --model {folder}: ",
        "--rank 5 here, 4 on the cloud",
        "--target k_proj, q_proj, v_proj of layers 0, 1 here, down_proj, v_proj of layers 0, 1 on the",
    ):
        assert message in result.output
    assert "Usage" not in result.output


def test_a_text_ends_an_answer(cloud, folder):
    chat = f"device --connect {cloud} --model {folder} {NEW} {GREEDY} 10"
    (whole,) = answers(run(chat))
    last = whole.split()[-1]
    (cut,) = answers(run(f"{chat} --stop nobody --stop {last}"))
    assert cut == whole[: whole.index(last)] + last != whole


def test_a_cloud_like_an_adapter_needs_no_list_of_targets(folder, tmp_path):
    """Its M stays where it is: the cloud has the configuration alone."""
    mine = saved(tmp_path / "mine", folder, 5, targets=["o_proj", "up_proj"], seed=3)
    (tmp_path / "public").mkdir()
    shutil.copy(mine / "adapter_config.json", tmp_path / "public")
    command = f"cloud --model {folder} --like {tmp_path / 'public'} --listen 127.0.0.1:0"
    with process(shlex.split(command)) as cloud:
        address = line_of(cloud.stdout, LISTENING)[1]
        result = run(f"device --connect {address} --model {folder} --adapter {mine} {GREEDY} 5")
    assert len(answers(result)) == 1


def test_a_saved_ladder_is_one_and_what_is_alike_can_be_trained(folder, tmp_path):
    ladder, model = saved(tmp_path, folder, 3, ladder=True), (str(folder), None, "fp32", "cpu")
    alike, _ = adapted_model(*model, like=ladder)
    assert (alike.peft_config["default"].peft_type, alike.peft_config["default"].r) == ("LADDER", 3)
    assert any(p.requires_grad for p in alike.parameters())
    loaded, _ = adapted_model(str(folder), ladder, "fp32", "cpu", rank=3, ladder=True)
    assert loaded.peft_config["default"].peft_type == "LADDER"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(rank=32), "holds an adapter with --rank 5, got --rank 32: leave it out"),
        (dict(seed=1), "holds an adapter with --seed 3, got --seed 1: leave it out"),
        (dict(targets=["q_proj"]), r"with --target \['o_proj', 'up_proj'\], got --target \['q_proj'\]: leave it out"),
    ],
)
def test_what_is_saved_is_not_contradicted(folder, tmp_path, asked, message):
    mine = saved(tmp_path, folder, 5, targets=["o_proj", "up_proj"], seed=3)
    for where in (dict(adapter=None, like=mine), dict(adapter=mine)):
        with pytest.raises(ValueError, match=message):
            adapted_model(str(folder), where.pop("adapter"), "fp32", "cpu", **where, **asked)
    same = dict(rank=5, seed=3, targets=["up_proj", "o_proj"])
    assert adapted_model(str(folder), None, "fp32", "cpu", like=mine, **same)


def test_an_address_in_use_is_told_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run(f"cloud --model /no/such --listen {address}")
    assert f"{address} cannot be bound: Address already in use" in " ".join(result.output.split())


def test_a_chat_says_that_the_cloud_is_silent_and_ends_with_a_line(folder, monkeypatch):
    def silent(client, *_, **__):
        client.on_silence(f"no answer for 12 s, trying for {client.wire.retry_s:.0f} more")
        raise KeyboardInterrupt

    monkeypatch.setattr("plpkg.residual.programs.chat.answer_lines", silent)
    result = run(f"device --connect 127.0.0.1:1 --model {folder} --retry 18 chat")
    assert result.exit_code == 130
    assert result.stderr == "\nno answer for 12 s, trying for 18 more\n\n\n"


def test_training_that_is_interrupted_says_how_it_goes_on(cloud, folder, tmp_path):
    """Ctrl+C, in a process of its own, some time after the first regular checkpoint."""
    text, out = tmp_path / "diary.txt", tmp_path / "mine"
    text.write_text(DIARY)
    train = f"device --connect {cloud} --model {folder} {NEW} train {text} {out} --steps 100000 --seq 8"
    with process(shlex.split(train)) as training:
        shown = ""
        while not re.search(r"[2-9]\d/100000", shown):
            shown += training.stdout.read(1)
        training.send_signal(signal.SIGINT)
        shown = training.stdout.read()
        assert training.wait() == 130, shown
    assert "Traceback" not in shown
    checkpoint = out / "checkpoint.safetensors"
    steps = int(re.search(rf"{checkpoint} has (\d+) of 100000 steps: the same command goes on", shown)[1])
    assert len(checkpoints.read(checkpoint)["log"]) == steps >= 20


@pytest.mark.parametrize(
    ("options", "draft", "trips"),
    [
        ("", "lookup", "a round trip"),
        ("--ladder", "none", "10 round trips"),
        ("--fold", "public", "a round trip"),
    ],
)
def test_chat_with_guesses_says_what_they_saved(folder, monkeypatch, options, draft, trips):
    """The cloud is a process of its own; the tokens are the same as without guesses."""
    encoded = [type("Tokens", (), {"ids": torch.arange(2, 11)})]
    monkeypatch.setattr("plpkg.corpora.public", lambda split: [])
    monkeypatch.setattr("plpkg.corpora.encode", lambda documents, tokenizer: encoded)
    with serving(folder, options) as address:
        chat = f"device --connect {address} --model {folder} {NEW} {options} {GREEDY} 10 --draft"
        plain, guessed = run(f"{chat} none"), run(f"{chat} {draft}")
    assert answers(guessed) == answers(plain)
    assert all("; 10 tokens, " in result.stderr for result in (plain, guessed))
    assert trips in guessed.stderr
    assert ("guesses accepted" in guessed.stderr) == (draft != "none")


@pytest.mark.parametrize("command", ["cloud --listen 127.0.0.1:0", "chat", "train text.txt out"])
def test_each_process_is_left_with_its_part(folder, tmp_path, monkeypatch, command):
    """Every tensor that the command made and that is alive while it serves, chats or trains."""

    def alive():
        gc.collect()
        # A compiler may have left some that have no memory.
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and not is_fake(o)]
        return {t.untyped_storage().data_ptr(): t for t in tensors if t.untyped_storage().nbytes()}

    def used(end, *_, **__):
        seen.update(alive=alive(), part=end.part)

    before, seen = alive(), {}
    for waits in ("wire.cloud.CloudServer.wait", "programs.chat.answer_lines", "programs.training.train"):
        monkeypatch.setattr(f"plpkg.residual.{waits}", used)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("my cat")
    answers(run(complete(command, folder, "--rank 4")))
    held = {t.untyped_storage().data_ptr() for t in (*seen["part"].parameters(), *seen["part"].buffers())}
    beside = [t for at, t in seen["alive"].items() if at not in held and at not in before]
    assert sum(t.numel() for t in beside) < WIDTH, [tuple(t.shape) for t in beside]
    assert held <= set(seen["alive"])


PEAK = """
import sys, threading
from plpkg.residual.programs.commands import client_of

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


def test_chat_is_what_generate_gives_and_remembers_with_a_template(pair, folder, capsys):
    base, tokenizer = load_backbone(folder)
    model = get_peft_model(base, PrivateLoraConfig(r_c2d=4, r_d2c=4))
    _, client, _ = pair(model=model, served=model)
    answer_lines(client, tokenizer, iter(["my cat"]), 4)
    ids = torch.tensor([[1, *tokenizer("my cat")["input_ids"]]])
    answer = client.generate(ids, 4)[0, ids.shape[1] :]
    assert capsys.readouterr().out.strip() == tokenizer.decode(answer, skip_special_tokens=True).strip()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} and {% endfor %}"
    original, asked = client.generate, []
    client.generate = lambda ids, *rest, **options: (asked.append(ids), original(ids, *rest, **options))[1]
    answer_lines(client, tokenizer, iter(["my cat", "", "sleeps"]), 3)
    first, second = (tokenizer.decode(ids[0]) for ids in asked)
    assert second.startswith(first)
    assert "sleeps" in second


@pytest.fixture(scope="module")
def files(folder, tmp_path_factory):
    """What is saved, and what is damaged."""
    path = tmp_path_factory.mktemp("files")
    saved(path / "sound", folder)
    saved(path / "given", folder, init="given")
    for name, content in (
        *((file, b"bad\n\xff\xfe") for file in ("lone/cert.pem", "pair/cert.pem", "pair/key.pem", "binary.txt")),
        ("diary.txt", DIARY.encode()),
        ("run/checkpoint.safetensors", b"junk\n"),
    ):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    return path


def complete(command, folder, options=""):
    """With a model, and for a device with a cloud that is not there."""
    if command.startswith("cloud"):
        return f"cloud --model {folder} {options} {command.removeprefix('cloud')}"
    return f"device --connect 127.0.0.1:1 --model {folder} {options} {command}"


NOT_ON_LOOPBACK = "is not a loopback address, which never leaves a machine: TLS"
GIVEN = "given has an A and a B that its configuration does not tell (init='given'): --adapter reads them, and M"
NO_LADDER = "holds a PRIVATELORA adapter, but a ladder was asked for: leave --ladder out"
TOP_P = "top_p must be greater than 0 and at most 1, got 2.0"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cloud --listen 0.0.0.0:0", f"0.0.0.0:0 {NOT_ON_LOOPBACK} (--"),
        ("cloud --listen [::]:0", f"{NOT_ON_LOOPBACK} (--tls) and a token (PLPKG_TOKEN) needed"),
        ("cloud --listen here", "an address must be host:port, got 'here'"),
        ("cloud --rank 0", "--rank must be a whole number of at least 1, got 0"),
        ("cloud --dtype int4", "dtype must be one of 'fp16', 'bf16', 'fp32', 'auto', got 'int4'"),
        ("cloud --first-k 2", "first_k must be between 0 and num_hidden_layers - 1=1"),
        ("cloud --sessions 0", "sessions must be"),
        ("cloud --target embed_tokens", "model.embed_tokens is a Embedding: only nn.Linear and Conv1D can be"),
        ("cloud --target norm", "model.norm is a LlamaRMSNorm: only nn.Linear and Conv1D can be adapted"),
        pytest.param("cloud --device cuda", "device='cuda' cannot be used: ", marks=WITHOUT_CUDA),
        ("cloud --device foo", "device='foo' cannot be used: "),
        ("cloud --device ''", "device='' cannot be used: "),
        ("cloud --fold", "fold=True needs an adapter whose projection the last layer adds"),
        ("cloud --ladder --rank 4 --first-k 1", "a ladder needs every layer in the cloud, got first_k=1, last_k=0"),
        ("cloud --tls nosuch", "No such file or directory: 'nosuch/cert.pem'"),
        ("cloud --tls lone", "No such file or directory: 'lone/key.pem'"),
        ("cloud --tls pair", "cert.pem and key.pem in pair are not a certificate and"),
        ("cloud --like mine --adapter other", "--like mine and --adapter other: take one of them"),
        ("cloud --like /no/such", "/no/such holds no adapter: it has no adapter_config.json"),
        ("cloud --like given", GIVEN),
        ("cloud --ladder --adapter sound", NO_LADDER),
        ("--connect example.org:1 chat", "leaves a machine: TLS (--ca) and a token (PLPKG_"),
        ("chat", "Error: no connection to 127.0.0.1:1: Connection refused: no cloud is there"),
        ("--retry -1 chat", "retry_s must be at least 0, got -1.0"),
        ("--link pigeon chat", "pigeon"),
        ("--ca nosuch chat", "No such file or directory: 'nosuch'"),
        ("--ca pair/cert.pem chat", "pair/cert.pem is not a certificate"),
        ("--ca pair chat", "Is a directory: 'pair'"),
        ("--target embed_tokens chat", "model.embed_tokens is a Embedding: only nn.Linear and"),
        ("--ladder --rank 4 --fold chat", "fold=True needs a PrivateLoRA adapter and last_k=0, got LADDER"),
        ("--like given chat", GIVEN),
        ("--adapter /no/such chat", "/no/such holds no adapter"),
        ("--ladder --adapter sound chat", NO_LADDER),
        ("chat --top-p 2", TOP_P),
        ("chat --top-p 2 --temperature 0", TOP_P),
        ("chat --temperature -1", "temperature must be greater than 0, got -1.0"),
        ("chat --stop ''", "stop_strings must be strings that are not empty, got ['']"),
        ("chat --draft foo", "draft must be one of 'none', 'lookup', 'public', got 'foo'"),
        ("chat --draft lookup --draft-tokens -1", "draft_tokens must be a whole number of at"),
        ("chat --max-new-tokens -1", "max_new_tokens must be a whole number of at least 1, got -1"),
        ("train /no/such/file out", "/no/such/file"),
        ("train writer:nobody out", "writer must be one of"),
        ("train binary.txt out", "binary.txt is not UTF-8: byte 4, in line 2"),
        (
            "train diary.txt run --seq 8",
            "cannot be read: Error while deserializing header: header too small: remove it to start anew",
        ),
    ],
)
def test_a_command_says_what_is_wrong_and_leaves_nothing(folder, files, monkeypatch, command, message):
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    result = run(complete(command, folder))
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert sorted(files.rglob("*")) == before


def test_help_says_what_the_cloud_is_told():
    chat, train, cloud = (
        " ".join(run(f"{command} --help").output.split()) for command in ("device chat", "device train", "cloud")
    )
    assert "The cloud gets all guesses" in chat
    assert "embeddings, M's answers and gradients are. From these a cloud can read the text, and compute M." in train
    assert "stay" not in train
    assert "a new one with a random A" in cloud


def test_a_chat_without_a_line_tries_the_connection(folder):
    result = run(f"device --connect 127.0.0.1:1 --model {folder} chat", "")
    assert result.exit_code == 2
    assert "no cloud is there" in result.output
    assert "--connect HOST:PORT is needed" in run(f"device --model {folder} chat").output


def test_what_is_written_does_not_rule_the_terminal(capsys):
    class Escapes:
        def decode(self, ids, **_):
            return "\x1b]0;owned\x07 a\rb\n" * torch.tensor(ids).numel()  # one or several, by transformers' release

    printed = _Printed(Escapes(), skip_prompt=True)
    printed.put(torch.tensor([[1]]))  # the prompt
    printed.put(torch.tensor([[2]]))
    printed.end()
    shown = capsys.readouterr().out
    assert "owned" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_training_text_comes_from_files_folders_and_writers(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"entry {i}")
    assert len(texts(str(tmp_path))) == 2
    assert len(texts(str(tmp_path), "validation")) == 1
    assert {d.name for d in texts("writer:seaborn")}.isdisjoint(d.name for d in texts("writer:seaborn", "validation"))


@pytest.mark.parametrize(
    ("learnt", "held_out"),
    [
        ("one. " * 10 + "\n\n" + "two. " * 10, "\n\n" + "three. " * 2),
        ("a\n" * 44 + "a", "\n" + "a\n" * 5),
        ("a " * 44 + "a", " " + "a " * 5),
        ("word", ""),
    ],
)
def test_the_end_of_one_file_is_held_out(tmp_path, learnt, held_out):
    """From a paragraph's beginning on, a line's, or a word's."""
    file = tmp_path / "diary.md"
    file.write_text(learnt + held_out)
    assert [d.text for d in texts(str(file))] == [learnt]
    assert "".join(d.text for d in texts(str(file), "validation")) == held_out


def test_lines_are_asked_for_on_a_terminal_only(capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert list(lines_of(io.StringIO("a\nb"))) == ["a", "b"]
    assert capsys.readouterr().out == ""
    assert list(lines_of(Terminal("a\n"))) == ["a"]
    assert capsys.readouterr().out == "> > "


def test_a_process_without_standard_input_has_no_lines(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert list(lines_of()) == []
