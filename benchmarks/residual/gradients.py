"""What the cloud learns from the gradients of training over the wire, beside what it reads in any case.

plpkg-small learns from one writer's text with M of rank 64 at q, k and v, as ``plpkg device train`` does: per step the
device sends embeddings, v = M u for each u = A x that it gets, the gradient of the loss at the last hidden state, and
for each gradient at v that comes back the one at u, Mᵀ times it. All of it is rounded to fp16, as on the wire, and the
loss is scaled so that none of it underflows. What follows from the gradients alone, as if nothing else were seen:

* labels: the head and the hidden state are the cloud's own, so it knows the softmax p, and the gradient at the hidden
  state is Wᵀ(p − e_label) by a number: the label is the row of W that is nearest to what is left.
* m: least squares on (gradient at v, gradient at u) gives Mᵀ; after so many steps, each with the M of that step; its
  relative error for the layer and projection where it is largest.

The labels are the text, but for each window's first token.

Run: ``python -m benchmarks.residual.gradients`` (two minutes on one idle core). Not part of ``make bench``.
"""

import torch
from torch.nn import functional

from benchmarks import record
from benchmarks.residual.methods import BATCH, SEQ, Method, low, personalise, prepared
from plpkg import corpora
from plpkg.backbones import load_backbone
from plpkg.residual import attacks
from plpkg.residual.adapter import matrices

WRITER, RANK, LR = "seaborn", 64, 5e-3
STEPS = (1, 10, 60)
WINDOW = 128
SCALE = 2.0**14


def sent(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().half().float()


def crossed(model, ids: torch.Tensor) -> dict:
    """What crosses in one training step of ``(batch, seq)`` ids, in the cloud's view."""
    seen, hooks = {"v": {}, "u": {}}, []
    for name, m in matrices(model).items():

        def gradients(module, given, came, name=name):
            seen["u"][name], seen["v"][name] = sent(given[0]), sent(came[0])

        hooks.append(m.register_full_backward_hook(gradients))
    try:
        base = model.get_base_model()
        embedded = base.get_input_embeddings()(ids).requires_grad_()
        hidden = base.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        hidden.retain_grad()
        logits = base.lm_head(hidden)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        (loss * SCALE / ids[:, 1:].numel()).backward()
    finally:
        for hook in hooks:
            hook.remove()
    seen["hidden"], seen["at hidden"] = sent(hidden), sent(hidden.grad)
    model.zero_grad()
    return seen


def labels(seen: dict, ids: torch.Tensor, head: torch.Tensor) -> float:
    hidden, gradient = seen["hidden"][:, :-1], seen["at hidden"][:, :-1] * ids[:, 1:].numel() / SCALE
    left = (hidden @ head.T).softmax(-1) @ head - gradient  # the label's row
    return attacks.token_accuracy(attacks.recover_tokens(left, head), ids[:, 1:])


def worst_error(model, seen: dict) -> float:
    errors = []
    for name, m in matrices(model).items():
        stolen = attacks.recover_m(seen["v"][name], seen["u"][name]).T
        errors.append(attacks.relative_error(stolen, m.weight.detach()) if m.weight.any() else 0.0)
    return max(errors)


def main() -> None:
    torch.set_num_threads(1)
    start, tokenizer = load_backbone("plpkg-small")
    start.requires_grad_(False)
    head = start.lm_head.weight
    text = corpora.encode(corpora.writer(WRITER).split("train"), tokenizer)
    victim = next(corpora.batches(corpora.encode(corpora.writer(WRITER).split("test"), tokenizer), batch=8, seq=WINDOW,
                                  seed=0))  # fmt: skip
    model, learnt, rows = prepared(Method(low(RANK)), start), 0, []
    stream = corpora.batches(text, batch=BATCH, seq=SEQ, seed=0)
    for steps in STEPS:
        personalise(model, stream, LR, steps - learnt)
        learnt = steps
        seen = crossed(model, victim)
        rows.append({"section": "labels", "case": f"after {steps} steps", "recovered": labels(seen, victim, head)})
        rows.append({"section": "m", "case": f"after {steps} steps", "error": round(worst_error(model, seen), 5)})
    record.write("residual.gradients", rows)


if __name__ == "__main__":
    main()
