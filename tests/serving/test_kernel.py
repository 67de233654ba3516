"""The Triton kernel: interpreted in a process of its own, compiled without a GPU, run on one where there is one.

The interpreter shows that indices, masks and strides are right, with programs one after another and bf16 as fp32.
That the kernel compiles is a test of its own; that what is compiled is right shows on a GPU alone.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from plpkg.serving import kernel
from plpkg.serving.segments import Segments, sgmv

from rounding import assert_close
from waiting import interpreter

pytestmark = pytest.mark.skipif(not kernel.AVAILABLE, reason="Triton is not installed: pip install '.[gpu]'")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOKENS = 150
MIXED = [(0, 3, 1), (3, 3, 0), (3, 5, None), (5, 90, 2), (92, 93, 0), (93, 149, 1)]  # 90, 91 and 149 are in none
SINGLE = [(k, k + 1, k % 3) for k in range(20)]
INTERPRET = """
import sys, torch
from plpkg.serving import kernel
cases = torch.load(sys.argv[1])
for case in cases.values():
    kernel.add_sgmv(**case)
torch.save({name: case["y"] for name, case in cases.items()}, sys.argv[1])
"""


def arguments(dtype=torch.float32, rank=4, hidden=70, out=45, segments=MIXED):
    make = torch.Generator().manual_seed(rank)
    y, x, downs, ups = (
        torch.randn(shape, generator=make).to(dtype)
        for shape in ((TOKENS, out), (TOKENS, hidden), (3, rank, hidden), (3, out, rank))
    )
    return {"y": y, "x": x, "downs": downs, "ups": ups, "scales": [0.5, 3.0, -1.25], "segments": segments}


def turned(case):
    """The same product of the same numbers, in tensors as the backward pass has them, and of which none is dense."""
    wide = torch.zeros(TOKENS, 2 * case["x"].shape[1], dtype=case["x"].dtype)
    wide[:, ::2] = case["x"]
    return case | {
        "y": case["y"].T.contiguous().T,
        "x": wide[:, ::2],
        "downs": case["downs"].mT.contiguous().mT,
        "ups": case["ups"].mT.contiguous().mT,
        "scales": torch.tensor(case["scales"]).repeat_interleave(2)[::2],
    }


def poisoned(case):
    return case | {"downs": case["downs"].index_fill(0, torch.tensor([1]), torch.nan)}


CASES = {
    **{f"{dtype}, rank {rank}": arguments(dtype, rank) for dtype in DTYPES for rank in (1, 4, 16, 33)},
    **{f"{dtype}, turned": turned(arguments(dtype)) for dtype in DTYPES},
    **{f"{dtype}, poisoned": poisoned(arguments(dtype)) for dtype in DTYPES},
    "many tiles": arguments(rank=70, hidden=131, out=129),
    "one token each": arguments(segments=SINGLE),
    "no adapter": arguments(segments=[(0, 0, 1), (0, TOKENS, None)]),
    "float64": arguments(torch.float64, rank=5),
}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """The ``y`` of every case."""
    path = tmp_path_factory.mktemp("kernel") / "cases.pt"
    torch.save(CASES, path)
    interpreter(INTERPRET, path, env=os.environ | {"TRITON_INTERPRET": "1"})
    return torch.load(path)


def exact(y, x, downs, ups, scales, segments):
    """The definition, in float64."""
    x, downs, ups, result = x.double(), downs.double(), ups.double(), y.to(torch.float64, copy=True)
    for start, stop, index in segments:
        if index is not None:
            result[start:stop] += float(scales[index]) * x[start:stop] @ downs[index].T @ ups[index].T
    return result


def size(y, x, downs, ups, scales, segments):
    """The sum of the magnitudes of an element's terms."""
    return exact(y.abs(), x.abs(), downs.abs(), ups.abs(), [abs(float(scale)) for scale in scales], segments)


def terms(x, downs):
    """v and y are rounded to the dtype once (by the interpreter cut off, for bf16), summed in fp32 or better."""
    sums = torch.promote_types(x.dtype, torch.float32)
    return 3 + (x.shape[1] + downs.shape[1]) * torch.finfo(sums).eps / torch.finfo(x.dtype).eps


@pytest.mark.parametrize("name", [name for name in CASES if "poisoned" not in name])
def test_interpreted_it_is_the_float64_loop(interpreted, name):
    case = CASES[name]
    assert_close(interpreted[name], exact(**case), terms(case["x"], case["downs"]), size(**case))
    served = {token for start, stop, index in case["segments"] if index is not None for token in range(start, stop)}
    rest = [token for token in range(TOKENS) if token not in served]
    assert torch.equal(interpreted[name][rest], case["y"][rest])


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_adapter_leaves_a_row_bit_identical(interpreted, dtype):
    sound, other = interpreted[f"{dtype}, rank 4"], interpreted[f"{dtype}, poisoned"]
    assert torch.equal(sound[3:93], other[3:93])
    assert torch.equal(sound[149:], other[149:])
    assert other[:3].isnan().all()
    assert other[93:149].isnan().all()


@pytest.mark.parametrize(("segments", "block"), [(MIXED, 64), (SINGLE, 16), ([], 16)])
def test_each_token_of_an_adapter_is_in_one_block(segments, block):
    segments = Segments(segments)
    table, length = kernel._table(segments, torch.device("cpu"))
    assert length == block
    blocks = [(token, index) for at, stop, index in table.tolist() for token in range(at, min(at + block, stop))]
    runs = [(range(start, stop), index) for start, stop, index in segments if index is not None]
    assert blocks == [(token, index) for tokens, index in runs for token in tokens]
    assert kernel._table(segments, torch.device("cpu"))[0] is table  # made once


def test_one_dtype():
    case = arguments()
    with pytest.raises(ValueError, match=r"one dtype, got torch\.float32, torch\.float16, torch\.float32"):
        kernel.add_sgmv(**case | {"x": case["x"].half()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("rank", [1, 33])
def test_it_compiles_for_a_gpu_as_it_would_be_launched(monkeypatch, tmp_path, dtype, capability, rank):
    """Into machine code, by the ptxas that comes with Triton; the driver is what a GPU of this kind would have."""
    for name in ("TRITON_INTERPRET", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # nothing is taken from an earlier run
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set
    jitted, compiled = kernel._jitted(), []
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    gpu = SimpleNamespace(
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    monkeypatch.setattr(driver, "_active", gpu)

    class Launches:
        def __getitem__(self, grid):
            return lambda *args, **constants: compiled.append(jitted.run(*args, grid=grid, warmup=True, **constants))

    monkeypatch.setattr(kernel, "_jitted", Launches)
    kernel.add_sgmv(**arguments(dtype, rank, hidden=256, out=128))
    assert len(compiled) == 2
    for made in compiled:
        assert made.asm["cubin"]
        assert made.metadata.shared <= 48 * 1024  # what every GPU gives a program
        assert "tf32" not in made.asm["ptx"]
        kind = {torch.float16: ".f32.f16.f16", torch.bfloat16: ".f32.bf16.bf16", torch.float32: "fma.rn.f32"}[dtype]
        assert kind in made.asm["ptx"]  # tensor cores that sum in fp32; fp32's own units


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: not run in CI")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 16, 33])
def test_on_a_gpu_forward_and_backward_are_the_float64_loop(dtype, rank):
    case = arguments(dtype, rank) | {"segments": Segments(MIXED)}
    y, x, downs, ups = (case[name].cuda().requires_grad_() for name in ("y", "x", "downs", "ups"))
    result = sgmv(x, downs, ups, case["scales"], case["segments"])
    assert_close(result.cpu(), exact(**case | {"y": 0 * case["y"]}), terms(x, downs), size(**case))
    (dx,) = torch.autograd.grad(result, x, y)
    back = case | {"y": 0 * case["x"], "x": case["y"], "downs": case["ups"].mT, "ups": case["downs"].mT}
    assert_close(dx.cpu(), exact(**back), terms(y, downs), size(**back | {"y": case["x"]}))
