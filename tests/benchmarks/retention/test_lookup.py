import torch

from benchmarks.retention.lookup import train_lookup
from plpkg.retention import tiny
from plpkg.retention.trials.tasks import lookup

from rounding import sampling_error


def test_lookup_learns_a_little():
    """The loss of a few steps falls; the whole training is the benchmark's."""
    model = train_lookup(steps=30, progress=False)
    task = lookup(1024, 4, question="first", seed=5)
    logits = [m(tiny.packed(task.ids)).logits[:, -1] for m in (tiny.untrained(), model)]
    before, after = (torch.nn.functional.cross_entropy(each, task.values, reduction="none") for each in logits)
    gain = before - after
    assert gain.mean() > sampling_error(gain.var().item(), len(gain))
