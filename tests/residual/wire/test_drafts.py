"""Guesses over a real connection: the same tokens, the same distribution, and the bytes of a count by hand."""

import collections
import copy
import functools
import itertools
import math
import re

import numpy as np
import pytest
import torch
from scipy import stats

from plpkg.residual import CloudServer, DeviceClient, Limits, RefusedError, release
from plpkg.residual.wire import writing
from plpkg.residual.wire.stream import Stream
from tests.residual.conftest import IDS, SCHEMES, SCHEMES_OF_FAMILIES, at_once, scheme
from tests.residual.wire.conftest import LENGTHS, cut_at, expected_tokens, in_order, same_tokens

from rounding import STANDARD_ERRORS, relative
from waiting import wait_until

TEXT = IDS[:1, :9]
CHANCE = stats.norm.sf(STANDARD_ERRORS)
"""How seldom a sound sampler gives what is refused here."""
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
    for draft in (None, "lookup", "backbone", none, right(expected)):
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


@pytest.mark.parametrize("name", ["qkv", "ladder"])
def test_guesses_that_stop_and_begin_anew_change_no_token(pair, name):
    """Wrong at first and right later; what they were is remembered from text to text."""
    _, client, whole = pair(name=name)
    expected = expected_tokens(whole, TEXT, 40)

    def draft(ids, count):
        return (wrong if len(ids) < 24 else right)(expected)(ids, count)

    def guesses(count, least):
        before = client.traffic
        text = client.generate(TEXT, count, eos_token_id=-1, draft=draft, min_acceptance=least)
        assert torch.equal(text, expected[:, : 9 + count])
        traffic = client.traffic - before
        return traffic.drafted_tokens, traffic.accepted_tokens, traffic.stopped

    assert guesses(40, 0) == (15 * 6 + 3 * 6 + 3, 21, "")
    assert guesses(40, 0.25) == (2 * 6 + 1 + 1 + 3 * 6, 19, "")
    client.generate(TEXT, 1, eos_token_id=-1)  # without a draft: what was is forgotten
    stopped = "guesses stopped after 12: 0 of 12 accepted, 3 of 12 needed"
    assert guesses(8, 0.25) == (2 * 6, 0, stopped)
    assert guesses(8, 0.25) == (1, 0, stopped)
    assert repr(client.traffic).endswith(f" guesses accepted; {stopped}")


@pytest.mark.parametrize("name", ["qkv", "ladder"])
def test_the_cloud_that_guesses_no_more_leaves_the_sampled_text_as_it_would_be(pair, name):
    _, client, _ = pair(name=name, m_scale=30.0)

    def sampled(least):
        common = dict(do_sample=True, temperature=0.02, eos_token_id=-1, generator=torch.Generator().manual_seed(3))
        return client.generate(TEXT, 24, draft="backbone", min_acceptance=least, **common)

    always = sampled(0)
    assert not client.traffic.stopped
    assert torch.equal(sampled(1), always)
    assert client.traffic.stopped


@pytest.mark.parametrize("draft", [None, "backbone"])
def test_the_coldest_samples_are_the_likeliest_tokens(pair, draft):
    _, client, whole = pair(name="ladder")
    for options in (dict(temperature=1e-300), dict(temperature=1e-40, top_k=2**33)):
        same_tokens(client, whole, TEXT, 8, do_sample=True, draft=draft, **options)


@pytest.mark.parametrize(("family", "cut"), [("llama", (1, 2)), ("gemma2", (1, 1)), ("gpt2", (1, 0)), ("gpt2", (0, 1))])
def test_guesses_pass_the_layers_on_the_device_as_well(pair, family, cut):
    _, client, whole = pair(family, *cut, options=WINDOWS.get(family))
    for draft in ("lookup", off, right(expected_tokens(whole, TEXT, 16))):
        same_tokens(client, whole, TEXT, 16, draft=draft)
    with pytest.raises(ValueError, match=r"draft='backbone' needs every layer in the cloud, but \d are on the device"):
        client.generate(TEXT, 4, eos_token_id=-1, draft="backbone")


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
        assert torch.equal(sampled("backbone"), sampled("backbone"))


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0):
    """By hand: the most probable ``top_k``, of them the fewest that have ``top_p`` together."""
    scores = sorted(((score / temperature, token) for token, score in enumerate(logits.tolist())), reverse=True)
    scores = scores[: top_k or None]
    total, chosen, so_far = sum(math.exp(score) for score, _ in scores), {}, 0.0
    for score, token in scores:
        if so_far < top_p:
            chosen[token] = math.exp(score) / total
            so_far += chosen[token]
    return {token: p / so_far for token, p in chosen.items()}


def assert_drawn(draws):
    """Pearson's test of ``(token, distribution)``: how often a distribution's most probable token was drawn, and so on.

    Different distributions vary less than one that is their mean, so that the test is on the safe side.
    """
    observed, predicted = collections.Counter(), collections.Counter()
    for token, p in draws:
        ranks = sorted(p, key=p.get, reverse=True)
        observed[ranks.index(token)] += 1
        predicted.update(dict(enumerate(p[each] for each in ranks)))
    for rank in sorted(predicted, reverse=True):  # below 5 the statistic is not distributed as chi-square
        if predicted[rank] < 5:
            predicted[rank - 1] += predicted.pop(rank)
            observed[rank - 1] += observed.pop(rank, 0)
    assert len(predicted) > 1
    assert stats.chisquare(*([counts[rank] for rank in predicted] for counts in (observed, predicted))).pvalue > CHANCE


@pytest.mark.parametrize(
    "options", [{}, dict(temperature=0.3), dict(temperature=0.5, top_k=3), dict(temperature=0.5, top_p=0.8)]
)
def test_the_race_is_won_as_the_probabilities_say(options):
    logits = torch.linspace(-1, 1, 6)[None]
    warp = writing.checked_warpers(1, do_sample=True, **options)
    p = distribution(logits[0], **options)
    assert_drawn((writing.race(warp(None, logits), seed, 7).item(), p) for seed in range(4000))


@pytest.mark.parametrize(
    ("name", "read", "options"),
    [("ladder", 0, dict(temperature=0.7, top_k=4)), ("down", 1, dict(temperature=0.7, top_p=0.9))],
)
def test_what_the_backbone_guesses_leaves_the_distribution_as_it_is(adapted, name, read, options):
    """Of the token behind an accepted guess, behind a rejected one, and of the guessed one; M is in the layers or not.

    A cloud whose M acts in the layers guesses once it has read the text, one token later.
    """
    tiny = dict(shape=dict(num_layers=1, vocab=5, hidden=16, num_heads=2, num_kv_heads=1), m_scale=100.0)
    model, start = adapted(**scheme(name)[0] | tiny), [1, 2, 3]
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)

    @functools.cache
    @torch.no_grad()
    def expected(*context):
        return distribution(model(input_ids=torch.tensor([context])).logits[0, -1], **options)

    draws = {kind: [] for kind in ("guessed", "accepted", "rejected")}
    generator = torch.Generator().manual_seed(5)
    common = dict(do_sample=True, eos_token_id=-1, draft="backbone", draft_tokens=1, generator=generator, **options)
    with CloudServer(model, precision="fp32") as cloud, DeviceClient(cloud.address, model, precision="fp32") as client:
        for _ in range(250):
            before = client.traffic
            *context, guessed, last = client.generate(torch.tensor([start]), 2 + read, **common)[0].tolist()
            draws["guessed"].append((guessed, expected(*context)))
            kind = "accepted" if (client.traffic - before).accepted_tokens else "rejected"
            draws[kind].append((last, expected(*context, guessed)))
    for each in draws.values():
        assert len(each) > 25
        assert_drawn(each)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("draft", [None, "right", "backbone"])
def test_the_bytes_are_those_of_a_count_by_hand(pair, name, draft):
    """Every M is zero: so the backbone guesses right, always."""
    _, client, whole = pair(name=name, m_scale=0.0, precision="fp16")
    guess = right(expected_tokens(whole, TEXT, 8)) if draft == "right" else draft
    before = client.traffic
    same_tokens(client, whole, TEXT, 8, draft=guess, draft_tokens=3)
    traffic = client.traffic - before
    exchanges = {"qkv": 12, "late": 12, "down": 4, "fold": 3, "late fold": 3, "fold of two": 1}.get(name, 0)
    riders = 4 * 5 if "ladder" in name else 5 if "fold" in name else 0
    # Each pass: tokens that the device sends, guesses of its own among them; and those that the cloud writes.
    if draft is None:
        passes = [(9, 0)] + [(1, 0)] * 7
    elif draft == "right":
        passes = [(9 + 3, 0), (1 + 3, 0)]
    elif "ladder" in name:
        passes = [(9, 3), (1, 3)]
    else:
        passes = [(9, 0), (1, 3), (1, 2)]  # not before the text has been read
    bytes_each, written = client.dtype.itemsize, sum(written for _, written in passes)
    read = sum(sent for sent, _ in passes) + written
    positions = len(passes) * (4 if draft == "right" else 1) + written
    assert traffic.sent_bytes == bytes_each * (32 * (read - written) + 3 * exchanges * read)
    assert traffic.received_bytes == bytes_each * ((32 + riders) * positions + 5 * exchanges * read) + 4 * written
    assert traffic.round_trips == TRIPS[name] * len(passes)
    guesses = 6 if draft == "right" else written
    assert (traffic.tokens, traffic.drafted_tokens, traffic.accepted_tokens) == (8, guesses, guesses)


@pytest.mark.parametrize("draft", [off, "backbone"])
@pytest.mark.parametrize(
    ("name", "what", "count"),
    [*((name, what, 2) for name in ("qkv", "ladder") for what in ("embed", "receive"))]
    + [(name, "residual", 7) for name in ("qkv", "late", "fold")],
)
def test_a_broken_link_changes_no_bit_of_a_guessed_pass(pair, name, draft, what, count):
    """Sampled, so that it shows in which random numbers; with sliding windows."""
    _, client, _ = pair("mistral", name=name, options=WINDOWS["mistral"], link="lan")

    def sampled():
        generator = torch.Generator().manual_seed(2)
        return client.generate(TEXT, 12, do_sample=True, eos_token_id=-1, draft=draft, generator=generator)

    expected, before = sampled(), client.traffic
    seen = cut_at(client, what, count)
    assert torch.equal(sampled(), expected)
    assert len(seen) >= count
    assert (client.traffic - before).tokens == 12


@pytest.mark.parametrize("name", ["qkv", "ladder"])
@pytest.mark.parametrize("draft", [None, "lookup", "backbone"])
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
                guessed = [client.generate(TEXT, 8, eos_token_id=-1, draft=d) for d in ("backbone", "lookup", off)]
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


@pytest.mark.parametrize(
    ("name", "draft"), [("qkv", None), ("qkv", "lookup"), ("qkv", "backbone"), ("ladder", off), ("ladder", "backbone")]
)
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
    for draft in (None, "lookup", "backbone", off, right(expected_tokens(whole, ids, 12))):
        same_tokens(client, whole, ids, 12, draft=draft)


def test_the_end_of_a_sequence_ends_its_guesses(pair):
    _, client, whole = pair()
    expected = expected_tokens(whole, TEXT, 12)
    stop = expected[0, 12].item()
    end = 10 + expected[0, 9:].tolist().index(stop)
    for draft in (right(expected), "backbone", "lookup"):
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


@pytest.mark.parametrize("name", ["qkv", "fold", "ladder"])
def test_a_cloud_that_has_freed_its_embedding_refuses_to_write(pair, name):
    server, client, whole = pair(name=name)
    release(server.part.public, server.part)
    with pytest.raises(RefusedError, match="this cloud has released the embedding and the LM head, and cannot"):
        client.generate(TEXT, 6, eos_token_id=-1, draft="backbone")
    same_tokens(client, whole, TEXT, 6, draft="lookup")


def tokens_of(*tokens):
    return torch.tensor(tokens, dtype=torch.int32).numpy().tobytes()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (dict(round_trips=0), "the cloud's round_trips must be between 1 and 1, got 0"),
        (dict(round_trips=2), "the cloud's round_trips must be between 1 and 1, got 2"),
        (dict(tokens=b""), r"a tensor of shape \(3,\) has 12 bytes, got 0"),
        (dict(tokens=tokens_of(1, 2, 3, 4)), r"a tensor of shape \(3,\) has 12 bytes, got 16"),
        (dict(tokens=tokens_of(1, 64, 3)), r"the cloud has written \[1, 64, 3\], which are no tokens"),
        (dict(tokens=tokens_of(-1, 2, 3)), r"the cloud has written \[-1, 2, 3\], which are no tokens"),
    ],
)
def test_a_cloud_that_writes_nonsense_is_named_and_the_next_text_works(pair, monkeypatch, said, message):
    _, client, whole = pair(name="ladder")
    original = Stream._final

    def foreign(self, hidden, written=()):
        final = original(self, hidden, written)
        for name, value in said.items():
            setattr(final, name, value)
        return final

    monkeypatch.setattr(Stream, "_final", foreign)
    with pytest.raises(ValueError, match=message):
        client.generate(TEXT, 4, eos_token_id=-1, draft="backbone")
    monkeypatch.undo()
    same_tokens(client, whole, TEXT, 4, draft="backbone")


def test_the_cloud_guesses_without_any_m(pair, adapted):
    """Not even with one that it happens to have."""
    config, _ = scheme("ladder")
    model = adapted(**config)
    with CloudServer(model, precision="fp32") as cloud, DeviceClient(cloud.address, model, precision="fp32") as client:
        with model.disable_adapter():
            own = expected_tokens(model, TEXT, 4)[0, 9:].tolist()
        answered, original = [], client._final
        client._final = lambda *given: answered.append(original(*given)) or answered[-1]
        same_tokens(client, model, TEXT, 6, draft="backbone", draft_tokens=4)
    assert answered[0][1] == own != expected_tokens(model, TEXT, 6)[0, 9:13].tolist()


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
