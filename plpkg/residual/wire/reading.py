"""A text that device and cloud read together, each into its own KV cache."""

from collections.abc import Sequence

import torch

from plpkg.residual.cut.device_part import DeviceCache
from plpkg.residual.wire.remote_layers import RemoteLayers


class PromptReading:
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
        self._layers = layers
        self._anew_beyond = anew_beyond
        self._chunk_size = chunk_size
        self._stream = -1  # in which the cache was begun: the cloud keeps nothing of another one
        self._cache = DeviceCache(first=None, last=None)  # nothing is read yet

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
        """Read what is not in the caches: the logits after the last ``wanted`` tokens."""
        stream = self._layers.wire.stream
        if stream != self._stream or self._has_to_begin_anew(ids.shape[1]):
            self._stream = stream
            self._cache = self._layers.part.new_cache()
        unread = ids[:, self._cache.seen :]
        if self._chunk_size is not None:
            while unread.shape[1] > self._chunk_size:
                self._pass(unread[:, : self._chunk_size], 1)
                self._cache.cut_back(self._cache.seen)  # else sliding windows would keep what the chunk has pushed out
                unread = unread[:, self._chunk_size :]
        return self._pass(unread, wanted)

    def _has_to_begin_anew(self, length: int) -> bool:
        """Whether a text of this length turns the RoPE of what has been read."""
        if self._anew_beyond is None:
            return False
        return self._cache.seen <= self._anew_beyond < length

    def _pass(self, ids: torch.Tensor, wanted: int) -> torch.Tensor:
        """One pass of the tokens ``(batch, seq)`` behind what has been read."""
        part = self._layers.part
        keep = self._cache.seen
        hidden = part.embed(ids, cache=self._cache)
        positions = wanted
        if part.last is not None:  # the KV caches of the device's last layers have to be filled
            positions = ids.shape[1]
        final = self._layers(hidden, positions, cache=self._cache, keep=keep, new_sequence=keep == 0)
        return part.logits(final, cache=self._cache)[:, -wanted:]
