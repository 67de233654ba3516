"""What of a copy is a person's own, by memory addresses and by what a step of learning changes."""

import copy

import peft
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from plpkg.autonomy.nets import logits
from plpkg.autonomy.scope import SCOPES, personal_copy
from plpkg.backbones import FAMILIES, random_backbone
from tests.autonomy.conftest import SIZES, Net, learner, same, samples, texts, values

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # peft, of GPT-2

LEARNERS = ["lstm", "mobile", *FAMILIES]
WITHOUT = {("lstm", "norm"), *((family, "bias") for family in ("llama", "mistral", "phi3", "gemma2"))}
CASES = [(name, scope) for name in LEARNERS for scope in SCOPES if (name, scope) not in WITHOUT]


def loss_of(model, examples):
    return cross_entropy(logits(model, examples.x).flatten(0, -2), examples.y.flatten())


def step(model, trained, examples, lr=0.1):
    """One step of SGD on what is trained."""
    gradients = torch.autograd.grad(loss_of(model, examples), trained.values())
    for p, gradient in zip(trained.values(), gradients, strict=True):
        p.data.sub_(lr * gradient)


def expected(model, scope):
    """The names of what a scope trains, by the names that the networks of this test give."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    head = "lm_head" if hasattr(model, "lm_head") else "head"
    modules = dict(model.named_modules()).items()
    norms = [name for name, m in modules if isinstance(m, nn.BatchNorm2d | nn.LayerNorm) or "RMSNorm" in str(type(m))]
    return {
        "head": {name for name in names if name.rpartition(".")[0] == head},
        "bias": {name for name in names if "bias" in name.rpartition(".")[2]},
        "norm": {name for name in names if name.rpartition(".")[0] in norms},
        "all": {name for name, _ in model.named_parameters()},
    }[scope]


@pytest.mark.parametrize(("name", "scope"), CASES)
def test_a_copy_shares_what_is_not_trained_and_nothing_else(name, scope):
    model, examples = learner(name).train(), samples(name, 6)
    next(model.parameters()).requires_grad_(False)
    before, wanted = values(model), {n: p.requires_grad for n, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    personal, trained = personal_copy(model, scope)
    assert not any(module.training for module in personal.modules())
    public = {p.data_ptr() for p in model.parameters()}
    own = {p.data_ptr() for p in trained.values()}
    assert not own & public
    assert len(own) == len(trained)
    assert {p.data_ptr() for p in personal.parameters()} <= own | public
    for key, p in personal.named_parameters(remove_duplicate=False):
        assert p.requires_grad == (p.data_ptr() in own)
        assert (key in trained and p is trained[key]) or not p.requires_grad or scope == "all"
    if scope != "lora":
        assert trained.keys() == expected(model, scope)
        assert same(personal.state_dict(), before)
    step(personal, trained, examples)
    if scope == "lora":  # B begins at zero, so that A moves with the second step
        step(personal, trained, examples)
    model.train()
    assert same(model.state_dict(), before)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == wanted
    assert model.training
    assert all(p is parameters[n] for n, p in model.named_parameters())
    personal.train()
    personal(examples.x)  # BatchNorm's statistics are the copy's own
    assert same(model.state_dict(), before)
    if name not in ("lstm", "mobile"):
        if scope == "all":  # everything trained stays tied
            assert personal.lm_head.weight is personal.get_input_embeddings().weight
            assert personal.config.tie_word_embeddings
            assert "lm_head.weight" not in trained
        assert model.config.tie_word_embeddings
        assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("scope", ["bias", "all"])
def test_what_is_tied_within_the_scope_is_trained_as_one(scope):
    model = Net(lambda net, x: net.head(net.b(net.a(x).relu()).relu()), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    model.head, model.b.bias = nn.Linear(6, 4), model.a.bias
    personal, trained = personal_copy(model, scope)
    assert personal.a.bias is personal.b.bias is trained["a.bias"]
    assert "b.bias" not in trained
    assert model.a.bias is model.b.bias is not trained["a.bias"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_is_untied_in_the_copy_and_learns_alone(family, tmp_path):
    model, examples = learner(family), texts(6)
    personal, trained = personal_copy(model, "head")
    step(personal, trained, examples)
    embedding = personal.get_input_embeddings().weight
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert not torch.equal(embedding, personal.lm_head.weight)
    assert not personal.config.tie_word_embeddings
    untied = random_backbone(family, dtype=torch.float64, **SIZES, options={"tie_word_embeddings": False})
    untied.load_state_dict(model.state_dict())
    leaf = untied.lm_head.weight
    (gradient,) = torch.autograd.grad(loss_of(untied, examples), leaf)
    torch.testing.assert_close(personal.lm_head.weight, leaf - 0.1 * gradient, rtol=0, atol=0)
    if family == "llama":  # saved, it is whole
        personal.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
        assert torch.equal(logits(loaded, examples.x), logits(personal, examples.x))


@pytest.mark.parametrize(
    ("name", "scope", "message"),
    [
        ("lstm", "norm", "WordLSTM has nothing to train of the scope 'norm'"),
        ("llama", "bias", "LlamaForCausalLM has nothing to train of the scope 'bias'"),
        ("gemma2", "bias", "Gemma2ForCausalLM has nothing to train of the scope 'bias'"),
        ("mobile", "body", "scope must be one of 'head', 'bias', 'norm', 'lora', 'all', got 'body'"),
    ],
)
def test_a_scope_that_the_model_lacks_is_refused(name, scope, message):
    with pytest.raises(ValueError, match=message):
        personal_copy(learner(name), scope)


@pytest.mark.parametrize("name", ["mobile", "llama", "gpt2"])
def test_lora_is_peft_s(name):
    model, chance = learner(name), torch.get_rng_state()
    targets = {"mobile": ["head"], "gpt2": ["c_attn"]}.get(name, ["q_proj"])
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets)
    trained = personal_copy(model, "lora", config, seed=5)[1]
    assert torch.equal(torch.get_rng_state(), chance)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        whole = peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(config))
    theirs = {n.removeprefix("base_model.model."): p for n, p in whole.named_parameters() if p.requires_grad}
    assert trained.keys() == theirs.keys()
    assert same(trained, theirs)
    other = personal_copy(model, "lora", config, seed=6)[1]
    assert not any(torch.equal(p, other[key]) for key, p in trained.items() if "lora_A" in key)
    assert {p.shape[0] for key, p in personal_copy(model, "lora")[1].items() if "lora_A" in key} == {8}


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_a_bias_that_lora_trains_is_the_person_s_own(bias):
    model, examples = learner("qwen2"), texts(4)
    before = values(model)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], bias=bias, lora_dropout=0.5)
    personal, trained = personal_copy(model, "lora", config)
    assert not any(module.training for module in personal.modules())  # dropout rests
    assert any("bias" in key for key in trained) == (bias != "none")
    step(personal, trained, examples)
    assert same(model.state_dict(), before)


@pytest.mark.parametrize(("name", "scope"), [c for c in CASES if c[0] in ("lstm", "mobile", "llama")])
def test_a_state_is_taken_over(name, scope):
    model, examples = learner(name), samples(name, 6)
    personal, trained = personal_copy(model, scope, seed=1)
    for _ in range(2):
        step(personal, trained, examples)
    state = {key: p.detach().clone() for key, p in trained.items()}
    again, taken = personal_copy(model, scope, seed=2, state=state)
    assert torch.equal(logits(again, examples.x), logits(personal, examples.x))
    assert not {p.data_ptr() for p in taken.values()} & {value.data_ptr() for value in state.values()}


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("head.bias"),
        lambda state: state.update({"head.scale": torch.ones(1)}),
        lambda state: state.update({"head.bias": torch.ones(1)}),  # which would be broadcast
        lambda state: state.update({"body.1.weight": state.pop("head.weight")}),
        lambda state: state.clear(),
    ],
    ids=["missing", "more", "shape", "another name", "empty"],
)
def test_a_state_of_something_else_is_refused(change):
    model = learner("mobile")
    state = {key: p.detach().clone() for key, p in personal_copy(model, "head")[1].items()}
    change(state)
    with pytest.raises(ValueError, match=r"the state has \[.*\], and 'head' trains \['head.bias', 'head.weight'\]"):
        personal_copy(model, "head", state=state)
