"""Requests that go on from a reading, against the reading's own answers; float64."""

import copy

import pytest
import torch

from plpkg.backbones import load_backbone
from plpkg.retention import chunked_prefill
from plpkg.retention.scorers import H2O, KeyNorm
from plpkg.serving.engine import Engine, Request

FAMILIES = {  # of the model, and where kept units stand
    "llama": ("llama", {}, ("original", "reassigned")),
    "qwen2": ("qwen2", {}, ("original", "reassigned")),
    "gpt2, learnt positions": ("gpt2", {}, ("original",)),
    "gemma2, every other layer has a window": ("gemma2", dict(sliding_window=4), ("original",)),
    "gemma2, the window is not full": ("gemma2", dict(sliding_window=32), ("original",)),
}
CASES = [(family, options, each) for family, options, positions in FAMILIES.values() for each in positions]


@pytest.mark.parametrize(("family", "options", "positions"), CASES)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT corrects it itself in GPT-2
def test_a_reading_is_gone_on_from_as_it_answers_itself(family, options, positions, tools):
    """In a batch, by several adapters, in parts, and leaves no trace: neither in the reading nor for other prompts."""
    model = tools.backbone(family, options=options)
    twin, adapter = tools.adapted(model, 2)
    long, question, other = tools.texts(29, 11, 20)
    reads = [chunked_prefill(model, long[None], scorer, 10, 4, positions=positions) for scorer in (KeyNorm(), H2O())]
    engine = Engine(model, max_batch=5, max_step_tokens=7)
    engine.load("a", adapter)
    requests = [
        Request(question, name, 12, reading=reading, logprobs=0, score_prompt=True)
        for name in (None, "a")
        for reading in (*reads, None)
    ]
    before = [layer.clone() for reading in reads for pair in reading.units(model)[1] for layer in pair]
    identities = [engine.add(request) for request in [*requests, Request(other, "a", 12)]]
    written = {identity: [] for identity in identities}
    while engine._waiting or engine._running:
        for identity, token in engine.step():
            written[identity].append(token)
    for identity, request in zip(identities, requests, strict=False):
        reader = twin if request.adapter else model
        if request.reading is None:
            assert written[identity] == tools.alone(reader, question, 12)
            continue
        answer = request.reading.ask(reader, question[None], max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert written[identity] == answer[0].tolist()
        whole = torch.cat([question, answer[0]])
        scored = [each.logprob for each in engine.scored[identity]]
        assert scored == pytest.approx(request.reading.score(reader, whole[None])[0].tolist(), abs=1e-5)  # float32
    assert written[identities[-1]] == tools.alone(twin, other, 12)
    after = [layer for reading in reads for pair in reading.units(model)[1] for layer in pair]
    assert all(map(torch.equal, before, after))
    for identity, request in zip(identities, requests, strict=False):  # nothing is shared that was read behind others
        assert engine.generate([request]) == [written[identity]]
    assert len({engine.scored[identity][-1].logprob for identity in identities[:-1]}) == 6


def test_a_reading_that_does_not_fit_is_refused(tools):
    model, (long, question) = tools.backbone(), tools.texts(29, 5)
    read = chunked_prefill(model, long[None], KeyNorm(), 10, 4, positions="original")
    two = chunked_prefill(model, torch.stack([long, long]), KeyNorm(), 10, 4)
    engine = Engine(model, max_batch=1)
    for reading, message, new in (
        (two, "goes on from one prompt, and this is a reading of 2", 5),
        (read, "5 ids and 63 new ones behind the 29 of the reading do not fit the model's 96 positions", 63),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add(Request(question, None, new, reading=reading))
    for other, message in (
        (tools.backbone(seed=1), "was read by a backbone with fingerprint"),
        (copy.deepcopy(model).float(), "was read in torch.float64, but LlamaForCausalLM is torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(other).add(Request(question, reading=read))
    running, waiting = (engine.add(Request(question, None, 5, reading=read)) for _ in range(2))
    engine.step()
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    assert engine.step() == []
    assert {engine.finished.pop(each) for each in (running, waiting)} == {"error: the model has changed since it began"}
    with pytest.raises(ValueError, match="have changed since it read this: read it again"):
        engine.add(Request(question, reading=read))


def test_a_stop_string_ends_an_answer_after_a_reading():
    small, tokenizer = load_backbone("plpkg-small")
    ids = tokenizer("Once there was a dog that lived in a little house", return_tensors="pt").input_ids
    read, question = chunked_prefill(small, ids, KeyNorm(), 64, 8), tokenizer(" near the").input_ids
    engine = Engine(small, tokenizer)
    (free,) = engine.generate([Request(question, None, 16, reading=read)])
    assert free == read.ask(small, torch.tensor([question]), max_new_tokens=16, do_sample=False)[0].tolist()
    stop = tokenizer.decode(free)[7:12]
    want = next(k for k in range(1, 17) if stop in tokenizer.decode(free[:k]))
    assert engine.generate([Request(question, None, 16, reading=read, stop=[stop])]) == [free[:want]]
