"""A body and a head together are the model; new weights are new; a file's are those that were written."""

import pytest
import torch
from torch import nn

from plpkg import catalog
from plpkg.autonomy.nets import HeadSplit, MobileNet, WordLSTM, logits, pretrained, save, untrained, vocabulary
from plpkg.backbones import FAMILIES, random_backbone

from rounding import assert_close

LEARNERS = ["lstm", "mobile", *FAMILIES]


def assert_whole(model, x):
    """The head's logits of the body's features are the model's, but for the order of the head's sums."""
    split = HeadSplit(model)
    features, whole = split.features(x), logits(model, x)
    together = split.logits(features.flatten(0, -2)).view_as(whole)
    size = features.abs().max() * split.head.weight.abs().sum(1).max() + whole.abs().max()
    assert_close(together, whole, features.shape[-1] + 1, size.item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", LEARNERS)
def test_head_and_body_are_the_model(name, dtype, tools):
    model, x = tools.learner(name, dtype), tools.samples(name, 5, dtype=dtype).x
    names, state = list(dict(model.named_modules())), tools.values(model)
    assert_whole(model, x)
    HeadSplit(model).verify(x)
    assert list(dict(model.named_modules())) == names
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_soft_cap_is_the_head_s(tools):
    model = random_backbone("gemma2", dtype=torch.float64, **tools.SIZES, options=dict(final_logit_softcapping=0.01))
    x = tools.texts(3).x
    assert_whole(model, x)
    split = HeadSplit(model)
    capped, bare = split.logits(split.features(x).flatten(0, 1)), split.head(split.features(x).flatten(0, 1))
    assert capped.abs().max() <= 0.01 < bare.abs().max()
    assert_close(capped, 0.01 * torch.tanh(bare / 0.01), tools.SIZES["hidden"] + 9, bare.abs().max().item())


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_language_model_is_its_own(tied, tools):
    model = random_backbone("llama", **tools.SIZES, options=dict(tie_word_embeddings=tied))
    assert HeadSplit(model).head is model.lm_head
    assert HeadSplit(model).name == "lm_head"


class Twice(nn.Module):
    """Its last ``nn.Linear`` is followed by something that ``then`` does."""

    def __init__(self, then):
        super().__init__()
        self.first, self.last, self.then = nn.Linear(4, 4), nn.Linear(4, 4), then

    def forward(self, x):
        return self.then(self.last(torch.relu(self.first(x))))


class Reversed(nn.Module):
    """Its last ``nn.Linear``, as they are listed, comes first."""

    def __init__(self, hidden):
        super().__init__()
        self.head, self.body = nn.Linear(hidden, 3), nn.Linear(4, hidden)

    def forward(self, x):
        return self.head(self.body(x))


class Unused(Twice):
    """Its last ``nn.Linear`` does nothing at all."""

    def forward(self, x):
        return self.first(x)


WRONG = {
    "a factor": (Twice(lambda out: 2 * out), "does more to its logits than its last layer, 'last'"),
    "a nonlinearity": (Twice(nn.Tanh()), "does more to its logits than its last layer, 'last'"),
    "some of the classes": (Twice(lambda out: out[..., :2]), "last"),
    "unused": (Unused(None), "does more to its logits|is not what makes the logits"),
    "another order, equal widths": (Reversed(4), "'body' is not what makes the logits of Reversed|does more"),
    "another order": (Reversed(8), "'body' is not what makes the logits of Reversed"),
    "the head alone": (nn.Linear(4, 3), "'' is not what makes the logits of Linear"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_last_layer_that_is_not_the_head_is_refused(case):
    model, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        HeadSplit(model).verify(torch.linspace(-1, 2, 24).view(2, 3, 4))


def test_a_model_without_a_linear_layer_is_refused():
    with pytest.raises(ValueError, match=r"Sequential has no nn\.Linear that makes its logits"):
        HeadSplit(nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten()))


@pytest.mark.parametrize("name", ["lstm", "mobile", "gemma2"])
def test_a_forward_pass_that_fails_leaves_the_head(name, tools):
    model, examples = tools.learner(name), tools.samples(name, 3)
    split, head = HeadSplit(model), model.get_submodule(HeadSplit(model).name)
    before = logits(model, examples.x)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        split.features(examples.x[:, 0] if name == "mobile" else examples.x + 10_000)
    assert model.get_submodule(split.name) is head
    assert torch.equal(logits(model, examples.x), before)


def test_gradients_reach_the_body(tools):
    model, images = tools.learner("mobile"), tools.images(3)
    split = HeadSplit(model)
    split.logits(split.features(images.x)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", ["lstm", "mobile", "llama", "gpt2"])
def test_untrained_weights_are_new_and_those_of_the_seed(name, mode, tools):
    model = tools.learner(name, seed=7).train(mode)
    state, chance = tools.values(model), torch.get_rng_state()
    one, same, other = untrained(model, 1), untrained(model, 1), untrained(model, 2)
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert one.training is mode
    assert [(key, value.dtype, value.shape) for key, value in one.state_dict().items()] == [
        (key, value.dtype, value.shape) for key, value in state.items()
    ]
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in one.parameters()}
    assert not shared
    for key, p in one.named_parameters():
        assert torch.equal(p, same.get_parameter(key))
        if p.unique().numel() > 1:  # ones and zeros of a norm, or of a bias, are drawn by nobody
            assert not torch.equal(p, other.get_parameter(key))
            assert not torch.equal(p, state[key])
    if name == "mobile":
        assert all(m.running_mean.eq(0).all() and m.running_var.eq(1).all()
                   for m in one.modules() if isinstance(m, nn.BatchNorm2d))  # fmt: skip


def test_an_untrained_language_model_stays_tied_and_is_as_torch_has_drawn_it(tools):
    model = tools.learner("llama")
    fresh = untrained(model, 3)
    assert fresh.lm_head.weight is fresh.model.embed_tokens.weight
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        expected = WordLSTM(20, 5, (4, 3))
    drawn = untrained(WordLSTM(20, 5, (4, 3)), 4)
    assert all(torch.equal(value, expected.state_dict()[key]) for key, value in drawn.state_dict().items())
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0, got -1"):
        untrained(model, -1)


@pytest.mark.parametrize("name", ["words", "digits"])
def test_what_is_saved_comes_back_in_half_precision(name, tools, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = WordLSTM() if name == "words" else MobileNet()
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.normal_()
    state = tools.values(model)
    save(model, tmp_path / f"{name}.safetensors")
    monkeypatch.setattr(catalog, "data_path", lambda *parts: tmp_path / parts[-1])
    loaded = pretrained(name)
    assert not loaded.training
    for key, value in loaded.state_dict().items():
        assert value.dtype == state[key].dtype
        expected = state[key].half().float() if value.is_floating_point() else state[key]
        assert torch.equal(value, expected)
    assert torch.equal(model.head.weight, state["head.weight"])
    half = sum(2 * v.numel() if v.is_floating_point() else 8 for v in state.values())
    assert half <= (tmp_path / f"{name}.safetensors").stat().st_size < half + 8_000  # the names


def test_the_names_of_what_is_pretrained():
    with pytest.raises(ValueError, match="name must be one of 'words', 'digits', got 'word'"):
        pretrained("word")


def test_the_networks_that_come_with_the_package(tools):
    words, digits, known = pretrained("words"), pretrained("digits"), vocabulary()
    assert len(known) == words.head.out_features == words.embedding.num_embeddings == 10_000
    assert known.words[:2] == ("<unknown>", "<begin>")
    HeadSplit(words).verify(torch.arange(12).view(2, 6))
    HeadSplit(digits).verify(tools.images(3, dtype=torch.float32).x)
    assert not words.training
    assert all(value.isfinite().all() for m in (words, digits) for value in m.state_dict().values())


def test_shapes():
    ids = torch.arange(12).view(3, 4)
    assert WordLSTM(20, 5, (4, 3))(ids).shape == (3, 4, 20)
    assert MobileNet(7, channels=3, widths=(4, 6))(torch.rand(2, 3, 8, 8)).shape == (2, 7)
    sizes = [tuple(p.shape) for p in MobileNet().parameters() if p.dim() == 4]
    assert sizes == [(16, 1, 3, 3), (16, 1, 3, 3), (32, 16, 1, 1), (32, 1, 3, 3), (64, 32, 1, 1)]
