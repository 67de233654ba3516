r"""The score that weighs quality by speed (PrivateLoRA article).

.. math:: M_S = \frac{TPS}{TPS_C} (\bar M - \bar M_{NT})
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from plpkg.validation import keywords, number


@keywords()
def score(
    tokens_per_s: float,
    gpu_tokens_per_s: float,
    accuracy: float | Sequence[float],
    untuned_accuracy: float | Sequence[float],
) -> float:
    """Gain in accuracy, times the share of the GPU's speed that is left: M_S.

    Parameters
    ----------
    tokens_per_s, gpu_tokens_per_s
        Speed of the method, and of the untuned model on the cloud.
    accuracy, untuned_accuracy
        Accuracy after and before tuning, in percent: one number, or one for each benchmark
        (their unrounded mean counts, as in the published table).

    Raises
    ------
    ValueError
        A speed is not positive, or the two lists of benchmarks differ in length.
    """
    tokens_per_s = number("tokens_per_s", tokens_per_s, open_low=True)
    gpu_tokens_per_s = number("gpu_tokens_per_s", gpu_tokens_per_s, open_low=True)
    after = _benchmarks("accuracy", accuracy)
    before = _benchmarks("untuned_accuracy", untuned_accuracy)
    if len(after) != len(before):
        raise ValueError(
            f"accuracy and untuned_accuracy must cover the same benchmarks, got {len(after)} and {len(before)}"
        )
    return tokens_per_s / gpu_tokens_per_s * (fmean(after) - fmean(before))


def _benchmarks(name: str, accuracy: Any) -> list[float]:
    """The accuracies of one or several benchmarks as a list."""
    is_text = isinstance(accuracy, str | bytes)  # number() refuses it below
    is_scalar = getattr(accuracy, "ndim", 1) == 0  # an array without dimensions has __iter__, but raises there
    one = is_text or is_scalar or not hasattr(accuracy, "__iter__")
    values = [accuracy] if one else list(accuracy)
    if not values:
        raise ValueError(f"{name} must hold at least one benchmark, got {accuracy!r}")
    return [number(name, value, 0, 100) for value in values]
