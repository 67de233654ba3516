"""What a device can do about it, what that costs, and what an attacker who knows the defence still learns.

- Decoder layers on the device (``split(first_k=…)``). Attackers: ``LinearInverter``, ``MlpInverter``,
  ``greedy_search``.
- Gaussian noise on what is sent: :class:`NoisySender`. Attackers on embeddings: the nearest row, which is the
  likeliest (so that a search with known weights finds no better one); ``recover_tokens`` with the language model's own
  expectation; inverters trained with noise. On every M's answers: ``recover_m`` from more tokens.
- A secret embedding that the frozen cloud layers can still read: :func:`private_embedding`. Attackers: the nearest
  row; ``LinearInverter`` on a few known pairs; ``frequency_attack``; :func:`prediction_attack`.
- A function instead of the matrix M: :class:`NonlinearM`. Attacker: :func:`steal_function`.

A defence's cost is :func:`plpkg.residual.cost.device_cost`, and the quality it leaves is ``plpkg.scoring.score`` of
the model within :func:`sending`. The defences are this package's own experiments with PrivateLoRA (arXiv 2311.14030),
which has none. Left out: encryption and trusted hardware, which would hide the messages; noise with a proven
guarantee.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from plpkg.residual.adapter import layers, matrices
from plpkg.residual.parts import LAYERS
from plpkg.residual.privacy.attacks import fit, pairs, recover_m, relative_error
from plpkg.results import Tabular
from plpkg.validation import number, one_of, whole_number


class NoisySender:
    """Gaussian noise on what is sent, anew each time: whoever sends a text twice lets the cloud average.

    Parameters
    ----------
    scale
        The noise's standard deviation relative to ``rms``.
    rms
        Root mean square of what is sent without noise: :func:`rms`. Without it each message's own.
    seed
        Of the noise. A device draws its own in secret.

    Attributes
    ----------
    std
        The noise's standard deviation in each entry; without ``rms`` that of each message with root mean square 1.
    """

    def __init__(self, scale: float, rms: float | None = None, seed: int = 0) -> None:
        self.std = number("scale", scale) * (1.0 if rms is None else number("rms", rms, open_low=True))
        self._own = rms is None
        self._generator = torch.Generator().manual_seed(whole_number("seed", seed, 0))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(…, hidden)`` in and out."""
        std = self.std * rms(hidden) if self._own else self.std
        return hidden + std * torch.randn(hidden.shape, generator=self._generator).to(hidden)


def rms(hidden: torch.Tensor) -> float:
    """Root mean square of all entries."""
    return hidden.double().square().mean().sqrt().item()


@contextlib.contextmanager
def sending(
    model,
    *,
    table: torch.Tensor | None = None,
    noise: NoisySender | None = None,
    first_k: int = 0,
    answers: NoisySender | None = None,
) -> Iterator[None]:
    """Let an uncut model compute with what a defended device would send.

    Parameters
    ----------
    model
        A Hugging Face causal model, with or without an adapter.
    table
        ``(vocab, hidden)``: the embedding on the device. The LM head stays as it is, even where both are one.
    noise
        Is added after ``first_k`` layers.
    answers
        Is added to what every M of the adapter ``"default"`` answers.

    Raises
    ------
    ValueError
        A table of another shape; a ``first_k`` that leaves no layer; ``answers`` where there is no M.
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder_layers = next(getattr(whole.base_model, name) for name in LAYERS if hasattr(whole.base_model, name))
    whole_number("first_k", first_k, 0, len(decoder_layers) - 1, "num_hidden_layers - 1")
    embedding, handles = whole.get_input_embeddings(), []
    answering = [] if answers is None else matrices(model).values()
    if table is not None:
        if table.shape != embedding.weight.shape:
            raise ValueError(f"table is {tuple(table.shape)}, the embedding {tuple(embedding.weight.shape)}")
        replaced = embedding.register_forward_hook(
            lambda _, args, output: functional.embedding(args[0], table).to(output)
        )
        handles.append(replaced)
    if noise is not None:
        place = decoder_layers[first_k - 1] if first_k else embedding
        handles.append(place.register_forward_hook(lambda _, args, output: noise(output)))
    for m in answering:
        handles.append(m.register_forward_hook(lambda _, args, output: answers(output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def public_table(model) -> torch.Tensor:
    """What the embedding gives for every token, ``(vocab, hidden)``: its weight, times the scale that Gemma has."""
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        return embedding(torch.arange(len(embedding.weight), device=embedding.weight.device))


def private_embedding(
    model, batches, *, start="perturbed", size=4.0, max_cosine=0.3, weight=10.0, steps=100, lr=2e-2, seed=0
) -> torch.Tensor:
    """Learn a secret embedding that the frozen layers still read: PrivateLoRA's "cold start", on public text only.

    The loss is the language model's, plus ``weight`` times what each row's cosine with the public row exceeds
    ``max_cosine`` by, on average.

    Parameters
    ----------
    model
        A Hugging Face causal model; nothing in it is changed.
    batches
        ``(batch, seq)`` ids of public text: ``plpkg.corpora.batches``.
    start
        ``"perturbed"``: the public rows plus Gaussian noise; ``"rotated"``: the public rows, all turned by one random
        orthogonal matrix, which keeps every distance and angle between them, and which frozen layers cannot read.
    size
        Standard deviation of that noise, relative to the root mean square of the table.
    max_cosine, weight
        As above.
    steps, lr
        AdamW's, its rate falling to zero.
    seed
        Of noise or rotation: the device's secret.

    Returns
    -------
    torch.Tensor
        ``(vocab, hidden)``, float32: for :func:`sending`, or for ``device.embedding``. Beside the public LM head it
        has to be kept, and no longer shares a tensor with it. What is sent is as long as before.
    """
    one_of("start", start, ("perturbed", "rotated"))
    number("size", size)
    number("max_cosine", max_cosine, -1, 1)
    number("weight", weight)
    public = public_table(model).float()
    generator = torch.Generator().manual_seed(whole_number("seed", seed, 0))
    if start == "perturbed":
        first = public + size * rms(public) * torch.randn(public.shape, generator=generator).to(public)
    else:
        first = public @ torch.linalg.qr(torch.randn([public.shape[1]] * 2, generator=generator))[0].to(public)
    secret = nn.Parameter(first)
    frozen = [p for p in model.parameters() if p.requires_grad]

    def loss() -> torch.Tensor:
        ids = next(batches).to(public.device)
        embedded = functional.embedding(ids, secret).to(model.dtype)
        logits = model(inputs_embeds=embedded, use_cache=False).logits[:, :-1]
        excess = (functional.cosine_similarity(secret, public) - max_cosine).relu().mean()
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) + weight * excess

    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        fit([secret], loss, steps, lr)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return secret.detach()


def symbols_of(received: torch.Tensor) -> torch.Tensor:
    """Number the distinct vectors ``(…, hidden)``: equal ones are the same unknown token. ``(…)``, int64."""
    flat = received.detach().reshape(-1, received.shape[-1])
    return flat.unique(dim=0, return_inverse=True)[1].reshape(received.shape[:-1])


def prediction_attack(log_probs: torch.Tensor, cipher: torch.Tensor) -> torch.Tensor:
    """Decipher a secret embedding's symbols by what the language model itself expects in their places.

    A cloud that serves a secret embedding well predicts in clear, through the public LM head, what comes next: over
    all places of a symbol, the token that was expected most.

    Parameters
    ----------
    log_probs
        ``(…, seq, vocab)``: at each position, of the token after it.
    cipher
        ``(…, seq)``: symbols from 0, of :func:`symbols_of`.

    Returns
    -------
    torch.Tensor
        ``(…, seq)``, int64; -1 for a symbol that does nothing but begin texts.
    """
    if log_probs.shape[:-1] != cipher.shape:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)} and cipher {tuple(cipher.shape)} are not of the same text"
        )
    later = cipher[..., 1:].flatten()
    total = torch.zeros(int(cipher.max()) + 1, log_probs.shape[-1], device=log_probs.device)
    total.index_add_(0, later, log_probs[..., :-1, :].flatten(0, -2).float())
    tokens = total.argmax(1)
    tokens[torch.bincount(later, minlength=len(tokens)) == 0] = -1
    return tokens[cipher]


class NonlinearM(nn.Module):
    """One hidden layer where M stands: ``(…, r_c2d)`` to ``(…, r_d2c)``, zero at first as M is.

    Parameters
    ----------
    r_c2d, r_d2c
        Ranks, as of M.
    hidden
        Width of the hidden layer.
    seed
        Of its weights.
    """

    def __init__(self, r_c2d: int, r_d2c: int, hidden: int, seed: int = 0) -> None:
        super().__init__()
        self.in_features, self.out_features = whole_number("r_c2d", r_c2d, 1), whole_number("r_d2c", r_d2c, 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(whole_number("seed", seed, 0))
            self.inner = nn.Linear(r_c2d, whole_number("hidden", hidden, 1))
            self.outer = nn.Linear(hidden, r_d2c, bias=False)
        nn.init.zeros_(self.outer.weight)

    @property
    def weight(self) -> torch.Tensor:
        """A number of the right precision: no matrix stands for this function, so that merging it fails."""
        return self.inner.weight.new_zeros(())

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return self.outer(functional.gelu(self.inner(u)))


def make_nonlinear(model, hidden: int, *, adapter_name: str = "default", seed: int = 0) -> None:
    """Put a :class:`NonlinearM` in the place of every M of an adapter. PEFT saves it, but cannot load it."""
    matrices(model, adapter_name)  # refuses a model without this adapter
    for i, layer in enumerate(layers(model, adapter_name).values()):
        m = layer.privatelora_M[adapter_name]
        new = NonlinearM(m.in_features, m.out_features, hidden, seed + i)
        layer.privatelora_M[adapter_name] = new.to(m.weight.device, m.weight.dtype)


@dataclass(frozen=True)
class Stolen(Tabular):
    """A copy of the function on a device.

    Attributes
    ----------
    pairs, held_out
        How many pairs it was learnt from, and how many tested on.
    relative_error, linear_error
        Of its outputs on the latter, and of the best matrix's.
    function
        ``(…, r_c2d)`` to ``(…, r_d2c)``, float64.
    """

    pairs: int
    held_out: int
    relative_error: float
    linear_error: float
    function: Callable[[torch.Tensor], torch.Tensor] = field(repr=False, compare=False)

    def rows(self) -> list[dict]:
        return [{name: value for name, value in vars(self).items() if name != "function"}]

    def __repr__(self) -> str:
        return f"Stolen({self.pairs:,} pairs: error {self.relative_error:.3g}, a matrix's {self.linear_error:.3g})"


def steal_function(
    u: torch.Tensor, v: torch.Tensor, *, held_out=0.2, hidden=256, steps=1000, batch=256, lr=3e-3, seed=0
) -> Stolen:
    """Learn the device's function from its answers: least squares, and a :class:`NonlinearM` for what that leaves.

    Parameters
    ----------
    u, v
        ``(…, r_c2d)`` and ``(…, r_d2c)``: what the cloud sent and received, in order.
    held_out
        The share at the end that is kept for the test.
    hidden, steps, batch, lr
        Of the network, and of AdamW, whose rate falls to zero.
    seed
        Of weights and batches.
    """
    u, v = pairs(u, v)
    n = len(u) - round(len(u) * number("held_out", held_out, 0, 1))
    if not 0 < n < len(u):
        raise ValueError(f"{len(u)} pairs with held_out={held_out} leave nothing to learn from, or nothing to test on")
    matrix = recover_m(u[:n], v[:n])
    rest = v - u @ matrix.T
    mean, std, scale = u[:n].mean(0), u[:n].std(0, correction=0) + 1e-12, rms(rest[:n]) + 1e-12
    x, y = ((u - mean) / std).float(), (rest / scale).float()
    student = NonlinearM(u.shape[1], v.shape[1], hidden, seed)
    generator = torch.Generator().manual_seed(seed)

    def loss() -> torch.Tensor:
        at = torch.randint(n, (batch,), generator=generator)
        return functional.mse_loss(student(x[at]), y[at])

    fit(student.parameters(), loss, steps, lr)

    @torch.no_grad()
    def function(asked: torch.Tensor) -> torch.Tensor:
        asked = asked.double()
        return asked @ matrix.T + scale * student(((asked - mean) / std).float())

    found, true = function(u[n:]), v[n:]
    return Stolen(n, len(u) - n, relative_error(found, true), relative_error(u[n:] @ matrix.T, true), function)
