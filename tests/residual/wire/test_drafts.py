"""Guesses over a real connection: the same tokens, the same distribution, and the bytes of a count by hand."""

import collections
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
from tests.residual.wire.conftest import LENGTHS, cut_at, expected_tokens, in_order

from rounding import STANDARD_ERRORS, relative

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
    config, cut = scheme(name, family)
    _, client, whole = pair(family, config=config, options=WINDOWS.get(family), **cut)
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


@pytest.mark.parametrize(("family", "cut"), [("llama", (1, 2)), ("gemma2", (1, 1)), ("gpt2", (1, 0)), ("gpt2", (0, 1))])
def test_guesses_pass_the_layers_on_the_device_as_well(pair, family, cut):
    _, client, whole = pair(family, *cut, options=WINDOWS.get(family))
    expected = expected_tokens(whole, TEXT, 16)
    for draft in ("lookup", off, right(expected)):
        assert torch.equal(client.generate(TEXT, 16, eos_token_id=-1, draft=draft), expected)
    with pytest.raises(ValueError, match=r"draft='backbone' needs every layer in the cloud, but \d are on the device"):
        client.generate(TEXT, 4, eos_token_id=-1, draft="backbone")


@pytest.mark.parametrize("given", [lambda ids, count: [], lambda ids, count: torch.tensor([1, 2])[:count]])
def test_any_number_of_any_integers_will_do(pair, given):
    _, client, whole = pair()
    assert torch.equal(client.generate(TEXT, 5, eos_token_id=-1, draft=given), expected_tokens(whole, TEXT, 5))


@pytest.mark.parametrize("name", ["qkv", "late fold", "gated ladder"])
def test_what_is_sampled_does_not_depend_on_the_devices_guesses(pair, name):
    config, cut = scheme(name)
    _, client, _ = pair(config=config, **cut)
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


OPTIONS = [dict(temperature=0.3), dict(temperature=0.5, top_k=3), dict(temperature=0.5, top_p=0.8)]


@pytest.mark.parametrize("options", [{}, *OPTIONS])
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
    with (
        CloudServer(model, precision="fp32") as cloud,
        DeviceClient(cloud.address, model, precision="fp32") as client,
    ):
        for _ in range(250):
            before = client.traffic
            *context, guessed, last = client.generate(torch.tensor([start]), 2 + read, **common)[0].tolist()
            draws["guessed"].append((guessed, expected(*context)))
            kind = "accepted" if (client.traffic - before).accepted_tokens else "rejected"
            draws[kind].append((last, expected(*context, guessed)))
    for each in draws.values():
        assert len(each) > 25
        assert_drawn(each)


NEW, GUESSES = 8, 3


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("draft", [None, "right", "backbone"])
def test_the_bytes_are_those_of_a_count_by_hand(pair, name, draft):
    """Every M is zero: so the backbone guesses right, always."""
    config, cut = scheme(name)
    _, client, whole = pair(config=config, m_scale=0.0, precision="fp16", **cut)
    expected = expected_tokens(whole, TEXT, NEW)
    guess = right(expected) if draft == "right" else draft
    before = client.traffic
    assert torch.equal(client.generate(TEXT, NEW, eos_token_id=-1, draft=guess, draft_tokens=GUESSES), expected)
    traffic = client.traffic - before
    ladder, exchanges = "ladder" in name, {"qkv": 12, "late": 12, "down": 4, "fold": 3, "late fold": 3}.get(name, 0)
    exchanges = 1 if name == "fold of two" else exchanges
    riders = 4 * 5 if ladder else 5 if cut else 0
    # Each pass: tokens that the device sends, guesses of its own among them; and those that the cloud writes.
    if draft is None:
        passes = [(9, 0)] + [(1, 0)] * 7
    elif draft == "right":
        passes = [(9 + 3, 0), (1 + 3, 0)]
    elif ladder:
        passes = [(9, 3), (1, 3)]
    else:
        passes = [(9, 0), (1, 3), (1, 2)]  # not before the text has been read
    bytes_each = client.dtype.itemsize
    up = sum(32 * sent + 3 * exchanges * (sent + written) for sent, written in passes)
    positions = sum(1 + written + (3 if draft == "right" else 0) for _, written in passes)
    down = (32 + riders) * positions + 5 * exchanges * sum(sent + written for sent, written in passes)
    assert traffic.sent_bytes == up * bytes_each
    assert traffic.received_bytes == down * bytes_each + 4 * sum(written for _, written in passes)
    assert traffic.round_trips == TRIPS[name] * len(passes)
    guesses = {None: 0, "right": 6, "backbone": sum(written for _, written in passes)}[draft]
    assert (traffic.tokens, traffic.drafted_tokens, traffic.accepted_tokens) == (NEW, guesses, guesses)


@pytest.mark.parametrize("draft", [off, "backbone"])
@pytest.mark.parametrize(
    ("name", "what", "count"),
    [
        *itertools.product(["qkv", "ladder"], ["embed", "receive"], [2]),
        *itertools.product(["qkv", "late", "fold"], ["residual"], [7]),
    ],
)
def test_a_broken_link_changes_no_bit_of_a_guessed_pass(pair, name, draft, what, count):
    """Sampled, so that it shows in which random numbers; with sliding windows."""
    config, cut = scheme(name)
    common = dict(do_sample=True, eos_token_id=-1, draft=draft)
    _, client, _ = pair("mistral", config=config, options=WINDOWS["mistral"], link="lan", **cut)
    expected, before = client.generate(TEXT, 12, generator=torch.Generator().manual_seed(2), **common), client.traffic
    seen = cut_at(client, what, count)
    tokens = client.generate(TEXT, 12, generator=torch.Generator().manual_seed(2), **common)
    assert torch.equal(tokens, expected)
    assert len(seen) >= count
    assert (client.traffic - before).tokens == 12


@pytest.mark.parametrize("name", ["qkv", "ladder"])
@pytest.mark.parametrize("draft", ["lookup", "backbone"])
def test_a_cloud_that_began_anew_gets_the_whole_sequence(pair, adapted, name, draft):
    config, _ = scheme(name)
    server, client, whole = pair(config=config)
    servers, written = [server], []

    def on_token(token):
        written.append(token)
        if len(written) == 4:
            servers[-1].stop()
            model = adapted(m_scale=0.0, **config)
            servers.append(CloudServer(model, server.address, precision="fp32").__enter__())

    tokens = client.generate(TEXT, 12, eos_token_id=-1, draft=draft, on_token=on_token)
    servers[-1].stop()
    assert torch.equal(tokens, expected_tokens(whole, TEXT, 12))
    assert torch.equal(torch.stack(written, dim=1), tokens[:, 9:])
    assert len(servers) == 2


@pytest.mark.parametrize("name", ["qkv", "ladder"])
def test_several_devices_write_at_once_each_with_its_own_guesses(adapted, name):
    config, _ = scheme(name)
    models = [adapted(m_scale=0.5 * i, **config) for i in range(6)]
    expected = [expected_tokens(model, TEXT, 8) for model in models]
    with CloudServer(adapted(m_scale=0.0, **config), precision="fp32") as cloud:

        def work(model):
            with DeviceClient(cloud.address, model, precision="fp32") as client:
                return [client.generate(TEXT, 8, eos_token_id=-1, draft=d) for d in ("backbone", "lookup", off)]

        for generated, right in zip(at_once(work, models), expected, strict=True):
            assert all(torch.equal(tokens, right) for tokens in generated)


@pytest.mark.parametrize(
    ("name", "draft"), [("qkv", "lookup"), ("qkv", "backbone"), ("ladder", off), ("ladder", "backbone")]
)
def test_up_to_the_clouds_longest_sequence(pair, name, draft):
    _, client, whole = pair(config=scheme(name)[0], cloud=dict(limits=Limits(tokens=20)))
    expected = expected_tokens(whole, TEXT, 12)
    assert torch.equal(client.generate(TEXT, 12, eos_token_id=-1, draft=draft), expected)
    written = []
    with pytest.raises(RefusedError, match="OUT_OF_RANGE: tokens would be 21, the cloud's limit is 20"):
        client.generate(TEXT, 40, eos_token_id=-1, draft=draft, on_token=written.append)
    assert torch.equal(torch.stack(written, dim=1), expected[:, 9:])


def test_a_first_pass_keeps_to_the_clouds_longest_sequence(pair):
    _, client, whole = pair(cloud=dict(limits=Limits(tokens=10)))
    expected = expected_tokens(whole, TEXT, 1)
    assert torch.equal(client.generate(TEXT, 8, eos_token_id=expected[0, -1].item(), draft=off), expected)


def test_a_device_that_was_away_too_long_begins_a_new_session(pair):
    server, client, whole = pair()
    for _ in range(2):
        assert torch.equal(client.generate(TEXT, 3, eos_token_id=-1, draft="lookup"), expected_tokens(whole, TEXT, 3))
        client._connection.reset()
        server._sessions.clear()


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ("longrope of Phi-3", "qkv"),
        ("longrope of Phi-3", "ladder"),
        ("longrope", "qkv"),
        ("dynamic", "qkv"),
    ],
)
def test_guesses_beyond_the_length_where_rope_changes(pair, rope, name):
    family, options = LENGTHS[rope]
    config, cut = scheme(name, family)
    _, client, whole = pair(family, config=config, options=options | {"max_position_embeddings": 8}, **cut)
    ids = TEXT[:, :5]
    expected = expected_tokens(whole, ids, 12)
    for draft in (None, "lookup", "backbone", off, right(expected)):
        assert torch.equal(client.generate(ids, 12, eos_token_id=-1, draft=draft), expected), draft


def test_the_end_of_a_sequence_ends_its_guesses(pair):
    _, client, whole = pair()
    expected = expected_tokens(whole, TEXT, 12)
    stop = expected[0, 12].item()
    end = 10 + expected[0, 9:].tolist().index(stop)
    for draft in (right(expected), "backbone", "lookup"):
        assert torch.equal(client.generate(TEXT, 12, eos_token_id=stop, draft=draft), expected[:, :end])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(draft="guess"), "draft must be one of 'lookup', 'public', 'backbone', got 'guess'"),
        (dict(draft="public"), "draft='public' counts text: give the model's tokenizer as well"),
        (dict(draft="lookup", draft_tokens=-1), "draft_tokens must be a whole number of at least 0, got -1"),
        (dict(draft="lookup", input_ids=IDS), "draft='lookup' is for one sequence, got 2"),
    ],
)
def test_bad_input_is_named_before_anything_is_sent(pair, options, message):
    _, client, _ = pair()
    with pytest.raises(ValueError, match=message):
        client.generate(**dict(input_ids=TEXT, max_new_tokens=2) | options)
    assert client.traffic.sent_message_bytes == 0


@pytest.mark.parametrize(
    "given",
    [None, 7, [-1], [3, 64], [10**9], [1.5], ["the"], [None], torch.tensor([1.0])],
    ids=lambda given: repr(given),
)
def test_a_draft_that_gives_no_tokens_is_named_and_the_next_text_works(pair, given):
    _, client, whole = pair()
    message = re.escape(f"the draft must give tokens from 0 to vocab - 1 = 63, got {given!r}")
    with pytest.raises(ValueError, match=message):
        client.generate(TEXT, 4, eos_token_id=-1, draft=lambda ids, count: given)
    expected = expected_tokens(whole, TEXT, 4)
    for given in (np.array([1, 2]), torch.tensor([1, 2]), (), itertools.repeat(5)):
        tokens = client.generate(TEXT, 4, eos_token_id=-1, draft=functools.partial(lambda given, *_: given, given))
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("name", ["qkv", "fold", "ladder"])
def test_a_cloud_that_has_freed_its_embedding_refuses_to_write(adapted, name):
    config, cut = scheme(name)
    served, model = adapted(m_scale=0.0, **config), adapted(**config)
    expected = expected_tokens(model, TEXT, 6)
    with (
        CloudServer(served, precision="fp32", **cut) as cloud,
        DeviceClient(cloud.address, model, precision="fp32", **cut) as client,
    ):
        release(served, cloud.part)
        with pytest.raises(RefusedError, match="this cloud has released the embedding and the LM head, and cannot"):
            client.generate(TEXT, 6, eos_token_id=-1, draft="backbone")
        assert torch.equal(client.generate(TEXT, 6, eos_token_id=-1, draft="lookup"), expected)


def tokens_of(*tokens):
    return torch.tensor(tokens, dtype=torch.int32).numpy().tobytes()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (b"", r"a tensor of shape \(3,\) has 12 bytes, got 0"),
        (tokens_of(1, 2, 3, 4), r"a tensor of shape \(3,\) has 12 bytes, got 16"),
        (tokens_of(1, 64, 3), r"the cloud has written \[1, 64, 3\], which are no tokens"),
        (tokens_of(-1, 2, 3), r"the cloud has written \[-1, 2, 3\], which are no tokens"),
    ],
)
def test_a_cloud_that_writes_nonsense_is_named_and_the_next_text_works(pair, monkeypatch, tokens, message):
    _, client, whole = pair(config=scheme("ladder")[0])
    original = Stream._final

    def foreign(self, hidden, written=()):
        final = original(self, hidden, written)
        final.tokens = tokens
        return final

    monkeypatch.setattr(Stream, "_final", foreign)
    with pytest.raises(ValueError, match=message):
        client.generate(TEXT, 4, eos_token_id=-1, draft="backbone")
    monkeypatch.undo()
    tokens = client.generate(TEXT, 4, eos_token_id=-1, draft="backbone")
    assert torch.equal(tokens, expected_tokens(whole, TEXT, 4))


def test_the_cloud_guesses_without_any_m(pair, adapted):
    """Not even with one that it happens to have."""
    config, _ = scheme("ladder")
    model = adapted(**config)
    with CloudServer(model, precision="fp32") as cloud, DeviceClient(cloud.address, model, precision="fp32") as client:
        with model.disable_adapter():
            own = expected_tokens(model, TEXT, 4)[0, 9:].tolist()
        answered, original = [], client._final
        client._final = lambda *given: answered.append(original(*given)) or answered[-1]
        expected = expected_tokens(model, TEXT, 6)
        assert torch.equal(client.generate(TEXT, 6, eos_token_id=-1, draft="backbone", draft_tokens=4), expected)
    assert answered[0][1] == own != expected[0, 9:13].tolist()


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_are_those_of_one_process(pair, same_gradients, name):
    """A ladder needs no backward pass through the cloud: one round trip, and no gradient crosses."""
    config, cut = scheme(name)
    _, client, whole = pair(config=config, m_scale=0.1, **cut)
    loss = client.train_step(IDS, IDS)
    assert loss == pytest.approx(whole(input_ids=IDS, labels=IDS).loss.item(), rel=relative(64 + IDS.numel()))
    same_gradients(in_order(client), whole, IDS)
    traffic, tokens = client.traffic, IDS.numel()
    if "ladder" in name:
        assert (traffic.sent_bytes, traffic.received_bytes) == (4 * 32 * tokens, 4 * (32 + 4 * 5) * tokens)
        assert traffic.round_trips == 1
    assert torch.equal(client.generate(IDS, 4, eos_token_id=-1), expected_tokens(whole, count=4))


@pytest.mark.parametrize(
    ("on_device", "on_cloud", "message"),
    [
        ("qkv", "late", "late False here, True on the cloud"),
        ("down", "fold", r"projections .*--ladder, --fold or --rank \[\] here, \[5\] on the cloud"),
        ("down", "ladder", r"projections \[1, 1, 1, 1\] here, \[\] on the cloud"),
    ],
)
def test_another_way_is_refused_with_both_values(adapted, on_device, on_cloud, message):
    (config, cut), (others, other_cut) = scheme(on_device), scheme(on_cloud)
    with (
        CloudServer(adapted(**others), precision="fp32", **other_cut) as cloud,
        DeviceClient(cloud.address, adapted(**config), precision="fp32", **cut) as client,
        pytest.raises(RefusedError, match=message),
    ):
        client.generate(TEXT, 1)
