"""Guesses over a real connection: the same tokens, and the bytes of a count by hand."""

import copy
import itertools
import re

import numpy as np
import pytest
import torch

from plpkg.residual import CloudServer, DeviceClient, Limits, RefusedError
from plpkg.residual.wire.session import Stream
from tests.residual.conftest import IDS, SCHEMES, SCHEMES_OF_FAMILIES, at_once, scheme
from tests.residual.wire.conftest import LENGTHS, cut_at, expected_tokens, in_order, same_tokens

from rounding import relative
from waiting import wait_until

TEXT = IDS[:1, :9]
WINDOWS = {"mistral": {"sliding_window": 6}, "gemma2": {"sliding_window": 6}}
TRIPS = {"qkv": 5, "down": 5, "late": 3, "fold": 4, "late fold": 3, "fold of two": 2, "ladder": 1, "gated ladder": 1}
"""Of a pass through four layers: every second of a late adapter's, which has two exchanges under way; and the end."""


def off(ids, count):
    """More guesses than were asked for, hardly one of them right."""
    return [(ids[-1] + i) % 64 for i in range(1, count + 3)]


def wrong(expected):
    return lambda ids, count: [(token + 1) % 64 for token in right(expected)(ids, count)]


def right(expected):
    return lambda ids, count: expected[0, len(ids) : len(ids) + count].tolist()


SOME = ("late", "late fold", "gated ladder")


@pytest.mark.parametrize(
    ("family", "name"), [case for case in SCHEMES_OF_FAMILIES if case[0] == "llama" or case[1] in SOME]
)
def test_the_same_tokens_as_in_one_process(pair, family, name):
    """Also beyond a sliding window, where what was guessed is taken out again, with what it had pushed out."""
    _, client, whole = pair(family, name=name, options=WINDOWS.get(family))
    expected = expected_tokens(whole, TEXT, 10)
    none = wrong(expected)
    for draft in (None, "lookup", none, right(expected)):
        before = client.traffic
        assert torch.equal(client.generate(TEXT, 10, eos_token_id=-1, draft=draft), expected)
        traffic = client.traffic - before
        assert traffic.tokens == 10
        assert traffic.accepted_tokens <= traffic.drafted_tokens
        if draft in (None, none):
            assert traffic.accepted_tokens == 0
            assert traffic.round_trips == TRIPS[name] * 10
    assert traffic.accepted_tokens == traffic.drafted_tokens == 8  # 7 + 3 tokens, each pass with one of its own
    assert traffic.round_trips == TRIPS[name] * 2


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_the_coldest_samples_are_the_likeliest_tokens(pair, draft):
    _, client, whole = pair(name="ladder")
    for options in (dict(temperature=1e-300), dict(temperature=1e-40, top_k=2**33)):
        same_tokens(client, whole, TEXT, 8, do_sample=True, draft=draft, **options)


@pytest.mark.parametrize(("family", "cut"), [("llama", (1, 2)), ("gemma2", (1, 1)), ("gpt2", (1, 0)), ("gpt2", (0, 1))])
def test_guesses_pass_the_layers_on_the_device_as_well(pair, family, cut):
    _, client, whole = pair(family, *cut, options=WINDOWS.get(family))
    for draft in ("lookup", off, right(expected_tokens(whole, TEXT, 16))):
        same_tokens(client, whole, TEXT, 16, draft=draft)


@pytest.mark.parametrize("name", ["qkv", "late fold", "gated ladder"])
def test_what_is_sampled_does_not_depend_on_the_devices_guesses(pair, name):
    _, client, _ = pair(name=name)
    for options in ({}, dict(temperature=0.5, top_k=9), dict(top_p=0.7)):

        def sampled(draft, options=options):
            common = dict(do_sample=True, eos_token_id=-1, generator=torch.Generator().manual_seed(3))
            return client.generate(TEXT, 8, draft=draft, **common, **options)

        expected = sampled(None)
        for draft in ("lookup", off, right(expected)):
            assert torch.equal(sampled(draft), expected)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("guesses", [False, True])
def test_the_bytes_are_those_of_a_count_by_hand(pair, name, guesses):
    _, client, whole = pair(name=name, m_scale=0.0, precision="fp16")
    draft = right(expected_tokens(whole, TEXT, 8)) if guesses else None
    before = client.traffic
    same_tokens(client, whole, TEXT, 8, draft=draft, draft_tokens=3)
    traffic = client.traffic - before
    exchanges = {"qkv": 12, "late": 12, "down": 4, "fold": 3, "late fold": 3, "fold of two": 1}.get(name, 0)
    riders = 4 * 5 if "ladder" in name else 5 if "fold" in name else 0
    passes = [9 + 3, 1 + 3] if guesses else [9] + [1] * 7  # tokens that go up, guesses among them
    read, positions = sum(passes), len(passes) * (4 if guesses else 1)
    assert traffic.sent_bytes == 2 * (32 + 3 * exchanges) * read
    assert traffic.received_bytes == 2 * ((32 + riders) * positions + 5 * exchanges * read)
    assert traffic.round_trips == TRIPS[name] * len(passes)
    assert (traffic.tokens, traffic.drafted_tokens, traffic.accepted_tokens) == (8, *[6 * guesses] * 2)


@pytest.mark.parametrize(
    ("name", "what", "count"),
    [*((name, what, 2) for name in ("qkv", "ladder") for what in ("embed", "receive"))]
    + [(name, "residual", 7) for name in ("qkv", "late", "fold")],
)
def test_a_broken_link_changes_no_token_of_a_guessed_pass(pair, name, what, count):
    """Sampled, so that it shows in which random numbers; with sliding windows."""
    _, client, _ = pair("mistral", name=name, options=WINDOWS["mistral"])

    def sampled():
        generator = torch.Generator().manual_seed(2)
        return client.generate(TEXT, 12, do_sample=True, eos_token_id=-1, draft=off, generator=generator)

    expected, before = sampled(), client.traffic
    seen = cut_at(client, what, count)
    assert torch.equal(sampled(), expected)
    assert len(seen) >= count
    assert (client.traffic - before).tokens == 12


@pytest.mark.parametrize("name", ["qkv", "ladder"])
@pytest.mark.parametrize("draft", [None, "lookup"])
def test_a_cloud_that_began_anew_gets_the_whole_sequence(pair, adapted, name, draft):
    server, client, whole = pair(name=name)
    servers, written = [server], []

    def begin_anew():
        servers[-1].stop()
        model = adapted(m_scale=0.0, **scheme(name)[0])
        servers.append(CloudServer(model, server.address, precision="fp32").__enter__())

    def on_token(token):
        written.append(token)
        if len(written) == 4:
            begin_anew()

    same_tokens(client, whole, TEXT, 12, draft=draft, on_token=on_token)
    assert torch.equal(torch.stack(written, dim=1), expected_tokens(whole, TEXT, 12)[:, 9:])
    begin_anew()
    assert client.train_step(IDS, IDS) > 0
    servers[-1].stop()
    assert len(servers) == 3


def test_sixteen_devices_at_once_each_with_its_own_adapter_and_guesses(adapted, same_gradients):
    config, _ = scheme("ladder")
    models = [adapted(m_scale=0.1 * i, **config) for i in range(16)]
    wholes = copy.deepcopy(models)
    with CloudServer(adapted(m_scale=0.0, **config), precision="fp32") as cloud:

        def work(model):
            with DeviceClient(cloud.address, model, precision="fp32") as client:
                guessed = [client.generate(TEXT, 8, eos_token_id=-1, draft=d) for d in ("lookup", off)]
                batch = client.generate(IDS, 5, eos_token_id=-1)
                client.train_step(IDS, IDS)
                return guessed, batch

        answers = at_once(work, models)
        wait_until(lambda: cloud.sessions == 0)
    for model, whole, (guessed, batch) in zip(models, wholes, answers, strict=True):
        expected = expected_tokens(whole, TEXT, 8)
        assert all(torch.equal(tokens, expected) for tokens in guessed)
        assert torch.equal(batch, expected_tokens(whole, count=5))
        same_gradients({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, whole, IDS)
    assert len({tuple(batch.flatten().tolist()) for _, batch in answers}) > 4


@pytest.mark.parametrize(("name", "draft"), [("qkv", None), ("qkv", "lookup"), ("ladder", off)])
def test_up_to_the_clouds_longest_sequence(pair, name, draft):
    _, client, whole = pair(name=name, cloud=dict(limits=Limits(tokens=20)))
    same_tokens(client, whole, TEXT, 12, draft=draft)
    written = []
    with pytest.raises(RefusedError, match="OUT_OF_RANGE: tokens would be 21, the cloud's limit is 20"):
        client.generate(TEXT, 40, eos_token_id=-1, draft=draft, on_token=written.append)
    assert torch.equal(torch.stack(written, dim=1), expected_tokens(whole, TEXT, 12)[:, 9:])


def test_a_first_pass_keeps_to_the_clouds_longest_sequence(pair):
    _, client, whole = pair(cloud=dict(limits=Limits(tokens=10)))
    expected = expected_tokens(whole, TEXT, 1)
    assert torch.equal(client.generate(TEXT, 8, eos_token_id=expected[0, -1].item(), draft=off), expected)


@pytest.mark.parametrize(
    ("rope", "name"),
    [("longrope of Phi-3", "qkv"), ("longrope of Phi-3", "ladder"), ("longrope", "qkv"), ("dynamic", "qkv")],
)
def test_guesses_beyond_the_length_where_rope_changes(pair, rope, name):
    family, options = LENGTHS[rope]
    _, client, whole = pair(family, name=name, options=options | {"max_position_embeddings": 8})
    ids = TEXT[:, :5]
    for draft in (None, "lookup", off, right(expected_tokens(whole, ids, 12))):
        same_tokens(client, whole, ids, 12, draft=draft)


def test_the_end_of_a_sequence_ends_its_guesses(pair):
    _, client, whole = pair()
    expected = expected_tokens(whole, TEXT, 12)
    stop = expected[0, 12].item()
    end = 10 + expected[0, 9:].tolist().index(stop)
    for draft in (right(expected), "lookup"):
        assert torch.equal(client.generate(TEXT, 12, eos_token_id=stop, draft=draft), expected[:, :end])


@pytest.mark.parametrize(
    "given", [None, 7, [-1], [3, 64], [10**9], [1.5], ["the"], [None], torch.tensor([1.0])], ids=repr
)
def test_a_draft_gives_any_number_of_any_integers_and_what_is_no_token_is_named(pair, given):
    """The next text works."""
    _, client, whole = pair()
    message = re.escape(f"the draft must give tokens from 0 to vocab - 1 = 63, got {given!r}")
    with pytest.raises(ValueError, match=message):
        client.generate(TEXT, 4, eos_token_id=-1, draft=lambda ids, count: given)
    for tokens in (np.array([1, 2]), torch.tensor([1, 2]), [], (), itertools.repeat(5)):
        same_tokens(client, whole, TEXT, 4, draft=lambda ids, count, tokens=tokens: tokens)


@pytest.mark.parametrize("said", [0, 2])
def test_a_cloud_that_counts_nonsense_is_named_and_the_next_text_works(pair, monkeypatch, said):
    _, client, whole = pair(name="ladder")
    original = Stream._final

    def foreign(self, hidden):
        final = original(self, hidden)
        final.round_trips = said
        return final

    monkeypatch.setattr(Stream, "_final", foreign)
    with pytest.raises(ValueError, match=f"the cloud's round_trips must be between 1 and 1, got {said}"):
        client.generate(TEXT, 4, eos_token_id=-1)
    monkeypatch.undo()
    same_tokens(client, whole, TEXT, 4)


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_are_those_of_one_process(pair, same_gradients, name):
    """A ladder needs no backward pass through the cloud: one round trip, and no gradient crosses."""
    _, client, whole = pair(name=name, m_scale=0.1)
    loss = client.train_step(IDS, IDS)
    assert loss == pytest.approx(whole(input_ids=IDS, labels=IDS).loss.item(), rel=relative(64 + IDS.numel()))
    same_gradients(in_order(client), whole, IDS)
    traffic, tokens = client.traffic, IDS.numel()
    if "ladder" in name:
        assert (traffic.sent_bytes, traffic.received_bytes) == (4 * 32 * tokens, 4 * (32 + 4 * 5) * tokens)
        assert traffic.round_trips == 1
    same_tokens(client, whole, count=4)
