"""A text that device and cloud read together, each into its own KV cache."""

from collections.abc import Sequence

import torch

from plpkg.residual.wire.layers import RemoteLayers


class Reading:
    """Reads what the cloud has not read yet: all of the text, where the stream has broken.

    Parameters
    ----------
    layers
        The cloud's.
    anew_beyond
        The length beyond which the model reads all of a text again, if it has one.
    chunk_size
        The most tokens that go up at a time.
    """

    def __init__(self, layers: RemoteLayers, anew_beyond: int | None = None, chunk_size: int | None = None) -> None:
        self._layers, self._anew_beyond, self._chunk_size = layers, anew_beyond, chunk_size
        self._stream, self._cache = -1, None

    def next_logits(self, ids: torch.Tensor, guesses: Sequence[int] = (), *, every: bool = False) -> torch.Tensor:
        """Logits of what follows ``ids (batch, seq)`` and each guess: ``(batch, guesses + 1, vocab)``.

        With ``every`` of what follows each token.

        Raises
        ------
        FloatingPointError
            They are not finite.
        """
        if guesses:
            ids = torch.cat([ids, torch.tensor([guesses])], dim=1)
        wanted = ids.shape[1] if every else len(guesses) + 1
        logits = self._layers.wire.step(self._read, ids, wanted)
        if not logits.amax(-1).isfinite().all():
            raise FloatingPointError("the logits are not finite: the adapter, or the backbone, is damaged or overflows")
        return logits

    def cut_back(self, keep: int) -> None:
        """Forget all but the first ``keep`` tokens: guesses that were wrong."""
        self._cache.cut_back(keep)

    def _read(self, ids: torch.Tensor, wanted: int) -> torch.Tensor:
        stream, length = self._layers.wire.stream, ids.shape[1]
        turned = self._anew_beyond is not None and self._cache and self._cache.seen <= self._anew_beyond < length
        if stream != self._stream or turned:
            self._stream, self._cache = stream, self._layers.part.new_cache()
        if self._chunk_size is not None:
            while length - self._cache.seen > self._chunk_size:
                self._pass(ids[:, self._cache.seen :][:, : self._chunk_size], 1)
                self._cache.cut_back(self._cache.seen)
        return self._pass(ids[:, self._cache.seen :], wanted)

    def _pass(self, ids: torch.Tensor, wanted: int) -> torch.Tensor:
        part, keep = self._layers.part, self._cache.seen
        hidden = part.embed(ids, cache=self._cache)
        positions = wanted if part.last is None else ids.shape[1]  # the KV caches of its layers have to be filled
        final = self._layers(hidden, positions, cache=self._cache, keep=keep, new_sequence=keep == 0)
        return part.logits(final, cache=self._cache)[:, -wanted:]
