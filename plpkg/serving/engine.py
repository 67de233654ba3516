"""One backbone, many adapters: requests of strangers in one batch, each answered as if it were alone.

Continuous batching (Orca, OSDI 2022; Punica, arXiv 2310.18547, Section 5): in every step each running request brings
what it has not read yet, a prompt or the token that it wrote last, packed into one row that is sorted by adapter. The
backbone's products run once for all of them, adapters through :mod:`plpkg.serving.sgmv`, attention through
:mod:`plpkg.serving.attention`. Who has finished leaves at once, who waits comes in.

Left out: which request should wait for which adapter (a scheduler's), and paged keys and values: each request holds
room for its prompt and all tokens that it may write. Of a batch's composition only rounding is seen in an answer.
"""

import inspect
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper, TopPLogitsWarper

from plpkg.serving.adapter import Adapter, InvalidAdapterError, targets, validate_adapter
from plpkg.serving.attention import KeyValues, Row, packed
from plpkg.serving.hooks import Group, Hooks
from plpkg.serving.pool import Form, Pool, form
from plpkg.serving.prefixes import Prefixes
from plpkg.serving.sgmv import Segments
from plpkg.validation import number, whole_number


@dataclass(frozen=True, eq=False)
class Request:
    """What to continue, and how.

    Attributes
    ----------
    input_ids
        The prompt's ids, a list or a tensor of one dimension.
    adapter
        The name of a loaded adapter, or None for the backbone alone.
    max_new_tokens
        The most tokens to write; the model's own end-of-text token ends it earlier, and is returned.
    temperature, top_p
        As in ``generate``; temperature 0 takes the likeliest token.
    seed
        Of the samples, which are then the same in every batch; None draws one.
    stop
        Strings after which it ends; the tokens that complete one are returned.
    account
        Whose request it is: prompts are shared within an account only.
    """

    input_ids: Sequence[int] | torch.Tensor
    adapter: str | None = None
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    account: str = ""


@dataclass(eq=False)
class _Sequence:
    """A request under way."""

    identity: int
    request: Request
    adapter: Adapter | None
    ids: list[int]  # the prompt, and what was written
    prompt: int
    past: KeyValues
    computed: int = 0  # of the ids, those whose keys and values are there
    generator: torch.Generator = field(default_factory=torch.Generator)

    @property
    def new(self) -> list[int]:
        return self.ids[self.prompt :]

    @property
    def owner(self) -> tuple[str, str]:
        return (self.adapter.digest if self.adapter else "", self.request.account)


class Engine:
    """Serves a causal language model with adapters.

    Parameters
    ----------
    model
        Any Hugging Face causal language model whose attention goes through transformers' public interface. It is
        tried on two short requests first, and left as it was between steps.
    tokenizer
        Needed for stop strings only.
    max_batch
        The most requests that run at a time; others wait in order.
    max_step_tokens
        The most tokens of a step: longer prompts are read over several, while others go on writing.
    shared_positions
        Keys and values kept for prompts that begin alike, in positions.

    Attributes
    ----------
    finished
        By id, why a request has ended: ``"stop"``, ``"length"``, or ``"error: …"``. Whoever reads it takes it out.

    Raises
    ------
    ValueError
        A model that does not answer the same when its requests are packed, or is in training mode.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer=None,
        *,
        max_batch: int = 32,
        max_step_tokens: int = 512,
        shared_positions: int = 2**16,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_batch = whole_number("max_batch", max_batch, 1)
        self.max_step_tokens = whole_number("max_step_tokens", max_step_tokens, self.max_batch)
        self.adapters: dict[str, Adapter] = {}
        self.finished: dict[int, str] = {}
        self._prefixes = Prefixes(whole_number("shared_positions", shared_positions, 0))
        self._pools: dict[Form, Pool] = {}
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._identities = itertools.count()
        self._positions = _positions(model.config)
        self._ends = _ends(model)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._try()
        self._hooks = Hooks(model, targets(model))

    # Adapters

    def load(self, name: str, adapter: Adapter | str | Path) -> Adapter:
        """Give an adapter a name; from then on, requests by that name mean this version.

        Parameters
        ----------
        name
            What requests call it. A name that is taken is given anew: running requests end as they began.
        adapter
            A folder, which is validated, or an :class:`Adapter`.

        Raises
        ------
        InvalidAdapterError
            It is not an adapter of this model.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"an adapter's name must be a string that is not empty, got {name!r}")
        adapter = adapter if isinstance(adapter, Adapter) else validate_adapter(adapter, self.model)
        shapes = targets(self.model)
        wrong = [
            f"{module} takes A and B of {(each.down.shape[0], *shapes.get(module, ()))[:2]}"
            for module, each in adapter.factors.items()
            if shapes.get(module) != (each.down.shape[1], each.up.shape[0])
        ]
        if wrong:
            raise InvalidAdapterError(wrong)
        self.adapters[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """Forget a name. Its requests that are under way end as they began, then its weights are let go.

        Raises
        ------
        ValueError
            There is no such adapter.
        """
        self._adapter(name)
        del self.adapters[name]
        self._drop_unused_pools()

    def _drop_unused_pools(self) -> None:
        self._pools = {key: pool for key, pool in self._pools.items() if pool.users}

    def _adapter(self, name: str) -> Adapter:
        if name not in self.adapters:
            raise ValueError(f"no adapter {name!r} is loaded; there are {', '.join(sorted(self.adapters)) or 'none'}")
        return self.adapters[name]

    # Requests

    def add(self, request: Request) -> int:
        """Queue a request; the adapter that its name means now is the one that answers.

        Raises
        ------
        ValueError
            An adapter that is not loaded, ids outside the vocabulary, too long a text, or a setting out of range.
        """
        return self._add(request).identity

    def _add(self, request: Request) -> _Sequence:
        ids = torch.as_tensor(request.input_ids)
        if ids.dim() != 1 or not len(ids) or ids.is_floating_point():
            raise ValueError(
                f"input_ids must be one text's ids, a list or (tokens,), got {tuple(ids.shape)} {ids.dtype}"
            )
        vocab = self.model.get_input_embeddings().num_embeddings
        if not 0 <= ids.min() <= ids.max() < vocab:
            raise ValueError(f"ids must be at least 0 and below vocab={vocab}, got {ids.min()} to {ids.max()}")
        new = whole_number("max_new_tokens", request.max_new_tokens, 1)
        if len(ids) + new > self._positions:
            raise ValueError(f"{len(ids)} ids and {new} new ones do not fit the model's {self._positions} positions")
        number("temperature", request.temperature)
        number("top_p", request.top_p, 0, 1, open_low=True)
        if isinstance(request.stop, str) or not all(isinstance(text, str) and text for text in request.stop):
            raise ValueError(f"stop must be strings that are not empty, in a list, got {request.stop!r}")
        if request.stop and self.tokenizer is None:
            raise ValueError(f"stop={request.stop!r} needs the tokenizer: Engine(model, tokenizer)")
        adapter = None if request.adapter is None else self._adapter(request.adapter)
        past = KeyValues(len(ids) + new)
        sequence = _Sequence(next(self._identities), request, adapter, ids.tolist(), len(ids), past)
        if request.seed is None:
            sequence.generator.seed()
        else:
            sequence.generator.manual_seed(request.seed)
        self._waiting.append(sequence)
        return sequence

    def cancel(self, identity: int) -> None:
        """Drop a request, whether it waits or runs; one that has ended or is unknown is no error."""
        self.finished.pop(identity, None)
        for sequence in [*self._waiting, *self._running]:
            if sequence.identity == identity:
                self._leave(sequence)

    def _leave(self, sequence: _Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        self._prefixes.keep(sequence.owner, sequence.ids[: sequence.computed], sequence.past)
        if sequence.adapter:
            self._pools[form(sequence.adapter)].release(sequence.adapter.digest)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_batch:
            sequence = self._waiting[0]
            if sequence.adapter:
                key = form(sequence.adapter)
                if key not in self._pools:
                    self._drop_unused_pools()
                    self._pools[key] = Pool(next(self.model.parameters()))
                self._pools[key].lease(sequence.adapter)
            past, positions = self._prefixes.find(sequence.owner, sequence.ids)
            if past is not None:
                sequence.past.copy(past, positions)
                sequence.computed = positions
            self._running.append(self._waiting.popleft())

    # Steps

    @torch.inference_mode()
    def step(self) -> list[tuple[int, int]]:
        """Read and write once for every running request.

        Returns
        -------
        list of (id, token)
            The tokens written, at most one a request; a request that still reads its prompt writes none.
        """
        self._admit()
        if not self._running:
            return []
        batch, rows, groups = self._pack()
        with self._hooks.batch(*groups):
            logits = self._forward([s.ids for s in batch], rows)
        written = []
        for sequence, row in zip(batch, rows, strict=True):
            sequence.computed = row.positions.stop
        for sequence, scores in zip([s for s in batch if s.computed == len(s.ids)], logits, strict=True):
            token = self._write(sequence, scores)
            written += [] if token is None else [(sequence.identity, token)]
        return written

    def _pack(self) -> tuple[list[_Sequence], list[Row], list[Group]]:
        """Which tokens of whom go into the step: sorted by adapter, those without one last."""
        left, share = self.max_step_tokens, {}
        for sequence in sorted(
            self._running, key=lambda s: len(s.ids) - s.computed > 1
        ):  # who writes is never left out
            share[sequence] = min(left, len(sequence.ids) - sequence.computed)
            left -= share[sequence]
        pools = list(self._pools.values())
        for pool in pools:
            pool.close_gaps()
        slots = {digest: (p, slot) for p, pool in enumerate(pools) for slot, digest in enumerate(pool.digests)}
        groups = [Group(Segments(), pool.factors) for pool in pools]
        batch = sorted(
            (s for s in self._running if share[s]),
            key=lambda s: slots[s.adapter.digest] if s.adapter else (len(pools), 0),
        )
        rows, end = [], 0
        for adapter, members in itertools.groupby(batch, key=lambda s: s.adapter and s.adapter.digest):
            first = end
            for sequence in members:
                rows.append(Row(slice(end, end + share[sequence]), sequence.computed, sequence.past))
                end += share[sequence]
            if adapter:
                pool, slot = slots[adapter]
                groups[pool].segments.append((first, end, slot))
        return batch, rows, groups

    def _forward(self, texts: list[list[int]], rows: list[Row]) -> torch.Tensor:
        """The logits ``(writers, vocab)`` after the last id of each text whose last id is among the step's rows."""
        device = self.model.device
        ids = [token for text, row in zip(texts, rows, strict=True) for token in text[row.start : row.positions.stop]]
        positions = [position for row in rows for position in row.positions]
        last = [row.rows.stop - 1 for text, row in zip(texts, rows, strict=True) if row.positions.stop == len(text)]
        last = torch.tensor(last, dtype=torch.long, device=device)
        with packed(self.model, rows):
            logits = self.model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),  # or it would look for texts
                use_cache=False,
                **({"logits_to_keep": last} if self._keeps else {}),
            ).logits[0]
        return logits if self._keeps else logits[last]

    def _write(self, sequence: _Sequence, scores: torch.Tensor) -> int | None:
        """Choose a token from ``(vocab,)`` scores, and let the request leave if that was its last."""
        request = sequence.request
        if not scores.max().isfinite():  # an adapter's overflow is its own requests' affair
            self.finished[sequence.identity] = "error: the logits are not finite"
            self._leave(sequence)
            return None
        if request.temperature == 0:
            token = int(scores.argmax())
        else:
            warpers = LogitsProcessorList([TemperatureLogitsWarper(float(request.temperature))])
            if request.top_p < 1:
                warpers.append(TopPLogitsWarper(float(request.top_p)))
            warped = warpers(torch.tensor([sequence.ids]), scores[None].float().cpu())
            token = int(torch.multinomial(warped.softmax(-1), 1, generator=sequence.generator))
        sequence.ids.append(token)
        if token in self._ends or self._stopped(sequence):
            self.finished[sequence.identity] = "stop"
        elif len(sequence.new) == request.max_new_tokens:
            self.finished[sequence.identity] = "length"
        if sequence.identity in self.finished:
            self._leave(sequence)
        return token

    def _stopped(self, sequence: _Sequence) -> bool:
        if not sequence.request.stop:
            return False
        longest = max(len(text.encode()) for text in sequence.request.stop)  # a token is a byte at least
        tail = self.tokenizer.decode(sequence.new[-longest - 4 :])  # and may end within a character
        return any(text in tail for text in sequence.request.stop)

    # Over these

    def stream(self, request: Request) -> Iterator[int]:
        """A request's tokens as they are written; whoever stops reading cancels it.

        Raises
        ------
        ValueError
            As :meth:`add`, when the first token is asked for.
        RuntimeError
            The request has ended with an error.
        """
        yield from self._read(self._add(request))

    def _read(self, sequence: _Sequence) -> Iterator[int]:
        seen = 0
        try:
            while seen < len(sequence.new) or sequence.identity not in self.finished:
                if seen == len(sequence.new):
                    self.step()
                yield from sequence.new[seen:]
                seen = len(sequence.new)
            reason = self.finished[sequence.identity]
            if reason.startswith("error"):
                raise RuntimeError(f"request {sequence.identity} ended with an {reason}")
        finally:
            self.cancel(sequence.identity)

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Serve requests together.

        Returns
        -------
        list of list of int
            Each request's new ids, in the order of the requests.

        Raises
        ------
        ValueError, RuntimeError
            As :meth:`stream`; none of the requests is left behind.
        """
        sequences = []
        try:
            for request in requests:
                sequences.append(self._add(request))
            return [list(self._read(sequence)) for sequence in sequences]
        finally:
            for sequence in sequences:
                self.cancel(sequence.identity)

    def close(self) -> None:
        """Take the hooks off the model."""
        self._hooks.close()

    @torch.inference_mode()
    def _try(self) -> None:
        """Refuse a model that answers otherwise when two requests are packed, be it for a reason nobody foresaw."""
        if self.model.training:
            raise ValueError("the model is in training mode: call model.eval() first")
        vocab, device = self.model.get_input_embeddings().num_embeddings, self.model.device
        texts = (torch.arange(12) % vocab).view(2, 6)
        expected = self.model(input_ids=texts.to(device), use_cache=False).logits[:, -1]
        pasts = KeyValues(6), KeyValues(6)
        try:  # in two parts, cut at another place in each
            for (i, j), (k, m) in (((0, 4), (0, 2)), ((4, 6), (2, 6))):
                rows = [Row(slice(0, j - i), i, pasts[0]), Row(slice(j - i, j - i + m - k), k, pasts[1])]
                logits = self._forward(texts.tolist(), rows)
            error = (logits - expected).abs().max() / expected.abs().max()
        except Exception as reason:
            raise ValueError(f"{type(self.model).__name__} cannot read packed requests: {reason}") from reason
        if not error <= torch.finfo(expected.dtype).eps ** 0.5:  # half of the digits
            raise ValueError(
                f"{type(self.model).__name__} answers otherwise when requests are packed (logits {error:.2g} apart): its "
                "layers look at neighbours in ways that this engine does not know"
            )


def _positions(config) -> int:
    """The longest text; where rotary tables grow with the longest of a batch, only as far as they do not."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # one for each kind of layer, or one
    limits = [config.max_position_embeddings]
    for each in kinds:
        if each.get("rope_type") in ("dynamic", "longrope"):
            limits.append(each.get("original_max_position_embeddings") or config.max_position_embeddings)
    return min(limits)


def _ends(model) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends} - {None}
