"""The two ends over a real connection, against the uncut model in one process, with everything that can break."""

import copy
import itertools
import random
import re
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from benchmarks.residual import families
from plpkg import communication
from plpkg.backbones import FAMILIES
from plpkg.catalog import ModelShape
from plpkg.residual import CloudServer, DeviceClient, Limits, PrivateLoraConfig, RefusedError
from plpkg.residual.wire import connection, messages, writing
from tests.residual.conftest import IDS, at_once, cloud_process, precise
from tests.residual.wire.conftest import LENGTHS, SLIDING, cut_at, expected_tokens, fail_at, in_order, same_tokens

from rounding import assert_as_exact, relative
from waiting import PATIENCE_S, wait_until

LOSS = relative(64 + IDS[:, 1:].numel())  # a sum over the vocabulary in each token's, then over the tokens
RANKS = dict(r_c2d=5, r_d2c=3)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_crossed(traffic, formula, model, **options):
    """As many bytes and round trips as a formula of the room of communication says."""
    expected = formula(ModelShape.from_config(model.get_base_model().config, "tiny"), batch=2, **options)
    assert (8 * traffic.sent_bytes, 8 * traffic.received_bytes) == (expected.uplink_bits, expected.downlink_bits)
    assert traffic.round_trips == expected.round_trips


def test_the_same_logits_and_tokens_as_in_one_process(pair, family, cut):
    _, client, whole = pair(family, *cut)
    with torch.no_grad():
        logits = client.logits(IDS)
        assert_as_exact(logits, whole(input_ids=IDS).logits, precise(whole)(input_ids=IDS).logits)
    if family == "llama":
        passes = RANKS | dict(phase="prefill", tokens=12, bits=32, final_hidden="all", first_k=cut[0], last_k=cut[1])
        assert_crossed(client.traffic, communication.low_rank, whole, **passes)
    same_tokens(client, whole)


@pytest.mark.parametrize(("family", "options"), [*((family, None) for family in FAMILIES), LENGTHS["longrope"]])
def test_it_writes_and_learns_by_turns_as_in_one_process(pair, same_gradients, family, options, cut):
    """What generating leaves in the cloud's modules (long frequencies, say) is no hindrance to training."""
    _, client, whole = pair(family, *cut, options=options, m_scale=0.1)
    expected_loss = whole(input_ids=IDS, labels=IDS).loss.item()
    for _ in range(2):
        same_tokens(client, whole)
        client.part.zero_grad()
        assert client.train_step(IDS, IDS) == pytest.approx(expected_loss, rel=LOSS)
        same_gradients(in_order(client), whole, IDS)


def test_one_text_is_a_batch_of_one(pair):
    _, client, _ = pair(m_scale=0.1)
    one, row = IDS[:1], IDS[0]
    for call in (client.logits, lambda ids: client.generate(ids, 3), lambda ids: client.per_example(ids)[1]):
        expected = call(one)
        assert all(torch.equal(call(form), expected) for form in (row, row.tolist(), {"input_ids": row.int()}))
    losses = [client.train_step(*form) for form in ((one, one), (row, row.tolist()), (row,), ({"input_ids": one},))]
    assert losses == losses[:1] * 4


def test_labels_of_minus_100_are_not_predicted(pair, same_gradients):
    """Whole numbers of any width will do."""
    _, client, whole = pair(m_scale=0.1)
    labels = IDS.clone()
    labels[:, 5:] = -100
    loss = client.train_step(IDS.to(torch.int16), labels.int())
    assert loss == pytest.approx(whole(input_ids=IDS, labels=labels).loss.item(), rel=LOSS)
    same_gradients(in_order(client), whole, IDS, labels=labels)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_bytes_are_those_of_the_formula(pair, precision, cut):
    server, client, whole = pair("llama", *cut, precision=precision, m_scale=0.1)
    common = RANKS | dict(first_k=cut[0], last_k=cut[1], bits=32 if precision == "fp32" else 16)

    def check(before, phase, tokens):
        traffic = client.traffic - before
        assert_crossed(traffic, communication.low_rank, whole, phase=phase, tokens=tokens, **common)

    before = client.traffic
    client.generate(IDS, 1, eos_token_id=-1)
    check(before, "prefill", 12)
    marks = []
    client.generate(IDS, 6, eos_token_id=-1, on_token=lambda token: marks.append(client.traffic))
    check(marks[0], "decode", 5)
    before = client.traffic
    client.train_step(IDS, IDS)
    check(before, "training", 12)
    # The last message may still be on its way.
    wait_until(lambda: server.traffic.received_message_bytes == client.traffic.sent_message_bytes)
    sent, received = client.traffic, server.traffic
    assert (sent.sent_bytes, sent.received_bytes) == (received.received_bytes, received.sent_bytes)
    assert sent.received_message_bytes == received.sent_message_bytes


@pytest.mark.parametrize(
    ("config", "formula", "lowest"),
    [
        ({}, dict(projections=3), 3),
        (dict(target_modules=["down_proj"]), dict(projections=1), 1),
        (dict(late=True), dict(projections=3, late=True), 6),
        (dict(target_modules=["down_proj"], layers_to_transform=[2]), dict(projections=1, adapted_layers=1), 1),
    ],
)
def test_the_lowest_layers_gradient_stays_where_it_is(pair, same_gradients, config, formula, lowest):
    """Nothing that learns has made its input. Without that, ``lowest`` projections' numbers less go up."""
    _, client, whole = pair(m_scale=0.1, config=config)
    before = client.traffic
    client.train_step(IDS, IDS)
    crossed = client.traffic - before
    same_gradients(in_order(client), whole, IDS)
    step = RANKS | dict(phase="training", tokens=12, bits=32)
    assert_crossed(crossed, communication.low_rank, whole, **step, **formula)
    projections = sum(client.terms.projections)
    assert crossed.sent_bytes == 4 * 24 * (2 * 32 + projections * 3 + (projections - lowest) * 5)


def test_full_activations_cross_as_the_formula_says(pair):
    lora = dict(r=2, target_modules=["q_proj", "k_proj", "v_proj"])
    _, client, whole = pair(precision="fp16", m_scale=0.2, config=dict(lora=lora))
    marks = []
    same_tokens(client, whole, on_token=lambda token: marks.append(client.traffic))
    full = dict(tokens=5, projections=3, endpoints=True, baseline="actual")
    assert_crossed(marks[-1] - marks[0], communication.full_activations, whole, **full)


@pytest.mark.parametrize("options", [{}, dict(temperature=0.7), dict(top_k=5), dict(temperature=1.3, top_p=0.8)])
def test_sampling_is_hugging_faces(pair, options):
    _, client, whole = pair()
    plain = dict(temperature=1.0, top_k=0, top_p=1.0)
    torch.manual_seed(1)
    expected = whole.generate(input_ids=IDS, max_new_tokens=8, do_sample=True, eos_token_id=None, **(plain | options))
    torch.manual_seed(1)
    assert torch.equal(client.generate(IDS, 8, do_sample=True, eos_token_id=-1, **options), expected)


def test_a_sequence_ends_at_its_stop_token_and_the_others_go_on(pair):
    _, client, whole = pair()
    free = expected_tokens(whole, count=8)
    stop = free[0, 14].item()
    stopped = client.generate(IDS, 8, eos_token_id=[stop, 63])
    first = (free[0, 12:] == stop).nonzero()[0].item() + 12
    assert torch.equal(stopped[0, : first + 1], free[0, : first + 1])
    assert (stopped[0, first:] == stop).all()
    streamed = []
    alone = client.generate(IDS[:1], 8, eos_token_id=stop, on_token=streamed.append)
    assert torch.equal(alone[0], free[0, : first + 1])
    assert torch.equal(torch.stack(streamed, dim=1), alone[:, 12:])


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_a_stop_string_ends_a_sequence_where_transformers_ends_it(pair, draft):
    """The string begins in the middle of one token and ends in the middle of the next."""
    _, client, whole = pair()
    vocab = {token: i for i, token in enumerate([*"abcdef", *(f"{i:02}" for i in range(6, 64))])}
    words = Tokenizer(models.BPE(vocab, merges=[]))
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    free = expected_tokens(whole, IDS[:1], count=8)
    one, two = tokenizer.convert_ids_to_tokens(free[0, 14:16])
    stop = dict(stop_strings=[one[-1] + two[0], "nobody writes this"], tokenizer=tokenizer)
    expected = whole.generate(input_ids=IDS[:1], max_new_tokens=8, do_sample=False, eos_token_id=None, **stop)
    assert torch.equal(expected, free[:, : expected.shape[1]])
    assert expected.shape[1] < free.shape[1]
    assert torch.equal(client.generate(IDS[:1], 8, eos_token_id=-1, draft=draft, **stop), expected)
    if draft is None:  # the other goes on
        both, ends = client.generate(IDS, 8, eos_token_id=-1, **stop), expected.shape[1]
        assert torch.equal(both[0, :ends], expected[0])
        assert (both[0, ends:] == expected[0, -1]).all()
        assert torch.equal(both[1], expected_tokens(whole, IDS, 8)[1])


def test_what_ends_a_sequence_is_the_models_own(pair, adapted):
    model = adapted()
    base, free = model.get_base_model(), expected_tokens(model, count=8)
    base.config.eos_token_id, base.generation_config.eos_token_id = 63, [63, free[0, 14].item()]
    _, client, whole = pair(model=model)
    tokens = client.generate(IDS[:1], 8)
    assert torch.equal(tokens, whole.generate(input_ids=IDS[:1], max_new_tokens=8, do_sample=False))
    base.config.eos_token_id, base.generation_config.eos_token_id = 7, 0
    assert writing.ends(base, None) == [0]
    base.generation_config.eos_token_id = None
    assert writing.ends(base, None) == []
    assert writing.ends(base, [3, -1]) == [3, -1]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize(
    ("what", "count"), [("embed", 1), ("embed", 3), ("residual", 2), ("residual", 7), ("receive", 1), ("receive", 4)]
)
def test_a_broken_link_neither_repeats_nor_loses_a_token(pair, family, what, count):
    """Also where the window of the KV cache slides, so that nothing can be taken out of it again."""
    first_k, options = (1, None) if family == "llama" else (0, SLIDING)
    server, client, whole = pair(family, first_k, options=options)
    seen = cut_at(client, what, count)
    same_tokens(client, whole)
    assert len(seen) > count
    assert server.sessions == 1
    same_tokens(client, whole, count=3)


@pytest.mark.parametrize("cut", [(0, 0), (1, 1)])
@pytest.mark.parametrize(
    ("what", "count"),
    [("embed", 1), ("residual", 2), ("receive", 1), ("residual_backward", 1), ("residual_backward", 2)],
)
def test_a_broken_link_loses_nothing_of_a_training_step(pair, same_gradients, cut, what, count):
    _, client, whole = pair("llama", *cut, m_scale=0.1)
    client.train_step(IDS, IDS)
    seen = cut_at(client, what, count)
    client.train_step(IDS, IDS)
    same_gradients(in_order(client), whole, IDS, IDS)
    assert len(seen) >= count
    same_tokens(client, whole, count=3)


def test_a_link_that_breaks_again_and_again(pair):
    _, client, whole = pair("mistral", options=SLIDING)
    stop, draw, cuts = threading.Event(), random.Random(0), []

    def saboteur():
        while not stop.wait(draw.uniform(0.02, 0.15)):
            call = client.wire._call
            if (
                call is not None and len(cuts) < 3
            ):  # until the next token, so that it comes also where every step takes longer than that
                call.cancel()
                cuts.append(1)

    thread = threading.Thread(target=saboteur)
    thread.start()
    try:
        for _ in range(3):
            same_tokens(client, whole, count=20, on_token=lambda _: cuts.clear())
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("work", ["generate", "guess", "train"])
def test_a_cloud_killed_in_the_middle_and_started_again(adapted, same_gradients, before, work):
    model = adapted(m_scale=0.1)
    whole = copy.deepcopy(model)
    process, address = cloud_process("127.0.0.1:0")
    processes = [process]

    def kill(number):
        if number == 6:
            process.kill()
            processes.append(cloud_process(address)[0])

    with DeviceClient(address, model, precision="fp32", retry_s=PATIENCE_S) as client:
        before(client.part, "residual", kill)
        if work == "generate":
            same_tokens(client, whole, count=5)
        elif work == "guess":
            same_tokens(client, whole, IDS[:1], 8, draft="lookup")
        else:
            for _ in range(2):
                client.train_step(IDS, IDS)
            same_gradients(in_order(client), whole, IDS, IDS)
    assert len(processes) == 2
    for each in processes:
        each.close()


@pytest.mark.parametrize("fault", ["no answer", "a broken link"])
def test_a_step_that_never_works_is_given_up(pair, before, fault):
    server, client, _ = pair(retry_s=1.0)
    client.generate(IDS, 1, eos_token_id=-1)
    given_up = threading.Event()
    if fault == "no answer":
        client.wire.timeout_s = 0.5
        before(server.part, "forward", lambda _: given_up.wait(PATIENCE_S))
    else:
        before(client.part, "residual", lambda _: client.wire._call.cancel())
    try:
        with pytest.raises(ConnectionError, match="no connection to"):
            client.generate(IDS, 1)
    finally:
        given_up.set()


def test_a_cloud_whose_code_fails_says_so_at_once_and_no_more(pair, before, caplog):
    """Trying again would work, and is not done."""
    server, client, whole = pair()
    before(server.part, "forward", fail_at(RuntimeError("/secret/path is full"), 1))
    with pytest.raises(RefusedError, match=r"^UNKNOWN: the cloud failed: RuntimeError$"):
        client.generate(IDS, 1)
    assert "/secret/path is full" in caplog.text
    same_tokens(client, whole, count=3)


def test_after_a_long_silence_it_goes_on(pair):
    """The cloud has ended the stream."""
    server, client, whole = pair(cloud={"limits": Limits(idle_s=0.2)})
    tokens = []

    def pause(token):
        tokens.append(token)
        if len(tokens) <= 2:
            wait_until(lambda: not server._streams)

    same_tokens(client, whole, on_token=pause)
    assert len(tokens) == 6


def test_one_client_does_one_thing_at_a_time_and_nothing_when_closed(pair):
    server, client, whole = pair()
    with pytest.raises(RuntimeError, match="this client is in the middle of a sequence"):
        client.generate(IDS, 3, eos_token_id=-1, on_token=lambda token: client.generate(IDS, 1))
    assert torch.equal(client.generate(IDS.int(), 3, eos_token_id=-1), expected_tokens(whole, count=3))
    client.close()
    with pytest.raises(RuntimeError, match="this client is closed"):
        client.generate(IDS, 1)
    wait_until(lambda: server.sessions == 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, IndexError])
def test_after_an_error_in_the_middle_of_a_step_the_next_works(pair, same_gradients, before, error):
    server, client, whole = pair(m_scale=0.1)
    before(client.part, "logits", fail_at(error, 1))
    with pytest.raises(error):
        client.train_step(IDS, IDS)
    same_tokens(client, whole, count=3)
    client.train_step(IDS, IDS)
    same_gradients(in_order(client), whole, IDS)
    client.close()
    wait_until(lambda: server.sessions == 0)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("cut", [(0, 0), (1, 1)])
def test_gradients_of_a_large_batch_do_not_underflow(pair, precision, cut):
    _, client, whole = pair("llama", *cut, precision=precision, m_scale=0.1)
    for _ in range(2):
        client.train_step(IDS, IDS, num_items=100_000)
        whole(input_ids=IDS, labels=IDS).loss.backward()
    crossings = 2 + 2 + 4 * (4 - sum(cut))  # hidden states and their gradients; of each layer u, v, and theirs
    for gradient, other in zip(in_order(client), gradients(whole).values(), strict=True):
        error = (gradient * 100_000 / 22 - other).norm()
        assert (
            error
            <= relative(crossings, getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[precision])) * other.norm()
        )


def test_the_smallest_gradients_are_numbers(pair):
    _, client, _ = pair(m_scale=0.1)
    with torch.no_grad():
        client.part.lm_head.weight.mul_(1e-40)
    client.train_step(IDS, IDS)
    assert all(gradient.isfinite().all() for gradient in in_order(client))


def test_no_proxy_stands_between(adapted, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        with CloudServer(adapted()) as cloud, DeviceClient(cloud.address, adapted(), retry_s=PATIENCE_S) as client:
            assert client.generate(IDS, 1).shape == (2, 13)


@pytest.mark.parametrize(("listening", "link"), [(True, None), (False, None), (False, "lan")])
def test_nobody_there_is_one_sentence_and_changes_no_gradient(adapted, monkeypatch, listening, link):
    """Nobody listens, which is not tried again; or who listens says nothing."""
    slept = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        message = f"^no connection to {address}: "
        if not listening:
            silent.close()
            message += "Connection refused: no cloud is there"
            monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
        with DeviceClient(
            address, adapted(), link=link, timeout_s=0.5 if listening else PATIENCE_S, retry_s=0.5
        ) as client:
            with pytest.raises(ConnectionError, match=message):
                client.generate(IDS, 1)
            first, *others = client.trainable()
            first.grad = torch.ones_like(first)
            with pytest.raises(ConnectionError, match=message):
                client.train_step(IDS, IDS)
            assert client.traffic.tokens == 0
    assert not slept
    assert (first.grad == 1).all()
    assert all(p.grad is None for p in others)


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_a_cloud_that_is_lost_is_said_as_long_as_it_lasts(adapted, monkeypatch):
    process, address = cloud_process()
    said = []
    with process, DeviceClient(address, adapted(), precision="fp32", retry_s=10) as client:
        client.on_silence = said.append
        client.generate(IDS, 2)
        assert not said
        process.kill()
        monkeypatch.setattr(connection, "time", Clock())
        with pytest.raises(ConnectionError, match=f"no connection to {address}"):
            client.generate(IDS, 2)
    seconds = [list(map(int, re.fullmatch(r"no answer for (\d+) s, trying for (\d+) more", s).groups())) for s in said]
    assert all(sum(each) in (9, 10, 11) for each in seconds)  # of rounded numbers
    silences = [silence for silence, _ in seconds]
    assert 3 <= silences[0] <= 5
    assert silences[-1] >= 6
    assert all(3 <= later - earlier <= 5 for earlier, later in itertools.pairwise(silences))


def test_silence_within_a_wait_is_said_and_is_not_the_end(pair, before, monkeypatch):
    """The cloud computes for long, and then it answers."""
    monkeypatch.setattr(messages, "TICK_S", 0.01)
    monkeypatch.setattr(connection, "SILENCE_S", 0.0)
    server, client, whole = pair()
    said, computed = [], threading.Event()

    def say(sentence):
        said.append(sentence)
        if len(said) == 3:
            computed.set()

    before(server.part, "forward", lambda _: computed.wait(PATIENCE_S))
    client.on_silence = say
    same_tokens(client, whole, count=3)
    assert len(said) >= 3
    assert all(re.fullmatch(r"no answer for \d+ s, trying for \d+ more", sentence) for sentence in said)


ONE, MASKED = IDS[:1], torch.full_like(IDS, -100)
FEW_WORDS = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
TOKEN_IDS = r"input_ids must be token ids, \(tokens,\) or \(batch, seq\)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.generate(torch.tensor(2)), TOKEN_IDS),
        (lambda c: c.generate(torch.empty(1, 0, dtype=torch.long)), TOKEN_IDS),
        (lambda c: c.generate(torch.ones(1, 2)), TOKEN_IDS),
        (lambda c: c.generate(IDS.bool(), 1), f"{TOKEN_IDS}.* of torch.bool"),
        (lambda c: c.generate([[1, 2], [3]], 1), rf"{TOKEN_IDS}, got \[\[1, 2\], \[3\]\]"),
        (lambda c: c.generate(torch.tensor([[1, 64]])), "input_ids must be between 0 and vocab - 1 = 63, got 64"),
        (lambda c: c.generate(torch.tensor([[-1, 6]])), "input_ids must be between 0 and vocab - 1 = 63, got -1"),
        (lambda c: c.generate(IDS, max_new_tokens=0), "max_new_tokens must be"),
        (lambda c: c.generate(IDS, 246), "257 tokens, the model has 256 positions"),
        (lambda c: c.generate(IDS, do_sample=True, temperature=0), "temperature must be greater than 0, got 0"),
        (lambda c: c.generate(IDS, do_sample=True, top_p=1.5), "top_p must be"),
        (lambda c: c.generate(IDS, do_sample=True, top_k=-1), "top_k must be"),
        (lambda c: c.generate(IDS, 1, do_sample="no"), "do_sample must be True or False, got 'no'"),
        (lambda c: c.generate(IDS, 1, eos_token_id="7"), "eos_token_id must be a whole number .*, got '7'"),
        (lambda c: c.generate(IDS, 1, eos_token_id=[3.5]), "eos_token_id must be a whole number .*, got 3.5"),
        (
            lambda c: c.generate(IDS, 1, stop_strings=["."]),
            r"stop_strings=\['.'\] are text: give the model's",
        ),
        (lambda c: c.generate(IDS, 1, stop_strings=["a", ""]), r"stop_strings must be .* not empty, got \['a', ''\]"),
        (lambda c: c.generate(IDS, 1, stop_strings=7), "stop_strings must be strings that are not empty, got 7"),
        (
            lambda c: c.generate(ONE, stop_strings="a", tokenizer=FEW_WORDS),
            "stop_strings='a' need a tokenizer that can write any text",
        ),
        (lambda c: c.generate(ONE, draft="guess"), "draft must be one of 'lookup', 'public', got 'guess'"),
        (lambda c: c.generate(ONE, draft="public"), "draft='public' counts text: give the model's tokenizer as well"),
        (lambda c: c.generate(ONE, draft_tokens=-1), "draft_tokens must be a whole number of at least 0, got -1"),
        (lambda c: c.generate(IDS, draft="lookup"), "draft='lookup' is for one sequence, got 2"),
        (lambda c: c.train_step(IDS, IDS.float()), "labels of a batch must be token ids, .* of torch.float32"),
        (lambda c: c.train_step(IDS, ONE[:, 1:]), r"labels of shape \(1, 11\) for ids of \(2, 12\)"),
        (lambda c: c.train_step(IDS, MASKED), "no label to predict: the first is not, and the other 22 are all -100"),
        (lambda c: c.train_step(IDS[:, :1], IDS[:, :1]), "no label to predict: the first is not, and the other 0"),
    ],
)
def test_bad_input_is_named_before_anything_is_sent(pair, call, message):
    _, client, _ = pair("gpt2")
    with pytest.raises(ValueError, match=message):
        call(client)
    assert client.traffic.sent_message_bytes == 0


def test_all_positions_of_opt_are_used_and_no_more():
    """Its embedding has two rows that are no positions."""
    mine, public = families.adapted("OPT", "M")
    with CloudServer(public, precision="fp32") as cloud, DeviceClient(cloud.address, mine, precision="fp32") as client:
        same_tokens(client, mine, IDS, 64 - 12 + 1)
        with pytest.raises(ValueError, match="65 tokens, the model has 64 positions"):
            client.generate(IDS, 64 - 12 + 2)


DOWN = dict(target_modules=["down_proj"])


@pytest.mark.parametrize(
    ("mine", "theirs", "cloud", "message"),
    [
        (dict(r_c2d=6), {}, {}, "--rank 6 here, 5 on the cloud"),
        (dict(projection_seed=1), {}, {}, "--seed 1 here, 0 on the cloud"),
        (dict(family="mistral"), {}, {}, "^FAILED_PRECONDITION: another --model here than on the cloud$"),
        (dict(target_modules=["q_proj"]), {}, {}, "--target q_proj of .* here, k_proj, q_proj, v_proj of"),
        ({}, dict(late=True), {}, "late False here, True on the cloud"),
        (DOWN, DOWN, dict(fold=True), r"projections .*--ladder, --fold or --rank \[\] here, \[5\] on the cloud"),
        (DOWN, dict(ladder=dict(r=5)), {}, r"projections \[1, 1, 1, 1\] here, \[\] on the cloud"),
    ],
)
def test_another_model_or_adapter_is_refused_with_both_values(pair, adapted, mine, theirs, cloud, message):
    _, client, _ = pair(model=adapted(**mine), config=theirs, cloud=cloud)
    with pytest.raises(RefusedError, match=message) as refused:
        client.generate(IDS, 1)
    assert refused.value.code.name == "FAILED_PRECONDITION"


@pytest.mark.parametrize(
    ("family", "first_k", "config"),
    [
        ("llama", 0, dict(lora=dict(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))),
        ("llama", 1, dict(lora=dict(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))),
        ("gpt2", 0, dict(lora=dict(r=2, target_modules=["c_attn"], modules_to_save=["wpe"], fan_in_fan_out=True))),
        ("phi3", 0, dict(target_modules="all-linear")),
        ("phi3", 0, dict(target_modules=["qkv_proj", "o_proj"])),
    ],
)
def test_whatever_learns_gets_its_own_gradient(pair, adapted, same_gradients, family, first_k, config):
    """An embedding as well, which LoRA trains and saves; and exchanges come in the order in which layers compute."""
    model = adapted(family, m_scale=0.1, **config)
    _, client, whole = pair(family, first_k, model=model, config=config)
    same_tokens(client, whole)
    for _ in range(2):  # what has learnt does not count as another model
        client.train_step(IDS, IDS)
    trained = config.get("lora", {}).get("modules_to_save", ())
    assert all(module in str(gradients(model).keys()) for module in trained)
    same_gradients(gradients(model), whole, IDS, IDS)


@pytest.mark.parametrize("rope", LENGTHS)
def test_another_devices_long_text_changes_nothing(adapted, rope):
    family, options = LENGTHS[rope]
    texts = [IDS[:1, :5], torch.cat([IDS, IDS], dim=1)[:1], IDS[:1, :5]]

    def model():
        return adapted(family, m_scale=0.1, options=options | {"max_position_embeddings": 16})

    expected = [expected_tokens(model(), ids, 8) for ids in texts]
    with CloudServer(model(), precision="fp32") as cloud:

        def generated(case):
            ids, mine = case
            with DeviceClient(cloud.address, mine, precision="fp32") as client:
                return [client.generate(ids, 8, eos_token_id=-1) for _ in range(5)]

        answers = at_once(generated, [(ids, model()) for ids in texts])
    for repeated, right in zip(answers, expected, strict=True):
        assert all(torch.equal(tokens, right) for tokens in repeated)


def test_clients_of_one_model_lose_no_gradient(adapted, same_gradients):
    model, steps = adapted(m_scale=0.1), 6
    whole = copy.deepcopy(model)
    with CloudServer(adapted(m_scale=0.0), precision="fp32") as cloud:

        def work(model):
            with DeviceClient(cloud.address, model, precision="fp32") as client:
                for _ in range(steps):
                    client.train_step(IDS, IDS)

        at_once(work, [model, model])
    same_gradients(gradients(model), whole, *[IDS] * 2 * steps)


def test_nothing_that_learns_is_said(pair, adapted):
    model = adapted()
    model.add_adapter("other", PrivateLoraConfig(r_c2d=5, r_d2c=3))
    model.set_adapter("default")
    _, client, _ = pair(model=model, adapter_name="other")
    with pytest.raises(ValueError, match="every M of 'other' is frozen"):
        client.train_step(IDS, IDS)
