"""The memory timeline: published figures, fake against real, PyTorch's own tracker, and what it must not change."""

import contextlib
import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from plpkg.memory import CATEGORIES, MIB, MemoryTimeline


def two_layers(batch):
    """The synthetic network of the Opacus article on ghost clipping: 5120 → 2560 → 1280, no bias."""
    model = torch.nn.Sequential(torch.nn.Linear(5120, 2560, bias=False), torch.nn.Linear(2560, 1280, bias=False))
    inputs, targets = torch.randn(batch, 5120), torch.randn(batch, 1280)
    return model, (inputs, targets), lambda x, y: torch.nn.functional.mse_loss(model(x), y)


def transformer(batch, attention="eager"):
    dims = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(**dims, intermediate_size=96, vocab_size=50, attn_implementation=attention)
    model = LlamaForCausalLM(config)
    ids = torch.ones(batch, 12, dtype=torch.long)
    return model, (ids,), lambda ids: model(ids, use_cache=False).logits.square().mean()


def step(build, batch, fake, optimizer_class=torch.optim.SGD):
    """One training step, its phases recorded."""
    with FakeTensorMode() if fake else contextlib.nullcontext():
        model, tensors, compute_loss = build(batch)
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        with MemoryTimeline() as timeline:
            timeline.track(model, optimizer, *tensors)
            with timeline.phase("forward"):
                loss = compute_loss(*tensors)
            with timeline.phase("backward"):
                loss.backward()
            with timeline.phase("step"):
                optimizer.step()
            with timeline.phase("zero_grad"):
                optimizer.zero_grad()
    return timeline


@pytest.mark.parametrize(("batch", "forward", "backward"), [(32, 0.47, 62.50), (2**17, 1920.0, 1932.5)])
def test_published_sgd_figures(batch, forward, backward):
    with FakeTensorMode():
        model, (x, y), _ = two_layers(batch)
        with MemoryTimeline() as timeline:
            timeline.track(model, x, y)
            with timeline.phase("forward"):
                output = model(x)  # its name holds it to the end
            loss = torch.nn.functional.mse_loss(output, y)
            with timeline.phase("backward"):
                loss.backward()
    assert [phase.increase_bytes / MIB for phase in timeline.phases] == pytest.approx([forward, backward], abs=0.005)
    assert timeline.to_frame()["parameters"].max() == 62.5


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_fake_and_real_agree_to_the_byte(optimizer_class, attention):
    with sdpa_kernel(SDPBackend.MATH):  # fused attention agrees once its kernel is named
        real, fake = (step(lambda n: transformer(n, attention), 3, fake, optimizer_class) for fake in (False, True))
    assert real.phases == fake.phases
    assert real.peak_bytes == fake.peak_bytes


def test_agrees_with_pytorchs_own_tracker():
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model, (x, y), compute_loss = two_layers(2**10)
        tracker = MemTracker()
        tracker.track_external(model, x, y)
        with tracker:
            compute_loss(x, y).backward()
        theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        model, (x, y), compute_loss = two_layers(2**10)
        with MemoryTimeline() as timeline:
            timeline.track(model, x, y)
            compute_loss(x, y).backward()
    storages = 2 + 2 + 2 + 4  # weights, gradients, inputs and targets; at the peak the activations and theirs
    assert timeline.peak_bytes == pytest.approx(theirs, abs=512 * storages)  # theirs rounds each up to 512 bytes


def test_a_model_of_a_hundred_billion_parameters():
    with FakeTensorMode(), MemoryTimeline() as timeline:
        layers = torch.nn.ModuleList(torch.nn.Linear(20_000, 20_000, bias=False) for _ in range(250))
        layers.requires_grad_(False)
        layers[-1].weight.requires_grad_(True)
        timeline.track(layers)
        with timeline.phase("step"):
            x = torch.randn(1, 20_000)
            for layer in layers:
                x = layer(x)
            x.sum().backward()
    assert timeline.to_frame()["parameters"].max() * MIB == 4 * 10**11
    assert timeline.to_frame()["gradients"].max() * MIB == 4 * 20_000**2


def test_categories_of_a_training_step():
    timeline = step(transformer, 3, fake=False, optimizer_class=torch.optim.Adam)
    frame = timeline.to_frame()  # ends with the block, though everything has been released since
    parameters = [p.nbytes for p in transformer(3)[0].parameters()]
    assert frame["gradients"].max() * MIB == sum(parameters)
    assert frame["optimizer"].iloc[-1] * MIB == sum(2 * nbytes + 4 for nbytes in parameters)  # and a step's number
    assert frame["gradients"].iloc[-1] == 0  # zero_grad frees them
    by_phase = frame.groupby("phase", sort=False)["activations"]
    assert by_phase.max()["forward"] > 0
    assert by_phase.last()["backward"] == 0  # what was saved is released
    assert frame["total"].max() * MIB == pytest.approx(timeline.peak_bytes)


def test_views_are_free_storages_die_and_resized_ones_are_recounted():
    with MemoryTimeline() as timeline:
        x = torch.ones(1024)
        y = x.view(32, 32).t()[1:]
        assert timeline.peak_bytes == 4096
        del x
        gc.collect()
        with timeline.phase("after"):
            pass
        assert timeline.phases[-1].start_bytes == 4096  # the view holds it
        del y
        gc.collect()
        with timeline.phase("gone"):
            torch.ones(8)
    assert timeline.phases[-1].start_bytes == 0
    assert timeline.phases[-1].increase_bytes == 32
    with MemoryTimeline() as timeline:
        x = torch.ones(4)
        x.resize_(1000)
        assert timeline.peak_bytes == 4000


def test_sparse_tensors_count_their_indices_and_values():
    with MemoryTimeline() as timeline:
        embedding = torch.nn.Embedding(1000, 4, sparse=True)
        timeline.track(embedding)
        with timeline.phase("backward"):
            embedding(torch.tensor([1, 2, 3])).sum().backward()
        gradient = embedding.weight.grad
    expected = gradient._indices().untyped_storage().nbytes() + gradient._values().untyped_storage().nbytes()
    assert timeline.to_frame()["gradients"].iloc[-1] * MIB == expected


def test_labels_and_nested_phases():
    with MemoryTimeline() as timeline, timeline.phase("outer"):
        cache = torch.zeros(256)
        with timeline.phase("inner"):
            timeline.label([cache], "KV cache")
    assert [phase.name for phase in timeline.phases] == ["inner", "outer"]
    assert timeline.to_frame()["KV cache"].iloc[-1] * MIB == 1024
    assert timeline.to_frame()["temporaries"].iloc[-1] == 0


def test_watching_changes_no_gradient_nor_second_derivative_and_leaves_no_hook():
    torch.manual_seed(0)
    model, tensors, compute_loss = transformer(2)
    compute_loss(*tensors).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with MemoryTimeline() as timeline:
        timeline.track(model)
        compute_loss(*tensors).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
    events = len(timeline.to_frame())
    compute_loss(*tensors).backward()
    assert timeline.to_frame()["gradients"].iloc[-1] == timeline.to_frame()["gradients"].iloc[events - 1]
    x = torch.tensor([2.0], requires_grad=True)
    with MemoryTimeline():
        (first,) = torch.autograd.grad(x**3, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
    assert second.item() == 12.0


def test_what_it_shows():
    timeline = step(two_layers, 32, fake=True)
    assert repr(timeline).startswith("MemoryTimeline: peak ")
    assert "backward +62." in repr(timeline)
    assert [row["phase"] for row in timeline.rows()] == ["forward", "backward", "step", "zero_grad"]
    assert "<td>backward</td>" in timeline._repr_html_()


def test_bad_input_is_named():
    timeline = MemoryTimeline()
    with pytest.raises(TypeError, match="a module, an optimizer or a tensor is wanted, got list"):
        timeline.track([])
    with pytest.raises(ValueError, match=f"category must be one of '{CATEGORIES[0]}'.*, got 'cash'"):
        timeline.label([], "cash")
    with timeline:
        pass
    with pytest.raises(RuntimeError, match="has been used"), timeline:
        pass


def test_a_gradient_that_a_hook_has_taken_is_not_labelled():
    weight = torch.nn.Parameter(torch.ones(4))
    weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with MemoryTimeline() as timeline:
        timeline.track(torch.nn.ParameterList([weight]))
        with timeline.phase("backward"):
            weight.sum().backward()
    assert timeline.to_frame()["gradients"].max() == 0.0
