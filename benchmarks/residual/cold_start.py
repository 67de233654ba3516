"""A secret embedding that the frozen cloud layers can still read: PrivateLoRA's "cold start" (arXiv 2311.14030).

Attackers: the nearest row; ``LinearInverter`` on a few known pairs; those of ``attackers.py`` on ciphers.
"""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.residual.attackers import fit
from benchmarks.residual.defences import rms
from plpkg.residual.attacks import public_table
from plpkg.validation import one_of


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
    public = public_table(model).float()
    generator = torch.Generator().manual_seed(seed)
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
