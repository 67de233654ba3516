"""Training of heads: the loss as published, resumed as if never stopped, and the backbone untouched.

Not run in CI: more than one GPU. Two processes on the CPU (gloo) stand in for them.
"""

from contextlib import ExitStack, suppress

import pytest
import torch
from torch.nn import functional

from plpkg import corpora
from plpkg.backbones import random_backbone
from plpkg.corpora import Tokens
from plpkg.retention import RetainingHeads, cis_labels, train
from plpkg.retention.train import _tokens, losses, overlap, train_heads
from tests.retention.conftest import in_double

from preloaded import Process
from rounding import TIMES, assert_as_exact, assert_close, relative

OPTIONS = dict(steps=8, lr=5e-3, warmup=2, progress=False)


def examples(count=40):
    generator = torch.Generator().manual_seed(1002)  # large, as are those below: other processes draw the same
    sizes = [(1, length) for i in range(count) for length in (12 + i % 3, 5)]
    drawn = (torch.randint(0, 64, size, generator=generator) for size in sizes)
    return list(zip(drawn, drawn, strict=True))  # prompts and answers by turns


def weights(heads):
    return torch.cat([p.detach().flatten() for p in heads.parameters()])


def test_the_losses_are_the_published_ones():
    generator = torch.Generator().manual_seed(0)
    predicted, labels = (2 * torch.randn(3, 1, 2, 9, generator=generator) for _ in range(2))
    regression, smooth = losses(predicted, labels)
    gaps = (predicted - labels).abs().flatten().tolist()
    rel = relative(len(gaps))
    assert regression.item() == pytest.approx(sum(0.5 * g * g if g < 1 else g - 0.5 for g in gaps) / len(gaps), rel=rel)
    by_layer = [functional.mse_loss(s[..., :-1], s[..., 1:]).item() for s in predicted]
    assert smooth.item() == pytest.approx(sum(by_layer), rel=rel)
    assert losses(predicted[..., :1], labels[..., :1])[1].item() == 0.0  # one unit has no neighbour


def test_overlap_is_the_share_of_the_best_tenth():
    labels = torch.arange(20.0)[None]
    assert overlap(labels, labels) == 1.0
    assert overlap(-labels, labels) == 0.0
    assert overlap(labels.roll(1, dims=-1), labels) == 0.5  # 18 and 0 for 18 and 19
    assert overlap(labels[..., :4], labels[..., :4]) == 1.0  # at least one unit


def gradient(model, heads, prompt, answer):
    """Of the loss with alpha=0.5, left in the heads' parameters as well."""
    labels, states = cis_labels(model, torch.cat([prompt, answer], dim=1), prompt.shape[1]), []
    hooks = [
        p.register_forward_hook(lambda *a: states.append(a[2]))
        for layer in model.model.layers
        for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    ]
    with torch.no_grad():
        model(prompt)
    for hook in hooks:
        hook.remove()
    predicted = heads([torch.cat(states[3 * i : 3 * i + 3], dim=-1) for i in range(2)])
    smooth = sum(functional.mse_loss(s[..., :-1], s[..., 1:]) for s in predicted)
    (functional.smooth_l1_loss(predicted, labels) + 0.5 * smooth).backward()
    return torch.cat([p.grad.flatten() for p in heads.parameters()])


def test_a_step_is_adamw_on_the_loss_by_hand(model, monkeypatch):
    clip = 1e-8  # as small as Adam's epsilon: more would not show in its first step
    heads, by_hand = RetainingHeads.attach(model, 8), RetainingHeads.attach(model, 8)
    (example,) = examples(1)
    monkeypatch.setattr(train, "CLIP_VALUE", clip)
    options = dict(steps=1, lr=0.01, warmup=0, alpha=0.5, progress=False)
    train_heads(model, heads, [example], **options)
    rounded, exact = gradient(model, by_hand, *example), gradient(in_double(model), in_double(by_hand), *example)
    torch.nn.utils.clip_grad_value_(by_hand.parameters(), clip)
    torch.optim.AdamW(by_hand.parameters(), lr=0.01, betas=(0.9, 0.95)).step()
    sure = rounded.abs() > clip + TIMES * (rounded - exact).abs().max()  # of the others rounding decides the step
    assert sure.double().mean() > 0.9
    assert_close(weights(heads)[sure], weights(by_hand)[sure], terms=10)


def test_training_helps_and_leaves_the_backbone_alone(model):
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    heads = RetainingHeads.attach(model, 16)
    log = train_heads(model, heads, examples(1) * 60, steps=60, lr=5e-3, warmup=5, progress=False)
    rows = log.rows()
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[-1]["loss"] == pytest.approx(rows[-1]["regression"] + 2.5e-3 * rows[-1]["smoothing"], rel=relative(4))
    assert repr(log).startswith("TrainingLog: 60 steps, loss ")
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_heads_in_bfloat16_learn_in_float32_and_are_as_before(backbone):
    model = backbone(dtype=torch.bfloat16)
    heads = RetainingHeads.attach(model, 8).requires_grad_(False)
    before = weights(heads)
    for data, options in ((lambda: 1 / 0, OPTIONS), (examples(), OPTIONS | {"lr": 1e-2})):
        with suppress(ZeroDivisionError):
            train_heads(model, heads, data, **options)
        assert heads.layers[0][0].weight.dtype == torch.bfloat16
        assert not any(p.requires_grad for p in heads.parameters())
    assert not torch.equal(weights(heads), before)


def test_stopped_and_resumed_it_ends_the_same(model, tmp_path):
    whole, parts, again = (RetainingHeads.attach(model, 8) for _ in range(3))
    log = train_heads(model, whole, examples, **OPTIONS, examples_per_step=2, out=tmp_path / "whole")

    def breaking():
        yield from examples(11)
        raise KeyboardInterrupt

    options = OPTIONS | dict(examples_per_step=2, out=tmp_path / "parts", checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        train_heads(model, parts, breaking, **options)
    resumed = train_heads(model, again, examples, **options)
    loaded = RetainingHeads.from_pretrained(tmp_path / "parts", model)
    assert torch.equal(weights(again), weights(whole))
    assert torch.equal(weights(loaded), weights(whole))
    assert resumed.rows() == log.rows()
    with pytest.raises(ValueError, match=r"holds a run with lr=0.005, now 0.1"):
        train_heads(model, again, examples, **options | {"lr": 0.1})


SCRIPT = """
import os, sys
out, rank = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # accelerate asks for them; they are not used
from torch import distributed
distributed.init_process_group("gloo", init_method=f"file://{out}.group", rank=int(rank), world_size=2)
from plpkg.backbones import random_backbone
from plpkg.retention import RetainingHeads
from plpkg.retention.train import train_heads
from tests.retention.test_train import OPTIONS, examples
model = random_backbone("llama", num_kv_heads=2, vocab=64, seed=1000)
heads = RetainingHeads.attach(model, 8, seed=1001)
train_heads(model, heads, examples, **OPTIONS, examples_per_step=2, out=out)
"""


def test_two_processes_are_one(backbone, tmp_path):
    model = backbone(seed=1000)
    one, exact = (RetainingHeads.attach(m, 8, seed=1001) for m in (model, in_double(model)))
    train_heads(model, one, examples, **OPTIONS, examples_per_step=2)
    train_heads(in_double(model), exact, examples, **OPTIONS, examples_per_step=2)
    with ExitStack() as stack:
        pair = [stack.enter_context(Process(SCRIPT, str(tmp_path / "out"), str(rank))) for rank in range(2)]
        for process in pair:
            assert process.wait() == 0, process.stdout.read()
    two = RetainingHeads.from_pretrained(tmp_path / "out", model)
    assert_as_exact(weights(two), weights(one), weights(exact))  # heads learn in float32, from exact states


def test_text_needs_a_tokenizer(model):
    def tokenizer(text, **_):
        return {"input_ids": [ord(c) % 64 for c in text]}

    heads, other = RetainingHeads.attach(model, 8), RetainingHeads.attach(model, 8)
    options, text = OPTIONS | dict(steps=1, warmup=0), ("a prompt", "yes")
    with pytest.raises(ValueError, match="text needs a tokenizer, got 'a prompt' without one"):
        train_heads(model, heads, [text], **options)
    train_heads(model, heads, [text], **options, tokenizer=tokenizer)
    train_heads(model, other, [[torch.tensor(tokenizer(part)["input_ids"]) for part in text]], **options)
    assert torch.equal(weights(heads), weights(other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(steps=0), "steps must be a whole number of at least 1, got 0"),
        (dict(warmup=9), "warmup must be between 0 and steps=8, got 9"),
        (dict(lr=0), "lr must be greater than 0, got 0"),
        (dict(alpha=-1), "alpha must be at least 0, got -1"),
        (dict(rows="all"), "rows must be one of 'answer', 'predicting', got 'all'"),
        (dict(data=examples(3)), "the data end after 3 examples, in step 4"),
        (dict(heads=RetainingHeads.attach(random_backbone("llama", seed=1), 8)), "belong to a backbone"),
        (dict(data=[(torch.zeros(4).long(), torch.zeros(0).long())] * 8), "4 tokens of prompt and 0 of answer"),
    ],
)
def test_bad_input_gets_a_sentence(model, changes, message):
    arguments = dict(model=model, heads=RetainingHeads.attach(model, 8), data=examples()) | OPTIONS
    with pytest.raises(ValueError, match=message):
        train_heads(**arguments | changes)


def test_a_loss_that_is_not_finite_stops(model, tmp_path):
    heads = RetainingHeads.attach(model, 8)
    with torch.no_grad():
        heads.layers[0][0].weight.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match="the loss of step 1 is nan: take a lower lr"):
        train_heads(model, heads, examples(), **OPTIONS, out=tmp_path)
    assert not list(tmp_path.iterdir())


class Letters:
    """A tokenizer of letters, with the plainest of chat templates."""

    chat_template = "role: content;"

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) % 60 for letter in text]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
        assert not tokenize
        return "".join(f"{m['role']}: {m['content']};" for m in messages) + "assistant: " * add_generation_prompt


LETTERS = Letters()
ASKED, SAID = {"role": "user", "content": "what?"}, {"role": "assistant", "content": "this"}
PROMPT, ANSWER = "user: what?;assistant: ", "this;"
IDS = [LETTERS(text, add_special_tokens=False)["input_ids"] for text in (PROMPT, ANSWER)]
SAME = [
    (PROMPT, ANSWER),
    [PROMPT, ANSWER],
    {"prompt": PROMPT, "answer": ANSWER},
    {"prompt": PROMPT, "completion": ANSWER, "id": 7},
    {"prompt": IDS[0], "completion": torch.tensor(IDS[1])},
    {"input_ids": IDS[0] + IDS[1], "labels": [-100] * len(IDS[0]) + IDS[1]},
    {"input_ids": torch.tensor([IDS[0] + IDS[1]]), "labels": torch.tensor([[-100] * len(IDS[0]) + IDS[1]])},
    {"messages": [ASKED, SAID]},
    [ASKED, SAID],
    {"prompt": [ASKED], "completion": [SAID]},
    (torch.tensor(IDS[0]), IDS[1]),
]


@pytest.mark.parametrize("example", SAME, ids=range(len(SAME)))
def test_examples_mean_the_same_in_every_form(example):
    ids, prompt_len = _tokens(example, LETTERS, "cpu")
    assert ids.tolist() == [IDS[0] + IDS[1]]
    assert prompt_len == len(IDS[0])


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (
            {"question": "a", "answer": "b"},
            r"an example must be \(prompt, answer\), .* or chat messages, got .*question",
        ),
        ({"prompt": "a", "answer": "b", "completion": "c"}, "an example must be"),
        (
            {"prompt": "a", "answer": "b", "context": "c"} | {"prompt": {}},
            "a prompt or answer that is no text must be token ids",
        ),
        (("a", "b", "c"), "an example must be"),
        ("a text", "an example must be"),
        ([1, 2, 3], "an example must be"),
        ([1, 2], "a prompt or answer that is no text must be token ids"),
        (([1.5], [2]), r"must be token ids, .* got \(1,\) of torch.float32"),
        ((torch.rand(3), [2]), r"must be token ids, .* got \(3,\) of torch.float32"),
        (
            {"input_ids": [1, 2, 3], "labels": [-100, 2, -100]},
            "labels must be -100 for the prompt, the first tokens, alone",
        ),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, "an example has 0 tokens of prompt and 3 of answer"),
        ({"messages": [ASKED, SAID], "tools": []}, "an example has 'tools', which is not read here"),
        ({"prompt": PROMPT, "answer": ANSWER, "images": [1]}, "an example has 'images', which is not read here"),
        ({"messages": [SAID, ASKED]}, "the last message must be the assistant's answer, got .*user"),
        ([SAID], "the last message must be the assistant's answer"),
    ],
)
def test_examples_that_mean_nothing_are_refused(example, message):
    with pytest.raises(ValueError, match=message):
        _tokens(example, LETTERS, "cpu")


def test_texts_and_chats_need_a_tokenizer():
    with pytest.raises(ValueError, match="text needs a tokenizer, got 'a' without one"):
        _tokens(("a", "b"), None, "cpu")
    with pytest.raises(ValueError, match="chat messages need a tokenizer that has a chat template"):
        _tokens([ASKED, SAID], None, "cpu")


def test_heads_learn_the_same_from_a_data_set(model):
    learnt, pairs = [], examples(8)
    texts = [torch.cat(pair, -1)[0] for pair in pairs]
    batch = corpora.batch(
        [Tokens(t, torch.arange(len(t)) >= len(p[0]), t) for t, (p, _) in zip(texts, pairs, strict=True)]
    )
    batch |= {
        name: torch.nn.functional.pad(batch[name], (0, 2), value=fill)
        for name, fill in dict(input_ids=0, attention_mask=0, labels=-100).items()
    }
    for data in (pairs, [{"prompt": p[0].tolist(), "completion": a[0].tolist()} for p, a in pairs], batch):
        heads = RetainingHeads.attach(model, 8)
        train_heads(model, heads, data, **OPTIONS)
        learnt.append(weights(heads))
    assert torch.equal(learnt[0], learnt[1])
    assert torch.equal(learnt[0], learnt[2])
