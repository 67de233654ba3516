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
from plpkg.clipping.execution import EXECUTIONS
from plpkg.clipping.layers import RULES, any_layer, embedding_scale, rule_for, scale, scale_offset

from rounding import assert_as_exact

BATCH = 4


class Net(nn.Module):
    """Layers and parameters by name, and what is done with them."""

    def __init__(self, body, **parts):
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **options):
        return self.body(self, *args, **options)


def numbers(*shape):
    return nn.Parameter(torch.randn(*shape))


def bare():
    """Parameters of its own beside its children's, as a vision transformer's embeddings."""
    parts = dict(first=numbers(1, 1, 6), places=numbers(1, 6, 6), inner=nn.Linear(6, 6))
    return Net(lambda net, x: torch.cat([net.first.expand(len(x), -1, -1), net.inner(x)], 1) + net.places, **parts)


def lists():
    """Parameters in lists and dictionaries, as PEFT's IA3 and VeRA have them, around a layer that learns, too."""
    parts = dict(scales=nn.ParameterDict({"in": numbers(6), "out": numbers(6)}), shifts=nn.ParameterList([numbers(6)]))
    nested = nn.ModuleDict({"more": nn.ParameterList([numbers(6)])})

    def body(net, x):
        inner = net.inner(x * net.scales["in"] + net.nested["more"][0])
        return inner * net.scales["out"] + net.shifts[0]

    return Net(body, inner=nn.Linear(6, 6), nested=nested, **parts)


def several():
    """Gives a dictionary and a tuple."""

    def body(net, x, *, shift=0.0):
        return {"a": x @ net.weight + shift, "b": (x * net.weight.diagonal(), None)}

    return Net(body, weight=numbers(6, 6))


def in_place(layer, x):
    return layer(x).relu_()


def shifted():
    """Its parameter has no effect yet: what it gives does not tell whose the second argument is."""
    return Net(lambda net, x, shift: x + net.weight * shift, weight=nn.Parameter(torch.zeros(6)))


def random(draw):
    """Draws random numbers, and is run again."""
    return Net(lambda net, x: x * net.weight * draw(x), weight=numbers(6))


class OldFunction(torch.autograd.Function):
    """As extensions write them: torch.func does not know it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight.sin()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight.sin(), (gradient * x * weight.cos()).sum_to_size(weight.shape)


class Places(nn.Embedding):
    """Positions from an offset on, as several families of models have them."""

    def forward(self, ids, offset=0):
        return super().forward((ids + offset) % len(self.weight))


def other_rows(which):
    """A table that looks elsewhere than at its ids: with those of :func:`embedding_scale` it looks at them."""

    class Elsewhere(nn.Embedding):
        def forward(self, ids):
            return super().forward(which(ids, len(self.weight)))

    return lambda: Elsewhere(9, 4)


class SometimesNorm(LlamaRMSNorm):
    """Longer texts than it is asked with get something else."""

    def forward(self, x):
        return super().forward(x) if x.shape[1] < 5 else super().forward(x).tanh()


class AddedNorm(LlamaRMSNorm):
    def forward(self, x, residual=0.0):
        return super().forward(x) + residual


class ChannelsNorm(nn.Module):
    """Of images the channels are second, of texts last."""

    def __init__(self):
        super().__init__()
        self.weight = numbers(6)

    def forward(self, x):
        dim, weight = (1, self.weight[:, None, None]) if x.ndim == 4 else (-1, self.weight)
        return x / x.norm(dim=dim, keepdim=True) * weight


def by_an_old_function():
    return Net(lambda net, x: OldFunction.apply(x, net.weight), weight=numbers(6))


def counted():
    """What it does depends on numbers, as an expert's does on how many tokens come to it."""
    return Net(lambda net, x: torch.cat([x[x > 0] * net.weight[0], x[x <= 0]]).sum() * x, weight=numbers(2))


def by_rows(layer, x):
    """It reads the examples, and gives rows: as a router does."""
    return layer(x).unflatten(0, (len(x), -1))


def router():
    return Net(lambda net, x: x.flatten(0, 1) * net.weight, weight=numbers(6))


def apart(layer, after):
    return Net(lambda net, x: after(net.layer, x), layer=layer)


def plain(layer, x):
    return layer(x)


def seen(layer, x):
    out = layer(x, shift=1.0)
    return out["a"] + out["b"][0].sin()


def first(layer, x):
    return layer(x)[0]


def to_itself(layer, x, **options):
    return layer(x, x, x, **options)[0]


def to_others(layer, x, **options):
    """Three keys and values for each example, made of what it reads."""
    return layer(x, x[:, :3].cos(), x[:, :3].sin(), **options)[0]


def flattened(layer, x, call=plain):
    """As OPT does it: an example's rows one after the other."""
    return call(layer, x.flatten(0, 1)).unflatten(0, (len(x), -1))


def unrolled(cell, x):
    """In its first call a cell has no state to read."""
    state = cell(x[:, 0])
    for step in x[:, 1:].unbind(1):
        state = cell(step, state)
    return state[0] if isinstance(state, tuple) else state


def graph():
    """A sparse buffer beside a layer."""
    net = Net(lambda net, x: torch.stack([net.edges @ each for each in net.inner(x)]), inner=nn.Linear(6, 6))
    net.register_buffer("edges", torch.eye(5).roll(1, 0).to_sparse())
    return net


def times(ids, layer, x):
    """What the layer gives for numbers that are nobody's."""
    return x * layer(ids).sin()


attention = partial(nn.MultiheadAttention, 6, 2, batch_first=True)
encoder = partial(nn.TransformerEncoderLayer, 6, 2, 8, batch_first=True)
lstm = partial(DPLSTM, 6, 4, batch_first=True)
private_attention = partial(DPMultiheadAttention, 6, 2, batch_first=True)
without_weights = partial(to_itself, need_weights=False)


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
    **{
        f"{norm.__module__}, {rows} rows": (lambda norm=norm, rows=rows: norm(nn.Linear(6, rows)), floats(5, 6), plain)
        for norm in (nn.utils.parametrizations.weight_norm, nn.utils.weight_norm)
        for rows in (BATCH, 3, 1)
    },
    "a list of parameters": (lists, floats(5, 6), plain),
    "ConvTranspose2d, changed in place": (lambda: nn.ConvTranspose2d(4, 6, 2, 2), floats(4, 5, 7), in_place),
    "InstanceNorm2d, changed in place": (lambda: nn.InstanceNorm2d(4, affine=True), floats(4, 5, 7), in_place),
    "Conv1D": (lambda: Conv1D(3, 6), floats(5, 6), plain),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), floats(4, 9, 7), plain),
    "Conv2d, groups": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2, dilation=(1, 2)), floats(4, 9, 7), plain),
    "Conv2d, same": (lambda: nn.Conv2d(4, 6, (3, 5), padding="same"), floats(4, 5, 7), plain),
    "Conv2d, reflected": (lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), floats(4, 5, 7), plain),
    "Conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), floats(4, 5, 7), plain),
    "Conv2d, ReLU in place": (lambda: nn.Conv2d(4, 6, 3), floats(4, 5, 7), lambda layer, x: layer(x).relu_()),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=2, stride=2, dilation=2), floats(4, 11), plain),
    "Conv1d, groups": (lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular", groups=2), floats(4, 9), plain),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), floats(2, 3, 4, 3), plain),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 3, 3, stride=2), floats(4, 7), plain),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 3, 3), floats(4, 5, 4), plain),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), floats(2, 3, 2, 3), plain),
    "Embedding": (lambda: nn.Embedding(6, 4), ids(9), plain),
    "Embedding, a category": (lambda: nn.Embedding(6, 4), ids(), plain),
    "Embedding, 3-D": (lambda: nn.Embedding(6, 4), ids(3, 2), plain),
    "Embedding, padding": (lambda: nn.Embedding(6, 4, padding_idx=2), ids(9), plain),
    "Embedding, scaled": (lambda: Gemma2TextScaledWordEmbedding(6, 4, 2, embed_scale=3.0), ids(9), plain),
    "Embedding, an offset": (lambda: Places(6, 4), ids(9), lambda layer, x: layer(x, offset=2)),
    "Embedding, hashed ids": (other_rows(lambda ids, size: ids % size), 5 * ids(7), plain),
    "Embedding, clamped ids": (other_rows(lambda ids, size: ids.clamp(1, 3)), ids(7), plain),
    "Embedding, places": (other_rows(lambda ids, size: torch.arange(ids.shape[1]).expand_as(ids)), ids(7), plain),
    "Embedding, negative ids": (other_rows(lambda ids, size: ids.abs()), -ids(7), plain),
    "a norm that is another one on longer texts": (lambda: SometimesNorm(6), floats(7, 6), plain),
    "Embedding, no tokens": (lambda: nn.Embedding(6, 4), ids(0), plain),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(6, 4), ids(5), plain),
    "EmbeddingBag, sum, padding": (lambda: nn.EmbeddingBag(6, 4, mode="sum", padding_idx=2), ids(5), plain),
    "LayerNorm": (lambda: nn.LayerNorm(6), floats(5, 6), plain),
    "LayerNorm, 2-D input": (lambda: nn.LayerNorm(6), floats(6), plain),
    "LayerNorm, two dimensions": (lambda: nn.LayerNorm((5, 6), bias=False), floats(3, 5, 6), plain),
    "RMSNorm": (lambda: nn.RMSNorm(6, eps=1e-5), floats(5, 6), plain),
    "Llama's RMSNorm": (lambda: LlamaRMSNorm(6), floats(5, 6), plain),
    "Gemma's RMSNorm": (lambda: Gemma2RMSNorm(6), floats(5, 6), plain),
    "T5's norm": (lambda: T5LayerNorm(6), floats(5, 6), plain),
    "a norm and what is added": (lambda: AddedNorm(6), floats(5, 6), lambda layer, x: layer(x, x.cos())),
    "a norm of channels": (ChannelsNorm, floats(6, 3, 6), plain),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), floats(4, 5, 3), plain),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), floats(4, 5), plain),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), floats(4, 5, 3), plain),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4, affine=True), floats(4, 3, 2, 3), plain),
    "SequenceBias": (lambda: SequenceBias(6, batch_first=True), floats(5, 6), plain),
    "PReLU, one weight": (nn.PReLU, floats(5, 6), plain),
    "PReLU": (lambda: nn.PReLU(5), floats(5, 6), plain),
    "Bilinear": (lambda: nn.Bilinear(6, 6, 3), floats(6), lambda layer, x: layer(x, x.flip(1))),
    "bare parameters": (bare, floats(5, 6), plain),
    "several outputs": (several, floats(5, 6), seen),
    "an old autograd function": (by_an_old_function, floats(5, 6), plain),
    "rows of what has none": (router, floats(5, 6), by_rows),
    **{
        kind.__name__: (partial(kind, 6, 6), floats(6), at)
        for kind, at in ((nn.LSTMCell, first), (nn.GRUCell, plain), (nn.RNNCell, plain))
    },
    "MultiheadAttention": (attention, floats(5, 6), to_itself),
    "MultiheadAttention, as many positions as examples": (attention, floats(BATCH, 6), to_itself),
    "MultiheadAttention, its weights not needed": (attention, floats(5, 6), without_weights),
    "MultiheadAttention to others": (attention, floats(5, 6), to_others),
    "MultiheadAttention to others, no weights": (attention, floats(5, 6), partial(to_others, need_weights=False)),
    "MultiheadAttention, a key for all": (partial(attention, add_bias_kv=True), floats(5, 6), to_itself),
    "DPMultiheadAttention": (private_attention, floats(5, 6), to_itself),
    "DPMultiheadAttention to others": (private_attention, floats(5, 6), to_others),
    "DPLSTM": (lstm, floats(5, 6), first),
    "DPLSTM, as many steps as examples": (lstm, floats(BATCH, 6), first),
    "DPLSTM, two layers, both ways": (partial(lstm, num_layers=2, bidirectional=True), floats(5, 6), first),
    "DPGRU": (lambda: DPGRU(6, 4, batch_first=True), floats(5, 6), first),
    "DPRNN": (lambda: DPRNN(6, 4, batch_first=True), floats(5, 6), first),
    "TransformerEncoderLayer": (partial(encoder, dropout=0.0), floats(5, 6), plain),
    "keyword argument": (lambda: nn.Linear(6, 3), floats(5, 6), lambda layer, x: layer(input=x)),
    "the same for all": (lambda: nn.Linear(6, 6), floats(5, 6), lambda layer, x: x * layer(torch.ones(1, 5, 6).to(x))),
    "positions for all": (lambda: nn.Embedding(5, 6), floats(5, 6), partial(times, torch.arange(5)[None])),
    "positions without a batch": (lambda: nn.Embedding(5, 6), floats(5, 6), partial(times, torch.arange(5))),
    "one position without a batch": (lambda: nn.Embedding(8, 6), floats(1, 6), partial(times, torch.arange(1))),
    "as many positions as examples": (
        lambda: nn.Embedding(BATCH, 6),
        floats(BATCH, 6),
        partial(times, torch.arange(BATCH)),
    ),
    "an argument as long as the batch, and for all": (
        shifted,
        floats(BATCH, 6),
        lambda layer, x: layer(x, torch.linspace(1, 2, BATCH)[:, None].to(x)),
    ),
    "MultiheadAttention, a mask as long as the batch": (
        attention,
        floats(BATCH, 6),
        partial(to_itself, attn_mask=torch.ones(BATCH, BATCH).triu(1).bool()),
    ),
    "LSTMCell, unrolled": (lambda: nn.LSTMCell(6, 4), floats(5, 6), unrolled),
    "GRUCell, unrolled": (lambda: nn.GRUCell(6, 4), floats(5, 6), unrolled),
    "a sparse buffer": (graph, floats(5, 6), plain),
    "flattened": (lambda: nn.Linear(6, 3), floats(5, 6), flattened),
    "flattened, LayerNorm": (lambda: nn.LayerNorm(6), floats(5, 6), flattened),
    "flattened, Llama's RMSNorm": (lambda: LlamaRMSNorm(6), floats(5, 6), flattened),
    "flattened, Conv2d": (lambda: nn.Conv2d(4, 6, 3), floats(5, 4, 6, 5), flattened),
    "flattened, GroupNorm": (lambda: nn.GroupNorm(2, 4), floats(5, 4, 3), flattened),
    "flattened, PReLU": (lambda: nn.PReLU(6), floats(5, 6), flattened),
    "flattened, MultiheadAttention": (attention, floats(2, 5, 6), partial(flattened, call=to_itself)),
}


def loss(model, x):
    out = model(x)
    return (out.sin() * torch.linspace(0.5, 2, out[0].numel(), dtype=out.dtype).reshape(out[0].shape)).flatten(1).sum(1)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch.func goes example by example
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")  # the older function is tested, too
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_example_at_a_time(name, assert_as_loop):
    make, x, after = CASES[name]
    torch.manual_seed(0)
    model = apart(make(), after)
    assert_as_loop(model, loss, x, *EXECUTIONS, max_grad_norm=1.0)
    model.double()
    x = x.double() if x.is_floating_point() else x
    mixed = name in ("Llama's RMSNorm", "Gemma's RMSNorm", "T5's norm", "a norm and what is added")
    for clipping in ("flat", "automatic", "per_layer"):
        assert_as_loop(model, loss, x, *EXECUTIONS, max_grad_norm=1.0, clipping=clipping, mixed=mixed)


STOCK = (
    *(nn.Linear(4, 3), Conv1D(3, 4), nn.Embedding(9, 4), nn.Conv1d(4, 3, 2), nn.Conv2d(4, 3, 2)),
    *(nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4)),
)


def test_each_rule_is_taken_for_its_layer():
    """Without its rule a layer would be taken apart slowly, with the same numbers."""
    assert {type(layer) for layer in STOCK} == set(RULES)
    assert all(rule_for(layer) is RULES[type(layer)] for layer in STOCK)


def test_a_scaled_embedding_is_recognised_by_what_it_does():
    assert embedding_scale(Gemma2TextScaledWordEmbedding(9, 4, 0, embed_scale=3.0)) == 3


@pytest.mark.parametrize(("layer", "offset"), [(LlamaRMSNorm(6), 0), (T5LayerNorm(6), 0), (Gemma2RMSNorm(6), 1)])
def test_norms_of_model_families_are_recognised_by_what_they_do(layer, offset):
    assert scale_offset(layer) == offset
    assert rule_for(layer).func is scale


@pytest.mark.parametrize("layer", [nn.Embedding(9, 4), nn.Linear(6, 3), LlamaRMSNorm(6)])
def test_what_only_looks_like_a_known_layer_is_taken_apart_by_torch_func(layer):
    class SquaredNorm(type(layer)):
        def forward(self, x):
            return super().forward(x).square()

    layer.__class__ = SquaredNorm
    assert rule_for(layer) is any_layer


def bags(layer, x):
    return layer(x.flatten(), 5 * torch.arange(len(x)))


def time_first(layer, x):
    return layer(x.transpose(0, 1)).transpose(0, 1)


EITHER = ValueError, NotImplementedError
COMPUTED = r"computes its weight anew whenever it is run.*; execution='loop' takes it, one example at a time"
REFUSED = [
    (lambda: nn.BatchNorm1d(5), floats(5, 6), plain, ValueError,
     r"layer \(BatchNorm1d\) normalises each example by the others"),
    (lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True), floats(5, 6), plain, ValueError,
     "running statistics"),
    (lambda: nn.Embedding(6, 4, max_norm=1.0), ids(9), plain, ValueError, r"max_norm=1\.0"),
    (lambda: nn.Embedding(6, 4, scale_grad_by_freq=True), ids(9), plain, ValueError, "scale_grad_by_freq"),
    (lambda: nn.Embedding(6, 4, sparse=True), ids(9), plain, ValueError, "sparse"),
    (lambda: nn.EmbeddingBag(6, 4), ids(5), bags, NotImplementedError,
     r"layer \(EmbeddingBag\): EmbeddingBag cannot be differentiated example by example \(offsets"),
    (partial(random, lambda x: torch.randint(2, x.shape)), floats(5, 6), plain, NotImplementedError,
     r"layer \(Net\): Net cannot be differentiated example by example \(it draws random numbers\); execution='loop'"),
    (lambda: nn.utils.spectral_norm(nn.Linear(6, 3)), floats(5, 6), plain, ValueError, COMPUTED),  # the older function
    *(
        (partial(kind, 6, 6), floats(5, 6), first, ValueError,
         rf"layer \({kind.__name__}\) is a fused kernel.*take opacus.layers.DP{kind.__name__}")
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    ),
    *(
        (lambda rows=rows: nn.utils.parametrizations.spectral_norm(nn.Linear(6, rows)), floats(5, 6), plain, ValueError,
         COMPUTED)
        for rows in (BATCH, 3, 1)
    ),
    *(
        row
        for length in (BATCH, 5)
        for row in (
            (lambda: nn.MultiheadAttention(6, 2), floats(length, 6), to_itself, ValueError,
             r"layer \(MultiheadAttention\) has batch_first=False; the first dimension must be the batch"),
            (lambda: DPMultiheadAttention(6, 2), floats(length, 6), to_itself, EITHER, "layer"),
            (lambda: SequenceBias(6), floats(length, 6), plain, EITHER, "layer"),
            (lambda: nn.Linear(6, 6), floats(length, 6), time_first, ValueError,
             rf"layer \(Linear\) gave a tensor of shape \({length}, 4, 6\).*batch of 4.*the layer the batch first"),
        )
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning", "ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(("make", "x", "after", "error", "message"), REFUSED)
def test_what_cannot_be_told_apart_is_refused_by_name(make, x, after, error, message):
    with pytest.raises(error, match=message):
        clipped_gradients(apart(make(), after), loss, x, 1.0)


def test_a_batch_norm_that_learns_nothing_and_stands_still_is_not_refused(assert_as_loop):
    model = apart(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(5).eval()), plain)
    assert_as_loop(model, loss, floats(5, 6), "book_keeping")


DRAWS = {
    "noise": torch.rand_like,
    "drop path": lambda x: (torch.rand(len(x), 1, 6) > 0.4) / 0.6,
    "drop path, in place": lambda x: x.new_empty(len(x), 1, 6).bernoulli_(0.6).div_(0.6),
    "a layer's dice for all": lambda x: torch.rand([]).to(x),
    "noise after dropout": lambda x: torch.randn_like(nn.functional.dropout(x, 0.5)) * nn.functional.dropout(x, 0.2),
}


@pytest.mark.parametrize("layer", [partial(attention, dropout=0.1), encoder])
def test_dropout_in_attention_that_torch_does_not_show_is_for_the_loop(layer):
    model = apart(layer(), to_itself if layer is not encoder else plain).train()
    with pytest.raises(NotImplementedError, match=r"it draws random numbers.*execution='loop' takes it"):
        clipped_gradients(model, loss, floats(6, 6), 1.0)
    clipped_gradients(model, loss, floats(6, 6), 1.0, "loop")


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_dropout_inside_a_layer_is_autograd_s(draw, flat):
    """With one seed all draw the same masks; where nothing is clipped, the sum is that of a backward pass."""
    torch.manual_seed(0)
    model, x = apart(random(draw), plain).double().train(), floats(6, 6).double()

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
