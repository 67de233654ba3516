"""The two-layer model that looks a value up: how ``data/retention/lookup.safetensors`` was trained."""

import random

import torch
from torch import nn
from torch.nn import functional

from plpkg.retention import tiny
from plpkg.retention.trials.tasks import lookup


def train_lookup(*, steps: int = 1500, lr: float = 5e-3, pairs: int = 16, seed: int = 0, progress: bool = True):
    """A model that looks a value up, whether the question stands after the pairs or (alone) before them.

    Asked last, it finds the value in its first layer, by the key that stands before it. Asked first, it is also taught
    to mark the pair that matches, by a linear probe on the first layer's output that is thrown away afterwards, so that
    the second layer can tell what is asked for from the unit itself. Without that it learns to read the question from
    the front at the end of the text instead, and no unit shows its worth.

    Parameters
    ----------
    steps, lr, seed, progress
        The arguments of :func:`plpkg.retention.trials.tiny.train`; half of each step's examples have the question last.
    pairs
        The most; each step draws a number from 2 up to a limit that grows in the first half.
    """
    model, draw = tiny.untrained(seed=seed), random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        probe = nn.Linear(model.config.hidden_size, 1)

    def loss(step: int) -> torch.Tensor:
        count = draw.randint(2, min(pairs, 5 + 2 * (pairs - 4) * step // steps))
        total = torch.zeros(())
        for i, question in enumerate(("first", "last")):
            task = lookup(32, count, question=question, seed=((seed + 1) * 1_000_003 + step) * 2 + i)
            output = model(tiny.packed(task.ids), use_cache=False, output_hidden_states=question == "first")
            total = total + functional.cross_entropy(output.logits[:, -1], task.values)
            if question == "first":
                marks = probe(output.hidden_states[1])[:, 4 : 4 + 2 * count : 2, 0]  # at the values
                matches = (task.prompt[:, 3::2] == task.prompt[:, 2:3]).float()
                total = total + 5 * functional.binary_cross_entropy_with_logits(marks, matches)
        return total

    return tiny.fit(model, [*model.parameters(), *probe.parameters()], loss, steps, lr, progress)
