"""Gaussian noise on what a device sends, and a model that computes with it.

Attackers on embeddings: the nearest row, which is the likeliest (so that a search with known weights finds no better
one); ``recover_tokens`` with the language model's own expectation; inverters that learn from text with noise. On every
M's answers: ``recover_m`` from more tokens. PrivateLoRA (arXiv 2311.14030) has no such defence.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch.nn import functional

from plpkg.residual.adapter import matrices
from plpkg.residual.cut.parts import LAYERS
from plpkg.validation import number, whole_number


class NoisySender:
    """Gaussian noise on what is sent, anew each time: whoever sends a text twice lets the cloud average.

    Parameters
    ----------
    scale
        The noise's standard deviation relative to ``rms``.
    rms
        Root mean square of what is sent without noise: :func:`rms`. Without it each message's own.
    seed
        Of the noise. A device draws its own in secret.

    Attributes
    ----------
    std
        The noise's standard deviation in each entry; without ``rms`` that of each message with root mean square 1.
    """

    def __init__(self, scale: float, rms: float | None = None, seed: int = 0) -> None:
        self.std = number("scale", scale) * (1.0 if rms is None else number("rms", rms, open_low=True))
        self._relative_to_each = rms is None
        self._generator = torch.Generator().manual_seed(whole_number("seed", seed, 0))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(…, hidden)`` in and out."""
        std = self.std * rms(hidden) if self._relative_to_each else self.std
        return hidden + std * torch.randn(hidden.shape, generator=self._generator).to(hidden)


def rms(hidden: torch.Tensor) -> float:
    """Root mean square of all entries."""
    return hidden.double().square().mean().sqrt().item()


@contextlib.contextmanager
def sending(
    model,
    *,
    table: torch.Tensor | None = None,
    noise: NoisySender | None = None,
    first_k: int = 0,
    answers: NoisySender | None = None,
) -> Iterator[None]:
    """Let an uncut model compute with what a defended device would send.

    Parameters
    ----------
    model
        A Hugging Face causal model, with or without an adapter.
    table
        ``(vocab, hidden)``: the embedding on the device. The LM head stays as it is, even where both are one.
    noise
        Is added after ``first_k`` layers.
    answers
        Is added to what every M of the adapter ``"default"`` answers.

    Raises
    ------
    ValueError
        A table of another shape; a ``first_k`` that leaves no layer; ``answers`` where there is no M.
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder_layers = next(getattr(whole.base_model, name) for name in LAYERS if hasattr(whole.base_model, name))
    whole_number("first_k", first_k, 0, len(decoder_layers) - 1, "num_hidden_layers - 1")
    embedding, handles = whole.get_input_embeddings(), []
    answering = [] if answers is None else matrices(model).values()
    if table is not None:
        if table.shape != embedding.weight.shape:
            raise ValueError(f"table is {tuple(table.shape)}, the embedding {tuple(embedding.weight.shape)}")
        replaced = embedding.register_forward_hook(
            lambda _, args, output: functional.embedding(args[0], table).to(output)
        )
        handles.append(replaced)
    if noise is not None:
        place = decoder_layers[first_k - 1] if first_k else embedding
        handles.append(place.register_forward_hook(lambda _, args, output: noise(output)))
    for m in answering:
        handles.append(m.register_forward_hook(lambda _, args, output: answers(output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
