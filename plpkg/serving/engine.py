"""One backbone, many adapters: requests of strangers in one batch, each answered as if it were alone.

Continuous batching (Orca, OSDI 2022; Punica, arXiv 2310.18547, Section 5): in every step each running request brings
what it has not read yet, a prompt or the token that it wrote last, packed into one row that is sorted by adapter. The
backbone's products run once for all of them, adapters through :mod:`plpkg.serving.segments`, attention through
:mod:`plpkg.serving.attention`. Who has finished leaves at once, who waits comes in.

Left out: which request should wait for which adapter (a scheduler's), and paged keys and values: each request holds
room for its prompt and all tokens that it may write.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from plpkg.adapters import Adapter, load_adapter, require_fit, targets
from plpkg.decoding import longest_text
from plpkg.fingerprints import stamp
from plpkg.serving.attention import KeyValues, Row, read
from plpkg.serving.packing import require_packable, vocabulary
from plpkg.serving.plan import plan
from plpkg.serving.prefixes import Prefixes
from plpkg.serving.requests import Request, Running, Scored
from plpkg.serving.slots import Hooks, Pool, form
from plpkg.validation import whole_number


class Engine:
    """Serves a causal language model with adapters.

    Parameters
    ----------
    model
        Any Hugging Face causal language model whose attention goes through transformers' public interface, without
        an adapter of its own. It is tried on short requests first, and left as it was between steps; in one, no other
        thread may use it. When its weights have changed, it is tried again; requests under way end with an error, and
        nothing read before is used.
    tokenizer
        Needed for stop strings only.
    max_batch
        The most requests that run at a time; others wait in order.
    max_step_tokens
        The most tokens of a step: longer prompts are read over several, while others go on writing.
    shared_bytes
        The most of keys and values that are kept for prompts that begin alike.
    max_model_len
        The most tokens of a text, prompt and answer together, if the model's own limit is too many.

    Attributes
    ----------
    adapters
        By name.
    finished
        By id, why a request has ended: ``"stop"``, ``"length"``, or ``"error: …"``. Whoever reads it takes it out.
    scored
        By id, what a request with ``logprobs`` has had scored since it was last taken out.

    Raises
    ------
    ValueError
        A model that does not answer the same when its requests are packed, is in training mode, or has an adapter.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer=None, *, max_batch=32, max_step_tokens=512, shared_bytes=2**30,
        max_model_len: int | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch = whole_number("max_batch", max_batch, 1)
        self.max_step_tokens = whole_number("max_step_tokens", max_step_tokens, self.max_batch)
        self.max_model_len = max_model_len
        self.adapters: dict[str, Adapter] = {}
        self.finished: dict[int, str] = {}
        self.scored: dict[int, list[Scored]] = {}
        self._closed = False
        self._prefixes = Prefixes(whole_number("shared_bytes", shared_bytes, 0))
        self._pools: dict[tuple, Pool] = {}
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._paused: dict[int, Running] = {}
        self._identities = itertools.count()
        self._unhook = lambda: None
        self._begin()

    def _begin(self) -> None:
        """Look at the model, which is new or has changed: whether it can be served, and what it says of itself."""
        self._stamp = None  # so that a model that is refused is looked at again
        self._unhook()
        model = self.model
        modules = targets(model)
        if model.training:
            raise ValueError(f"{type(model).__name__} is in training mode: call model.eval() first")
        for adapter in self.adapters.values():
            require_fit(adapter, model)
        require_packable(model, self.max_step_tokens)
        self._vocab = vocabulary(model)
        self._positions = longest_text(model.config, self.max_model_len)
        self._hooks = Hooks(model, modules)
        self._unhook = weakref.finalize(self, self._hooks.close)
        self._stamp = stamp(model)

    def _notice(self) -> None:
        """Begin anew if the model has changed: keys, values and slots are of the weights that made them."""
        # Every step looks for writes that torch counts. The others cost more, and are looked for before one comes in.
        comes = bool(self._waiting) and len(self._running) < self.max_batch
        if not self.model.training and stamp(self.model, values=comes) == self._stamp:
            return
        begun = [each for each in self._waiting if each.computed]
        for each in [*self._running, *self._paused.values(), *begun]:
            self.finished[each.identity] = "error: the model has changed since it began"
            self._leave(each)
        self._pools.clear()
        self._prefixes = Prefixes(self._prefixes.capacity)
        self._begin()

    def load(self, name: str, adapter: Adapter | str | Path) -> Adapter:
        """Give an adapter, or one in a folder, a name, which may be taken: requests under way end as they began.

        PrivateLoRA's, and any other method that is LoRA as well, is converted (:func:`~plpkg.adapters.load_adapter`).

        Raises
        ------
        InvalidAdapterError
            It is not an adapter of this model.
        """
        if self._closed:
            raise ValueError("the engine is closed")
        if not isinstance(name, str) or not name:
            raise ValueError(f"an adapter's name must be a string that is not empty, got {name!r}")
        if not isinstance(adapter, Adapter):
            adapter = load_adapter(adapter, self.model)
        require_fit(adapter, self.model)
        self.adapters[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """Forget a name; its weights go with the last request that uses them. ValueError if there is no such name."""
        self._adapter(name)
        del self.adapters[name]
        self._drop_pools()

    def forget(self, digest: str, account: str) -> None:
        """Drop the keys and values that are kept of what an account has read with an adapter."""
        self._prefixes.forget((digest, account))

    def _drop_pools(self) -> None:
        """Free the slots of adapters that are neither used nor loaded."""
        self._pools = {key: pool for key, pool in self._pools.items() if pool.users}
        loaded = {each.digest for each in self.adapters.values()}
        for pool in self._pools.values():
            pool.clear(loaded)

    def _adapter(self, name: str) -> Adapter:
        if name not in self.adapters:
            loaded = ", ".join(sorted(self.adapters)) or "none"
            raise ValueError(f"no adapter {name!r} is loaded; there are {loaded}")
        return self.adapters[name]

    def add(self, request: Request) -> int:
        """Queue a request, for the adapter that its name means now; its id.

        Raises
        ------
        ValueError
            An adapter that is not loaded, ids outside the vocabulary, too long a text, or a setting out of range.
        """
        return self._add(request).identity

    def check(self, request: Request) -> list[int]:
        """The ids of a request's prompt; ValueError as :meth:`add` for all but the adapter and a reading."""
        return request.check(self._vocab, self._positions, self.tokenizer)

    def _add(self, request: Request) -> Running:
        if self._closed:
            raise ValueError("the engine is closed")
        read, layers = self._read_before(request)
        if layers:
            keys, _ = layers[0]
            if len(keys) != 1:
                raise ValueError(f"a request goes on from one prompt, and this is a reading of {len(keys)}")
        ids = request.check(self._vocab, self._positions, self.tokenizer, read)
        adapter = None if request.adapter is None else self._adapter(request.adapter)
        past = self._room(request, len(ids), read, layers)
        each = Running(next(self._identities), request, adapter, [-1] * read + ids, past, computed=read, read=read)
        self._waiting.append(each)
        return each

    def _read_before(self, request: Request) -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
        """How many tokens a request's reading has read, and the keys and values of each layer."""
        if request.reading is None:
            return 0, []
        return request.reading.units(self.model)

    def _room(self, request: Request, prompt: int, read: int, layers: list) -> KeyValues:
        """Room for a prompt of so many ids and its answer, behind what its reading has kept."""
        kept = max((keys.shape[2] for keys, _ in layers), default=0)
        past = KeyValues(kept + prompt + request.max_new_tokens)
        past.begin(read, layers)
        return past

    def pause(self, identity: int) -> None:
        """Take a request out of the steps until :meth:`resume`; its answer goes on as if nothing had been.

        ValueError if it neither waits nor runs.
        """
        by_identity = {each.identity: each for each in [*self._waiting, *self._running]}
        if identity not in by_identity:
            raise ValueError(f"no request {identity} waits or runs")
        each = by_identity[identity]
        if each in self._waiting:
            self._waiting.remove(each)
        else:
            self._running.remove(each)
            self._release(each)
        self._paused[identity] = each

    def drop(self, identity: int) -> None:
        """Forget what a paused request has read: it reads it again. ValueError if it is not paused."""
        each = self._of_paused(identity)
        _, layers = self._read_before(each.request)
        each.past = self._room(each.request, each.prompt - each.read, each.read, layers)
        each.computed = each.read

    def resume(self, identity: int) -> None:
        """Let a paused request go on, before those that wait. ValueError if it is not paused."""
        self._waiting.appendleft(self._of_paused(identity))
        del self._paused[identity]

    def _of_paused(self, identity: int) -> Running:
        if identity not in self._paused:
            raise ValueError(f"no request {identity} is paused")
        return self._paused[identity]

    def cancel(self, identity: int) -> None:
        """Drop a request, whether it waits or runs; one that has ended or is unknown is no error."""
        self.finished.pop(identity, None)
        self.scored.pop(identity, None)
        for each in [*self._waiting, *self._running, *self._paused.values()]:
            if each.identity == identity:
                self._leave(each)

    def _leave(self, each: Running) -> None:
        """Take a request out, wherever it is; what it has read in a run may serve others."""
        if each in self._waiting:
            self._waiting.remove(each)
            return
        if self._paused.pop(each.identity, None):
            return
        self._running.remove(each)
        if not each.read:  # or its keys and values would depend on more than its ids
            self._prefixes.keep(each.owner, each.ids[: each.computed], each.past)
        self._release(each)

    def _release(self, each: Running) -> None:
        """Give back the lease of a slot."""
        if each.adapter:
            self._pools[form(each.adapter)].release(each.adapter.digest)
            if each.adapter not in self.adapters.values():
                self._drop_pools()

    def _admit(self) -> None:
        """Let requests that wait run, in order, as long as there are places."""
        while self._waiting and len(self._running) < self.max_batch:
            each = self._waiting[0]
            if each.adapter:
                self._lease(each.adapter)
            past = None
            if not each.computed:
                past, positions = self._prefixes.find(each.owner, each.ids)
            if past is not None and not each.request.score_prompt:  # scores need the logits of the whole prompt
                each.past.copy(past, positions)
                each.computed = positions
            self._running.append(self._waiting.popleft())

    def _lease(self, adapter: Adapter) -> None:
        """Hold an adapter in a slot of the pool for its form."""
        key = form(adapter)
        if key not in self._pools:
            self._drop_pools()
            self._pools[key] = Pool(self.model)
        self._pools[key].lease(adapter)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, int]]:
        """Read and write once for every running request: the ids and tokens of those that have written one.

        Raises
        ------
        ValueError
            The model has changed since the last step, and cannot be served as it is now.
        """
        if not (self._waiting or self._running):
            return []
        self._notice()
        self._admit()
        if not self._running:  # those that ran have ended
            return []

        # 1. Plan: the tokens of each request, and those after which logits are wanted.
        batch, rows, groups = plan(self._running, list(self._pools.values()), self.max_step_tokens)
        ids: list[int] = []
        wanted: list[int] = []
        counts: list[int] = []
        for each, row in zip(batch, rows, strict=True):
            after = row.wanted(len(each.ids))
            ids += each.ids[row.start : row.positions.stop]
            wanted += after
            counts.append(len(after))

        # 2. Read: one pass for all of them, (wanted, vocab).
        with self._hooks.batch(*groups):
            logits = read(self.model, ids, rows, wanted)

        # 3. Write: each request's next token; who has ended leaves.
        ends = self._ends()
        written: list[tuple[int, int]] = []
        finite = logits.amax(-1).isfinite()
        for each, row, scores, fine in zip(batch, rows, logits.split(counts), finite.split(counts), strict=True):
            try:
                if not fine.all():
                    raise FloatingPointError("the logits are not finite")
                reason = self._write(each, row, scores, ends, written)
            except Exception as error:  # an adapter's overflow, or a tokenizer's, is its own request's affair
                reason = f"error: {error}"
            if reason:
                self.finished[each.identity] = reason
                self._leave(each)
        return written

    def _ends(self) -> list[int]:
        """The model's end-of-text tokens."""
        ends = self.model.generation_config.eos_token_id
        if ends is None:
            return []
        return torch.as_tensor(ends).flatten().tolist()

    def _write(
        self, each: Running, row: Row, scores: torch.Tensor, ends: list[int], written: list[tuple[int, int]]
    ) -> str | None:
        """Write a request's next token, if all of it is read, and score what is asked for: why it has ended, if so."""
        whole = row.positions.stop == len(each.ids)
        if whole and each.request.max_new_tokens:
            token = each.choose(scores[-1])
            each.ids.append(token)
            written.append((each.identity, token))
        each.computed = row.positions.stop
        if each.request.logprobs is not None and len(scores):
            scored = each.scored_now(row, scores)
            self.scored.setdefault(each.identity, []).extend(scored)
        if not whole:
            return None
        return each.ended(ends, self.tokenizer)

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

    def _read(self, each: Running) -> Iterator[int]:
        """A request's new tokens; steps are made until it has ended."""
        seen = 0
        try:
            while True:
                if seen < len(each.new):
                    seen += 1
                    yield each.new[seen - 1]
                elif each in self._running or each in self._waiting:
                    self.step()
                else:
                    break
            if self._closed:
                raise RuntimeError("the engine was closed")
            reason = self.finished.get(each.identity, "")
            if reason.startswith("error"):
                raise RuntimeError(f"request {each.identity} ended with an {reason}")
        finally:
            self.cancel(each.identity)

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Serve requests together: each one's new ids, in the order of the requests.

        Raises
        ------
        ValueError, RuntimeError
            As :meth:`stream`; none of the requests is left behind.
        """
        added: list[Running] = []
        try:
            added += map(self._add, requests)
            return [list(self._read(each)) for each in added]
        finally:
            for each in added:
                self.cancel(each.identity)

    def close(self) -> None:
        """Drop every request and adapter, and take the hooks off the model; nothing is answered afterwards."""
        self._waiting.clear()
        self._running.clear()
        self._paused.clear()
        self.adapters.clear()
        self._pools.clear()
        self._prefixes = Prefixes(0)
        self._unhook()
        self._closed = True
