"""What the tests of this room share, with those of its benchmarks."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from plpkg.backbones import FAMILIES, random_backbone
from plpkg.residual import LadderConfig, PrivateLoraConfig, split

from direct import Direct
from preloaded import Process
from rounding import assert_as_exact
from waiting import PATIENCE_S, line_of

IDS = torch.arange(2, 26).reshape(2, 12) % 23 + 1  # never 0, which pads
FOLDED = ["fold", "late fold", "fold of two"]
SCHEMES = ["qkv", "down", "late", *FOLDED, "ladder", "gated ladder"]
"""How an adapter's residuals can cross."""
SCHEMES_OF_FAMILIES = [(f, name) for f in FAMILIES for name in SCHEMES if f != "gemma2" or name not in FOLDED]
"""Gemma 2 has a norm between its last projection and the hidden state."""
CUTS = [(0, 0), (1, 0), (0, 1), (1, 2)]


class Counted(Direct):
    """Also keeps what crossed."""

    def __init__(self, device):
        super().__init__(device)
        self.log = []

    def send(self, group, u):
        assert not u.requires_grad
        self.log.append(("up", group, tuple(u.shape)))
        super().send(group, u)

    def receive(self, group):
        v = super().receive(group)
        self.log.append(("down", group, tuple(v.shape)))
        return v

    def backward(self, group, grad_v, wanted):
        self.log.append(("gradient" if wanted else "last gradient", group, tuple(grad_v.shape)))
        grad_u = super().backward(group, grad_v, wanted)
        return grad_u if wanted else None


def connected(model, first_k=0, last_k=0, **options):
    device, cloud = split(model, first_k, last_k, **options)
    transport = Counted(device)
    cloud.connect(transport)
    return device, cloud, transport


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def down(family):
    """The last projection of each layer's MLP."""
    return ["mlp.c_proj"] if family == "gpt2" else ["down_proj"]


def scheme(name, family="llama"):
    """What ``adapted_backbone`` and ``split`` take for one of :data:`SCHEMES`."""
    config = dict(ladder=dict(r=5, width=16 if name == "gated ladder" else None)) if "ladder" in name else {}
    if name in ("down", "fold", "late fold", "fold of two"):
        config["target_modules"] = down(family)
    if name == "fold of two":
        config["layers_to_transform"] = [0, 3]
    return config | (dict(late=True) if "late" in name else {}), dict(fold=True) if "fold" in name else {}


def precise(model):
    """The same weights in float64; the original stays as it is."""
    return copy.deepcopy(model).double()


def backbone(family="llama", **shape):
    """A small random model of any family."""
    kv_heads = 4 if family == "gpt2" else 2
    dims = dict(num_layers=4, num_kv_heads=kv_heads, vocab=64, hidden=32, intermediate=48)
    return random_backbone(family, **dims | shape)


def adapted_backbone(family="llama", m_scale=1.0, options=None, lora=None, ladder=None, shape=(), **config):
    """A small model with an adapter (PrivateLoRA's, a ladder, or LoRA's) that is random, not zero."""
    if ladder is not None:
        adapter = LadderConfig(**ladder)
    elif lora is not None:
        adapter = LoraConfig(**lora)
    else:
        adapter = PrivateLoraConfig(**dict(r_c2d=5, r_d2c=3) | config)
    model = get_peft_model(backbone(family, options=options, **dict(shape)), adapter)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(kind in name for kind in ("privatelora_M", "ladder_M", "lora_")):
                parameter.copy_(m_scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


adapted = adapted_backbone


CLOUD = """
import sys, torch
torch.set_num_threads(1)
from peft import get_peft_model
from plpkg.backbones import FAMILIES, random_backbone
from plpkg.residual import CloudServer, PrivateLoraConfig
seed = int(sys.argv[2])
model = random_backbone("llama", num_layers=4, num_kv_heads=2, vocab=64, hidden=32, intermediate=48, seed=seed)
with CloudServer(get_peft_model(model, PrivateLoraConfig(r_c2d=5, r_d2c=3)), sys.argv[1], precision="fp32") as cloud:
    print(cloud.address, flush=True)
    cloud.wait()
"""


def cloud_process(address="127.0.0.1:0"):
    """A cloud in a process of its own, for the model of ``adapted()``; the process, and the cloud's address."""
    process = Process(CLOUD, address, str(torch.Generator().manual_seed(0).initial_seed()))
    return process, line_of(process.stdout, r"^127\.0\.0\.1:\d+$").group()


def at_once(work, arguments):
    """What ``work`` gives for each argument, each in a thread of its own."""
    threads = ThreadPoolExecutor(len(arguments))
    try:
        return list(threads.map(work, arguments, timeout=PATIENCE_S))
    finally:
        threads.shutdown(wait=False)


@torch.no_grad()
def logits(model, ids=IDS):
    return model(input_ids=ids).logits


def reloaded(model, folder, family="llama", **options):
    """The adapter on another copy of its backbone."""
    model.save_pretrained(folder)
    return PeftModel.from_pretrained(backbone(family), folder, **options)


def assert_apart(*given):
    """What ``assert_as_exact`` refuses."""
    with pytest.raises(AssertionError, match="apart"):
        assert_as_exact(*given)


def _same_gradients(gradients, whole, *batches, labels=None):
    """``gradients``, by name or in the parameters' order, are those of the undivided model for these batches."""
    expected, exact = (_gradients(model, batches, labels) for model in (whole, precise(whole)))
    if isinstance(gradients, dict):
        assert gradients.keys() == expected.keys()
        gradients = [gradients[name] for name in expected]
    sizes = [gradient.norm() for gradient in exact.values()]  # so that a small matrix counts as much as a large one
    relative = (
        [g / size for g, size in zip(gs, sizes, strict=True)] for gs in (gradients, expected.values(), exact.values())
    )
    assert_as_exact(*relative)


def _gradients(model, batches, labels):
    model.zero_grad()
    for ids in batches:
        model(input_ids=ids, labels=ids if labels is None else labels).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(params=FAMILIES)
def family(request):
    """Each architecture family."""
    return request.param


@pytest.fixture(params=CUTS, ids="{0[0]} and {0[1]}".format)
def cut(request):
    """How many of the first and of the last layers stay on the device."""
    return request.param


@pytest.fixture(scope="session")
def same_gradients():
    """Compares gradients with those of a model in one process, matrix by matrix."""
    return _same_gradients


@pytest.fixture(scope="session", name="adapted")
def _adapted():
    return adapted_backbone
