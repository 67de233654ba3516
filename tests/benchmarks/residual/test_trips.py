"""What a prompt costs is taken off, whatever its length: what is left is counted, and the formulas'."""

import pytest
import torch

from benchmarks.residual import trips
from plpkg.residual import CloudServer, DeviceClient
from tests.residual.conftest import adapted_backbone, scheme


@pytest.mark.parametrize("name", ["qkv", "down", "fold", "late fold", "fold of two", "ladder", "gated ladder"])
def test_without_its_prompt_a_text_has_the_bytes_of_its_tokens(name):
    config, cut = scheme(name)
    model = adapted_backbone(**config)
    with CloudServer(model, **cut) as cloud, DeviceClient(cloud.address, model, **cut) as client:

        def per_token(prompt: int, new: int) -> tuple[float, float]:
            ids = torch.arange(prompt)[None] % 60 + 1
            before = client.traffic
            client.generate(ids, new, eos_token_id=-1)
            traffic, (up, down) = client.traffic - before, trips.prompt_bytes(client.part, prompt)
            return (traffic.sent_bytes - up) / new, (traffic.received_bytes - down) / new

        one = trips.device_cost(client.part)
        expected = one.up_bytes_per_token, one.down_bytes_per_token
        assert per_token(1, 3) == per_token(9, 1) == per_token(trips.PROMPT, 4) == expected
