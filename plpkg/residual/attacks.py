"""Attacks of the cloud on PrivateLoRA's messages (arXiv 2311.14030): tokens in, tokens out, and M.

The cloud computes as agreed, keeps every message, and knows what is public: weights, the cut, and text of its own.

- a running cloud reads along where its own layers ask the device: :func:`listen`;
- word embeddings are rows of a public table: :func:`recover_tokens`;
- final hidden states go through a public LM head: their argmax is what a greedy device writes;
- u = A·x and v = M·u are input and output of the private matrix: :func:`exchanges`, :func:`recover_m`;
- behind a ladder no v crosses, but every token that M has chosen does: :func:`imitate_ladder`;
- hidden states after the device's own layers still tell the token: :class:`LinearInverter` learns it from public text.

Left out: attacks on the gradients that cross in training (BiSR, arXiv 2409.00960), and a cloud that cheats. Attackers
that no notebook calls (a network, a search with the public weights, ciphers) are in ``benchmarks/residual``.
"""

import copy
import math
from collections.abc import Iterable

import torch
from peft import PeftModel, get_peft_model

from plpkg.residual.adapter import matrices
from plpkg.residual.cut.cloud_part import CloudPart
from plpkg.residual.cut.device_part import DevicePart
from plpkg.residual.cut.exchange import Transport
from plpkg.residual.cut.parts import split
from plpkg.residual.methods import PrivateLoraConfig
from plpkg.validation import number, shown, whole_number

CHUNK = 2048
"""Positions, and rows of a table, that are compared at a time: their scores take 32 MiB in float64."""


class Heard:
    """Tensors that a listening cloud has received and sent, all devices together.

    Attributes
    ----------
    hidden
        The hidden states that came for each pass through the layers, ``(batch, seq, hidden)``.
    u, v
        The vectors that each exchange sent, before it is rounded for the wire, and received, by its number:
        ``(projections, batch, seq, rank)``.
    """

    def __init__(self) -> None:
        self.hidden: list[torch.Tensor] = []
        self.u: dict[int, list[torch.Tensor]] = {}
        self.v: dict[int, list[torch.Tensor]] = {}


class _Tapped:
    """A transport that is listened to; its backward pass is not."""

    def __init__(self, transport: Transport, heard: Heard) -> None:
        self._transport = transport
        self._heard = heard
        self.backward = transport.backward

    def send(self, group: int, u: torch.Tensor) -> None:
        self._heard.u.setdefault(group, []).append(u)
        self._transport.send(group, u)

    def receive(self, group: int) -> torch.Tensor:
        v = self._transport.receive(group)
        self._heard.v.setdefault(group, []).append(v)
        return v


def listen(part: CloudPart) -> Heard:
    """Keep all that a cloud's part gets and sends from now on: ``CloudServer.part``, before a device connects."""
    heard = Heard()
    connect = part.connect

    def tapped(transport: Transport | None) -> None:
        connect(None if transport is None else _Tapped(transport, heard))

    part.connect = tapped
    part.register_forward_pre_hook(lambda _, given: heard.hidden.append(given[0].detach()))
    return heard


def token_accuracy(recovered: torch.Tensor, true: torch.Tensor) -> float:
    """Share of the tokens that are right; both of the same shape, and not empty."""
    if recovered.shape != true.shape or not true.numel():
        raise ValueError(
            f"recovered {tuple(recovered.shape)} and true {tuple(true.shape)} are not the same tokens, or none"
        )
    return (recovered == true).double().mean().item()


def relative_error(estimate: torch.Tensor, truth: torch.Tensor) -> float:
    """Frobenius norm of the difference, divided by the truth's."""
    if estimate.shape != truth.shape:
        raise ValueError(f"an estimate {tuple(estimate.shape)} of a truth {tuple(truth.shape)}")
    if not truth.any():
        raise ValueError("the truth is zero: no error is relative to it")
    return ((estimate.double() - truth.double()).norm() / truth.double().norm()).item()


def public_table(model) -> torch.Tensor:
    """The embedding of every token, ``(vocab, hidden)``: its weight, times the scale that Gemma has."""
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        return embedding(torch.arange(len(embedding.weight), device=embedding.weight.device))


def recover_tokens(received: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The tokens ``(…)`` whose embeddings were sent: the nearest rows of the public table.

    Parameters
    ----------
    received
        ``(…, hidden)``, in whatever precision it crossed the wire. GPT-2's device adds position embeddings, which
        are public: subtract them first.
    table
        ``(vocab, hidden)``: what the embedding gives for each token.
    """
    return _nearest(received, table)[..., 0]


def _nearest(queries: torch.Tensor, keys: torch.Tensor, n: int = 1) -> torch.Tensor:
    """The n nearest keys, best first, ``(…, n)``: of highest q·k - k²/2, in float64, by chunks."""
    if queries.shape[-1] != keys.shape[-1]:
        raise ValueError(f"vectors of {queries.shape[-1]} entries cannot be compared with rows of {keys.shape[-1]}")
    if not len(keys) or not queries.isfinite().all():
        raise ValueError(f"some vectors to compare with the {len(keys)} rows are not finite, or there are no rows")
    flat = queries.detach().reshape(-1, queries.shape[-1])
    score = torch.full((len(flat), n), -math.inf, dtype=torch.float64, device=flat.device)
    index = torch.zeros(len(flat), n, dtype=torch.int64, device=flat.device)
    for start in range(0, len(keys), CHUNK):
        rows = keys[start : start + CHUNK].detach().to(flat.device, torch.float64)
        if not rows.isfinite().all():
            raise ValueError(f"of the rows {start} to {start + len(rows) - 1} to compare with, some are not finite")
        ids = torch.arange(start, start + len(rows), device=flat.device)
        for first in range(0, len(flat), CHUNK):
            chunk = slice(first, first + CHUNK)
            new = flat[chunk].double() @ rows.T - rows.square().sum(1) / 2  # (positions, rows)
            best, order = torch.cat([score[chunk], new], 1).topk(n)  # of those before, and these
            score[chunk] = best
            index[chunk] = torch.cat([index[chunk], ids.expand(len(new), -1)], 1).gather(1, order)
    return index.reshape(*queries.shape[:-1], n)


@torch.no_grad()
def exchanges(
    model: PeftModel, anchors: Iterable[torch.Tensor], adapter_name: str = "default"
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what each M received and answered on a text.

    Parameters
    ----------
    model
        With its adapter; through a cloud, a device has the same from its own part.
    anchors
        ``(batch, seq)`` ids.
    adapter_name
        Which adapter.

    Returns
    -------
    dict
        By module: u ``(tokens, r_c2d)`` and v ``(tokens, r_d2c)``, float64.
    """
    every = matrices(model, adapter_name)
    if adapter_name not in model.active_adapters:
        raise ValueError(f"the adapter {adapter_name!r} is not active, but {model.active_adapters}: set_adapter first")
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def keep(name: str):
        def hook(_, arguments, output):
            u, v = (tensor.detach().double().flatten(0, -2).cpu() for tensor in (arguments[0], output))
            seen.setdefault(name, []).append((u, v))

        return hook

    training = model.training
    model.eval()  # without dropout
    handles = [m.register_forward_hook(keep(name)) for name, m in every.items()]
    try:
        for ids in anchors:
            model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        if training:
            model.train()
        for handle in handles:
            handle.remove()
    if not seen:
        raise ValueError(
            f"nothing went through any M of {adapter_name!r}: there are no anchors, or it is merged or switched off"
        )
    exchanged = {}
    for name, calls in seen.items():
        u = torch.cat([u for u, _ in calls])
        v = torch.cat([v for _, v in calls])
        if not (u.isfinite().all() and v.isfinite().all()):
            raise ValueError(f"what goes through the M of {name} is not finite")
        exchanged[name] = (u, v)
    return exchanged


def recover_m(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """M from what went in and what came out, by least squares: exact up to rounding once u spans its space.

    Parameters
    ----------
    u, v
        ``(…, r_c2d)`` and ``(…, r_d2c)``: what the cloud sent and received for the same tokens.

    Returns
    -------
    torch.Tensor
        ``(r_d2c, r_c2d)``, float64; of the smallest norm where fewer than ``r_c2d`` tokens leave it open.
    """
    u, v = pairs(u, v)
    return torch.linalg.lstsq(u, v, driver="gelsd").solution.T


def pairs(u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and answers of M, checked, as float64 ``(n, r_c2d)`` and ``(n, r_d2c)``."""
    if u.shape[:-1] != v.shape[:-1] or u.ndim < 2 or not (u.numel() and v.numel()):
        raise ValueError(f"u {tuple(u.shape)} and v {tuple(v.shape)} are not pairs for at least one token")
    if not (u.isfinite().all() and v.isfinite().all()):
        raise ValueError("u and v must be finite")
    u, v = (tensor.detach().cpu().double().flatten(0, -2) for tensor in (u, v))
    return u, v


@torch.enable_grad()
def imitate_ladder(
    part: DevicePart, finals: torch.Tensor, tokens: torch.Tensor, *,
    temperature: float = 1.0, lr: float = 3e-3, steps: int = 160, seed: int = 0,
) -> float:  # fmt: skip
    """Train a ladder's M by maximum likelihood of what its owner's chose; the best for tokens held out is kept.

    Parameters
    ----------
    part
        The device's part as the cloud can build it, with an M of the owner's shape, which learns in place.
    finals, tokens
        ``(n, hidden + numbers)`` and ``(n,)``: what the cloud sent, and what the device chose from it.
    temperature
        Of the sampling; low for greedy text, so that only the order of the logits matters.
    lr, steps, seed
        Of AdamW, whose rate falls to zero; of what is held out, and of the order.

    Returns
    -------
    float
        Nats a held-out token: to choose the other settings by.
    """
    n = len(tokens)
    if n < 2 or finals.shape != (n, part.width) or not finals.isfinite().all():
        raise ValueError(f"finals {tuple(finals.shape)} and {n} tokens are not two pairs at least, or not finite")
    if part.tail is None or part.tail.m is None:
        raise ValueError("the part has no ladder: no M stands before its norm")
    require_tokens(tokens, part.embedding.num_embeddings)
    number("temperature", temperature, open_low=True)
    generator = torch.Generator().manual_seed(seed)
    m = part.tail.m.requires_grad_()
    num_held_out = min(math.ceil(n / 5), CHUNK)
    held_out, seen = torch.randperm(n, generator=generator).tensor_split([num_held_out])
    optimizer = torch.optim.AdamW(m.parameters(), weight_decay=0.0)
    best = math.inf
    kept: dict | None = None

    def loss(pairs: torch.Tensor) -> torch.Tensor:
        logits = part.logits(finals[pairs].to(part.lm_head.weight))  # (batch, vocab)
        return torch.nn.functional.cross_entropy(logits / temperature, tokens[pairs])

    for step in range(whole_number("steps", steps, 1) + 1):
        if step % (steps // 16 + 1) == 0:
            with torch.no_grad():
                now = loss(held_out).item()
            if now < best:
                best = now
                kept = copy.deepcopy(m.state_dict())
        optimizer.zero_grad()
        batch = seen[torch.randint(len(seen), (256,), generator=generator)]
        loss(batch).backward(inputs=list(m.parameters()))
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 10, 1 - step / steps)
        optimizer.step()
    if kept is None:
        raise ValueError(f"the loss at temperature={temperature} is never finite, from this M on")
    m.load_state_dict(kept)
    return best


def require_tokens(ids: torch.Tensor, vocab: int) -> None:
    """ValueError if there are no ids, or one that is no token."""
    if not ids.numel() or not 0 <= ids.min() <= ids.max() < vocab:
        raise ValueError(
            f"the tokens must be between 0 and vocab - 1 = {vocab - 1}, got {shown(ids.unique().tolist())}"
        )


class LinearInverter:
    """Tokens from hidden states that are a linear function of the embedding plus correlated noise; closed form.

    With ``h = e V + ε`` V is found by ridge regression on public text, the covariance of ε from its residuals (with
    Oracle Approximating Shrinkage: little text leaves most directions open), and a token is the one whose ``e V`` is
    nearest in the metric of ε: linear discriminant analysis with class means that are linear in the embedding, hence
    also for tokens that the text lacks.

    Parameters
    ----------
    hidden
        ``(…, hidden)``: what a device sends for the public text. (If it adds noise, with noise.)
    ids, table
        ``(…)`` and ``(vocab, hidden)``: the text's tokens, and the public embedding.
    ridge
        How far V is drawn to the identity, relative to the embedding's variance: more for less text.
    """

    def __init__(self, hidden: torch.Tensor, ids: torch.Tensor, table: torch.Tensor, *, ridge: float = 0.1) -> None:
        if hidden.shape != (*ids.shape, table.shape[-1]) or len(ids.unique()) < 2:
            raise ValueError(
                f"hidden {tuple(hidden.shape)} and ids {tuple(ids.shape)} are not pairs, or all alike, or not of the "
                f"table's width, {table.shape[-1]}"
            )
        require_tokens(ids, len(table))
        finite = (rows.isfinite().all() for rows in (hidden, *table.split(CHUNK)))  # without a copy of the whole table
        if not all(finite):
            raise ValueError("hidden and table must be finite")
        from sklearn.covariance import oas

        number("ridge", ridge, open_low=True)
        h = hidden.detach().double().reshape(-1, hidden.shape[-1])  # (tokens, hidden)
        e = table.detach()[ids.flatten()].double()  # (tokens, hidden)
        n = len(e)
        self.mean = h.mean(0)
        centre = e.mean(0)
        h = h - self.mean
        e = e - centre
        covariance = e.T @ e / n
        identity = torch.eye(e.shape[1]).to(e)
        shrink = ridge * covariance.trace() / len(identity) * identity
        v = torch.linalg.solve(covariance + shrink, e.T @ h / n + shrink)
        residuals = (h - e @ v).cpu().numpy()
        shrunk, _ = oas(residuals, assume_centered=True)
        noise = torch.from_numpy(shrunk).to(e)  # the covariance of ε
        floor = 1e-12 * h.square().mean() + 1e-6 * noise.trace() / len(noise)  # so that it can be inverted
        self.whiten = torch.linalg.cholesky(torch.linalg.inv(noise + floor * identity))
        seen = (v @ self.whiten).float()
        self.keys = (table.detach().float() @ seen).sub_(centre.float() @ seen)  # (vocab, hidden)

    def queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """Vectors to compare with the keys, in a space where the noise is white."""
        return (hidden.detach().double() - self.mean) @ self.whiten

    def candidates(self, hidden: torch.Tensor, n: int) -> torch.Tensor:
        """For each hidden state ``(…, hidden)`` the n likeliest tokens ``(…, n)``, best first."""
        return _nearest(self.queries(hidden), self.keys, whole_number("n", n, 1, len(self.keys), "vocab"))

    def recover(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens ``(…)``."""
        return self.candidates(hidden, 1)[..., 0]


def public_prefix(model, first_k: int) -> DevicePart:
    """The device's part as the cloud can build it: of a model without its private adapter, M = 0, and frozen."""
    adapted = get_peft_model(copy.deepcopy(model), PrivateLoraConfig(r_c2d=1, r_d2c=1))
    device, _ = split(adapted.eval(), first_k)
    return device.requires_grad_(False)
