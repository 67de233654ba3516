import pytest
import torch
from hypothesis import given, strategies as st

from plpkg.residual.wire.tensors import PRECISIONS, pack, unpack


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from(list(PRECISIONS)))
def test_a_tensor_crosses_unchanged(shape, precision):
    dtype = PRECISIONS[precision]
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
    with pytest.raises(OverflowError, match=r"a value of 1e\+39 is too large for fp32"):
        pack(torch.tensor([1e39], dtype=torch.float64), torch.float32)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_neither_sent_nor_taken(value, precision):
    dtype = PRECISIONS[precision]
    with pytest.raises(FloatingPointError, match=r"what was to be sent, of shape \(2,\), is not finite"):
        pack(torch.tensor([1.0, value]), dtype)
    data = torch.tensor([1.0, value], dtype=dtype).view(torch.uint8).numpy().tobytes()
    with pytest.raises(ValueError, match=r"what has come, of shape \(2,\), is not finite"):
        unpack(data, (2,), dtype)
