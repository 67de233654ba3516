"""A prompt that was read, and what is kept of it: it answers questions, and outlives the process.

Reading is the dear part. :meth:`PrefillResult.ask` puts any number of questions to what was read once: decoding only
appends units, so the cache is cut back to where it was, and no copy of it is made.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from plpkg import checkpoints
from plpkg.backbones import fingerprint
from plpkg.retention.cache import EvictingCache, EvictingLayer, UnitStore
from plpkg.retention.eviction import ChunkStep, Eviction, Log
from plpkg.retention.quantize import quantized
from plpkg.retention.watch import attention_layers
from plpkg.untrusted import finite, shown
from plpkg.validation import one_of, whole_number

FILE = "reading.safetensors"

OURS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache")
"""Arguments of ``generate`` that follow from the cache."""


@dataclass(frozen=True)
class PrefillResult:
    """A prompt that was read.

    Attributes
    ----------
    cache
        What is kept of it, ready for ``generate``: see :meth:`inputs`.
    logits
        ``(batch, vocab)`` after the last token.
    log
        Every forward pass with its cut.
    """

    cache: EvictingCache
    logits: torch.Tensor
    log: Log
    _eviction: Eviction = field(repr=False)

    def inputs(self, input_ids: torch.Tensor | None = None, *, repeats: int = 1) -> dict:
        """Keyword arguments for ``model.generate``, which goes on from here.

        Parameters
        ----------
        input_ids
            ``(batch, n)`` new tokens; by default the likeliest one. ``generate`` returns them before its own.
        repeats
            The ``num_beams`` or ``num_return_sequences`` of ``generate``: the cache is repeated that often, for good.

        Notes
        -----
        ``generate`` writes to the cache, and a second one goes on after the first: each needs ``inputs`` of its own.
        For several answers to one prompt there is :meth:`ask`. What looks back at the text (``repetition_penalty``,
        ``no_repeat_ngram_size``) sees ``input_ids`` and the answer, never the prompt, whose tokens the cache has not.
        """
        ids = self.logits.argmax(-1, keepdim=True) if input_ids is None else input_ids
        whole_number("the number of new tokens", ids.shape[-1], 1)
        if whole_number("repeats", repeats, 1) > 1:
            self.cache.batch_repeat_interleave(repeats)
            self._eviction.repeat(repeats)
        length = self.cache.get_seq_length() + ids.shape[-1]
        mask = torch.ones(len(ids), length, dtype=torch.long, device=ids.device)
        self.cache.expect_generate()
        return {"input_ids": ids, "attention_mask": mask, "past_key_values": self.cache}

    def ask(self, model: nn.Module, ids: torch.Tensor, **generate) -> torch.Tensor:
        """The answer to a question about what was read, which stays as it was: read once, ask many times.

        Parameters
        ----------
        model
            The model that has read, or the same backbone with another adapter.
        ids
            The question's tokens ``(batch, n)``, of one length; one row is put to every prompt of the batch.
        **generate
            Arguments of ``model.generate``: beams, samples, a streamer, the length.

        Returns
        -------
        torch.Tensor
            ``(batch · num_return_sequences, new)`` tokens of the answers, without the question. With
            ``return_dict_in_generate`` what ``generate`` returns, its ``sequences`` without the question.

        Raises
        ------
        ValueError
            Another backbone, arguments that follow from the cache, or a call within :meth:`evicting`.

        Notes
        -----
        With beams or several sequences the cache is repeated while they run, as ``generate`` needs it. For
        ``repetition_penalty`` and the like see :meth:`inputs`.
        """
        if given := [name for name in OURS if name in generate]:
            raise ValueError(f"ask sets {', '.join(given)} itself: give the question as ids, and nothing of the prompt")
        if self._eviction.decoding:
            raise ValueError("an answer within evicting() would evict what the next question needs: ask outside it")
        if model is not self._eviction.model:
            actual, read_by = fingerprint(model), fingerprint(self._eviction.model)
            if actual != read_by:
                raise ValueError(
                    f"this prompt was read by a backbone with fingerprint {read_by[:12]}…, "
                    f"but {type(model).__name__} has {actual[:12]}…"
                )
        batch = len(self.logits)
        if ids.ndim != 2 or len(ids) not in (1, batch) or not ids.shape[-1]:
            raise ValueError(f"ids must be (1, n) or ({batch}, n) with at least one token, got {tuple(ids.shape)}")
        config = generate.get("generation_config") or model.generation_config
        names = ("num_beams", "num_return_sequences")
        repeats = max(generate.get(name) or getattr(config, name, None) or 1 for name in names)
        mark = self.cache.mark()
        try:
            if repeats > 1:
                self.cache.batch_repeat_interleave(repeats)
            answer = model.generate(**self.inputs(ids.expand(batch, -1)), **generate)
        finally:
            self.cache.rewind(mark)
        if isinstance(answer, torch.Tensor):
            return answer[:, ids.shape[-1] :]
        answer.sequences = answer.sequences[:, ids.shape[-1] :]
        return answer

    def save(self, folder: str | Path) -> None:
        """Write what was read, for :func:`load`: ``reading.safetensors``, its owner's alone, whole or not at all.

        The scorer is not written, nor which units each cut has kept.

        Raises
        ------
        ValueError
            The cache's stores are of a kind that is not this package's.
        """
        folder, model = Path(folder), self._eviction.model
        state = {
            "identity": {"backbone": fingerprint(model), "dtype": str(model.dtype)},
            "positions": self.cache.contract,
            "store": next(iter(self.cache.evicting.values())).store.kind,
            "seen": self.cache.seen,
            "log": self.log.rows(),
            "logits": self.logits,
            "layers": self.cache.tensors(),
        }
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        checkpoints.save(folder / FILE, state)

    @contextmanager
    def evicting(self) -> Iterator[None]:
        """Cut after every forward pass of the model while the block runs, so that decoding stays within the budget.

        The last ``stabilizers`` units are safe from each cut. The first cut includes what ``local_len`` left whole.
        Every forward pass after the prefill has to run in such a block, or its units have no score.
        """
        with self._eviction.while_decoding():
            yield


def load(folder: str | Path, model: nn.Module) -> PrefillResult:
    """What :meth:`PrefillResult.save` wrote, where the model is: it answers as before, to the bit.

    Parameters
    ----------
    folder
        The folder.
    model
        The backbone that has read, in the same precision; its adapters are not compared.

    Raises
    ------
    FileNotFoundError
        The folder lacks the file.
    ValueError
        The file is damaged, or of an earlier version, or another model has read.
    """
    path = Path(folder, FILE)
    if not path.exists():
        raise FileNotFoundError(f"nothing that was read in {str(folder)!r}: it lacks {FILE}")
    try:
        state = checkpoints.read(path, functools.partial(_judge, model))
        kind = state["store"]
        cache = EvictingCache(model, state["positions"], UnitStore if kind is None else quantized(**kind))
        cache.restore({name: tensor.to(model.device) for name, tensor in state["layers"].items()}, state["seen"])
        _require_sound(model, cache, state["logits"])
        log = Log(ChunkStep(**row, kept=None) for row in state["log"])
        if not log:
            raise ValueError("the log has no chunk")
    except (LookupError, TypeError, RuntimeError, AttributeError, ValueError) as error:
        raise ValueError(f"what was read in {str(folder)!r} is not taken: {str(error).splitlines()[0]}") from error
    eviction = Eviction(model, cache, None, log[-1].after, 0, log_positions=False)
    eviction.log = log
    return PrefillResult(cache, state["logits"].to(model.device), log, eviction)


def _judge(model: nn.Module, outline: dict) -> None:
    """Refuse what another model has read, and what cannot be a reading of this one, before its tensors are read."""
    said, actual = outline["identity"], {"backbone": fingerprint(model), "dtype": str(model.dtype)}
    if said != actual:
        raise ValueError(
            f"this was read by a backbone with fingerprint {shown(said.get('backbone'))[1:13]}… in "
            f"{shown(said.get('dtype'))[1:-1]}, but {type(model).__name__} has {actual['backbone'][:12]}… in "
            f"{actual['dtype']}"
        )
    one_of("positions", outline["positions"], ("reassigned", "original"))
    if outline["store"] is not None:
        quantized(**outline["store"])
    seen, (batch, _) = whole_number("seen", outline["seen"], 1, 2**31 - 1), outline["logits"].shape
    for row in outline["log"]:
        ChunkStep(**row, kept=None)
        if any(not 0 <= row[low] <= row[high] <= seen for low, high in (("start", "stop"), ("after", "before"))):
            raise ValueError(f"log: {shown(row)} is no chunk of {seen:,} tokens")
    layers = attention_layers(model)
    for name, entry in outline["layers"].items():
        number, _, _ = name.partition(".")
        if number not in map(str, range(len(layers))) or entry.shape[:2] != (batch, layers[int(number)].num_kv_heads):
            raise ValueError(f"{shown(name)} of shape {entry.shape} is in no layer of {type(model).__name__}")


def _require_sound(model: nn.Module, cache: EvictingCache, logits: torch.Tensor) -> None:
    """ValueError if what the cache holds is not finite, or does not agree in shapes and counts."""
    seen, wrong = cache.seen, "layer {} does not hold what this model and {:,} tokens give"
    if logits.shape[1] != model.get_output_embeddings().weight.shape[0] or not finite(logits):
        raise ValueError("the logits are not this model's, or not finite")
    for i, (layer, dims) in enumerate(zip(cache.layers, attention_layers(model), strict=True)):
        evicts = isinstance(layer, EvictingLayer)
        keys, values = layer.store.read() if evicts else (layer.keys, layer.values)
        kept = layer.positions.shape[-1] if evicts else keys.shape[-2]
        shape = (len(logits), dims.num_kv_heads, kept, dims.head_dim)
        sound = 0 < kept <= seen and all(each.shape == shape and each.dtype == model.dtype for each in (keys, values))
        if sound and evicts:
            positions, scores = layer.positions, layer.scores
            sound = positions.dtype == torch.int32 and positions.shape == shape[:3]
            sound &= scores is None or scores.shape == positions.shape
            # Units stand in the order in which they were read.
            sound &= bool((positions >= 0).all() and (positions < seen).all() and (positions.diff() > 0).all())
        if not (sound and finite(keys) and finite(values)):
            raise ValueError(wrong.format(i, seen))
