"""What comes to a device: samples that are no numbers, labels that are none, models that are wrapped."""

import copy

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import nn

from plpkg import autonomy
from plpkg.adapters import validate_adapter
from plpkg.autonomy.baselines import cloud_train, counts, fed_avg
from plpkg.backbones import random_backbone
from plpkg.corpora.examples import IGNORED, Examples, Person
from plpkg.serving import Engine, Request

CLASSES = 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES)).eval()


def stream(count, seed=1):
    x = torch.randn(count, 1, 6, generator=torch.Generator().manual_seed(seed))
    return [(each, each[:, :CLASSES].argmax(1)) for each in x]


def examples(count=12, classes=CLASSES, low=0):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(2))
    return Examples(x, low + torch.arange(count) % classes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("allowance", [None, 10])
def test_a_sample_that_is_no_number_is_left_out_of_a_stream(value, allowance):
    learners = [autonomy.OnlineLearner(net(), batch=4, allowance=allowance) for _ in range(2)]
    for i, (x, y) in enumerate(stream(60)):
        for learner in learners:
            learner.label(learner.predict(x).ids, y)
        if i % 7 == 0:
            bad = torch.cat([x, torch.full_like(x, value)])
            with pytest.raises(ValueError, match="sample 1 of 2 gives features that are not finite: leave it out"):
                learners[0].predict(bad)
    plain, other = (learner.head.weight for learner in learners)
    assert torch.equal(plain, other)
    assert learners[0].accuracy == learners[1].accuracy


def test_a_step_that_would_break_the_head_is_not_made():
    learner = autonomy.OnlineLearner(net(), batch=2, lr=1e38)
    before = learner.head.weight.clone()
    ids = learner.predict(1e3 * torch.randn(2, 6)).ids
    with pytest.raises(FloatingPointError, match="a step of 2 labels makes the head not finite: take a lower lr"):
        learner.label(ids, torch.tensor([0, 1]))
    assert torch.equal(learner.head.weight, before)
    assert learner.predict(stream(1)[0][0]).ids == [2]


def test_a_step_that_is_not_made_holds_up_no_other_label():
    learner = autonomy.OnlineLearner(net(), batch=2, lr=1e38)
    x = torch.cat([1e3 * torch.ones(2, 6), torch.zeros(3, 6)])
    with pytest.raises(FloatingPointError, match="a step of 2 labels makes the head not finite"):
        learner.label(learner.predict(x).ids, [0, 1, 2, 3, 0])
    assert "of 5, 0 open" in repr(learner)


def test_predicted_under_autocast_and_learnt_outside():
    learner = autonomy.OnlineLearner(net(), batch=2)
    before = learner.head.weight.clone()
    with torch.autocast("cpu", torch.bfloat16):
        ids = learner.predict(torch.randn(2, 6)).ids
    learner.label(ids, [1, 2])
    assert not torch.equal(learner.head.weight, before)


@pytest.mark.parametrize("form", [list, torch.tensor, np.array])
def test_labels_may_come_in_a_list(form):
    learner = autonomy.OnlineLearner(net())
    learner.label(form(learner.predict(torch.randn(2, 6)).ids), form([1, 2]))
    assert len(learner.outcomes) == 2
    with pytest.raises(ValueError, match=r"x must be \(batch, ...\), got \(0, 6\)"):
        learner.predict(torch.zeros(0, 6))
    with pytest.raises(ValueError, match=r"y must be .*between 0 and classes - 1=3, got 7"):
        learner.label(learner.predict(torch.randn(1, 6)).ids, [7])


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        (examples(classes=8), None, "train has labels from 0 to 7, and the model has 4 classes"),
        (examples(low=-1), None, "train has labels from -1 to 2, and the model has 4 classes"),
        (examples(), examples(low=1), "validation has labels from 1 to 4, and the model has 4 classes"),
        (examples(), Examples(torch.zeros(2, 6), torch.full((2,), IGNORED)), "validation has no label that counts"),
    ],
)
@pytest.mark.parametrize("scope", ["head", "all"])
def test_labels_that_are_no_classes(train, validation, message, scope):
    with pytest.raises(ValueError, match=message):
        autonomy.transfer(net(), train, validation, scope, steps=2)


def test_people_without_a_label_that_counts():
    nothing = Examples(torch.zeros(2, 6), torch.full((2,), IGNORED))
    people = {name: Person(nothing, None, examples()) for name in "ab"}
    with pytest.raises(ValueError, match="nobody of 2 people has a label that counts"):
        fed_avg(net(), people, steps=2, rounds=1)
    with pytest.raises(ValueError, match="'a' has no validation data, which decide the weight of counts"):
        counts(net(), people)
    with pytest.raises(ValueError, match="there are no examples to join"):
        cloud_train(net(), {})


WRAPPED = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "in parallel": nn.DataParallel,
    "PEFT": lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval(),
    "PEFT, compiled": lambda model: torch.compile(WRAPPED["PEFT"](model), backend="eager"),
}


def sequences(model, count=6):
    ids = torch.randint(0, model.config.vocab_size, (count, 9), generator=torch.Generator().manual_seed(3))
    return Examples(ids[:, :-1], ids[:, 1:].contiguous())


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapped_model_is_the_one_within(wrap):
    torch.manual_seed(0)
    wrapped = wrap(random_backbone("llama", num_layers=2))
    inner = autonomy.nets.plain(wrapped)
    data = sequences(inner)
    models = wrapped, copy.deepcopy(inner)
    states = [autonomy.transfer(model, data, None, "head", steps=3, patience=None).state for model in models]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    predictions = [autonomy.OnlineLearner(model).predict(data.x).classes for model in models]
    assert torch.equal(*predictions)


SMALL = dict(vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
T5 = dict(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)


@pytest.mark.parametrize(
    "model",
    [
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=48, **T5)),
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
        lambda: transformers.LlamaModel(transformers.LlamaConfig(**SMALL)),
    ],
)
def test_what_reads_the_words_that_it_should_predict_is_refused(model):
    model, data = model().eval(), sequences(random_backbone("llama", num_layers=1, vocab=48))
    for use in (
        lambda: autonomy.transfer(model, data, None, "all", steps=1),
        lambda: autonomy.OnlineLearner(model),
        lambda: autonomy.evaluate(model, data),
    ):
        with pytest.raises(ValueError, match=f"{type(model).__name__} is no causal language model"):
            use()


def test_lora_on_lora_and_prompts_are_refused():
    base = random_backbone("llama", num_layers=1)
    data = sequences(base)
    prompted = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="PeftModelForCausalLM puts virtual tokens before the text"):
        autonomy.transfer(prompted, data, None, "head", steps=1)
    adapted = get_peft_model(random_backbone("llama", num_layers=1), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.q_proj carries LoRA already: merge it before"):
        autonomy.transfer(adapted, data, None, "lora", steps=1)


@pytest.mark.parametrize("config", [None, LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"])])
def test_what_was_trained_as_lora_is_served_and_loaded_by_peft(config, tmp_path):
    base = random_backbone("llama", num_layers=2)
    data = sequences(base)
    own = autonomy.transfer(base, data, None, "lora", lora=config, steps=5, lr=0.05, patience=None)
    adapter = own.adapter()
    adapter.save(tmp_path)
    validate_adapter(tmp_path, base)
    with torch.no_grad():
        expected = own.model(data.x).logits
        loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
        torch.testing.assert_close(loaded(data.x).logits, expected)
        assert (base(data.x).logits - expected).abs().max() > 0.01
    engine = Engine(base)
    engine.load("own", adapter)
    answers = engine.generate([Request(data.x[0], "own", max_new_tokens=4)])
    options = dict(attention_mask=torch.ones(1, 8), max_new_tokens=4, do_sample=False, eos_token_id=None)
    written = own.model.generate(data.x[:1], **options)[0, 8:]
    assert answers[0] == written.tolist()
    with pytest.raises(ValueError, match=r"lm_head.weight is no LoRA adapter: keep state"):
        autonomy.transfer(base, data, None, "head", steps=1).adapter()
