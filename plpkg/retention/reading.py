"""A prompt that was read, and what is kept of it: it answers questions, and outlives the process.

Reading is the dear part. :meth:`PrefillResult.ask` puts any number of questions to what was read once: decoding only
appends units, so the cache is cut back to where it was, and no copy of it is made.
"""

import functools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from plpkg import checkpoints
from plpkg.backbones import digest, fingerprint, stamp
from plpkg.batch import token_ids
from plpkg.learning import evaluating, forget_images
from plpkg.retention import watch
from plpkg.retention.cache import EvictingCache, EvictingLayer, UnitStore
from plpkg.retention.eviction import ChunkStep, Eviction, Log
from plpkg.retention.quantize import quantized
from plpkg.retention.watch import attention_layers
from plpkg.untrusted import Entry, finite, shown
from plpkg.validation import one_of, whole_number

FILE = "reading.safetensors"

OURS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache")
OURS += ("cache_implementation",)
"""Arguments of ``generate`` that follow from the cache."""

MOST = 2**24
"""Tokens in a reading that is saved, all prompts of the batch together: ``generate`` makes a mask of so many."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I32": torch.int32, "U8": torch.uint8}
"""What a reading is made of, by the names in a header."""


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
        ids = self.logits.argmax(-1, keepdim=True) if input_ids is None else token_ids(input_ids)
        forget_images(self._eviction.model)
        if whole_number("repeats", repeats, 1) > 1:
            self.cache.batch_repeat_interleave(repeats)
        length = self.cache.get_seq_length() + ids.shape[-1]
        mask = torch.ones(len(ids), length, dtype=torch.long, device=ids.device)
        self.cache.expect_generate()
        ours = {"past_key_values": self.cache, "use_cache": True, "cache_implementation": None}
        return {"input_ids": ids, "attention_mask": mask} | ours

    def ask(self, model: nn.Module, ids: torch.Tensor, **generate) -> torch.Tensor:
        """The answer to a question about what was read, which stays as it was: read once, ask many times.

        Parameters
        ----------
        model
            The model that has read, or the same backbone with another adapter.
        ids
            The question's tokens ``(n,)``, or ``(batch, n)`` of one length; one row is put to every prompt of the
            batch, and to one prompt several can be put at once.
        **generate
            Arguments of ``model.generate``: beams, samples, a streamer, ``logits_processor``, the length. The cache is
            used whatever ``generation_config`` says of caches, and nothing is dropped.

        Returns
        -------
        torch.Tensor
            ``(rows · num_return_sequences, new)`` tokens of the answers, without the question. With
            ``return_dict_in_generate`` what ``generate`` returns, its ``sequences`` without the question.

        Raises
        ------
        ValueError
            Another backbone, or one that has changed since; arguments that follow from the cache; more tokens, those of
            ``max_new_tokens`` included, than the model has learnt positions; a call within :meth:`evicting`.

        Warns
        -----
        UserWarning
            The model's adapter has changed since it has read: what is kept was made with the former one.

        Notes
        -----
        With beams or several sequences the cache is repeated while they run, as ``generate`` needs it. Of several
        threads that ask, one waits for the other. For ``repetition_penalty`` and the like see :meth:`inputs`.
        """
        if given := [name for name in OURS if name in generate]:
            raise ValueError(f"ask sets {', '.join(given)} itself: give the question as ids, and nothing of the prompt")
        config = generate.get("generation_config") or model.generation_config
        names = ("num_beams", "num_return_sequences")
        repeats = max(generate.get(name) or getattr(config, name, None) or 1 for name in names)
        new = generate.get("max_new_tokens") or getattr(config, "max_new_tokens", None) or 1
        with self._lent(model, ids, repeats, new - 1) as ids:  # nothing runs after the last one
            answer = model.generate(**self.inputs(ids), **generate)
        if isinstance(answer, torch.Tensor):
            return answer[:, ids.shape[-1] :]
        answer.sequences = answer.sequences[:, ids.shape[-1] :]
        return answer

    def score(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """How likely a given continuation is; what was read stays as it was.

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
        with self._lent(model, ids) as ids, torch.no_grad():
            logits = model(input_ids=ids, past_key_values=self.cache, use_cache=True).logits
            first = self.logits.repeat_interleave(len(ids) // len(self.logits), dim=0)
            log_p = torch.cat([first[:, None], logits[:, :-1]], dim=1).float().log_softmax(-1)
            return log_p.gather(-1, ids[..., None])[..., 0]

    def units(self, model: nn.Module) -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        """What is kept, for attention that somebody else computes: a :class:`plpkg.serving.Request` goes on from it.

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
        layers = [
            layer.read() if isinstance(layer, EvictingLayer) else (layer.keys, layer.values)
            for layer in self.cache.layers
        ]
        if (dtype := layers[0][0].dtype) != model.dtype:
            raise ValueError(f"this was read in {dtype}, but {type(model).__name__} is {model.dtype}")
        return self.cache.get_seq_length(), layers

    @contextmanager
    def _lent(self, model: nn.Module, ids: torch.Tensor, repeats: int = 1, more: int = 0) -> Iterator[torch.Tensor]:
        """The cache for a use with ``more`` tokens, after which it is as before; gives ids, a row for each of it."""
        if self._eviction.decoding:
            raise ValueError("an answer within evicting() would evict what the next question needs: ask outside it")
        self._check(model)
        ids, batch = token_ids(ids, "ids"), len(self.logits)
        if batch > 1 and len(ids) not in (1, batch):
            raise ValueError(f"ids must be (n,), (1, n) or ({batch}, n), got {tuple(ids.shape)}")
        copies = repeats * max(1, len(ids) // batch)
        with self._eviction.lent, evaluating(model):
            watch.check_ids(model, ids, self.cache.seen + more)
            mark = self.cache.mark()
            try:
                if copies > 1:
                    self.cache.batch_repeat_interleave(copies)
                yield ids.expand(max(batch, len(ids)), -1)
            finally:
                self.cache.rewind(mark)

    def _check(self, model: nn.Module) -> None:
        """See that the model's weights are those that have read."""
        read_by, (everything, backbone) = self._eviction.model, self._eviction.stamps
        if stamp(read_by, adapters=False) != backbone:
            raise ValueError(f"the weights of {type(read_by).__name__} have changed since it read this: read it again")
        if model is not read_by:
            actual, expected = fingerprint(model), fingerprint(read_by)
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
            :func:`load` would not take it: the cache's stores are not this package's, it has gone on or was repeated
            since the last cut, something in it is not finite, or more than 16,777,216 tokens were read. Or the model,
            which the file names by its weights, has others since, an adapter's included.
        """
        folder, model = Path(folder), self._eviction.model
        if stamp(model) != self._eviction.stamps[0]:
            raise ValueError(f"the weights of {type(model).__name__} have changed since it read this: read it again")
        state = {
            "identity": {"backbone": fingerprint(model), "dtype": str(model.dtype), "weights": digest(model)},
            "positions": self.cache.contract,
            "store": next(iter(self.cache.evicting.values())).store.kind,
            "seen": self.cache.seen,
            "log": self.log.rows(),
            "logits": self.logits,
            "layers": self.cache.tensors(),
        }
        _judge(model, state)
        _require_sound(self.cache, state)
        checkpoints.private_folder(folder)
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
    if not path.exists():
        raise FileNotFoundError(f"nothing that was read in {str(folder)!r}: it lacks {FILE}")
    try:
        state = checkpoints.read(path, functools.partial(_judge, model))
        cache = _cache_of(model, state)
        cache.restore({name: tensor.to(model.device) for name, tensor in state["layers"].items()}, state["seen"])
        _require_sound(cache, state)
    except ValueError as error:
        raise ValueError(f"what was read in {str(folder)!r} is not taken: {str(error)[:220]}") from error
    if digest(model) != state["identity"]["weights"]:
        warnings.warn(
            f"what was read in {str(folder)!r} was made with other weights than {type(model).__name__} has: another "
            "adapter, or a change that its fingerprint does not show",
            stacklevel=2,
        )
    log = Log(ChunkStep(**row, kept=None) for row in state["log"])
    eviction = Eviction(model, cache, None, log[-1].after, 0, log_positions=False)
    eviction.log = log
    return PrefillResult(cache, state["logits"].to(model.device), log, eviction)


def _cache_of(model: nn.Module, state: dict) -> EvictingCache:
    """An empty one, of the state's kind."""
    kind = state["store"]
    return EvictingCache(model, state["positions"], UnitStore if kind is None else quantized(**kind))


def _judge(model: nn.Module, state: dict) -> None:
    """ValueError for a state that no reading of this model has, whether its tensors are there or only described."""
    _require_fields("a reading", state, ("identity", "positions", "store", "seen", "log", "logits", "layers"))
    said, actual = state["identity"], {"backbone": fingerprint(model), "dtype": str(model.dtype)}
    _require_fields("identity", said, (*actual, "weights"))
    if not re.fullmatch("[0-9a-f]{64}", str(said["weights"])):
        raise ValueError(f"identity.weights must be a SHA-256 in hex, got {shown(said['weights'])}")
    if {name: said[name] for name in actual} != actual:
        raise ValueError(
            f"this was read by a backbone with fingerprint {shown(str(said['backbone'])[:12])[1:-1]}… in "
            f"{shown(str(said['dtype'])[:14])[1:-1]}, but {type(model).__name__} has {actual['backbone'][:12]}… in "
            f"{actual['dtype']}"
        )
    one_of("positions", state["positions"], ("reassigned", "original"))
    if state["store"] is not None:
        _require_fields("store", state["store"], ("bits", "scheme", "group"))
    cache, given, log = _cache_of(model, state), state["layers"], state["log"]
    for name, kind in {"layers": dict, "log": list}.items():
        if not isinstance(state[name], kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {shown(state[name])}")
    # How many prompts and units there are, two tensors say; all others must agree.
    first, vocab = next(iter(cache.evicting)), model.get_output_embeddings().weight.shape[0]
    batch, _ = _shape("logits", state["logits"], (model.dtype, torch.float32), ("batch", vocab))
    units, heads = f"{first}.positions", attention_layers(model)[first].num_kv_heads
    *_, kept = _shape(units, given.get(units), (torch.int32,), (batch, heads, "kept"))
    whole_number("seen", state["seen"], kept, MOST // batch)
    if log:  # one of many rows is not there yet
        _require_counts(log, state["seen"], kept)
    needed = _needed(model, cache, state, batch, kept)
    for name in [*needed, *given]:
        if name not in needed:
            raise ValueError(f"{shown(name)} is no tensor of such a cache, as {shown([*needed][:3])[1:-1]} are")
        _shape(name, given.get(name), *needed[name])


def _needed(model: nn.Module, cache: EvictingCache, state: dict, batch: int, kept: int) -> dict[str, tuple]:
    """Dtypes and shape of each tensor that the cache must have; it is filled with units that have no memory."""
    needed, given = {}, state["layers"]
    for i, (layer, dims) in enumerate(zip(cache.layers, attention_layers(model), strict=True)):
        held, widths = kept, {"keys": dims.head_dim, "values": dims.value_dim}
        if not isinstance(layer, EvictingLayer):
            held = min(state["seen"], layer.sliding_window - 1)
        shapes = {name: (batch, dims.num_kv_heads, held, width) for name, width in widths.items()}
        if not isinstance(layer, EvictingLayer):
            needed |= {f"{i}.{name}": ((model.dtype,), shape) for name, shape in shapes.items()}
            continue
        layer.store.append(*(torch.empty(shape, dtype=model.dtype, device="meta") for shape in shapes.values()))
        needed[f"{i}.positions"] = (torch.int32,), shapes["keys"][:3]
        if f"{i}.scores" in given:
            needed[f"{i}.scores"] = (torch.float32,), shapes["keys"][:3]
        # Groups of consecutive units come in parts as they fill, and only the state knows how many were in each.
        codes = [getattr(given.get(f"{i}.store.keys.{part}.codes"), "shape", ()) for part in range(len(given))]
        groups = [each[3] for each in codes if len(each) == 5]
        for name, tensor in layer.store.tensors().items():
            (half, first, last), own = name.partition(".0."), tuple(tensor.shape)
            parts = {name: own}
            if first and all(groups) and sum(groups) == own[3]:
                parts = {f"{half}.{part}.{last}": (*own[:3], count, own[4]) for part, count in enumerate(groups)}
            needed |= {f"{i}.store.{name}": ((tensor.dtype,), own) for name, own in parts.items()}
    return needed


def _require_fields(name: str, value: object, fields: tuple[str, ...]) -> None:
    """ValueError unless ``value`` is a dictionary of exactly these fields."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must have {', '.join(fields)}, got {shown(value)}")
    if odd := value.keys() ^ set(fields):
        raise ValueError(f"{name} must have {', '.join(fields)} alone: {shown(odd.pop())} is missing or unknown")


def _shape(name: str, value: object, dtypes: tuple, shape: tuple) -> tuple[int, ...]:
    """The shape of a tensor of such a dtype and shape; a name in the latter stands for any number from 1 on."""
    got = shown(value)
    if isinstance(value, (Entry, torch.Tensor)):
        dtype, own = DTYPES.get(value.dtype, value.dtype), tuple(value.shape)
        alike = len(own) == len(shape) and all(
            a == b or (isinstance(b, str) and a > 0) for a, b in zip(own, shape, strict=True)
        )
        if alike and dtype in dtypes:
            return own
        got = f"{dtype} of shape {own}"
    raise ValueError(f"{name} must be {dtypes[0]} of shape ({', '.join(map(str, shape))}), got {got}")


def _require_counts(log: list, seen: int, kept: int) -> None:
    """ValueError unless each forward pass goes on where the one before stopped, and the last stops here."""
    stop = after = 0
    for i, row in enumerate(log):
        _require_fields(f"log[{i}]", row, ("start", "stop", "before", "after"))
        fits = all(type(count) is int for count in row.values()) and row["start"] == stop < row["stop"]
        if not (fits and 0 < row["after"] <= row["before"] == after + row["stop"] - stop):
            raise ValueError(f"log[{i}] must go on from {stop:,} tokens and {after:,} units, got {shown(row)}")
        stop, after = row["stop"], row["after"]
    if (stop, after) != (seen, kept):
        raise ValueError(
            f"the log must end with what is held, {seen:,} tokens and {kept:,} units, got {stop:,} and {after:,}"
        )


def _require_sound(cache: EvictingCache, state: dict) -> None:
    """ValueError for numbers that no reading gives, in a state that was judged and its cache."""
    _require_counts(state["log"], cache.seen, cache.kept)
    for name, tensor in {"logits": state["logits"], **state["layers"]}.items():
        bad = tensor.isnan().any() if name.endswith("scores") else tensor.numel() and not finite(tensor, tensor.dtype)
        if bad:
            raise ValueError(f"{name} has numbers that are not finite in {tensor.dtype}")
        if name.endswith("scale") and tensor.min() < 0:
            raise ValueError(f"{name} must be 0 or more, got {tensor.min():g}")
    for i, layer in cache.evicting.items():
        low, high = (bound.item() for bound in layer.positions.aminmax())
        if low < 0 or high >= cache.seen or not (layer.positions.diff() > 0).all():
            raise ValueError(
                f"{i}.positions must rise within 0 to {cache.seen - 1:,}, got others, from {low:,} to {high:,}"
            )
        if not all(finite(each, layer.dtype) for each in layer.store.read()):  # rounded, it may be beyond the dtype
            raise ValueError(f"{i}.store has numbers that are not finite in {layer.dtype} once they are unpacked")
