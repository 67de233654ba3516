"""A cloud whose cache forgets, against the whole model under the same budget in one process."""

import copy

import pytest
import torch

from plpkg import retention
from plpkg.residual import DeviceClient, RefusedError
from plpkg.retention import scorers
from tests.residual.conftest import IDS, at_once, scheme
from tests.residual.wire.conftest import SLIDING, cut_at, expected_tokens


@pytest.fixture
def bounded(pair, adapted):
    """As ``pair``; the cloud's heads keep six units."""

    def start(scorer, family="llama", name="qkv", options=None, **device):
        served = adapted(family, m_scale=0.0, options=options, **scheme(name, family)[0])
        cache = retention.bounded(served, scorer, 6)
        return pair(family, name=name, options=options, served=served, cloud=dict(cache=cache), **device)

    return start


def tokens_in_one_process(model, scorer):
    read = retention.chunked_prefill(model, IDS, scorer, 6, 5, positions="original")
    with read.evicting():
        written = model.generate(**read.inputs(), max_new_tokens=7, do_sample=False, eos_token_id=None)
    return torch.cat([IDS, written], 1)


@pytest.mark.parametrize("scorer", [scorers.Random(3), scorers.H2O(), scorers.SinkRecent(sink=2)], ids=repr)
@pytest.mark.parametrize(
    ("family", "name", "options"),
    [
        ("llama", "qkv", None),
        ("llama", "late fold", None),
        ("qwen2", "ladder", None),
        ("gpt2", "qkv", None),
        ("gemma2", "down", SLIDING),
    ],
)
def test_it_forgets_as_in_one_process(bounded, scorer, family, name, options):
    """Two devices at once, of which one loses its link within the prompt."""
    server, client, whole = bounded(scorer, family, name, options)
    expected = tokens_in_one_process(whole, scorer)
    cuts = cut_at(client, "embed", 2)
    common = dict(fold="fold" in name, precision="fp32")
    with DeviceClient(server.address, copy.deepcopy(whole), **common) as other:
        for written in at_once(lambda c: c.generate(IDS, 8, eos_token_id=-1, chunk_size=5), [client, other]):
            assert torch.equal(written, expected)
        assert len(cuts) > 5
        assert [stream._cache.kept for stream in server._streams if stream.greeted] == [6, 6]
    assert not torch.equal(expected, expected_tokens(whole, count=8))


def test_an_exchange_that_breaks_leaves_the_scores_as_they_were(bounded):
    """The layers before it have added up their attention already."""
    scorer = scorers.H2O()
    _, client, whole = bounded(scorer)
    cut_at(client, "residual", 7)  # in the second chunk's third layer
    assert torch.equal(client.generate(IDS, 8, eos_token_id=-1, chunk_size=5), tokens_in_one_process(whole, scorer))


@pytest.mark.parametrize("cut", [(0, 0), (1, 1)])
def test_chunks_alone_change_nothing(pair, cut):
    _, client, whole = pair("mistral", *cut, options=SLIDING)
    for chunk_size in (1, 5, 12, 20):
        written = client.generate(IDS, 8, eos_token_id=-1, chunk_size=chunk_size)
        assert torch.equal(written, expected_tokens(whole, count=8))
    with pytest.raises(ValueError, match="chunk_size must be a whole number of at least 1, got 0"):
        client.generate(IDS, 8, chunk_size=0)


def test_nothing_is_taken_out_of_it_again(bounded, pair):
    _, client, whole = bounded(scorers.KeyNorm())
    with pytest.raises(ValueError, match="draft='lookup': the cloud's cache is bounded, and cannot take guesses back"):
        client.generate(IDS[:1], 3, draft="lookup")
    client.wire.forgets = False  # a device that does not know
    with pytest.raises(RefusedError, match="cache is bounded: no guess can be taken out of it again"):
        client.generate(IDS[:1], 8, draft=lambda ids, count: [1] * count, eos_token_id=-1)
    client = bounded(scorers.KeyNorm())[1]
    client.train_step(IDS, IDS)  # needs no cache
    with pytest.raises(ValueError, match="is for all 4 layers of the model, and here are 3"):
        pair(first_k=1, cloud=dict(cache=retention.bounded(whole, scorers.KeyNorm(), 6)))


@pytest.mark.parametrize(
    ("scorer", "budget", "message"),
    [
        (scorers.SirLlm(), 6, "SirLlm needs the tokens and the logits, which no layer knows"),
        (scorers.SinkRecent(sink=2, recent=5), 6, "SinkRecent protects sink=2 and recent=5 units, more than budget=6"),
        (scorers.KeyNorm(), 0, "budget must be a whole number of at least 1, got 0"),
    ],
)
def test_what_the_layers_cannot_do_is_refused_at_once(adapted, scorer, budget, message):
    with pytest.raises(ValueError, match=message):
        retention.bounded(adapted(), scorer, budget)
