"""The three graphs against autograd's engine and SGD, in float32 beside float64, and from a file."""

import copy
import functools
import io
import math
import zipfile

import peft
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from plpkg.autonomy.compile import ThreeGraphs, three_graphs
from plpkg.autonomy.nets import MobileNet, WordLSTM
from plpkg.backbones import random_backbone
from tests.autonomy.conftest import Net, same

from rounding import assert_as_exact

LR, STEPS = 0.1, 5


def draw(function, *arguments):
    return function(*arguments, generator=torch.Generator().manual_seed(0))


def next_word(logits, y):
    return cross_entropy(logits.flatten(0, 1), y.flatten())


def next_token(logits, ids):
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def words():
    ids = draw(torch.randint, 40, (3, 3))
    return WordLSTM(40, 8, (10, 9)), next_word, (ids[:, :-1], ids[:, 1:])


def digits():
    model = MobileNet(widths=(4, 6))
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):  # statistics as after training, not 0 and 1
            draw(layer.running_mean.normal_, 0, 0.5)
            draw(layer.running_var.uniform_, 0.5, 2)
    return model, cross_entropy, (draw(torch.randn, 5, 1, 8, 8), draw(torch.randint, 10, (5,)))


def tokens(adapters=False):
    model = random_backbone("llama", num_layers=1, hidden=16, intermediate=24, vocab=48, num_kv_heads=2,
                            options={"tie_word_embeddings": True})  # fmt: skip
    if adapters:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        model = peft.inject_adapter_in_model(config, model)
    ids = draw(torch.randint, 48, (2, 9))
    return model, next_token, (ids, ids)  # one tensor twice


CASES = {
    "LSTM, head": (words, "head."),
    "CNN, head": (digits, "head."),
    "CNN, all": (digits, ""),
    "Llama, LoRA": (lambda: tokens(True), "lora_"),
    "Llama, norms": (tokens, "norm"),
}


def learner(case):
    torch.manual_seed(0)
    make, part = CASES[case]
    model, loss, example = make()
    for name, p in model.named_parameters():
        p.requires_grad_(part in name)
    return model.eval(), loss, example


@functools.cache  # a graph takes a second to build
def compiled(case):
    learnt = learner(case)
    return *learnt, three_graphs(*learnt)


def eager(model, loss, example, dtype=torch.float32):
    """Logits, loss and gradients by autograd, and the parameters after some steps of torch's SGD."""
    twin = copy.deepcopy(model).to(dtype)
    x, y = example[0].to(dtype) if example[0].is_floating_point() else example[0], example[1]
    trained = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    optimizer, results = torch.optim.SGD(trained.values(), lr=LR), []
    for _ in range(STEPS):
        output = twin(x)
        logits = getattr(output, "logits", output)
        value = loss(logits, y)
        optimizer.zero_grad()
        value.backward()
        results = results or [[logits.detach()], [value.detach()], [p.grad.clone() for p in trained.values()]]
        optimizer.step()
    return [*results, [p.detach() for p in trained.values()]]


@pytest.mark.parametrize("case", CASES)
def test_the_graphs_are_autograd_and_sgd(case):
    model, loss, example, built = compiled(case)
    graphs = ThreeGraphs(built.programs, built.parameters)
    value, gradients = graphs.gradients(*example)
    found = [[graphs.forward(example[0])], [value], list(gradients.values())]
    for _ in range(STEPS):
        graphs.step(*example, LR)
    found.append(list(graphs.parameters.values()))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert list(graphs.parameters) == list(gradients) == names
    twins = (eager(model, loss, example, dtype) for dtype in (torch.float32, torch.float64))
    for ours, theirs, exact in zip(found, *twins, strict=True):
        assert [t.shape for t in ours] == [t.shape for t in theirs]
        assert_as_exact(ours, theirs, exact)


@pytest.fixture
def built():
    return compiled("CNN, head")


def test_one_step_is_the_three_graphs_in_turn(built):
    example, programs, first = built[2], built[3].programs, built[3].parameters
    graphs, other = ThreeGraphs(programs, first), ThreeGraphs(programs, first)
    value, gradients = graphs.gradients(*example)
    new = graphs.update(first, gradients, LR)
    assert other.step(*example, LR) == value.item()
    assert same(new, other.parameters)
    backwards = {name: gradients[name] for name in reversed(gradients)}
    assert same(graphs.update(first, backwards, LR), new)
    assert all(graphs.parameters[name] is value for name, value in first.items())
    assert graphs.step(*example, 0) == graphs.step(*example, 0) == value.item()
    for x, lr in ((example[0] * math.nan, LR), (example[0], 1e308)):
        with pytest.raises(FloatingPointError, match=r"a step with a loss of .* makes .* not finite"):
            other.step(x, example[1], lr)
    assert same(new, other.parameters)


def test_nothing_of_the_example_is_in_the_programs(built):
    model, loss, (x, y), graphs = built
    x, y, exact = 2 * x, (y + 1) % 10, copy.deepcopy(model).double()
    assert_as_exact(graphs.forward(x), model(x), exact(x.double()))
    assert_as_exact(graphs.gradients(x, y)[0], loss(model(x), y), loss(exact(x.double()), y))


def test_programs_from_files_go_on_where_these_are(built):
    model, _, example, (programs, first) = *built[:3], (built[3].programs, built[3].parameters)
    graphs, loaded = ThreeGraphs(programs, first), {}
    graphs.step(*example, LR)
    for name, program in programs.items():
        file = io.BytesIO()
        torch.export.save(program, file)
        loaded[name] = torch.export.load(file)
        with zipfile.ZipFile(file) as parts:
            content = b"".join(map(parts.read, parts.namelist()))
        assert (model.body[0].weight.detach().numpy().tobytes() in content) == (name != "update")
        for secret in (*example, *first.values(), *graphs.parameters.values()):
            assert secret.numpy().tobytes() not in content
    other = ThreeGraphs(loaded, graphs.parameters)
    assert [graphs.step(*example, LR) for _ in range(2)] == [other.step(*example, LR) for _ in range(2)]
    assert same(other.parameters, graphs.parameters)
    assert other.rows()[1:] == graphs.rows()[1:]  # a file has outputs of the forward graph that nothing uses


def test_what_is_frozen_is_not_differentiated(built):
    graphs = built[3]
    whole = compiled("CNN, all")[3]
    assert "convolution_backward" in str(whole.programs["loss"].graph)
    assert "convolution_backward" not in str(graphs.programs["loss"].graph)
    (forward, differentiated, update), more = graphs.rows(), whole.rows()[1]
    assert forward["operators"] < differentiated["operators"] < more["operators"]
    assert [row["graph"] for row in graphs.rows()] == ["forward", "loss", "update"]
    assert (forward["inputs"], forward["outputs"]) == (2 + 1, 1)
    assert (differentiated["inputs"], differentiated["outputs"]) == (2 + 2, 1 + 2)
    assert (update["inputs"], update["outputs"]) == (2 + 2 + 1, 2)
    count = len([node for node in graphs.programs["loss"].graph.nodes if node.op not in ("placeholder", "output")])
    assert differentiated["operators"] == count < differentiated["nodes"]
    assert f"loss of {count} operators" in repr(graphs)
    assert f"<td>{count}</td>" in graphs._repr_html_()


def test_what_was_not_compiled_is_refused(built):
    _, _, (x, y), graphs = built
    with pytest.raises(ValueError, match=r"x must be \(5, 1, 8, 8\) as compiled, got \(4, 1, 8, 8\)"):
        graphs.forward(x[:4])
    with pytest.raises(ValueError, match=r"y must be \(5,\) as compiled, got \(4,\)"):
        graphs.gradients(x, y[:4])
    with pytest.raises(ValueError, match=r"lr must be .* got -1"):
        graphs.step(x, y, -1)
    with pytest.raises(ValueError, match=r"head\.bias"):
        graphs.update(graphs.parameters, {"head.weight": graphs.parameters["head.weight"]}, LR)


def pair(trained="used", training=False):
    """Two layers, of which the first alone makes the logits."""
    model = Net(lambda net, x: net.used(x), used=nn.Linear(3, 2), other=nn.Linear(3, 2)).eval()
    model.other.train(training)
    for name, p in model.named_parameters():
        p.requires_grad_(trained in name)
    return model, (draw(torch.randn, 4, 3), draw(torch.randint, 2, (4,)))


def restless():
    """A loss that is another one each time."""
    times = iter(range(9))
    return lambda logits, y: cross_entropy(logits, y) * (1 + next(times))


@pytest.mark.parametrize(
    ("options", "loss", "message"),
    [
        (dict(training=True), cross_entropy, "'other' is in training mode"),
        (dict(trained="none"), cross_entropy, r"depends on what is trained, got 0\.\d"),
        (dict(trained="other"), cross_entropy, "depends on what is trained"),
        (dict(trained=""), cross_entropy, "does not depend on 'other.weight'"),
        (dict(), lambda logits, y: logits.sum(1), "one number .* got tensor"),
        (dict(), restless(), "gradient of 'used.weight' is .* from autograd's"),
    ],
)
def test_what_cannot_be_compiled_is_refused(options, loss, message):
    model, example = pair(**options)
    with pytest.raises(ValueError, match=message):
        three_graphs(model, loss, example)


def test_the_model_stays_as_it_is_and_gradients_that_are_off_are_on_here():
    model, (x, y) = pair()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        graphs = three_graphs(model, cross_entropy, (x, y))
    graphs.step(x, y, 0.0)
    assert same(model.state_dict(), before)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]
    assert all(p.grad is None for p in model.parameters())
    wrong = torch.softmax(linear(x, model.used.weight, model.used.bias), 1) - nn.functional.one_hot(y, 2)  # (4, 2)
    torch.testing.assert_close(graphs.gradients(x, y)[1]["used.weight"], (wrong.T @ x / 4).detach())
