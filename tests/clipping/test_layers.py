"""Every layer's per-sample gradients against autograd, one example at a time; and what is refused."""

from functools import partial

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention, SequenceBias
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm, Gemma2TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

from plpkg.clipping import clipped_gradients
from plpkg.clipping.layers import any_layer, embedding_scale, rule_for, scale, scale_offset

from rounding import assert_as_exact

EXECUTIONS = ("per_sample", "fast", "ghost", "book_keeping")
BATCH = 4


class Bare(nn.Module):
    """Parameters of its own beside its children's, as a vision transformer's embeddings."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 6))
        self.places = nn.Parameter(torch.randn(1, 6, 6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        x = self.inner(x)
        return torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places


class Several(nn.Module):
    """Gives a dictionary and a tuple."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x, *, shift=0.0):
        return {"a": x @ self.weight + shift, "b": (x * self.weight.diagonal(), None)}


class Shifted(nn.Module):
    """Its parameter has no effect yet: what it gives does not tell whose the second argument is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))

    def forward(self, x, shift):
        return x + self.weight * shift


class Apart(nn.Module):
    def __init__(self, layer, after):
        super().__init__()
        self.layer, self.after = layer, after

    def forward(self, x):
        return self.after(self.layer, x)


def plain(layer, x):
    return layer(x)


def seen(layer, x):
    out = layer(x, shift=1.0)
    return out["a"] + out["b"][0].sin()


def flattened(layer, x):
    """As OPT does it: an example's rows one after the other."""
    return layer(x.flatten(0, 1)).unflatten(0, (len(x), -1))


def first(layer, x):
    return layer(x)[0]


def to_itself(layer, x, **options):
    return layer(x, x, x, **options)[0]


def to_others(layer, x, **options):
    """Three keys and values for each example, made of what it reads."""
    return layer(x, x[:, :3].cos(), x[:, :3].sin(), **options)[0]


def floats(*shape):
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))


def ids(*shape):
    return torch.randint(0, 6, (BATCH, *shape), generator=torch.Generator().manual_seed(1))


CASES = {
    "Linear, 2-D": (lambda: nn.Linear(6, 3), floats(6), plain),
    "Linear, 3-D": (lambda: nn.Linear(6, 3), floats(5, 6), plain),
    "Linear, 4-D": (lambda: nn.Linear(6, 3), floats(2, 3, 6), plain),
    "Linear, no bias": (lambda: nn.Linear(6, 3, bias=False), floats(5, 6), plain),
    "Linear, long": (lambda: nn.Linear(3, 2), floats(40, 3), plain),
    "Linear, used twice": (lambda: nn.Linear(6, 6), floats(5, 6), lambda layer, x: layer(layer(x).tanh())),
    "Conv1D": (lambda: Conv1D(3, 6), floats(5, 6), plain),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), floats(4, 9, 7), plain),
    "Conv2d, groups": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2, dilation=(1, 2)), floats(4, 9, 7), plain),
    "Conv2d, same": (lambda: nn.Conv2d(4, 6, (3, 5), padding="same"), floats(4, 5, 7), plain),
    "Conv2d, reflected": (lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), floats(4, 5, 7), plain),
    "Conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), floats(4, 5, 7), plain),
    "Conv2d, ReLU in place": (lambda: nn.Conv2d(4, 6, 3), floats(4, 5, 7), lambda layer, x: layer(x).relu_()),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=2, stride=2, dilation=2), floats(4, 11), plain),
    "Conv1d, groups, circular": (
        lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular", groups=2),
        floats(4, 9),
        plain,
    ),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), floats(2, 3, 4, 3), plain),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 3, 3, stride=2), floats(4, 7), plain),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 3, 3), floats(4, 5, 4), plain),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), floats(2, 3, 2, 3), plain),
    "Embedding": (lambda: nn.Embedding(6, 4), ids(9), plain),
    "Embedding, a category": (lambda: nn.Embedding(6, 4), ids(), plain),
    "Embedding, 3-D": (lambda: nn.Embedding(6, 4), ids(3, 2), plain),
    "Embedding, padding": (lambda: nn.Embedding(6, 4, padding_idx=2), ids(9), plain),
    "Embedding, scaled": (lambda: Gemma2TextScaledWordEmbedding(6, 4, 2, embed_scale=3.0), ids(9), plain),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(6, 4), ids(5), plain),
    "EmbeddingBag, sum, padding": (lambda: nn.EmbeddingBag(6, 4, mode="sum", padding_idx=2), ids(5), plain),
    "LayerNorm": (lambda: nn.LayerNorm(6), floats(5, 6), plain),
    "LayerNorm, 2-D input": (lambda: nn.LayerNorm(6), floats(6), plain),
    "LayerNorm, two dimensions": (lambda: nn.LayerNorm((5, 6), bias=False), floats(3, 5, 6), plain),
    "RMSNorm": (lambda: nn.RMSNorm(6, eps=1e-5), floats(5, 6), plain),
    "Llama's RMSNorm": (lambda: LlamaRMSNorm(6), floats(5, 6), plain),
    "Gemma's RMSNorm": (lambda: Gemma2RMSNorm(6), floats(5, 6), plain),
    "T5's norm": (lambda: T5LayerNorm(6), floats(5, 6), plain),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), floats(4, 5, 3), plain),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), floats(4, 5), plain),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), floats(4, 5, 3), plain),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4, affine=True), floats(4, 3, 2, 3), plain),
    "SequenceBias": (lambda: SequenceBias(6, batch_first=True), floats(5, 6), plain),
    "PReLU, one weight": (nn.PReLU, floats(5, 6), plain),
    "PReLU": (lambda: nn.PReLU(5), floats(5, 6), plain),
    "Bilinear": (lambda: nn.Bilinear(6, 6, 3), floats(6), lambda layer, x: layer(x, x.flip(1))),
    "bare parameters": (Bare, floats(5, 6), plain),
    "several outputs": (Several, floats(5, 6), seen),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), floats(5, 6), to_itself),
    "MultiheadAttention, as many positions as examples": (
        lambda: nn.MultiheadAttention(6, 2, batch_first=True),
        floats(BATCH, 6),
        to_itself,
    ),
    "MultiheadAttention, its weights not needed": (
        lambda: nn.MultiheadAttention(6, 2, batch_first=True),
        floats(5, 6),
        partial(to_itself, need_weights=False),
    ),
    "MultiheadAttention to others": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), floats(5, 6), to_others),
    "MultiheadAttention to others, its weights not needed": (
        lambda: nn.MultiheadAttention(6, 2, batch_first=True),
        floats(5, 6),
        partial(to_others, need_weights=False),
    ),
    "MultiheadAttention, a key and a value for all": (
        lambda: nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True),
        floats(5, 6),
        to_itself,
    ),
    "DPMultiheadAttention": (lambda: DPMultiheadAttention(6, 2, batch_first=True), floats(5, 6), to_itself),
    "DPMultiheadAttention to others": (lambda: DPMultiheadAttention(6, 2, batch_first=True), floats(5, 6), to_others),
    "DPLSTM": (lambda: DPLSTM(6, 4, batch_first=True), floats(5, 6), first),
    "DPLSTM, as many steps as examples": (lambda: DPLSTM(6, 4, batch_first=True), floats(BATCH, 6), first),
    "DPLSTM, two layers, both ways": (
        lambda: DPLSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True),
        floats(5, 6),
        first,
    ),
    "DPGRU": (lambda: DPGRU(6, 4, batch_first=True), floats(5, 6), first),
    "DPRNN": (lambda: DPRNN(6, 4, batch_first=True), floats(5, 6), first),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
        floats(5, 6),
        plain,
    ),
    "keyword argument": (lambda: nn.Linear(6, 3), floats(5, 6), lambda layer, x: layer(input=x)),
    "the same for all": (
        lambda: nn.Linear(6, 6),
        floats(5, 6),
        lambda layer, x: x * layer(torch.ones(1, 5, 6, dtype=x.dtype)),
    ),
    "positions for all": (
        lambda: nn.Embedding(5, 6),
        floats(5, 6),
        lambda layer, x: x * layer(torch.arange(5)[None]).sin(),
    ),
    "positions without a batch": (
        lambda: nn.Embedding(5, 6),
        floats(5, 6),
        lambda layer, x: x * layer(torch.arange(5)).sin(),
    ),
    "positions without a batch, as many as examples": (
        lambda: nn.Embedding(BATCH, 6),
        floats(BATCH, 6),
        lambda layer, x: x * layer(torch.arange(BATCH)).sin(),
    ),
    "an argument as long as the batch, and for all": (
        Shifted,
        floats(BATCH, 6),
        lambda layer, x: layer(x, torch.linspace(1, 2, x.shape[1])[:, None].to(x.dtype)),
    ),
    "MultiheadAttention, a mask as long as the batch": (
        lambda: nn.MultiheadAttention(6, 2, batch_first=True),
        floats(BATCH, 6),
        lambda layer, x: layer(x, x, x, attn_mask=torch.ones(BATCH, BATCH).triu(1).bool())[0],
    ),
    "flattened": (lambda: nn.Linear(6, 3), floats(5, 6), flattened),
    "flattened, LayerNorm": (lambda: nn.LayerNorm(6), floats(5, 6), flattened),
    "flattened, Llama's RMSNorm": (lambda: LlamaRMSNorm(6), floats(5, 6), flattened),
    "flattened, Conv2d": (lambda: nn.Conv2d(4, 6, 3), floats(5, 4, 6, 5), flattened),
    "flattened, GroupNorm": (lambda: nn.GroupNorm(2, 4), floats(5, 4, 3), flattened),
    "flattened, PReLU": (lambda: nn.PReLU(6), floats(5, 6), flattened),
    "flattened, MultiheadAttention": (
        lambda: nn.MultiheadAttention(6, 2, batch_first=True),
        floats(2, 5, 6),
        lambda layer, x: layer(*3 * [x.flatten(0, 1)])[0].unflatten(0, (len(x), -1)),
    ),
}


def loss(model, x):
    out = model(x)
    return (out.sin() * torch.linspace(0.5, 2, out[0].numel(), dtype=out.dtype).reshape(out[0].shape)).flatten(1).sum(1)


def build(name):
    make, x, after = CASES[name]
    torch.manual_seed(0)
    return Apart(make(), after), x


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch.func goes example by example
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_example_at_a_time(name, execution, assert_as_loop):
    model, x = build(name)
    for clipping in ("flat", "per_layer"):
        assert_as_loop(model, loss, x, execution, 1.0, clipping=clipping)
    model.double()
    x = x.double() if x.is_floating_point() else x
    mixed = name in ("Llama's RMSNorm", "Gemma's RMSNorm", "T5's norm")
    for clipping in ("flat", "automatic", "per_layer"):
        assert_as_loop(model, loss, x, execution, 1.0, clipping=clipping, mixed=mixed)


def test_a_scaled_embedding_is_recognised_by_what_it_does():
    assert embedding_scale(Gemma2TextScaledWordEmbedding(9, 4, 0, embed_scale=3.0)) == 3

    class Squared(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids).square()

    assert rule_for(Squared(9, 4)) is any_layer


@pytest.mark.parametrize(("layer", "offset"), [(LlamaRMSNorm(6), 0), (T5LayerNorm(6), 0), (Gemma2RMSNorm(6), 1)])
def test_norms_of_model_families_are_recognised_by_what_they_do(layer, offset):
    assert scale_offset(layer) == offset
    assert rule_for(layer).func is scale


def test_what_only_looks_like_a_norm_is_taken_apart_by_torch_func():
    class TwiceNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return x * self.weight.square()

    class OddLinear(nn.Linear):
        def forward(self, x):
            return super().forward(x).square()

    assert rule_for(TwiceNorm()) is any_layer
    assert rule_for(OddLinear(6, 3)) is any_layer


def refused(layer, x=None, after=plain, error=ValueError):
    model = Apart(layer, after)
    with pytest.raises(error) as caught:
        clipped_gradients(model, loss, floats(5, 6) if x is None else x, 1.0)
    return str(caught.value)


def test_layers_that_mix_examples_are_refused_by_name():
    assert "layer (BatchNorm1d) normalises each example by the others" in refused(nn.BatchNorm1d(5))
    assert "running statistics" in refused(nn.InstanceNorm1d(5, affine=True, track_running_stats=True))
    assert "max_norm=1.0" in refused(nn.Embedding(6, 4, max_norm=1.0), ids(9))
    assert "scale_grad_by_freq" in refused(nn.Embedding(6, 4, scale_grad_by_freq=True), ids(9))
    assert "sparse" in refused(nn.Embedding(6, 4, sparse=True), ids(9))
    for length in (BATCH, 5):
        message = refused(nn.MultiheadAttention(6, 2), floats(length, 6), to_itself)
        assert "layer (MultiheadAttention) has batch_first=False; the first dimension must be the batch" in message
        for layer in (DPMultiheadAttention(6, 2), SequenceBias(6)):
            after = to_itself if isinstance(layer, DPMultiheadAttention) else plain
            assert "layer" in refused(layer, floats(length, 6), after, (ValueError, NotImplementedError))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_fused_recurrent_layers_are_refused_with_what_to_take(kind):
    name = kind.__name__
    message = refused(kind(6, 6), floats(6) if "Cell" in name else floats(5, 6), first)
    assert f"layer ({name}) is a fused kernel" in message
    assert f"take opacus.layers.DP{name.removesuffix('Cell')}" in message


def test_bags_of_any_length_are_refused_by_name():
    def bags(layer, x):
        return layer(x.flatten(), 5 * torch.arange(len(x)))

    message = refused(nn.EmbeddingBag(6, 4), ids(5), bags, NotImplementedError)
    assert "layer (EmbeddingBag): torch.func cannot differentiate EmbeddingBag example by example (offsets" in message


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.parametrize("rows", [BATCH, 3])
def test_a_weight_that_is_computed_is_refused_by_name(norm, rows):
    message = refused(norm(nn.Linear(6, rows)))
    assert "layer.parametrizations.weight (ParametrizationList) gives the same for all examples" in message
    assert "freeze the layer, or take execution='loop'" in message


# The older functions are what is tested; torch.func goes example by example.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning", "ignore:.*weight_norm:FutureWarning")
def test_a_weight_that_a_hook_computes_is_refused_by_name():
    message = refused(nn.utils.weight_norm(nn.Linear(6, 3)), error=NotImplementedError)
    assert "layer.weight_g, layer.weight_v: used outside of the layer that owns it" in message
    assert refused(nn.utils.spectral_norm(nn.Linear(6, 3)), error=NotImplementedError).startswith("layer")


def test_a_batch_norm_that_learns_nothing_and_stands_still_is_not_refused(assert_as_loop):
    model = Apart(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(5).eval()), plain)
    assert_as_loop(model, loss, floats(5, 6), "book_keeping")


def test_random_numbers_in_a_layer_that_is_run_again_are_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return x * self.weight * torch.rand_like(x)

    assert "layer (Odd): torch.func cannot differentiate" in refused(Odd(), error=NotImplementedError)


@pytest.mark.parametrize("length", [BATCH, 5])
def test_a_layer_without_the_batch_first_is_refused_by_name(length):
    def time_first(layer, x):
        return layer(x.transpose(0, 1)).transpose(0, 1)

    message = refused(nn.Linear(6, 6), floats(length, 6), time_first)
    assert f"layer (Linear) gave a tensor of shape ({length}, 4, 6)" in message
    assert "batch of 4" in message
    assert "give the layer the batch first" in message


DROPPING = {
    "MultiheadAttention": (lambda: nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True), to_itself),
    "MultiheadAttention, its weights not needed": (
        lambda: nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True),
        partial(to_itself, need_weights=False),
    ),
    "MultiheadAttention, flattened": (
        lambda: nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True),
        lambda layer, x: to_itself(layer, x.unflatten(1, (3, 2)).flatten(0, 1)).unflatten(0, (len(x), 3)).flatten(1, 2),
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), plain),
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_inside_a_layer_is_autograd_s(name, flat):
    """With one seed all draw the same masks; where nothing is clipped, the sum is that of a backward pass."""
    make, after = DROPPING[name]
    torch.manual_seed(0)
    model, x = Apart(make(), after).double().train(), floats(6, 6).double()

    def sums(execution, max_grad_norm, seed=1):
        torch.manual_seed(seed)
        return flat(clipped_gradients(model, loss, x, max_grad_norm, execution)[0])

    torch.manual_seed(1)
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss(model, x).sum(), list(model.parameters()))])
    clipped = sums("per_sample", 0.5)
    for execution in EXECUTIONS:
        assert_as_exact(sums(execution, 1e6), wanted, wanted)
        assert_as_exact(sums(execution, 0.5), clipped, clipped)
        assert (sums(execution, 1e6, seed=2) - wanted).norm() > 0.01 * wanted.norm()
