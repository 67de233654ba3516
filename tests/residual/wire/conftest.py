"""Both ends over a real connection, and what breaks it."""

import contextlib
import copy

import pytest
import torch

from plpkg.residual import CloudServer, DeviceClient
from plpkg.residual.wire.messages import BrokenStreamError
from tests.residual.conftest import IDS, scheme

SLIDING = {"sliding_window": 8}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
    "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0],
}  # fmt: skip
LENGTHS = {
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "longrope": ("llama", {"rope_parameters": LONG_ROPE}),
    "longrope of Phi-3": ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 8}),
}


@pytest.fixture
def pair(adapted):
    """Starts a cloud and a device with models of their own; gives the cloud, the device and the whole model.

    ``config`` is of both models' adapters, which cross in one of the ``SCHEMES``; ``model`` stands in the place of the
    device's, ``served`` in that of the cloud's.
    """
    with contextlib.ExitStack() as opened:

        def start(
            family="llama", first_k=0, last_k=0, *, name="qkv", precision="fp32", m_scale=1.0, options=None,
            config=(), model=None, served=None, cloud=(), **device,
        ):  # fmt: skip
            settings, cut = scheme(name, family)
            settings |= dict(options=options) | dict(config)
            common = dict(first_k=first_k, last_k=last_k, precision=precision) | cut
            if model is None:
                model = adapted(family, m_scale=m_scale, **settings)
            if served is None:
                served = adapted(family, m_scale=0.0, **settings)
            server = opened.enter_context(CloudServer(served, **common | dict(cloud)))
            client = opened.enter_context(DeviceClient(server.address, model, **common, **device))
            return server, client, copy.deepcopy(model)

        yield start


@pytest.fixture
def before(monkeypatch):
    """``before(owner, method, act)``: ``act`` gets the number of each call, from 1. Returns those so far."""

    def watch(owner, method, act):
        original, calls = getattr(owner, method), []

        def watched(*arguments, **options):
            calls.append(len(calls) + 1)
            act(calls[-1])
            return original(*arguments, **options)

        monkeypatch.setattr(owner, method, watched)
        return calls

    return watch


def fail_at(error, *numbers):
    """For ``before``: the calls of these numbers end in an error."""

    def act(number):
        if number in numbers:
            raise error

    return act


def same_tokens(client, model, ids=IDS, count=6, **options):
    """The device writes what the whole model writes."""
    assert torch.equal(client.generate(ids, count, eos_token_id=-1, **options), expected_tokens(model, ids, count))


def expected_tokens(model, ids=IDS, count=6):
    return model.generate(input_ids=ids, max_new_tokens=count, do_sample=False, eos_token_id=None)


def in_order(client):
    """Gradients of the device's M in the order of the whole model's parameters: first layers, cloud's, last."""
    parts = [client.part.first, client.part.matrices, client.part.tail, client.part.last]
    return [p.grad for part in parts if part is not None for p in part.parameters() if p.grad is not None]


def cut_at(client, what, count):
    """The stream breaks at the ``count``-th time that the device does something, and only then."""
    owner = client.wire if what == "receive" else client.part
    original, seen = getattr(owner, what), []

    def breaking(*arguments, **options):
        result = original(*arguments, **options)
        if what == "receive" and arguments != ("final",):
            return result
        seen.append(1)
        if len(seen) == count:
            client.wire._call.cancel()
            if what == "receive":  # the answer was on its way, and lost
                raise BrokenStreamError("cut")
        return result

    setattr(owner, what, breaking)
    return seen
