"""A prompt that was read, and the units kept of it: it answers questions, and outlives the process.

Reading is the dear part. :meth:`PrefillResult.ask` puts any number of questions to what was read once: decoding only
appends units, so the cache is cut back to where it was, and no copy of it is made.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plpkg.backbones import fingerprint
from plpkg.decoding import cache_argument
from plpkg.files import checkpoints
from plpkg.fingerprints import digest, stamp
from plpkg.inputs import token_ids
from plpkg.retention.cache.evicting import EvictingCache, EvictingLayer
from plpkg.retention.cache.quantize import quantized
from plpkg.retention.cache.store import UnitStore
from plpkg.retention.eviction import ChunkStep, Eviction, Log
from plpkg.retention.layers import check_ids
from plpkg.training_loop import evaluating, forget_images

FILE = "reading.safetensors"
"""The file of a folder that holds a prompt that was read."""

OURS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",  # the cache's name before transformers 5.24
    "use_cache",
    "cache_implementation",
)
"""Arguments of ``generate`` that follow from the cache."""


@dataclass(frozen=True)
class PrefillResult:
    """A prompt that was read.

    Attributes
    ----------
    cache
        The units that are kept of it, ready for ``generate``: see :meth:`inputs`.
    logits
        ``(batch, vocab)`` after the last token.
    log
        Every forward pass with its cut.
    """

    cache: EvictingCache
    logits: torch.Tensor
    log: Log
    _eviction: Eviction = field(repr=False)

    def __repr__(self) -> str:
        mib = self.cache.num_bytes / 2**20
        return (
            f"PrefillResult: {self.cache.seen:,} tokens read, of which each KV head keeps {self.cache.kept:,} units "
            f"({mib:,.1f} MiB)"
        )

    def inputs(self, input_ids: torch.Tensor | None = None) -> dict:
        """Keyword arguments for ``model.generate``, which goes on from here.

        Parameters
        ----------
        input_ids
            ``(batch, n)`` new tokens; by default the likeliest one. ``generate`` returns them before its own.

        Notes
        -----
        ``generate`` writes to the cache, and a second one goes on after the first: each needs ``inputs`` of its own.
        For several answers to one prompt there is :meth:`ask`. What looks back at the text (``repetition_penalty``,
        ``no_repeat_ngram_size``) sees ``input_ids`` and the answer, never the prompt, whose tokens the cache has not.
        """
        ids = self.logits.argmax(-1, keepdim=True) if input_ids is None else token_ids(input_ids)
        forget_images(self._eviction.model)
        length = self.cache.get_seq_length() + ids.shape[-1]
        mask = torch.ones(len(ids), length, dtype=torch.long, device=ids.device)
        self.cache.expect_generate()
        return {
            "input_ids": ids,
            "attention_mask": mask,
            **cache_argument(self.cache),
            "use_cache": True,
            "cache_implementation": None,  # else a model's own configuration would make another cache
        }

    def ask(self, model: Any, ids: torch.Tensor, **generate) -> torch.Tensor:
        """The answer to a question about what was read, which stays as it was: read once, ask many times.

        Parameters
        ----------
        model
            The model that has read, or the same backbone with another adapter.
        ids
            The question's tokens ``(n,)``, or ``(batch, n)`` of one length: one question goes to all prompts of a
            batch, and several questions can go to one prompt.
        **generate
            Arguments of ``model.generate``: sampling, a streamer, ``logits_processor``, the length. The cache is used
            whatever ``generation_config`` says of caches, and nothing is dropped.

        Returns
        -------
        torch.Tensor
            ``(rows, new)`` tokens of the answers, without the question. With ``return_dict_in_generate`` what
            ``generate`` returns, its ``sequences`` without the question.

        Raises
        ------
        ValueError
            Another backbone, or one that has changed since; arguments that follow from the cache; beams, several
            sequences or guessed tokens; more tokens, those of ``max_new_tokens`` included, than the model has learnt
            positions; a call within :meth:`evicting`.

        Warns
        -----
        UserWarning
            The model's adapter has changed since it has read: what is kept was made with the former one.

        Notes
        -----
        Several samples are the same question in several rows, for which the cache is repeated while they run. Of
        several threads that ask, one waits for the other. For ``repetition_penalty`` and the like see :meth:`inputs`.
        """
        given = [name for name in OURS if name in generate]
        if given:
            raise ValueError(f"ask sets {', '.join(given)} itself: give the question as ids, and nothing of the prompt")
        for name in ("num_beams", "num_return_sequences"):
            count = _setting(name, generate, model)
            if count > 1:
                raise ValueError(f"ask gives one answer a row, got {name}={count}: for several ask in several rows")
        new_tokens = _setting("max_new_tokens", generate, model)
        with self._lent(model, ids, new_tokens - 1) as question:  # the last new token is not read any more
            answer = model.generate(**self.inputs(question), **generate)
        asked = question.shape[-1]
        if isinstance(answer, torch.Tensor):
            return answer[:, asked:]
        answer.sequences = answer.sequences[:, asked:]
        return answer

    def score(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """The likelihood of a given continuation; what was read stays as it was.

        Parameters
        ----------
        model, ids
            As for :meth:`ask`: the continuation's tokens.

        Returns
        -------
        torch.Tensor
            ``(rows, n)``: the log-probability of each token in nats, float32, given the prompt and the tokens before.

        Raises
        ------
        ValueError
            As :meth:`ask`.
        """
        with self._lent(model, ids) as rows, torch.no_grad():
            logits = model(input_ids=rows, **cache_argument(self.cache), use_cache=True).logits
            copies = len(rows) // len(self.logits)
            before = self.logits.repeat_interleave(copies, dim=0)[:, None]  # they predict the first token
            log_p = torch.cat([before, logits[:, :-1]], dim=1).float().log_softmax(-1)  # (rows, n, vocab)
            return log_p.gather(-1, rows[..., None])[..., 0]

    def units(self, model: nn.Module) -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The kept units, for attention that somebody else computes: a :class:`plpkg.serving.Request` goes on from it.

        Parameters
        ----------
        model
            As for :meth:`ask`.

        Returns
        -------
        (position, layers)
            The next token's position; and each layer's keys, rotated, and values ``(batch, num_kv_heads, kept,
            head_dim)``. Every later token sees all of them, unless the layer has a sliding window: that one's are the
            last before ``position``.

        Raises
        ------
        ValueError
            As :meth:`ask`, or the model has another dtype.
        """
        self._check(model)
        layers = []
        for layer in self.cache.layers:
            units = layer.read() if isinstance(layer, EvictingLayer) else (layer.keys, layer.values)
            layers.append(units)
        first_keys, _ = layers[0]
        if first_keys.dtype != model.dtype:
            raise ValueError(f"this was read in {first_keys.dtype}, but {type(model).__name__} is {model.dtype}")
        return self.cache.get_seq_length(), layers

    @contextmanager
    def _lent(self, model: nn.Module, ids: torch.Tensor, more: int = 0) -> Iterator[torch.Tensor]:
        """Lend the cache to a use of these ids and ``more`` tokens, after which it is as before.

        Yields
        ------
        torch.Tensor
            ``(rows, n)`` the ids, in as many rows as the cache has meanwhile.
        """
        if self._eviction.decoding:
            raise ValueError("an answer within evicting() would evict what the next question needs: ask outside it")
        self._check(model)
        ids = token_ids(ids, "ids")
        batch = len(self.logits)
        if batch > 1 and len(ids) not in (1, batch):
            raise ValueError(f"ids must be (n,), (1, n) or ({batch}, n), got {tuple(ids.shape)}")
        copies = max(1, len(ids) // batch)  # more than 1 where several questions go to one prompt
        with self._eviction.lent, evaluating(model):
            check_ids(model, ids, self.cache.seen + more)
            mark = self.cache.mark()
            try:
                if copies > 1:
                    self.cache.batch_repeat_interleave(copies)
                yield ids.expand(max(batch, len(ids)), -1)  # one question goes to all prompts
            finally:
                self.cache.rewind(mark)

    def _check(self, model: nn.Module) -> None:
        """See that the model's weights are those that have read."""
        read_by = self._eviction.model
        everything, backbone = self._eviction.stamps
        if stamp(read_by, adapters=False) != backbone:
            raise ValueError(f"the weights of {type(read_by).__name__} have changed since it read this: read it again")
        if model is not read_by:
            actual = fingerprint(model)
            expected = fingerprint(read_by)
            if actual != expected:
                raise ValueError(
                    f"this prompt was read by a backbone with fingerprint {expected[:12]}…, "
                    f"but {type(model).__name__} has {actual[:12]}…"
                )
        elif stamp(model) != everything:
            warnings.warn(
                f"the adapter of {type(model).__name__} has changed since it read this: what is kept was made with the "
                "former one",
                stacklevel=5,
            )

    def save(self, folder: str | Path) -> None:
        """Write what was read, for :func:`load`: ``reading.safetensors``, its owner's alone, whole or not at all.

        The scorer is not written, nor which units each cut has kept.

        Raises
        ------
        ValueError
            The cache's stores are not this package's, it has gone on or was repeated since the last cut, or the model,
            which the file names by its weights, has others since, an adapter's included.
        """
        model = self._eviction.model
        everything, _ = self._eviction.stamps
        if stamp(model) != everything:
            raise ValueError(f"the weights of {type(model).__name__} have changed since it read this: read it again")
        first_layer = next(iter(self.cache.evicting.values()))
        last_step = self.log[-1]
        held = (len(first_layer.positions), self.cache.seen, self.cache.kept)
        logged = (len(self.logits), last_step.stop, last_step.after)
        if held != logged:
            raise ValueError("the cache has gone on or was repeated since the last cut: save it before")
        state = {
            "identity": {"backbone": fingerprint(model), "dtype": str(model.dtype), "weights": digest(model)},
            "positions": self.cache.contract,
            "store": first_layer.store.kind,
            "seen": self.cache.seen,
            "log": self.log.rows(),
            "logits": self.logits,
            "layers": self.cache.tensors(),
        }
        checkpoints.save(Path(folder, FILE), state)

    @contextmanager
    def evicting(self) -> Iterator[None]:
        """Cut after every forward pass of the model while the block runs, so that decoding stays within the budget.

        The last ``stabilizers`` units are safe from each cut. The first cut includes what ``local_len`` left whole.
        Every forward pass after the prefill has to run in such a block, or its units have no score.
        """
        with self._eviction.while_decoding():
            yield


def _setting(name: str, generate: dict, model: Any) -> int:
    """An argument of ``generate``, given by itself or in a configuration; 1 where nobody says."""
    config = generate.get("generation_config") or model.generation_config
    return generate.get(name) or getattr(config, name, None) or 1


def load(folder: str | Path, model: nn.Module) -> PrefillResult:
    """The prompt that :meth:`PrefillResult.save` wrote, where the model is: it answers as before, to the bit.

    Parameters
    ----------
    folder
        The folder.
    model
        The backbone that has read, in the same precision.

    Raises
    ------
    FileNotFoundError
        The folder lacks the file.
    ValueError
        The file is damaged, or of an earlier version, or another model has read.

    Warns
    -----
    UserWarning
        The weights are not all the same: the adapter is another one, say.
    """
    path = Path(folder, FILE)
    state = checkpoints.read(path, ("identity", "positions", "store", "seen", "log", "logits", "layers"))
    reader = state["identity"]
    actual = fingerprint(model)
    if (reader["backbone"], reader["dtype"]) != (actual, str(model.dtype)):
        raise ValueError(
            f"{path} was read by a backbone with fingerprint {reader['backbone'][:12]}… in {reader['dtype']}, but "
            f"{type(model).__name__} has {actual[:12]}… in {model.dtype}: read the text anew"
        )
    store = UnitStore if state["store"] is None else quantized(**state["store"])
    cache = EvictingCache(model, state["positions"], store)
    tensors = {name: tensor.to(model.device) for name, tensor in state["layers"].items()}
    cache.restore(tensors, state["seen"])
    if digest(model) != reader["weights"]:
        warnings.warn(
            f"what was read in {str(folder)!r} was made with other weights than {type(model).__name__} has: another "
            "adapter, or a change that its fingerprint does not show",
            stacklevel=2,
        )
    log = Log(ChunkStep(**row, kept=None) for row in state["log"])
    eviction = Eviction(model, cache, scorer=None, budget=log[-1].after, stabilizers=0, log_positions=False)
    eviction.log = log
    return PrefillResult(cache, state["logits"].to(model.device), log, eviction)
