"""What the tests of this room share."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plpkg.backbones import random_backbone

ATTENTION = [
    *((family, kind) for family in ("llama", "mistral", "qwen2", "phi3", "gpt2") for kind in ("eager", "sdpa")),
    ("gemma2", "eager"),  # transformers has no SDPA for its soft cap
]
ROTARY = [(family, kind) for family, kind in ATTENTION if family != "gpt2"]
CONTRACTS = [("original", *case) for case in ATTENTION] + [("reassigned", *case) for case in ROTARY]


def _backbone(family="llama", attention="sdpa", *, num_layers=2, options=None, **dims):
    of_family = {"mistral": {"sliding_window": None}, "gemma2": {"layer_types": ["full_attention"] * num_layers}}
    chosen = {"attn_implementation": attention} | of_family.get(family, {}) | (options or {})
    kv_heads = 4 if family == "gpt2" else 2
    return random_backbone(family, num_layers=num_layers, num_kv_heads=kv_heads, vocab=64, options=chosen, **dims)


def other_family(name, **options):
    """A small random model of a family that :mod:`plpkg.backbones` does not have."""
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=64)
    sizes |= dict(vocab_size=64, num_hidden_layers=2, pad_token_id=0)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes | options)).eval()


def in_double(module):
    """The same weights in float64; the original stays as it is."""
    return copy.deepcopy(module).double()


@pytest.fixture(scope="session")
def backbone():
    """Makes a small random model of any family, without sliding windows."""
    return _backbone


@pytest.fixture
def model():
    """A small random Llama."""
    return _backbone()


@pytest.fixture
def ids():
    """``(2, 29)`` tokens."""
    return torch.randint(0, 64, (2, 29), generator=torch.Generator().manual_seed(0))
