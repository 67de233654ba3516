"""The device's end: embedding, LM head and every M here, the decoder layers in a :class:`.CloudServer` elsewhere.

Generation and training go on where they were after a connection broke: a step that was not answered is asked for
again, and what it had added to a gradient is taken back first.

A pass can yield several tokens: guesses travel along (:mod:`plpkg.residual.drafts`), or the cloud writes on, and the
device takes of them what it would have chosen itself, then one more token of its own. What it writes does not depend
on the guesses, nor on whether they stop because too few are right, but for rounding: a pass over several positions sums
in another order.

Left out: beam search, and batches of sequences of unequal length (pad on the right and mask the labels to train on
them).
"""

import contextlib
import copy
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from peft import PeftModel

from plpkg.batch import Ids, ids_and_labels, token_ids
from plpkg.catalog import Link
from plpkg.decoding import rope_changes
from plpkg.residual import drafts
from plpkg.residual.device_part import DeviceCache, Gradients
from plpkg.residual.drafts import Acceptance, Draft
from plpkg.residual.parts import split
from plpkg.residual.wire import writing
from plpkg.residual.wire.certificates import require_protection
from plpkg.residual.wire.connection import Connection, Counter, SessionLostError
from plpkg.residual.wire.relay import Relay
from plpkg.residual.wire.tensors import PRECISIONS, pack, unpack
from plpkg.residual.wire.terms import terms
from plpkg.residual.wire.wire_pb2 import Choice, Part, Step
from plpkg.residual.wire.writing import Writing
from plpkg.validation import number, whole_number

Result = TypeVar("Result")

RESTARTS = 4
"""How often a step begins anew because the cloud has forgotten the session."""

_TRAINING: weakref.WeakKeyDictionary[PeftModel, threading.Lock] = weakref.WeakKeyDictionary()
"""Clients of one model add to the same gradients, one after the other."""


class DeviceClient:
    """A model whose decoder layers are elsewhere; a context manager.

    Parameters
    ----------
    target
        The cloud's ``host:port``.
    model
        What ``get_peft_model(model, PrivateLoraConfig(...))`` gave, or a ``LadderConfig``, with the M to use. Only the
        device's part of it is used; :func:`plpkg.residual.parts.release` frees the rest.
    first_k, last_k, fold, precision, adapter_name
        As the cloud has them.
    token, ca
        The bearer token, and the certificate to trust (``cert.pem``): both needed but on a loopback address.
    link
        A :class:`plpkg.catalog.Link` or its name: everything goes through a relay with its rates and round-trip time.
    timeout_s
        The longest wait for an answer.
    retry_s
        How long to try to come back after the connection broke. A first connection that is refused is not tried again.

    Attributes
    ----------
    part, adapter_name
        The device's part of the model, and which adapter it is.
    terms
        What the cloud must have as well.
    traffic, looks
        What has crossed so far; and of that, with :meth:`per_example`'s ``look``, to see whether examples mix.

    Raises
    ------
    ValueError
        A target that needs TLS and a token without them; a time that cannot be.
    OSError
        ``ca`` cannot be read.
    """

    def __init__(
        self,
        target: str,
        model: PeftModel,
        *,
        first_k: int = 0,
        last_k: int = 0,
        fold: bool = False,
        precision: str = "fp16",
        adapter_name: str = "default",
        token: str | None = None,
        ca: str | Path | None = None,
        link: str | Link | None = None,
        timeout_s: float = 30.0,
        retry_s: float = 30.0,
    ) -> None:
        number("timeout_s", timeout_s, open_low=True)
        number("retry_s", retry_s)
        require_protection(target, encrypted=ca is not None, token=token, option="--ca")
        self.part, cloud = split(model, first_k, last_k, fold=fold, adapter_name=adapter_name)
        self.part.eval()
        self.terms = terms(model, self.part, cloud.riders, adapter_name, (first_k, last_k), precision)
        self.dtype, self.adapter_name = PRECISIONS[precision], adapter_name
        self._peft_model, self._model, self.looks = model, model.get_base_model(), Counter()
        self._closed, self._acceptance = False, Acceptance(None)
        self._in_use, self._training = threading.Lock(), _TRAINING.setdefault(model, threading.Lock())
        self.relay = None if link is None else Relay(target, link)
        via = self.relay and self.relay.address
        try:
            waits = dict(timeout_s=timeout_s, retry_s=retry_s)
            self._connection = Connection(target, self.terms, token=token, ca=ca, via=via, **waits)
        except BaseException:
            if self.relay is not None:
                self.relay.close()
            raise

    def __enter__(self) -> "DeviceClient":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Leave the cloud."""
        self._closed = True
        self._connection.close(leave=self._in_use.acquire(blocking=False))  # and nothing begins any more
        if self.relay is not None:
            self.relay.close()

    @property
    def on_silence(self) -> Callable[[str], object] | None:
        """Called with a sentence every few seconds while the cloud does not answer."""
        return self._connection.on_silence

    @on_silence.setter
    def on_silence(self, say: Callable[[str], object] | None) -> None:
        self._connection.on_silence = say

    @property
    def traffic(self) -> Counter:
        """What has crossed so far: a copy, so that two of them can be subtracted."""
        return copy.copy(self._connection.traffic)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Ids,
        max_new_tokens: int = 64,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        eos_token_id: int | list[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        on_token: Callable[[torch.Tensor], object] | None = None,
        draft: str | Draft | None = None,
        draft_tokens: int = 6,
        min_acceptance: float | None = None,
        chunk_size: int | None = None,
        tokenizer=None,
    ) -> torch.Tensor:
        """Continue sequences.

        Parameters
        ----------
        input_ids
            ``(batch, seq)`` or one text's ``(tokens,)``, also as a list, without padding.
        max_new_tokens
            At most.
        do_sample, temperature, top_k, top_p, generator
            Sample, instead of taking the most probable token; as in Hugging Face's ``generate``, but for ``top_k``,
            which is 50 there unless told otherwise, and 0 here: any token.
        eos_token_id
            What ends a sequence; the model's own by default, ``-1`` for none.
        stop_strings
            They end a sequence as well, wherever in a token they end; they need the ``tokenizer``.
        on_token
            Called with each new ``(batch,)`` of tokens as soon as it is there.
        draft
            Who guesses what follows, for one sequence: ``"lookup"`` in the text so far; ``"public"``, counts of public
            text as well, which need the ``tokenizer``; ``"backbone"``, the cloud, which writes on without M; or a
            function (:data:`plpkg.residual.drafts.Draft`). All guesses reach the cloud, the wrong ones as well. The
            tokens are the same as without, sampled ones with the same ``generator``, too; but ``"backbone"`` samples
            with random numbers that it tells the cloud: another text, of the same distribution.
        draft_tokens
            At most so many guesses in a pass.
        min_acceptance
            The share of guesses that has to be accepted, or they stop until one is right again
            (:class:`plpkg.residual.drafts.Acceptance`; a client remembers what its last draft did). By default what
            saves time, by the clock; with 0 guesses never stop.
        chunk_size
            Tokens of the prompt that go up at a time; all of them by default. A cloud with a bounded cache
            (``CloudServer(cache=…)``) never holds more units than its budget and so many: it forgets after each chunk
            and each token. It takes no ``draft``. Reading again what a lost session had read forgets anew.

        Returns
        -------
        torch.Tensor
            ``(batch, seq + new)``; behind its end a sequence repeats the token that ended it.

        Raises
        ------
        ValueError
            Arguments that cannot be.
        ConnectionError
            The cloud cannot be reached.
        FloatingPointError
            M or the logits are not finite.
        plpkg.residual.wire.connection.RefusedError
            It does not want to: a sequence too long, say.
        """
        choice = dict(do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p)
        writing.checked_warpers(max_new_tokens, **choice)  # refuses what cannot be
        whole_number("draft_tokens", draft_tokens, 0)
        if chunk_size is not None:
            whole_number("chunk_size", chunk_size, 1)
        if min_acceptance is not None:
            number("min_acceptance", min_acceptance, 0, 1)
        ids, ends = self._checked(input_ids, more=max_new_tokens - 1), writing.ends(self._model, eos_token_id)
        stops = writing.stops(stop_strings, tokenizer)
        guess, ahead = drafts.chosen(draft, tokenizer), draft == "backbone"
        if draft is not None and len(ids) > 1:
            raise ValueError(f"draft={draft!r} is for one sequence, got {len(ids)}: they would not keep pace")
        if ahead and (kept := self.terms.first_k + self.terms.last_k):
            raise ValueError(f"draft={draft!r} needs every layer in the cloud, but {kept} are on the device")
        vocab = self.part.embedding.num_embeddings
        self._require_finite()
        text = Writing(ids, max_new_tokens, ends, stops, guess, vocab, ahead, generator, **choice)
        limit, changes = writing.reads_anew_beyond(self._model), rope_changes(self._model.config)
        cache = self.part.new_cache()
        if (draft, min_acceptance) != (self._acceptance.draft, self._acceptance.least):
            self._acceptance = Acceptance(draft, min_acceptance)
        acceptance, traffic = self._acceptance, self._connection.traffic

        def next_logits() -> tuple[torch.Tensor, list[int]]:
            nonlocal cache
            length = text.ids.shape[1]
            turns = writing.guesses_before_rope_turns(changes, length)
            count = max(0, min(draft_tokens, text.room, self._connection.max_tokens - length, turns))
            count = acceptance.allowed(count)
            written = count if ahead and (cache.seen or not self.part.matrices) else 0
            try:
                while chunk_size is not None and length - cache.seen > chunk_size:
                    self._next_logits(text.ids[:, cache.seen : cache.seen + chunk_size], cache, [], 0, None)
                    cache.cut_back(cache.seen)
                return self._next_logits(text.ids[:, cache.seen :], cache, text.guesses(count), written, text.choice)
            except SessionLostError:  # so the sequence begins anew as well, with all that it has
                cache = self.part.new_cache()
                raise

        with self._alone():
            self._begin_anew(lambda: self._connection.keep_trying(lambda: None))  # it says how long a text may be
            if draft is not None and self._connection.forgets:
                raise ValueError(f"draft={draft!r}: the cloud's cache is bounded, and cannot take guesses back")
            while not text.over:
                if limit is not None and cache.seen <= limit < text.ids.shape[1]:
                    cache = self.part.new_cache()
                read, began, accepted = text.ids.shape[1] - cache.seen, time.perf_counter(), traffic.accepted_tokens
                logits, guesses = self._begin_anew(next_logits)
                seconds = time.perf_counter() - began if read == 1 else None
                for tokens, guessed in text.take(logits, guesses):
                    traffic.wrote(len(tokens), accepted=guessed)
                    if on_token is not None:
                        on_token(tokens)
                acceptance.add(len(guesses), traffic.accepted_tokens - accepted, seconds)
                traffic.stopped = acceptance.stopped
                cache.cut_back(text.ids.shape[1] - 1)
        return text.ids

    @torch.no_grad()
    def logits(self, input_ids: Ids) -> torch.Tensor:
        """Logits ``(batch, seq, vocab)`` of what follows each token of ``(batch, seq)`` or of one text: to score it.

        Raises
        ------
        ValueError, ConnectionError, RefusedError
            As in :meth:`generate`.
        """
        ids = self._checked(input_ids)

        def run() -> torch.Tensor:
            return self._next_logits(ids, self.part.new_cache(), [], 0, None, every=True)[0]

        with self._alone():
            return self._begin_anew(run)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One sequence or training step at a time: the cloud has one cache for this device."""
        if self._closed:
            raise RuntimeError("this client is closed")
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("this client is in the middle of a sequence or a training step: take another for more")
        try:
            yield
        finally:
            self._in_use.release()

    def train_step(
        self,
        input_ids: Ids,
        labels: Ids | None = None,
        *,
        num_items: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> float:
        """Add the gradient of the loss to every M, and to what else is trainable on the device.

        Parameters
        ----------
        input_ids, labels
            ``(batch, seq)``, or one text's; labels of -100 are not predicted. Or a batch as in :meth:`per_example`.
        num_items
            What the sum of the losses is divided by: of all steps that accumulate together. By default the
            labels that are predicted in this one.
        optimizer
            If given, it makes its step and the gradients are cleared.

        Returns
        -------
        float
            The loss, in nats per token.

        Raises
        ------
        ValueError
            Shapes that do not fit, no label to predict, or nothing on the device that learns.
        FloatingPointError
            The loss or a gradient is not finite.
        ConnectionError, RefusedError
            As in :meth:`generate`. Whatever is raised, the gradients are as they were before.
        """
        ids, targets = self._targets(input_ids if labels is None else (input_ids, labels))
        predicted = int((targets != -100).sum())
        if not predicted:
            raise ValueError(f"no label to predict: the first is not, and the other {targets.numel()} are all -100")
        items = predicted if num_items is None else whole_number("num_items", num_items, 1)
        with self._alone(), self._training:
            (loss,), (gradients,) = self._pass_both_ways(ids, targets, [items])
            if not all(gradient.isfinite().all() for gradient in gradients.values()):
                raise FloatingPointError("the gradient is not finite")
            for parameter, gradient in gradients.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def per_example(self, batch, *, look: bool = False) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Each example's gradient of its own loss: what ``make_private(…, per_example=client.per_example)`` clips.

        The device has what goes into every M and the gradient of what comes out, so a step crosses as it does in
        :meth:`train_step`, to the byte. An ε of such a training is about whoever gets M, or what it writes, later.
        It holds nothing back from the cloud, which sees the text (:mod:`plpkg.residual.attacks`) and gradients without
        noise; and it needs a cloud that lets no example change what it computes for another one.

        Parameters
        ----------
        batch
            Token ids ``(batch, seq)``, ``(ids, labels)``, or a mapping such as ``corpora.batch`` makes:
            :func:`plpkg.batch.ids_and_labels`.
        look
            Count what crosses in ``looks``: nothing is learnt from this pass.

        Returns
        -------
        (gradients, losses)
            By the model's name of each parameter that learns ``(batch, *shape)``; and ``(batch,)``, each the mean over
            the example's own labels in nats per token, 0 where it has none.

        Raises
        ------
        ValueError
            Shapes that do not fit, padding on the left, or nothing on the device that learns.
        FloatingPointError
            A loss is not finite.
        ConnectionError, RefusedError
            As in :meth:`generate`.
        """
        ids, targets = self._targets(batch)
        items = (targets != -100).sum(1).clamp(min=1).tolist()  # an example's own; of the batch's, it would mix them
        with self._alone():
            before = self.traffic
            losses, each = self._pass_both_ways(ids, targets, items)
            if look:
                self.looks = self.looks + (self.traffic - before)
        learning = {name: p for name, p in self._peft_model.named_parameters() if p in set(self.trainable())}
        stacked = {
            name: torch.stack([found.get(p, torch.zeros_like(p)) for found in each]) for name, p in learning.items()
        }
        return stacked, torch.tensor(losses)

    def trainable(self) -> list[torch.nn.Parameter]:
        """What learns on the device: every M, unless it is frozen.

        Raises
        ------
        ValueError
            Nothing does.
        """
        if trainable := [p for p in self.part.parameters() if p.requires_grad]:
            return trainable
        raise ValueError(f"every M of {self.adapter_name!r} is frozen: set_adapter, or load it with is_trainable=True")

    def _require_finite(self) -> None:
        tail = () if self.part.tail is None or self.part.tail.m is None else self.part.tail.m.parameters()
        if not all(p.isfinite().all() for p in (*self.part.matrices.parameters(), *tail)):
            raise FloatingPointError(f"an M of {self.adapter_name!r} is not finite: load the adapter anew")

    def _begin_anew(self, run: Callable[[], Result]) -> Result:
        """``run()``, again with a new session where the cloud has forgotten the one before."""
        for _ in range(RESTARTS):
            with contextlib.suppress(SessionLostError):
                return run()
        return run()

    def _pass_both_ways(
        self, ids: torch.Tensor, targets: torch.Tensor, items: Sequence[int]
    ) -> tuple[list[float], list[Gradients]]:
        """The losses and the gradients of as many equal parts of a batch as there are ``items``.

        A part's loss is the sum over its targets, divided by its ``items``. Nothing of a part depends on another one.
        """
        of_m = set(self.part.matrices.parameters())
        here = [parameter for parameter in self.trainable() if parameter not in of_m]
        run = functools.partial(self._there_and_back, ids, targets, items, here)
        return self._begin_anew(lambda: self._connection.keep_trying(run))  # any session will do

    def _there_and_back(
        self, ids: torch.Tensor, targets: torch.Tensor, items: Sequence[int], here: list[torch.nn.Parameter]
    ) -> tuple[list[float], list[Gradients]]:
        """``here`` learns beside M."""
        gradients: list[Gradients] = [{} for _ in items]
        embedded = [self.part.embed(part) for part in ids.chunk(len(items))]
        hidden, input_gradient = torch.cat(embedded).detach(), embedded[0].requires_grad
        sending = dict(train=True, positions=ids.shape[1], input_gradient=input_gradient)
        self._send_step(self._connection.steps + 1, ids.shape, pack(hidden, self.dtype), **sending)
        self._exchange(ids.shape, train=len(items))
        final, _ = self._final(*ids.shape)
        parts = zip(final.chunk(len(items)), targets.chunk(len(items)), items, gradients, strict=True)
        losses, back, scales = [], [], []
        for arrived, labels, count, found in parts:
            arrived.requires_grad_()
            logits = self.part.logits(arrived)[:, :-1].flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
            loss = loss / count
            if not loss.isfinite():
                raise FloatingPointError(f"the loss is {loss.item()}")
            grad, *others = torch.autograd.grad(loss, [arrived, *here], allow_unused=True)
            _add(found, here, others)
            # A power of two brings the gradients to where the wire's precision is good; the way back is linear.
            scales.append(2.0 ** min(126, -math.frexp(grad.abs().max().item())[1]))  # float32 has no larger one
            back.append(grad * scales[-1])
            losses.append(loss.item())
        self._connection.steps += 1
        if not (self.part.matrices or input_gradient):
            return losses, gradients  # nothing that learns is before the cloud's layers
        self._connection.send(grad_hidden=pack(torch.cat(back), self.dtype))
        due, sent = set(range(len(self.part.matrices))), True
        while due:
            part = self._connection.receive("grad_output", round_trips=int(sent))
            grad_v = self._unpack_part(part, due, ids.shape, self.terms.r_d2c)
            grad_u, each = self.part.residual_backward(part.group, grad_v)
            for found, scaled, scale in zip(gradients, each, scales, strict=True):
                _add(found, scaled, [gradient / scale for gradient in scaled.values()])
            if sent := not part.unanswered:
                self._connection.send(grad_input=Part(group=part.group, data=pack(grad_u, self.dtype)))
        if input_gradient:
            grad = unpack(self._connection.receive("grad_hidden"), tuple(hidden.shape), self.dtype).to(hidden)
            for found, sent, part, scale in zip(gradients, embedded, grad.chunk(len(items)), scales, strict=True):
                _add(found, here, torch.autograd.grad(sent, here, part / scale, allow_unused=True))
        return losses, gradients

    def _next_logits(
        self,
        ids: torch.Tensor,
        cache: DeviceCache,
        guesses: list[int],
        ahead: int,
        choice: Choice | None,
        *,
        every: bool = False,
    ) -> tuple[torch.Tensor, list[int]]:
        """Logits ``(batch, guesses + 1, vocab)`` of what follows ``ids`` ``(batch, seq)`` and each guess, and these.

        The guesses are the device's, or as many as ``ahead`` of the cloud's. With ``every`` the logits are those of
        every position.
        """
        keep = cache.seen
        if guesses:
            ids = torch.cat([ids, torch.tensor([guesses])], dim=1)
        hidden = pack(self.part.embed(ids, cache=cache), self.dtype)
        cache.seen += ahead
        wanted = ids.shape[1] if every else len(guesses) + 1
        positions = wanted if self.part.last is None else ids.shape[1]  # its KV caches have to be filled
        read = (len(ids), ids.shape[1] + (ahead if self.part.matrices else 0))  # in the pass that asks for every M
        extra = dict(ahead=ahead, choice=choice) if ahead else {}
        number = None

        def run() -> tuple[torch.Tensor, list[int]]:
            nonlocal number
            answered = number is not None and number == self._connection.steps  # but the answer was lost
            if not answered:
                number = self._connection.steps + 1
            begins = dict(keep=keep, new_sequence=keep == 0)
            self._send_step(number, ids.shape, hidden, positions=positions, **begins, **extra)
            if not answered:
                self._exchange(read, cache=cache)
            return self._final(len(ids), positions, ahead)

        final, written = self._connection.keep_trying(run)
        self._connection.steps = number
        self._connection.traffic.drafted_tokens += len(guesses) + len(written)
        guesses = guesses or written
        logits = self.part.logits(final, cache=cache)[:, -max(wanted, len(guesses) + 1) :]
        if not logits.amax(-1).isfinite().all():
            raise FloatingPointError("the logits are not finite: the adapter, or the backbone, is damaged or overflows")
        return logits, guesses

    def _send_step(self, number: int, shape: tuple[int, int], hidden: bytes, **fields) -> None:
        step = Step(number=number, batch=shape[0], seq=shape[1], hidden=hidden, **fields)
        self._connection.send(step=step)

    def _exchange(self, shape: tuple[int, int], cache: DeviceCache | None = None, train: int = 0) -> None:
        """Answer every A·x of a pass over ``(batch, seq)`` with M·A·x; ``train`` is :meth:`DevicePart.residual`'s."""
        due = set(range(len(self.part.matrices)))
        while due:
            part = self._connection.receive("residual", round_trips=0)
            u = self._unpack_part(part, due, shape, self.terms.r_c2d)
            data = pack(self.part.residual(part.group, u, train=train, cache=cache), self.dtype)
            self._connection.send(residual=Part(group=part.group, data=data))

    def _final(self, batch: int, positions: int, ahead: int = 0) -> tuple[torch.Tensor, list[int]]:
        """What ends a pass: ``(batch, positions + ahead, width)``, and the tokens that the cloud has written."""
        final = self._connection.receive("final", round_trips=0)
        most = len(self.part.matrices) + 1  # each exchange, and the end
        self._connection.traffic.round_trips += whole_number("the cloud's round_trips", final.round_trips, 1, most)
        hidden = unpack(final.hidden, (batch, positions + ahead, self.part.width), self.dtype)
        written = unpack(final.tokens, (ahead,), torch.int32).tolist()
        if any(not 0 <= token < self.part.embedding.num_embeddings for token in written):
            raise ValueError(f"the cloud has written {written}, which are no tokens")
        return hidden.to(self.part.lm_head.weight), written

    def _unpack_part(self, part: Part, due: set[int], shape: tuple[int, int], rank: int) -> torch.Tensor:
        """What came for an exchange that was due, and is no more: each once, in the order of the cloud's layers."""
        if part.group not in due:
            raise ValueError(f"the cloud sent exchange {part.group} where one of {sorted(due)} was due")
        due.remove(part.group)
        return unpack(part.data, (self.terms.projections[part.group], *shape, rank), self.dtype)

    def _targets(self, batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids ``(batch, seq)``, and what is to be predicted at each but the last."""
        ids, labels = (each.cpu() for each in ids_and_labels(batch))
        ids = self._checked(ids)
        self._checked(torch.where(labels == -100, 0, labels), "labels")
        return ids, labels[:, 1:]

    def _checked(self, ids: Ids, name: str = "input_ids", *, more: int = 0) -> torch.Tensor:
        ids = token_ids(ids, name).cpu()
        vocab, low, high = self.part.embedding.num_embeddings, ids.min().item(), ids.max().item()
        if low < 0 or high >= vocab:
            raise ValueError(f"{name} must be between 0 and vocab - 1 = {vocab - 1}, got {low if low < 0 else high}")
        positions = self._model.config.max_position_embeddings if self.part.positions is not None else None
        if positions is not None and ids.shape[1] + more > positions:
            raise ValueError(f"{ids.shape[1] + more} tokens, the model has {positions} positions")
        return ids


def _add(gradients: Gradients, parameters: Iterable[torch.nn.Parameter], found: Iterable[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            gradients[parameter] = gradients.get(parameter, 0) + gradient
