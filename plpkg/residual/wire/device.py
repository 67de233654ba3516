"""The device's end: embedding, LM head and every M here, the decoder layers in a :class:`.CloudServer` elsewhere.

After a connection broke the text is read again, and a training step begins again: nothing is written twice, or learnt
twice.

A pass can yield several tokens: guesses travel along (:mod:`plpkg.residual.drafts`), and the device takes of them what
it would have chosen itself, then one more token of its own. What it writes does not depend on the guesses but for
rounding: a pass over several positions sums in another order.

Left out: beam search, and batches of sequences of unequal length (pad on the right and mask the labels to train on
them).
"""

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from plpkg.catalog import Link, link as find_link
from plpkg.decoding import rope_changes
from plpkg.inputs import Ids, ids_and_labels, token_ids
from plpkg.residual import drafts
from plpkg.residual.cut.parts import split
from plpkg.residual.drafts import Draft
from plpkg.residual.wire import writing
from plpkg.residual.wire.connection import Wire
from plpkg.residual.wire.messages import Counter
from plpkg.residual.wire.reading import PromptReading
from plpkg.residual.wire.remote_layers import RemoteLayers
from plpkg.residual.wire.terms import terms
from plpkg.residual.wire.training_step import Learner
from plpkg.residual.wire.writing import Writing
from plpkg.validation import number, whole_number

_TRAINING: weakref.WeakKeyDictionary[PeftModel, threading.Lock] = weakref.WeakKeyDictionary()
"""Clients of one model add to the same gradients, one after the other."""


class DeviceClient:
    """A model whose decoder layers are elsewhere; a context manager.

    Parameters
    ----------
    target
        The cloud's ``host:port``.
    model
        The result of ``get_peft_model(model, PrivateLoraConfig(...))``, or a ``LadderConfig``, with the M to use. Only
        the device's part of it is used; :func:`plpkg.residual.cut.parts.release` frees the rest.
    first_k, last_k, fold, precision, adapter_name
        As the cloud has them.
    token, ca
        The bearer token, and the certificate to trust (``cert.pem``): both needed but on a loopback address.
    link
        A :class:`plpkg.catalog.Link` or its name: each message takes its time (:mod:`plpkg.residual.wire.link`).
    timeout_s
        The longest wait for an answer.
    retry_s
        How long to try to come back after the connection broke. A first connection that is refused is not tried again.

    Attributes
    ----------
    part, adapter_name
        The device's part of the model, and which adapter it is.
    wire, link
        The connection, and what its messages pass.
    terms
        The terms that the cloud must have as well.
    traffic, looks
        The traffic so far; and of that, with :meth:`per_example`'s ``look``, to see whether examples mix.

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
        self.link = None if link is None else find_link(link)
        self.part, cloud = split(model, first_k, last_k, fold=fold, adapter_name=adapter_name)
        self.part.eval()
        self.terms = terms(model, self.part, cloud.riders, adapter_name, (first_k, last_k), precision)
        self.adapter_name = adapter_name
        self.looks = Counter()
        self._peft_model = model
        self._model: Any = model.get_base_model()  # of any family
        self._in_use = threading.Lock()
        self._training = _TRAINING.setdefault(model, threading.Lock())
        self.wire = Wire(target, self.terms, token=token, ca=ca, link=self.link, timeout_s=timeout_s, retry_s=retry_s)
        self._layers = RemoteLayers(self.part, self.wire)

    def __enter__(self) -> "DeviceClient":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Leave the cloud: what is under way fails."""
        self.wire.close()

    def connect(self) -> None:
        """Meet the cloud now, and not with the first text.

        Raises
        ------
        ConnectionError, RefusedError
            As in :meth:`generate`.
        """
        with self._alone():
            self.wire.meet()

    @property
    def on_silence(self) -> Callable[[str], object] | None:
        """Called with a sentence every few seconds while the cloud does not answer."""
        return self.wire.on_silence

    @on_silence.setter
    def on_silence(self, say: Callable[[str], object] | None) -> None:
        self.wire.on_silence = say

    @property
    def traffic(self) -> Counter:
        """The counts so far: a copy, so that two of them can be subtracted."""
        return copy.copy(self.wire.traffic)

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
            The tokens that end a sequence; the model's own by default, ``-1`` for none.
        stop_strings
            They end a sequence as well, wherever in a token they end; they need the ``tokenizer``.
        on_token
            Called with each new ``(batch,)`` of tokens as soon as it is there.
        draft
            Who guesses what follows, for one sequence: ``"lookup"`` in the text so far; ``"public"``, counts of public
            text as well, which need the ``tokenizer``; or a function (:data:`plpkg.residual.drafts.Draft`). All guesses
            reach the cloud, the wrong ones as well. The tokens are the same as without, sampled ones with the same
            ``generator``, too.
        draft_tokens
            At most so many guesses in a pass.
        chunk_size
            Tokens of the prompt that go up at a time; all of them by default. A cloud with a bounded cache
            (``CloudServer(cache=…)``) never holds more units than its budget and so many: it forgets after each chunk
            and each token. Such a cloud takes no ``draft``. A text that is read again after a break is forgotten anew.

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
        choice: dict[str, Any] = dict(do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p)
        writing.checked_warpers(max_new_tokens, **choice)  # refuses what cannot be
        whole_number("draft_tokens", draft_tokens, 0)
        if chunk_size is not None:
            whole_number("chunk_size", chunk_size, 1)
        ids = self._checked(input_ids, more=max_new_tokens - 1)  # the last token is not read
        ends = writing.ends(self._model, eos_token_id)
        stops = writing.stops(stop_strings, tokenizer)
        guess = drafts.chosen(draft, tokenizer)
        if draft is not None and len(ids) > 1:
            raise ValueError(f"draft={draft!r} is for one sequence, got {len(ids)}: they would not keep pace")
        self._require_finite()
        text = Writing(ids, max_new_tokens, ends, stops, guess, self.part.embedding.num_embeddings, generator, **choice)
        reading = PromptReading(self._layers, writing.reads_anew_beyond(self._model), chunk_size)
        self.connect()  # it says how long a text may be
        if draft is not None and self.wire.forgets:
            raise ValueError(f"draft={draft!r}: the cloud's cache is bounded, and cannot take guesses back")
        rope_limits = rope_changes(self._model.config)
        with self._alone():
            while not text.over:
                guesses = text.guesses(min(draft_tokens, self._most_guesses(text, rope_limits)))
                logits = reading.next_logits(text.ids, guesses)
                self.wire.traffic.drafted_tokens += len(guesses)
                for tokens, guessed in text.take(logits, guesses):
                    self.wire.traffic.wrote(len(tokens), accepted=guessed)
                    if on_token is not None:
                        on_token(tokens)
                reading.cut_back(text.ids.shape[1] - 1)  # the token that was written last is not read yet
        return text.ids

    def _most_guesses(self, text: Writing, rope_limits: list[tuple[str, int]]) -> int:
        """How many guesses one pass may carry: what the text, the cloud and the model's RoPE have room for."""
        length = text.ids.shape[1]
        before_turn = writing.guesses_before_rope_turns(rope_limits, length)
        return min(text.room, self.wire.max_tokens - length, before_turn)

    @torch.no_grad()
    def logits(self, input_ids: Ids) -> torch.Tensor:
        """Logits ``(batch, seq, vocab)`` of what follows each token of ``(batch, seq)`` or of one text: to score it.

        Raises
        ------
        ValueError, ConnectionError, RefusedError
            As in :meth:`generate`.
        """
        ids = self._checked(input_ids)
        with self._alone():
            return PromptReading(self._layers).next_logits(ids, every=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One sequence or training step at a time: the cloud has one cache for this device."""
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
            The number by which the sum of the losses is divided: of all steps that accumulate together. By default the
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
            losses, by_chunk = Learner(self._layers).gradients(ids, targets, [items], self.trainable())
            (gradients,) = by_chunk  # the whole batch is one chunk
            if not all(gradient.isfinite().all() for gradient in gradients.values()):
                raise FloatingPointError("the gradient is not finite")
            for parameter, gradient in gradients.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        return losses[0]

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
            :func:`plpkg.inputs.ids_and_labels`.
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
            losses, by_example = Learner(self._layers).gradients(ids, targets, items, self.trainable())
            if look:
                self.looks = self.looks + (self.traffic - before)
        learning = set(self.trainable())
        stacked = {}
        for name, parameter in self._peft_model.named_parameters():
            if parameter in learning:
                zeros = torch.zeros_like(parameter)  # of examples whose loss does not depend on it
                stacked[name] = torch.stack([gradients.get(parameter, zeros) for gradients in by_example])
        return stacked, torch.tensor(losses)

    def trainable(self) -> list[torch.nn.Parameter]:
        """The parameters that learn on the device: every M, unless it is frozen.

        Raises
        ------
        ValueError
            Nothing does.
        """
        trainable = [parameter for parameter in self.part.parameters() if parameter.requires_grad]
        if not trainable:
            raise ValueError(
                f"every M of {self.adapter_name!r} is frozen: set_adapter, or load it with is_trainable=True"
            )
        return trainable

    def _require_finite(self) -> None:
        """Refuse an M that is damaged, before anything is sent."""
        every_m = list(self.part.matrices.parameters())
        tail = self.part.tail
        if tail is not None and tail.m is not None:
            every_m += tail.m.parameters()
        if not all(m.isfinite().all() for m in every_m):
            raise FloatingPointError(f"an M of {self.adapter_name!r} is not finite: load the adapter anew")

    def _targets(self, batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids ``(batch, seq)``, and what is to be predicted at each but the last."""
        ids, labels = ids_and_labels(batch)
        ids = self._checked(ids)
        labels = labels.cpu()
        self._checked(torch.where(labels == -100, 0, labels), "labels")
        return ids, labels[:, 1:]

    def _checked(self, ids: Ids, name: str = "input_ids", *, more: int = 0) -> torch.Tensor:
        """Token ids ``(batch, seq)`` that the model knows, and has positions for, with so many ``more`` behind them."""
        ids = token_ids(ids, name).cpu()
        vocab = self.part.embedding.num_embeddings
        low, high = ids.min().item(), ids.max().item()
        if low < 0 or high >= vocab:
            raise ValueError(f"{name} must be between 0 and vocab - 1 = {vocab - 1}, got {low if low < 0 else high}")
        if self.part.positions is not None:  # GPT-2's and OPT's are a table
            positions = self._model.config.max_position_embeddings
            length = ids.shape[1] + more
            if length > positions:
                raise ValueError(f"{length} tokens, the model has {positions} positions")
        return ids
