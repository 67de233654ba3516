"""The two ends over a real connection, against the uncut model in one process, with everything that can break."""

import copy
import itertools
import random
import re
import socket
import threading
import time

import pytest
import torch

from plpkg import communication
from plpkg.backbones import FAMILIES
from plpkg.catalog import ModelShape
from plpkg.residual import CloudServer, DeviceClient, Limits, PrivateLoraConfig, RefusedError
from plpkg.residual.wire import connection, writing
from tests.residual.conftest import CUTS, IDS, at_once, cloud_process, precise
from tests.residual.wire.conftest import LENGTHS, LONG_ROPE, SLIDING, cut_at, expected_tokens, in_order

from rounding import assert_as_exact, relative
from waiting import PATIENCE_S, wait_until

LOSS = relative(64 + IDS[:, 1:].numel())  # a sum over the vocabulary in each token's, then over the tokens


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), CUTS)
def test_the_same_tokens_as_in_one_process(pair, family, first_k, last_k):
    _, client, whole = pair(family, first_k, last_k)
    assert torch.equal(client.generate(IDS, 6, eos_token_id=-1), expected_tokens(whole))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), CUTS)
def test_the_same_gradients_as_in_one_process(pair, same_gradients, family, first_k, last_k):
    _, client, whole = pair(family, first_k, last_k, m_scale=0.1)
    loss = client.train_step(IDS, IDS)
    assert loss == pytest.approx(whole(input_ids=IDS, labels=IDS).loss.item(), rel=LOSS)
    same_gradients(in_order(client), whole, IDS)


@pytest.mark.parametrize(
    ("family", "options"),
    [*((family, None) for family in FAMILIES), ("llama", {"rope_parameters": LONG_ROPE})],
)
def test_training_after_generating_and_generating_after_training(pair, same_gradients, family, options):
    """What generating leaves in the cloud's modules (long frequencies, say) is no hindrance to training."""
    _, client, whole = pair(family, options=options, m_scale=0.1)
    expected = expected_tokens(whole)
    for _ in range(2):
        assert torch.equal(client.generate(IDS, 6, eos_token_id=-1), expected)
        client.part.zero_grad()
        client.train_step(IDS, IDS)
        same_gradients(in_order(client), whole, IDS)


def test_gradients_add_up_until_an_optimizer_makes_its_step(pair, same_gradients):
    _, client, whole = pair(m_scale=0.1)
    items = 2 * 11
    for ids in IDS.split(1):
        client.train_step(ids, ids, num_items=items)
    same_gradients(in_order(client), whole, IDS)
    trainable = [p for p in client.part.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trainable]
    client.train_step(IDS, IDS, optimizer=torch.optim.SGD(trainable, lr=0.1))
    assert all(p.grad is None for p in trainable)
    assert not any(torch.equal(p, b) for p, b in zip(trainable, before, strict=True))


def test_labels_of_minus_100_are_not_predicted(pair, same_gradients):
    """Whole numbers of any width will do."""
    _, client, whole = pair(m_scale=0.1)
    labels = IDS.clone()
    labels[:, 5:] = -100
    loss = client.train_step(IDS.to(torch.int16), labels.int())
    assert loss == pytest.approx(whole(input_ids=IDS, labels=labels).loss.item(), rel=LOSS)
    same_gradients(in_order(client), whole, IDS, labels=labels)


def test_training_lowers_the_loss_and_never_changes_the_cloud(pair):
    server, client, _ = pair(m_scale=0.0)
    before = copy.deepcopy(server.part.state_dict())
    optimizer = torch.optim.Adam([p for p in client.part.parameters() if p.requires_grad], lr=0.05)
    losses = [client.train_step(IDS, IDS, optimizer=optimizer) for _ in range(15)]
    assert losses[0] > losses[7] > losses[14], losses
    after = server.part.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in server.part.parameters())


def same_bytes(traffic, formula):
    assert (8 * traffic.sent_bytes, 8 * traffic.received_bytes) == (formula.uplink_bits, formula.downlink_bits)
    assert traffic.round_trips == formula.round_trips


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("first_k", "last_k"), CUTS)
def test_the_bytes_are_those_of_the_formula(pair, precision, first_k, last_k):
    server, client, whole = pair(first_k=first_k, last_k=last_k, precision=precision, m_scale=0.1)
    shape = ModelShape.from_config(whole.get_base_model().config, "tiny")
    common = dict(batch=2, first_k=first_k, last_k=last_k, bits=32 if precision == "fp32" else 16)

    def check(before, phase, tokens):
        formula = communication.low_rank(shape, r_c2d=5, r_d2c=3, phase=phase, tokens=tokens, **common)
        same_bytes(client.traffic - before, formula)

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
    _, client, whole = pair(precision="fp32", m_scale=0.1, config=config)
    shape = ModelShape.from_config(whole.get_base_model().config, "tiny")
    before = client.traffic
    client.train_step(IDS, IDS)
    crossed = client.traffic - before
    same_gradients(in_order(client), whole, IDS)
    same_bytes(
        crossed,
        communication.low_rank(shape, r_c2d=5, r_d2c=3, phase="training", tokens=12, batch=2, bits=32, **formula),
    )
    projections = sum(client.terms.projections)
    assert crossed.sent_bytes == 4 * 24 * (2 * 32 + projections * 3 + (projections - lowest) * 5)


def test_full_activations_cross_as_the_formula_says(pair):
    lora = dict(r=2, target_modules=["q_proj", "k_proj", "v_proj"])
    _, client, whole = pair(precision="fp16", m_scale=0.2, config=dict(lora=lora))
    shape = ModelShape.from_config(whole.get_base_model().config, "tiny")
    marks = []
    tokens = client.generate(IDS, 6, eos_token_id=-1, on_token=lambda token: marks.append(client.traffic))
    assert torch.equal(tokens, expected_tokens(whole))
    common = dict(projections=3, endpoints=True, baseline="actual")
    same_bytes(marks[-1] - marks[0], communication.full_activations(shape, tokens=5, batch=2, **common))


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


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize(
    ("what", "count"), [("embed", 1), ("embed", 3), ("residual", 2), ("residual", 7), ("receive", 1), ("receive", 4)]
)
def test_a_broken_link_neither_repeats_nor_loses_a_token(pair, family, what, count):
    """Also where the window of the KV cache slides, so that nothing can be taken out of it again."""
    options = SLIDING if family != "llama" else None
    first_k = 1 if family == "llama" else 0
    server, client, whole = pair(family, first_k, link="lan", options=options)
    seen = cut_at(client, what, count)
    assert torch.equal(client.generate(IDS, 6, eos_token_id=-1), expected_tokens(whole))
    assert len(seen) > count
    assert server.sessions == 1
    assert torch.equal(client.generate(IDS, 3, eos_token_id=-1), expected_tokens(whole, count=3))


@pytest.mark.parametrize("cut", [(0, 0), (1, 1)])
@pytest.mark.parametrize(
    ("what", "count"),
    [("embed", 1), ("residual", 2), ("receive", 1), ("residual_backward", 1), ("residual_backward", 2)],
)
def test_a_broken_link_loses_nothing_of_a_training_step(pair, same_gradients, cut, what, count):
    _, client, whole = pair("llama", *cut, m_scale=0.1, link="lan")
    client.train_step(IDS, IDS)
    seen = cut_at(client, what, count)
    client.train_step(IDS, IDS)
    same_gradients(in_order(client), whole, IDS, IDS)
    assert len(seen) >= count
    assert torch.equal(client.generate(IDS, 3, eos_token_id=-1), expected_tokens(whole, count=3))


def test_a_link_that_breaks_again_and_again(pair):
    _, client, whole = pair("mistral", link="lan", options=SLIDING)
    stop, draw, cuts = threading.Event(), random.Random(0), []

    def saboteur():
        while not stop.wait(draw.uniform(0.02, 0.15)):
            if len(cuts) < 3:  # until the next token, so that it comes also where every step takes longer than that
                client.relay.cut()
                cuts.append(1)

    thread = threading.Thread(target=saboteur)
    thread.start()
    try:
        generated = [client.generate(IDS, 20, eos_token_id=-1, on_token=lambda _: cuts.clear()) for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    expected = expected_tokens(whole, count=20)
    assert all(torch.equal(tokens, expected) for tokens in generated)


def test_a_cloud_that_began_anew_gets_the_whole_sequence(adapted):
    model, tokens = adapted(), []
    servers = [CloudServer(adapted(m_scale=0.0), precision="fp32").__enter__()]

    def began_anew():
        servers[-1].stop()
        servers.append(CloudServer(adapted(m_scale=0.0), servers[0].address, precision="fp32").__enter__())

    def on_token(token):
        tokens.append(token)
        if len(tokens) == 4:
            began_anew()

    with DeviceClient(servers[0].address, model, precision="fp32") as client:
        assert torch.equal(client.generate(IDS, 8, eos_token_id=-1, on_token=on_token), expected_tokens(model, count=8))
        began_anew()
        assert client.train_step(IDS, IDS) > 0
    servers[-1].stop()


@pytest.mark.parametrize("work", ["generate", "guess", "train"])
def test_a_cloud_killed_in_the_middle_and_started_again(adapted, same_gradients, work):
    model = adapted(m_scale=0.1)
    whole = copy.deepcopy(model)
    process, address = cloud_process("127.0.0.1:0")
    with DeviceClient(address, model, precision="fp32", retry_s=PATIENCE_S) as client:
        original, seen, processes = client.part.residual, [], [process]

        def kill(*arguments, **options):
            seen.append(1)
            if len(seen) == 6:
                processes[0].kill()
                processes.append(cloud_process(address)[0])
            return original(*arguments, **options)

        client.part.residual = kill
        if work == "generate":
            assert torch.equal(client.generate(IDS, 5, eos_token_id=-1), expected_tokens(whole, count=5))
        elif work == "guess":
            tokens = client.generate(IDS[:1], 8, eos_token_id=-1, draft="backbone")
            assert torch.equal(tokens, expected_tokens(whole, IDS[:1], 8))
        else:
            for _ in range(2):
                client.train_step(IDS, IDS)
            same_gradients(in_order(client), whole, IDS, IDS)
    assert len(processes) == 2
    for each in processes:
        each.close()


def test_sixteen_devices_at_once_each_with_its_own_adapter(adapted, same_gradients):
    models = [adapted(m_scale=0.1 * i) for i in range(16)]
    expected = [expected_tokens(model, count=5) for model in models]
    assert len({tuple(tokens.flatten().tolist()) for tokens in expected}) > 4
    wholes = [copy.deepcopy(model) for model in models]
    with CloudServer(adapted(m_scale=0.0), precision="fp32") as cloud:

        def work(model):
            with DeviceClient(cloud.address, model, precision="fp32") as client:
                tokens = client.generate(IDS, 5, eos_token_id=-1)
                client.train_step(IDS, IDS)
                return tokens

        generated = at_once(work, models)
        wait_until(lambda: cloud.sessions == 0)
    for model, whole, tokens, right in zip(models, wholes, generated, expected, strict=True):
        assert torch.equal(tokens, right)
        same_gradients(gradients(model), whole, IDS)


def test_a_cloud_that_stops_answering_in_the_middle_is_given_up(pair):
    server, client, _ = pair(retry_s=2.0)
    client.generate(IDS, 1, eos_token_id=-1)
    client._connection.timeout_s = 0.5
    stuck = threading.Event()
    original = server.part.forward
    server.part.forward = lambda *arguments, **options: (stuck.wait(PATIENCE_S), original(*arguments, **options))[1]
    try:
        with pytest.raises(ConnectionError, match="no connection to"):
            client.generate(IDS, 1)
    finally:
        stuck.set()


def test_a_step_that_never_works_is_given_up(pair):
    _, client, _ = pair(link="lan", retry_s=1.0)
    original = client.part.residual

    def cuts(*arguments, **options):
        client.relay.cut()
        return original(*arguments, **options)

    client.part.residual = cuts
    with pytest.raises(ConnectionError, match="no connection to"):
        client.generate(IDS, 1)


def fail_once(part, method, error):
    """The next call of a method, and no later one, ends in this error."""
    original = getattr(part, method)

    def fails(*arguments, **options):
        setattr(part, method, original)
        raise error

    setattr(part, method, fails)


def test_a_cloud_whose_code_fails_says_so_at_once_and_no_more(pair, caplog):
    server, client, whole = pair(retry_s=100 * PATIENCE_S)
    fail_once(server.part, "forward", RuntimeError("/secret/path is full"))
    began = time.monotonic()
    with pytest.raises(RefusedError, match=r"^UNKNOWN: the cloud failed: RuntimeError$"):
        client.generate(IDS, 1)
    assert time.monotonic() - began < PATIENCE_S
    assert "/secret/path is full" in caplog.text
    assert torch.equal(client.generate(IDS, 3, eos_token_id=-1), expected_tokens(whole, count=3))


def test_after_a_long_silence_it_goes_on(pair):
    server, client, whole = pair(cloud={"limits": Limits(idle_s=0.2)})
    pauses = []

    def pause(token):
        if len(pauses) < 2:
            time.sleep(0.8)
        pauses.append(token)

    assert torch.equal(client.generate(IDS, 6, eos_token_id=-1, on_token=pause), expected_tokens(whole))
    assert server.sessions == 1


def test_one_client_does_one_thing_at_a_time_and_nothing_when_closed(pair):
    server, client, whole = pair()
    with pytest.raises(RuntimeError, match="this client is in the middle of a sequence"):
        client.generate(IDS, 3, eos_token_id=-1, on_token=lambda token: client.generate(IDS, 1))
    assert torch.equal(client.generate(IDS.int(), 3, eos_token_id=-1), expected_tokens(whole, count=3))
    client.close()
    with pytest.raises(RuntimeError, match="this client is closed"):
        client.generate(IDS, 1)
    assert server.sessions == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, IndexError])
def test_after_an_error_in_the_middle_of_a_step_the_next_works(pair, same_gradients, error):
    server, client, whole = pair(m_scale=0.1)
    fail_once(client.part, "logits", error)
    with pytest.raises(error):
        client.train_step(IDS, IDS)
    assert torch.equal(client.generate(IDS, 3, eos_token_id=-1), expected_tokens(whole, count=3))
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
    for _ in range(2):
        whole(input_ids=IDS, labels=IDS).loss.backward()
    crossings = 2 + 2 + 4 * (4 - sum(cut))  # hidden states and their gradients; of each layer u, v, and theirs
    for gradient, other in zip(in_order(client), gradients(whole).values(), strict=True):
        error = (gradient * 100_000 / 22 - other).norm()
        assert error <= relative(crossings, client.dtype) * other.norm()


def test_what_ends_a_sequence_is_the_models_own(pair, adapted):
    model = adapted()
    free = expected_tokens(model, count=8)
    base = model.get_base_model()
    base.config.eos_token_id, base.generation_config.eos_token_id = 63, [63, free[0, 14].item()]
    _, client, whole = pair(model=model)
    tokens = client.generate(IDS[:1], 8)
    assert torch.equal(tokens, whole.generate(input_ids=IDS[:1], max_new_tokens=8, do_sample=False))


def test_no_proxy_stands_between(adapted, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        with CloudServer(adapted()) as cloud, DeviceClient(cloud.address, adapted(), retry_s=PATIENCE_S) as client:
            assert client.generate(IDS, 1).shape == (2, 13)


def test_more_tokens_than_there_are_positions_are_refused(pair):
    _, client, _ = pair("gpt2")
    with pytest.raises(ValueError, match="257 tokens, the model has 256 positions"):
        client.generate(IDS, 246)


@pytest.mark.parametrize("listening", [True, False])
def test_nobody_there_is_one_sentence(adapted, listening):
    """Nobody listens, or who listens says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        if not listening:
            silent.close()
        with DeviceClient(address, adapted(), timeout_s=0.5, retry_s=0.5) as client:
            with pytest.raises(ConnectionError, match=f"no connection to {address}"):
                client.generate(IDS, 1)
            parameters = [p for p in client.part.parameters() if p.requires_grad]
            parameters[0].grad = torch.ones_like(parameters[0])
            with pytest.raises(ConnectionError):
                client.train_step(IDS, IDS)
    assert [p.grad is None for p in parameters] == [False] + [True] * (len(parameters) - 1)
    assert (parameters[0].grad == 1).all()


@pytest.mark.parametrize("link", [None, "lan"])
def test_a_first_connection_that_is_refused_is_not_tried_again(adapted, monkeypatch, link):
    """A relay in between would accept it."""
    slept = []
    monkeypatch.setattr(connection.time, "sleep", slept.append)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with DeviceClient(address, adapted(), link=link) as client:
        with pytest.raises(
            ConnectionError, match=f"^no connection to {address}: Connection refused: no cloud is there"
        ):
            client.generate(IDS, 1)
        assert not slept
        assert client.traffic.tokens == 0


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
    assert [sum(each) in (9, 10, 11) for each in seconds] == [True] * len(seconds)  # of rounded numbers
    silences = [silence for silence, _ in seconds]
    assert 3 <= silences[0] <= 5
    assert silences[-1] >= 6
    assert all(3 <= later - earlier <= 5 for earlier, later in itertools.pairwise(silences))


def test_silence_within_a_wait_is_said_and_is_not_the_end(pair, monkeypatch):
    """The cloud computes for long, and then it answers."""
    monkeypatch.setattr(connection, "TICK_S", 0.01)
    monkeypatch.setattr(connection, "SILENCE_S", 0.0)
    server, client, whole = pair()
    said, computed = [], threading.Event()

    def say(sentence):
        said.append(sentence)
        if len(said) == 3:
            computed.set()

    original = server.part.forward
    server.part.forward = lambda *arguments, **options: (computed.wait(PATIENCE_S), original(*arguments, **options))[1]
    client.on_silence = say
    assert torch.equal(client.generate(IDS, 3, eos_token_id=-1), expected_tokens(whole, count=3))
    assert len(said) >= 3
    assert all(re.fullmatch(r"no answer for \d+ s, trying for \d+ more", sentence) for sentence in said)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), [(0, 0), (1, 1)])
def test_logits_are_those_of_the_whole_model(pair, family, first_k, last_k):
    _, client, whole = pair(family, first_k, last_k)
    before = client.traffic
    logits = client.logits(IDS)
    assert_as_exact(logits, whole(input_ids=IDS).logits, precise(whole)(input_ids=IDS).logits)
    shape = ModelShape.from_config(whole.get_base_model().config, "tiny")
    if whole.config.model_type == "llama":
        run = dict(phase="prefill", tokens=12, batch=2, bits=32, final_hidden="all", first_k=first_k, last_k=last_k)
        same_bytes(client.traffic - before, communication.low_rank(shape, r_c2d=5, r_d2c=3, **run))
    assert torch.equal(client.generate(IDS, 3, eos_token_id=-1), expected_tokens(whole, count=3))  # all is as it was


@pytest.mark.parametrize("what", ["embed", "residual", "receive"])
def test_a_broken_link_loses_nothing_of_the_logits(pair, what):
    _, client, _ = pair(link="lan")
    expected = client.logits(IDS)
    seen = cut_at(client, what, 1)
    assert torch.equal(client.logits(IDS), expected)
    assert seen


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.generate(torch.tensor([1, 2])), r"input_ids must be whole numbers of shape \(batch, seq\)"),
        (lambda c: c.generate(torch.empty(1, 0, dtype=torch.long)), "input_ids must be whole numbers"),
        (lambda c: c.generate(torch.ones(1, 2)), "input_ids must be whole numbers"),
        (lambda c: c.generate(IDS.bool(), 1), "input_ids must be whole numbers of shape .*, got torch.bool"),
        (lambda c: c.generate([[1, 2]], 1), "input_ids must be a tensor of shape .batch, seq., got a list"),
        (lambda c: c.generate(torch.tensor([[1, 64]])), "input_ids must be between 0 and vocab - 1 = 63, got 64"),
        (lambda c: c.generate(torch.tensor([[-1, 6]])), "input_ids must be between 0 and vocab - 1 = 63, got -1"),
        (lambda c: c.generate(IDS, max_new_tokens=0), "max_new_tokens must be"),
        (lambda c: c.generate(IDS, do_sample=True, temperature=0), "temperature must be greater than 0, got 0"),
        (lambda c: c.generate(IDS, do_sample=True, top_p=1.5), "top_p must be"),
        (lambda c: c.generate(IDS, do_sample=True, top_k=-1), "top_k must be"),
        (lambda c: c.generate(IDS, 1, do_sample="no"), "do_sample must be True or False, got 'no'"),
        (lambda c: c.generate(IDS, 1, eos_token_id="7"), "eos_token_id must be a whole number of at least -1, got '7'"),
        (lambda c: c.generate(IDS, 1, eos_token_id=[3.5]), "eos_token_id must be a whole number .*, got 3.5"),
        (lambda c: c.train_step(IDS, IDS.float()), "labels must be whole numbers of shape .*, got torch.float32"),
        (
            lambda c: c.train_step(IDS, IDS[:, 1:]),
            r"labels of shape \(2, 11\) for input_ids of shape \(2, 12\)",
        ),
        (
            lambda c: c.train_step(IDS, torch.full_like(IDS, -100)),
            "no label to predict: the first is not, and the other 22 are all -100",
        ),
        (lambda c: c.train_step(IDS[:, :1], IDS[:, :1]), "no label to predict: the first is not, and the other 0"),
    ],
)
def test_bad_input_is_named_before_anything_is_sent(pair, call, message):
    _, client, _ = pair()
    with pytest.raises(ValueError, match=message):
        call(client)
    assert client.traffic.sent_message_bytes == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(r_c2d=6), "--rank 6 here, 5 on the cloud"),
        (dict(projection_seed=1), "--seed 1 here, 0 on the cloud"),
        (dict(family="mistral"), "--model .* here, .* on the cloud"),
        (dict(target_modules=["q_proj"]), "--target q_proj of .* here, k_proj, q_proj, v_proj of"),
    ],
)
def test_another_model_or_adapter_is_refused_with_both_values(pair, adapted, config, message):
    _, client, _ = pair(model=adapted(**config))
    with pytest.raises(RefusedError, match=message) as refused:
        client.generate(IDS, 1)
    assert refused.value.code.name == "FAILED_PRECONDITION"


def test_bytes_on_the_tcp_stream_are_counted_by_the_relay(pair):
    _, client, _ = pair(precision="fp16", link="lan")
    client.generate(IDS, 4, eos_token_id=-1)
    traffic = client.traffic
    assert traffic.sent_message_bytes < client.relay.uplink_bytes < traffic.sent_message_bytes + 4000
    assert traffic.received_message_bytes < client.relay.downlink_bytes < traffic.received_message_bytes + 4000


@pytest.mark.parametrize(
    ("family", "module", "first_k"), [("llama", "embed_tokens", 0), ("llama", "embed_tokens", 1), ("gpt2", "wpe", 0)]
)
def test_an_embedding_that_learns_gets_its_own_gradient(pair, adapted, same_gradients, family, module, first_k):
    model = adapted(family, m_scale=0.1, modules_to_save=[module])
    _, client, whole = pair(family, first_k, model=model)
    client.train_step(IDS, IDS)
    client.train_step(IDS, IDS)  # what has learnt does not count as another model
    assert any(module in name for name in gradients(model))
    same_gradients(gradients(model), whole, IDS, IDS)


@pytest.mark.parametrize("targets", ["all-linear", ["qkv_proj", "o_proj"]])
def test_exchanges_come_in_the_order_in_which_layers_compute(pair, adapted, same_gradients, targets):
    model = adapted("phi3", m_scale=0.1, target_modules=targets)
    _, client, whole = pair("phi3", model=model, config=dict(target_modules=targets))
    assert torch.equal(client.generate(IDS, 6, eos_token_id=-1), expected_tokens(whole))
    client.train_step(IDS, IDS)
    same_gradients(gradients(model), whole, IDS)


@pytest.mark.parametrize("rope", LENGTHS)
def test_another_devices_long_text_changes_nothing(adapted, rope):
    family, options = LENGTHS[rope]
    options = options | {"max_position_embeddings": 16}
    short, long = IDS[:1, :5], torch.cat([IDS, IDS], dim=1)[:1]

    def model():
        return adapted(family, m_scale=0.1, options=options)

    texts = [short, long, short]
    expected = [expected_tokens(model(), ids, 8) for ids in texts]
    with CloudServer(model(), precision="fp32") as cloud:

        def generated(case):
            ids, mine = case
            with DeviceClient(cloud.address, mine, precision="fp32") as client:
                return [client.generate(ids, 8, eos_token_id=-1) for _ in range(5)]

        answers = at_once(generated, [(ids, model()) for ids in texts])
    for repeated, right in zip(answers, expected, strict=True):
        assert all(torch.equal(tokens, right) for tokens in repeated)


def test_the_smallest_gradients_are_numbers(pair):
    _, client, whole = pair(m_scale=0.1)
    for model in (whole, client):
        head = model.part.lm_head if model is client else model.get_base_model().lm_head
        with torch.no_grad():
            head.weight.mul_(1e-40)
    client.train_step(IDS, IDS)
    assert all(gradient.isfinite().all() for gradient in in_order(client))


def test_clients_of_one_model_lose_no_gradient(adapted, same_gradients):
    model = adapted(m_scale=0.1)
    whole, steps = copy.deepcopy(model), 6
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


def test_token_zero_can_end_a_sequence(adapted):
    model = adapted()
    base = model.get_base_model()
    base.config.eos_token_id, base.generation_config.eos_token_id = 7, 0
    assert writing.ends(base, None) == [0]
    base.generation_config.eos_token_id = None
    assert writing.ends(base, None) == []
    assert writing.ends(base, [3, -1]) == [3, -1]
