"""Personalising over the wire: what it learns, and what an interruption changes (nothing)."""

import os
import shutil

import pytest
import torch
from grpc import StatusCode
from peft import PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict

from plpkg.corpora import Document, encode
from plpkg.files import checkpoints
from plpkg.pretraining import train_tokenizer
from plpkg.residual import CloudServer, DeviceClient, LadderConfig, PrivateLoraConfig, RefusedError
from plpkg.residual.programs import training
from plpkg.residual.programs.training import score_of, train
from plpkg.residual.wire.messages import Messages, StatusError
from plpkg.residual.wire.wire_pb2 import FromCloud, FromDevice, Part
from plpkg.scoring import Score, score
from tests.residual.conftest import backbone
from tests.residual.wire.conftest import fail_at

from rounding import relative

TEXT = [Document(str(i), f"The secret of day {i} is kept on the device, never in the cloud. " * 3) for i in range(12)]
GONE, REFUSED = ConnectionError("gone"), RefusedError(StatusError(StatusCode.FAILED_PRECONDITION, "another model"))
TINY = dict(steps=6, batch=2, seq=16, warmup=2, lr=0.02, checkpoint_every=2, progress=False)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, 280)


def base():
    return backbone(num_layers=2, vocab=280)


def model(config=None):
    return get_peft_model(base(), config or PrivateLoraConfig(r_c2d=6, r_d2c=6))


def first_m(adapted):
    return next(p for p in adapted.parameters() if p.requires_grad)


@pytest.fixture
def cloud():
    with CloudServer(model(), precision="fp32") as server:
        yield server


def run(cloud, tokenizer, out, adapted=None, text=TEXT, **changes):
    adapted = model() if adapted is None else adapted
    with DeviceClient(cloud.address, adapted, precision="fp32") as client:
        return train(client, adapted, tokenizer, text, out, **(TINY | changes)), get_peft_model_state_dict(adapted)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_it_learns_and_leaves_an_adapter_that_peft_loads(cloud, tokenizer, tmp_path):
    result, learnt = run(cloud, tokenizer, tmp_path / "out", steps=25, lr=0.05)
    assert len(result.losses) == 25
    assert sum(result.losses[-5:]) < sum(result.losses[:5])
    assert repr(result).startswith("Training(25 steps, loss 5.")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "out")
    assert same(get_peft_model_state_dict(loaded), learnt)
    assert any(t.abs().max() > 0 for t in learnt.values())
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "checkpoint.safetensors"} <= names


@pytest.mark.parametrize("width", [None, 8])
def test_a_ladder_learns_and_goes_on_where_it_was(tokenizer, tmp_path, before, width):
    """Also through a client that is made when M has learnt: the cloud has another M, and need not know it."""

    def ladder():
        torch.manual_seed(0)  # a gated M begins with random numbers
        return model(LadderConfig(r=6, width=width))

    with CloudServer(ladder(), precision="fp32") as cloud:
        whole, expected = run(cloud, tokenizer, tmp_path / "whole", ladder(), steps=8)
        assert whole.losses[-1] < whole.losses[0]
        before(DeviceClient, "train_step", fail_at(GONE, 6))
        with pytest.raises(ConnectionError, match="gone"):
            run(cloud, tokenizer, tmp_path / "parts", ladder(), steps=8)
        parts, learnt = run(cloud, tokenizer, tmp_path / "parts", ladder(), steps=8)
        assert same(learnt, expected)
        assert parts == whole
        loaded = PeftModel.from_pretrained(base(), tmp_path / "parts")
        with DeviceClient(cloud.address, loaded, precision="fp32") as client:
            assert client.generate(torch.tensor([[1, 2, 3]]), 2, eos_token_id=-1).shape == (1, 5)


@pytest.mark.parametrize(
    ("error", "checkpoint_every"), [(GONE, 2), (GONE, 100), (REFUSED, 100), (KeyboardInterrupt(), 100)]
)
def test_an_interrupted_run_is_saved_and_ends_with_the_same_adapter(
    cloud, tokenizer, tmp_path, before, error, checkpoint_every
):
    """Not only what the last regular checkpoint has is saved."""
    whole, expected = run(cloud, tokenizer, tmp_path / "whole", accumulate=2)
    # At once; in the middle of the fourth step; and in that of the fifth.
    calls = before(DeviceClient, "train_step", fail_at(error, 1, 9, 12))
    out = tmp_path / "parts"
    changes = dict(accumulate=2, checkpoint_every=checkpoint_every)
    for kept, note in (
        (None, f"no step is kept: {out} has no"),
        (3, f"{out / 'checkpoint.safetensors'} has 3 of 6 steps: the same command"),
        (4, f"{out / 'checkpoint.safetensors'} has 4 of 6 steps: the same command"),
    ):
        with pytest.raises(type(error)) as stopped:
            run(cloud, tokenizer, out, **changes)
        assert stopped.value.__notes__[-1].startswith(note)
        if kept:
            assert len(checkpoints.read(out / "checkpoint.safetensors")["log"]) == kept
    parts, learnt = run(cloud, tokenizer, out, **changes)
    assert len(calls) == 16  # the steps that were done are not done again
    assert same(learnt, expected)
    assert parts == whole


def test_the_bar_says_that_the_cloud_is_silent(cloud, tokenizer, tmp_path, monkeypatch, capsys):
    step = DeviceClient.train_step

    def silent(self, *arguments, **options):
        self.on_silence("no answer for 12 s, trying for 18 more")
        return step(self, *arguments, **options)

    monkeypatch.setattr(DeviceClient, "train_step", silent)
    adapted, said = model(), []
    with DeviceClient(cloud.address, adapted, precision="fp32") as client:
        client.on_silence = said.append
        train(client, adapted, tokenizer, TEXT, tmp_path, **TINY | dict(progress=True))
        assert client.on_silence == said.append
    assert "no answer for 12 s, trying for 18 more]" in capsys.readouterr().err
    assert not said


def test_held_out_text_is_scored_over_the_wire(cloud, tokenizer, monkeypatch):
    adapted, windows = model(), dict(batch=3, seq=16)
    torch.nn.init.normal_(first_m(adapted))
    expected = score(adapted, tokenizer, TEXT[:3], stride=16, **windows)
    with DeviceClient(cloud.address, adapted, precision="fp32") as client:
        encoded = encode(TEXT, tokenizer)
        bits = score_of(client, adapted.config, encoded[:3], **windows).bits
        assert bits == pytest.approx(expected.bits, rel=relative(280 + expected.tokens))  # vocabulary, then tokens
        monkeypatch.setattr("plpkg.residual.programs.training.HELD_OUT_TOKENS", len(encoded[0]) + 5)
        first = score_of(client, adapted.config, encoded, **windows)
    assert first.tokens == len(encoded[0]) - 1 + 4  # the first of each is not predicted


@pytest.mark.parametrize(
    "held_out", [TEXT[:2], [Document("a", "shared", ((0, 6),))], []], ids=["some", "all is masked", "none"]
)
def test_what_is_held_out_is_scored_before_and_after(cloud, tokenizer, tmp_path, before, monkeypatch, held_out):
    """Once each, and an interrupted run knows what was before."""
    adapted, text = model(), dict(text=TEXT[2:], held_out=held_out)
    first = score(adapted, tokenizer, TEXT[:2], seq=16, stride=16).bits_per_byte
    whole, _ = run(cloud, tokenizer, tmp_path / "whole", adapted, **text)
    if held_out != TEXT[:2]:
        assert (whole.before, whole.after) == (None, None)
        assert repr(whole).startswith("Training(6 steps, loss 5.")
        return
    last = score(adapted, tokenizer, TEXT[:2], seq=16, stride=16).bits_per_byte
    assert [whole.before, whole.after] == pytest.approx([first, last], rel=relative(280 + 2 * 60))
    assert whole.after < whole.before
    assert repr(whole) == f"Training(6 steps, held out {whole.before:.3f} to {whole.after:.3f} bits per byte)"
    before(DeviceClient, "train_step", fail_at(GONE, 4))
    with pytest.raises(ConnectionError, match="gone"):
        run(cloud, tokenizer, tmp_path / "parts", **text)
    scored = []
    monkeypatch.setattr(training, "score_of", lambda *_, **__: scored.append(1) or Score(1.0, 1, 1))
    assert run(cloud, tokenizer, tmp_path / "parts", **text)[0].before == whole.before
    assert len(scored) == 1  # after the last step


def test_passes_that_accumulate_are_one_large_batch(cloud, tokenizer, tmp_path):
    once, _ = run(cloud, tokenizer, tmp_path / "once", steps=1, batch=4)
    twice, _ = run(cloud, tokenizer, tmp_path / "twice", steps=1, batch=2, accumulate=2)
    assert twice.losses[0] == pytest.approx(once.losses[0], rel=relative(280 + 4 * 15))  # vocabulary, then tokens


def test_another_run_in_the_same_folder_is_refused(cloud, tokenizer, tmp_path):
    run(cloud, tokenizer, tmp_path / "out", steps=2)
    with CloudServer(model(), precision="fp32", last_k=1) as other:
        client = DeviceClient(other.address, model(), precision="fp32", last_k=1)
        with client, pytest.raises(ValueError, match="holds a run with last_k=None, now 1"):
            train(client, model(), tokenizer, TEXT, tmp_path / "out", **(TINY | {"steps": 2}))
    begun = model()
    torch.nn.init.constant_(first_m(begun), 0.1)
    for changes, message in (
        (dict(steps=3), r"holds a run with steps=2, now 3"),
        (dict(text=TEXT[1:]), "holds a run with text="),
        (dict(adapted=begun), "holds a run with start="),
        (dict(held_out=TEXT[:1]), "holds a run with held_out=None, now"),
    ):
        with pytest.raises(ValueError, match=message):
            run(cloud, tokenizer, tmp_path / "out", **dict(steps=2) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(steps=0), "steps must be"),
        (dict(accumulate=0), "accumulate must be"),
        (dict(lr=0), "lr must be greater than 0"),
        (dict(batch=10_000), "tokens are too few"),
        (dict(text=[]), "0 tokens are too few"),
    ],
)
def test_a_run_that_cannot_start_leaves_nothing(cloud, tokenizer, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(cloud, tokenizer, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_file_is_not_a_folder(cloud, tokenizer, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="out is not a folder"):
        run(cloud, tokenizer, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_run_that_diverges_says_so(cloud, tokenizer, tmp_path, monkeypatch):
    adapted = model()
    with torch.no_grad():
        adapted.get_output_embeddings().weight.fill_(float("nan"))
    cloud.terms.model = ""  # the broken model has another fingerprint
    monkeypatch.setattr("plpkg.residual.wire.terms.fingerprint", lambda _: "")
    with pytest.raises(FloatingPointError, match="in step 1, the loss is nan: take another folder"):
        run(cloud, tokenizer, tmp_path / "out", adapted=adapted)
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("end", "content", "status"),
    [(FromDevice, content, "INVALID_ARGUMENT: ") for content in ("step", "residual", "grad_hidden", "grad_input")]
    + [(FromCloud, content, "") for content in ("residual", "final", "grad_output")],
)
def test_what_is_not_finite_is_learnt_from_at_neither_end(
    cloud, tokenizer, tmp_path, monkeypatch, end, content, status, at
):
    """An end that does not look at what it sends, in one message of the step ``at``."""
    send, seen, adapted = Messages.send, [], model()
    a_step = 1 if content in ("step", "final", "grad_hidden", "grad_input") else 2  # layers; the lowest's is not sent

    def unchecked(self, **fields):
        if self._sends is end and content in fields:
            seen.append(1)
            if len(seen) == at * a_step + 1:
                given = fields[content]
                if isinstance(given, bytes):
                    fields[content] = poisoned(given)
                else:
                    name = "data" if isinstance(given, Part) else "hidden"
                    setattr(given, name, poisoned(getattr(given, name)))
        send(self, **fields)

    def poisoned(data):
        return data[:-4] + torch.tensor(float("nan")).numpy().tobytes()

    monkeypatch.setattr(Messages, "send", unchecked)
    with pytest.raises((ValueError, RefusedError), match=f"{status}what has come, of shape .* is not finite"):
        run(cloud, tokenizer, tmp_path / "out", adapted, checkpoint_every=1, steps=2)
    assert all(t.isfinite().all() for t in get_peft_model_state_dict(adapted).values())
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()
    monkeypatch.undo()
    _, learnt = run(cloud, tokenizer, tmp_path / "out", checkpoint_every=1, steps=2)
    assert same(learnt, run(cloud, tokenizer, tmp_path / "whole", steps=2)[1])


def test_a_gradient_that_overflows_is_not_learnt_from(cloud):
    adapted = model()
    m = first_m(adapted)
    hook = m.register_hook(lambda gradient: torch.full_like(gradient, 3e38) * 10)
    ids = torch.arange(32).reshape(2, 16)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    with DeviceClient(cloud.address, adapted, precision="fp32") as client:
        with pytest.raises(FloatingPointError, match="the gradient is not finite"):
            client.train_step(ids, ids, optimizer=optimizer)
        assert m.grad is None
        assert not m.any()
        hook.remove()
        client.train_step(ids, ids, optimizer=optimizer)
        assert all(p.any() and p.grad is None for p in client.trainable())


def test_what_training_writes_is_its_owners_alone(cloud, tokenizer, tmp_path):
    before = os.umask(0)
    try:
        run(cloud, tokenizer, tmp_path / "new" / "out", steps=2)
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "out").stat().st_mode & 0o777 == 0o700
    files = list((tmp_path / "new" / "out").iterdir())
    assert len(files) == 4
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_a_run_killed_between_its_two_files_leaves_no_mixed_adapter(cloud, tokenizer, tmp_path, monkeypatch):
    out, other = tmp_path / "out", tmp_path / "other"
    run(cloud, tokenizer, out, steps=2)
    shutil.copytree(out, other)
    (other / "checkpoint.safetensors").unlink()
    replace = os.replace

    def killed(source, target):
        if target == other / "adapter_model.safetensors":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run(cloud, tokenizer, other, steps=2, seed=1)
    with pytest.raises(ValueError, match="one of them is of another adapter, or a run was killed"):
        PeftModel.from_pretrained(base(), other)
    _, learnt = run(cloud, tokenizer, other, steps=2, seed=1)
    loaded = PeftModel.from_pretrained(base(), other)
    assert same(get_peft_model_state_dict(loaded), learnt)


@pytest.mark.parametrize("config", [PrivateLoraConfig(r_c2d=6, r_d2c=6), LadderConfig(r=6)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_an_m_that_is_not_finite_says_so_before_it_writes(pair, config, do_sample):
    adapted = model(config)
    _, client, _ = pair(model=adapted, served=adapted)
    for damaged, place, message in (
        (first_m(adapted), (0, 0), "an M of 'default' is not finite: load the adapter anew"),
        (adapted.get_output_embeddings().weight, (3, 3), "the logits are not finite"),
    ):
        sound = damaged[place].item()
        damaged.data[place] = float("nan")
        with pytest.raises(FloatingPointError, match=message):
            client.generate(torch.tensor([[1, 2]]), 3, do_sample=do_sample)
        damaged.data[place] = sound
