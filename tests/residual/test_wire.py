import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

import plpkg
from plpkg.backbones import FAMILIES, fingerprint, random_backbone
from plpkg.residual import split, wire
from plpkg.residual.wire import Counter, Limits, is_loopback, pack, require_protection, unpack
from plpkg.residual.wire_pb2 import FromDevice, Part


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from(list(wire.PRECISIONS)))
def test_a_tensor_crosses_unchanged(shape, precision):
    dtype = wire.PRECISIONS[precision]
    tensor = torch.randn(shape).to(dtype)
    data = pack(tensor, dtype)
    assert len(data) == tensor.numel() * dtype.itemsize
    assert torch.equal(unpack(data, tuple(shape), dtype), tensor)


def test_a_view_is_packed_in_its_own_order():
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(unpack(pack(tensor, torch.float32), (3, 2), torch.float32), tensor)


def test_what_is_received_can_be_written_to():
    received = unpack(pack(torch.ones(2), torch.float32), (2,), torch.float32)
    received += 1
    assert received.tolist() == [2, 2]


@pytest.mark.parametrize("count", [0, 1, 23, 25, 48])
def test_another_number_of_bytes_is_refused(count):
    with pytest.raises(ValueError, match=rf"a tensor of shape \(2, 3\) has 24 bytes, got {count}"):
        unpack(bytes(count), (2, 3), torch.float32)


def test_a_value_too_large_for_the_wire_is_named():
    with pytest.raises(OverflowError, match="a value of 70000 is too large for fp16: take bf16 or fp32"):
        pack(torch.tensor([1.0, -70000.0]), torch.float16)
    pack(torch.tensor([1.0, -70000.0]), torch.bfloat16)
    assert unpack(pack(torch.tensor([float("inf")]), torch.float16), (1,), torch.float16).isinf()  # it was so before


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:0", True),
        ("[::1]:5", True),
        ("0.0.0.0:5", False),
        ("[::]:5", False),
        ("10.0.0.1:5", False),
        ("example.org:5", False),
        ("localhost.example.org:5", False),
        ("127.0.0.1.example.org:5", False),
    ],
)
def test_what_never_leaves_the_machine(address, local):
    assert is_loopback(address) is local
    if local:
        require_protection(address, encrypted=False, token=None)
    else:
        for encrypted, token, missing in (
            (False, None, "TLS and a token"), (False, "t", "TLS"), (True, None, "a token"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"is not on this machine: {missing} needed"):
                require_protection(address, encrypted=encrypted, token=token)
        require_protection(address, encrypted=True, token="t")


@pytest.mark.parametrize(
    "address", ["localhost", ":5", "localhost:", "localhost:http", "", "::1:5", "[::1]:70000", "localhost:\u0665"]
)
def test_an_address_has_a_host_and_a_port(address):
    with pytest.raises(ValueError, match="an address must be host:port"):
        is_loopback(address)


@pytest.mark.parametrize("token", ["", " ", "a\nb", "ü"])
def test_an_impossible_token_is_refused(token):
    with pytest.raises(ValueError, match="the token must be printable ASCII"):
        require_protection("localhost:1", encrypted=True, token=token)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fingerprint_is_the_base_models_alone(adapted, family):
    model = adapted(family)
    plain = random_backbone(
        family, num_layers=4, num_kv_heads=4 if family == "gpt2" else 2, vocab=64, hidden=32, intermediate=48
    )
    found = fingerprint(plain)
    assert fingerprint(model.get_base_model()) == found
    assert fingerprint(adapted(family, m_scale=2.0).get_base_model()) == found
    assert fingerprint(plain.bfloat16()) == found
    with torch.no_grad():
        plain.get_output_embeddings().weight[0, 0] += 1
    assert fingerprint(plain) != found


def test_every_difference_is_named_with_both_values(adapted):
    model = adapted()
    device, _ = split(model)
    here = wire.terms(model, device, "default", (0, 0), "fp16")
    assert not wire.differences(here, here)
    for field in here.DESCRIPTOR.fields:
        there = type(here).FromString(here.SerializeToString())
        if field.is_repeated:
            there.projections.append(7)
        else:
            value = getattr(here, field.name)
            setattr(there, field.name, value + "x" if isinstance(value, str) else value + 1)
        found = wire.differences(here, there)
        assert found.startswith(f"{field.name} is ")
        shown = (list(getattr(t, field.name)) if field.is_repeated else getattr(t, field.name) for t in (here, there))
        assert found == "{} is {!r} on the device and {!r} on the cloud".format(field.name, *shown)
    assert here.projections == [3, 3, 3, 3]
    assert here.targets == "k_proj, q_proj, v_proj of layers 0, 1, 2, 3"


def test_another_layer_or_setting_is_another_model(adapted):
    def of(**changes):
        model = adapted(**changes)
        return wire.terms(model, split(model)[0], "default", (0, 0), "fp16")

    found = wire.differences(of(layers_to_transform=[0, 1]), of(layers_to_transform=[2, 3]))
    assert found == "targets is 'k_proj, q_proj, v_proj of layers 0, 1' on the device and " + (
        "'k_proj, q_proj, v_proj of layers 2, 3' on the cloud"
    )
    assert wire.differences(of(), of(options={"rms_norm_eps": 0.5})).startswith("model is ")


def test_an_unknown_precision_is_named(adapted):
    model = adapted()
    with pytest.raises(ValueError, match="precision must be one of 'fp16', 'bf16', 'fp32', got 'int8'"):
        wire.terms(model, split(model)[0], "default", (0, 0), "int8")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (dict(sessions=0), "sessions must be a whole number of at least 1, got 0"),
        (dict(tokens=1.5), "tokens must be"),
        (dict(answer_s=0), "answer_s must be greater than 0, got 0"),
        (dict(idle_s=float("inf")), "idle_s must be greater than 0, got inf"),
    ],
)
def test_impossible_limits_are_named(limits, message):
    with pytest.raises(ValueError, match=message):
        Limits(**limits)


def test_a_counter_counts_and_subtracts():
    counter = Counter()
    message = FromDevice(residual=Part(group=1, data=bytes(10)))
    counter.sent(bytes(10), message)
    earlier = Counter(**vars(counter))
    counter.received(bytes(4), message)
    counter.round_trips += 1
    size = len(message.SerializeToString())
    assert vars(counter - earlier) == vars(Counter(0, 4, 0, size, 1))
    assert repr(counter) == f"10 bytes sent + 4 received, 1 round trips ({size} + {size} with protobuf)"
    assert counter.to_frame()["sent_bytes"].item() == 10


def test_the_generated_code_is_that_of_the_protocol_file(tmp_path):
    root = Path(plpkg.__file__).parent.parent
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--python_out={tmp_path}"]
    subprocess.run([*command, str(root / "plpkg/residual/wire.proto")], check=True)
    here, anew = (Path(f, "plpkg/residual/wire_pb2.py").read_text() for f in (root, tmp_path))
    descriptor = [line for line in here.splitlines() if line.startswith("DESCRIPTOR = ")]
    assert descriptor == [line for line in anew.splitlines() if line.startswith("DESCRIPTOR = ")]
