"""What the tests of this room share: the three learners in small, with a few samples each."""

import copy

import torch
from torch import nn

from plpkg.autonomy.nets import MobileNet, WordLSTM
from plpkg.backbones import random_backbone
from plpkg.corpora.examples import Examples

VOCAB = 48
SIZES = dict(num_layers=2, hidden=16, num_heads=2, intermediate=24, vocab=VOCAB, max_positions=96)


def learner(name, dtype=torch.float64, seed=0):
    """A small random model: ``"lstm"``, ``"mobile"``, or a family of :data:`plpkg.backbones.FAMILIES`."""
    if name not in ("lstm", "mobile"):
        return random_backbone(name, dtype=dtype, seed=seed, **SIZES, options={"tie_word_embeddings": True})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = WordLSTM(VOCAB, 8, (10, 6)) if name == "lstm" else MobileNet(widths=(4, 6, 8))
    for module in model.modules():
        if hasattr(module, "running_var"):  # public statistics that are not those of any batch
            module.running_mean.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
            module.running_var.add_(0.5)
    return model.to(dtype).eval()


def images(count, seed=0, dtype=torch.float64):
    """Noise, whose labels can be learnt by heart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 8, 8, generator=generator).to(dtype)  # (samples, channels, height, width)
    return Examples(x, torch.randint(10, (count,), generator=generator))


def texts(count, seed=0, seq=6):
    """Rows of a language in which each word has one favourite follower, of any length from 1 to ``seq``."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (count, seq + 1), generator=generator)  # (samples, seq + 1)
    follows = torch.rand(count, seq, generator=generator) < 0.7  # (samples, seq)
    for place in range(seq):
        ids[:, place + 1] = torch.where(follows[:, place], 2 + (3 * ids[:, place]) % (VOCAB - 2), ids[:, place + 1])
    lengths = torch.randint(1, seq + 1, (count, 1), generator=generator)  # (samples, 1)
    padding = torch.arange(seq) >= lengths  # (samples, seq)
    return Examples(ids[:, :-1].masked_fill(padding, 0), ids[:, 1:].masked_fill(padding, -100))


def samples(name, count, seed=0, dtype=torch.float64):
    """Examples that suit :func:`learner`."""
    return images(count, seed, dtype) if name == "mobile" else texts(count, seed)


def values(model):
    """Copies of all that a model's state holds."""
    return copy.deepcopy(model.state_dict())


def same(one, other):
    """Whether two states have the same names and the same bits."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


class Net(nn.Module):
    """Some layers, in the order in which they are given, and what the forward pass does with them."""

    def __init__(self, steps, **layers):
        super().__init__()
        self.steps = steps
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.steps(self, x)
