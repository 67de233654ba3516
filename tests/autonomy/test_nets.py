"""A body and a head together are the model; new weights are new; a file's are those that were written."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from plpkg import catalog
from plpkg.autonomy.nets import HeadSplit, MobileNet, WordLSTM, logits, pretrained, untrained, vocabulary
from plpkg.backbones import FAMILIES, random_backbone
from tests.autonomy.conftest import SIZES, Net, images, learner, same, samples, texts, values

from rounding import assert_close

LEARNERS = ["lstm", "mobile", *FAMILIES]


def assert_whole(model, x):
    """The head's logits of the body's features are the model's, but for the order of the head's sums."""
    split = HeadSplit(model)
    features, whole = split.features(x), logits(model, x)
    together = split.logits(features.flatten(0, -2)).view_as(whole)
    size = features.abs().max() * split.head.weight.abs().sum(1).max() + whole.abs().max()
    assert_close(together, whole, features.shape[-1] + 1, size.item())
    return together


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", LEARNERS)
def test_head_and_body_are_the_model(name, dtype):
    model, x = learner(name, dtype), samples(name, 5, dtype=dtype).x
    names, state = list(dict(model.named_modules())), values(model)
    assert_whole(model, x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    HeadSplit(model).verify(x)
    assert list(dict(model.named_modules())) == names
    assert list(model.state_dict()) == list(state)
    assert same(model.state_dict(), state)


def test_a_soft_cap_is_the_head_s():
    model = random_backbone("gemma2", dtype=torch.float64, **SIZES, options=dict(final_logit_softcapping=0.01))
    x = texts(3).x
    assert_whole(model, x)
    split = HeadSplit(model)
    capped, bare = split.logits(split.features(x).flatten(0, 1)), split.head(split.features(x).flatten(0, 1))
    assert capped.abs().max() <= 0.01 < bare.abs().max()
    assert_close(capped, 0.01 * torch.tanh(bare / 0.01), SIZES["hidden"] + 9, bare.abs().max().item())


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_language_model_is_its_own(tied):
    model = random_backbone("llama", **SIZES, options=dict(tie_word_embeddings=tied))
    split = HeadSplit(model)
    assert split.head is model.lm_head
    assert split.name == "lm_head"


def twice(steps):
    """Two layers, of which the second should make the logits."""
    return Net(steps, first=nn.Linear(4, 256), last=nn.Linear(256, 4))


def reversed_layers(hidden):
    """The last one, as they are listed, comes first."""
    return Net(lambda net, x: net.head(net.body(x)), head=nn.Linear(hidden, 3), body=nn.Linear(4, hidden))


WRONG = {
    "a factor": (twice(lambda net, x: 2 * net.last(net.first(x))), "does more to its logits than its last .*, 'last'"),
    "a nonlinearity": (
        twice(lambda net, x: torch.tanh(net.last(net.first(x)))),
        "does more to its logits than its last layer, 'last'",
    ),
    "some of the classes": (twice(lambda net, x: net.last(net.first(x))[..., :2]), "last"),
    "unused": (twice(lambda net, x: net.first(x)), "does more to its logits|is not what makes the logits"),
    "another order, equal widths": (reversed_layers(4), "'body' is not what makes the logits of Net|does more"),
    "another order": (reversed_layers(8), "'body' is not what makes the logits of Net"),
    "the head alone": (nn.Linear(4, 3), "'' is not what makes the logits of Linear"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", WRONG)
def test_a_last_layer_that_is_not_the_head_is_refused(case, dtype):
    model, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        HeadSplit(copy.deepcopy(model).to(dtype)).verify(torch.linspace(-8, 16, 24, dtype=dtype).view(2, 3, 4))
    with pytest.raises(ValueError, match=r"Sequential has no nn\.Linear that makes its logits"):
        HeadSplit(nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten()))


@pytest.mark.parametrize("name", ["lstm", "mobile", "gemma2"])
def test_a_forward_pass_that_fails_leaves_the_head(name):
    model, examples = learner(name), samples(name, 3)
    split, head = HeadSplit(model), model.get_submodule(HeadSplit(model).name)
    before = logits(model, examples.x)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        split.features(examples.x[:, 0] if name == "mobile" else examples.x + 10_000)
    assert model.get_submodule(split.name) is head
    assert torch.equal(logits(model, examples.x), before)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", ["lstm", "mobile", "llama", "gpt2"])
def test_untrained_weights_are_new_and_those_of_the_seed(name, mode):
    model = learner(name, seed=7).train(mode)
    state, chance = values(model), torch.get_rng_state()
    one, again, other = untrained(model, 1), untrained(model, 1), untrained(model, 2)
    assert torch.equal(torch.get_rng_state(), chance)
    assert same(model.state_dict(), state)
    assert one.training is mode
    forms = [[(key, t.dtype, t.shape) for key, t in each.items()] for each in (one.state_dict(), state)]
    assert forms[0] == forms[1]
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in one.parameters()}
    for key, p in one.named_parameters():
        assert torch.equal(p, again.get_parameter(key))
        if p.unique().numel() > 1:  # ones and zeros of a norm, or of a bias, are drawn by nobody
            assert not torch.equal(p, other.get_parameter(key))
            assert not torch.equal(p, state[key])
    for m in one.modules():
        assert not isinstance(m, nn.BatchNorm2d) or (m.running_mean.eq(0).all() and m.running_var.eq(1).all())


def test_an_untrained_language_model_stays_tied_and_is_as_torch_has_drawn_it():
    model = learner("llama")
    fresh = untrained(model, 3)
    assert fresh.lm_head.weight is fresh.model.embed_tokens.weight
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        expected = WordLSTM(20, 5, (4, 3))
    assert same(untrained(WordLSTM(20, 5, (4, 3)), 4).state_dict(), expected.state_dict())
    with pytest.raises(ValueError, match=r"seed must be between 0 and .*, got -1"):
        untrained(model, -1)


@pytest.mark.parametrize("name", ["words", "digits"])
def test_weights_are_read_in_half_precision(name, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = WordLSTM() if name == "words" else MobileNet()
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.normal_()
    state = values(model)
    half = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    save_file(half, tmp_path / f"{name}.safetensors")
    monkeypatch.setattr(catalog, "data_path", lambda *parts: tmp_path / parts[-1])
    loaded = pretrained(name)
    assert not loaded.training
    for key, value in loaded.state_dict().items():
        assert value.dtype == state[key].dtype
        assert torch.equal(value, half[key].to(value.dtype))


def test_the_networks_that_come_with_the_package():
    with pytest.raises(ValueError, match="name must be one of 'words', 'digits', got 'word'"):
        pretrained("word")
    words, digits, known = pretrained("words"), pretrained("digits"), vocabulary()
    assert len(known) == words.head.out_features == words.embedding.num_embeddings == 10_000
    assert known.words[:2] == ("<unknown>", "<begin>")
    HeadSplit(words).verify(torch.arange(12).view(2, 6))
    HeadSplit(digits).verify(images(3, dtype=torch.float32).x)
    assert not words.training
    assert all(value.isfinite().all() for m in (words, digits) for value in m.state_dict().values())


def test_shapes():
    ids = torch.arange(12).view(3, 4)
    assert WordLSTM(20, 5, (4, 3))(ids).shape == (3, 4, 20)
    assert MobileNet(7, channels=3, widths=(4, 6))(torch.rand(2, 3, 8, 8)).shape == (2, 7)
    sizes = [tuple(p.shape) for p in MobileNet().parameters() if p.dim() == 4]
    assert sizes == [(16, 1, 3, 3), (16, 1, 3, 3), (32, 16, 1, 1), (32, 1, 3, 3), (64, 32, 1, 1)]
