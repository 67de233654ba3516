"""The memory of a private training step, tensor by tensor: the data flow of Opacus of 2024, emulated.

:func:`emulate` walks through one step of a network of linear layers without bias or nonlinearity and holds what
Opacus 1.5.2 (August 2024) held, under names. Nothing of its code is used: a matrix product is a matrix product, and
what is kept for how long follows from the execution, from autograd, and from the design decisions listed in
:class:`Choices`. Each phase's increase is counted twice, by the names here and by :class:`plpkg.memory.MemoryTimeline`,
and the two must agree to the byte. :func:`measure` runs any other step the same way, given a function that takes
the timeline: the installed Opacus (:func:`plpkg.clipping.memory.published.opacus_step`), or another engine.

Source: the Opacus article (PyTorch blog, 2024-08-20), whose tables :mod:`plpkg.clipping.memory.published` puts
beside these.

Left out: what kernels allocate inside themselves and what allocators round up. The mean squared error is taken in
steps: PyTorch's fused one leaves a tensor of the output's size behind the scalar on real tensors, none on fake ones.
The article does not name its loss: every figure fits the mean squared error, while cross-entropy would need 1292.5 MiB
where the article prints 1932.5.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plpkg.memory import MIB, MemoryTimeline
from plpkg.results import Tabular
from plpkg.validation import flag, one_of, whole_number

EXECUTIONS = ("sgd", "hooks", "ghost")
PHASES = ("model", "forward", "loss", "first backward", "clip factors", "second backward", "step")
WIDTHS = (5120, 2560, 1280)


@dataclass(frozen=True)
class Choices:
    """Where an implementation holds more than the execution needs. The defaults are those of Opacus 1.5.2.

    Attributes
    ----------
    copy_backprops
        The output gradients of a mean loss are multiplied by the batch size into a new tensor. Without: the
        small results are scaled in place.
    double_buffer
        ``hooks`` copies each per-sample gradient into a buffer of zeros of the same size. Without: it is kept.
    noise_buffer
        A tensor of zeros is made, and not used, while the noise is drawn.
    late_first_hook
        The first layer's hook runs when its weight gradient exists already. Without: before (full backward hooks).
    deepcopy_grad
        ``ghost`` keeps a copy of the clipped gradient beside ``.grad``. Without: the tensor itself.
    """

    copy_backprops: bool = True
    double_buffer: bool = True
    noise_buffer: bool = True
    late_first_hook: bool = True
    deepcopy_grad: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            flag(name, value)


OPACUS_2024 = Choices()


@dataclass(frozen=True)
class StepMemory(Tabular):
    """How far memory rises in each phase of a training step, and which tensors make the difference.

    Attributes
    ----------
    parts_bytes
        For each phase: at its highest point, the bytes of each tensor that was not there when the phase began;
        negative for one that has gone since. Their sum is the increase.
    """

    execution: str
    batch: int
    widths: tuple[int, ...]
    parts_bytes: dict[str, dict[str, int]]

    def increase_bytes(self, phase: str) -> int:
        """The peak of a phase above its start. Raises ``ValueError`` for a phase that the step does not have."""
        return sum(self.parts_bytes[one_of("phase", phase, tuple(self.parts_bytes))].values())

    def rows(self) -> list[dict]:
        return [{"phase": phase, "increase_mib": self.increase_bytes(phase) / MIB} for phase in self.parts_bytes]

    def __repr__(self) -> str:
        figures = ", ".join(f"{row['phase']} +{row['increase_mib']:.2f}" for row in self.rows())
        return f"{self.execution}, batch {self.batch}, {' → '.join(map(str, self.widths))}: {figures} MiB"


class _Held(dict):
    """The tensors of a step by name. Knows which were alive when the most bytes were."""

    def __init__(self, timeline: MemoryTimeline) -> None:
        super().__init__()
        self._timeline = timeline
        self._peak: dict[str, int] = {}
        self.parts_bytes: dict[str, dict[str, int]] = {}

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        if name in self:
            raise KeyError(f"{name!r} is held already: old and new would be alive together, under one name")
        super().__setitem__(name, tensor)
        sizes = self._sizes()
        if sum(sizes.values()) > sum(self._peak.values()):
            self._peak = sizes

    def drop(self, *names: str) -> None:
        for name in names:
            del self[name]

    def rename(self, old: str, new: str) -> None:
        self[new] = self.pop(old)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._sizes()
        self._peak = start
        with self._timeline.phase(name):
            yield
        change = {key: self._peak.get(key, 0) - start.get(key, 0) for key in {**self._peak, **start}}
        parts = {key: size for key, size in change.items() if size}
        counted = self._timeline.phases[-1].increase_bytes
        if sum(parts.values()) != counted:
            raise AssertionError(f"{name}: the named tensors make {sum(parts.values())} bytes, counted {counted}")
        self.parts_bytes[name] = parts

    def _sizes(self) -> dict[str, int]:
        return {name: tensor.untyped_storage().nbytes() for name, tensor in self.items()}


def emulate(
    execution: str,
    batch: int,
    widths: tuple[int, ...] = WIDTHS,
    choices: Choices = OPACUS_2024,
) -> StepMemory:
    """The memory of one training step in the data flow of Opacus of 2024, or with other choices, on fake tensors.

    Parameters
    ----------
    execution
        ``"sgd"``, ``"hooks"`` (per-sample gradients; the article's "vanilla") or ``"ghost"``.
    batch
        Examples in the batch.
    widths
        Input, hidden and output widths: one linear layer between each two, float32, no bias, no nonlinearity.

    Raises
    ------
    ValueError
        An unknown execution, a batch or width below 1, fewer than two widths.
    """
    one_of("execution", execution, EXECUTIONS)
    batch = whole_number("batch", batch, 1)
    widths = checked_widths(widths)
    steps = []
    measure(lambda timeline: steps.append(_step(timeline, execution, batch, widths, choices)))
    return StepMemory(execution, batch, widths, steps[0].parts_bytes)


def checked_widths(widths: Iterable[int]) -> tuple[int, ...]:
    """The widths of a network with at least one layer. Raises ``ValueError`` otherwise."""
    given = widths if isinstance(widths, Iterable) else [widths]
    widths = tuple(whole_number("widths", width, 1) for width in given)
    if len(widths) < 2:
        raise ValueError(f"widths must have at least an input and an output, got {widths}")
    return widths


@torch.no_grad()
def _step(timeline, execution, batch, widths, choices, clip=1.0, noise_multiplier=1.0, lr=0.1) -> _Held:
    held = _Held(timeline)
    layers = range(1, len(widths))
    names = ["x", *(f"h{i}" for i in layers[:-1]), "y"]  # layer i reads names[i - 1] and writes names[i]
    generator = torch.Generator().manual_seed(0)
    held["x"] = torch.randn(batch, widths[0], generator=generator)  # (batch, in)
    held["target"] = torch.randn(batch, widths[-1], generator=generator)  # (batch, out)
    with held.phase("model"):
        for i in layers:
            held[f"W{i}"] = torch.empty(widths[i], widths[i - 1])  # (out, in)
            held[f"W{i}"].normal_(std=widths[i - 1] ** -0.5, generator=generator)
    with held.phase("forward"):
        for i in layers:
            held[names[i]] = held[names[i - 1]] @ held[f"W{i}"].T  # (batch, out)
    with held.phase("loss"):
        # (batch, out)
        held["loss per element"] = torch.nn.functional.mse_loss(held["y"], held["target"], reduction="none")
        held["loss per sample"] = held["loss per element"].mean(dim=1)  # (batch,)
        held.drop("loss per element")
        if execution != "ghost":
            held["loss"] = held["loss per sample"].mean()
            held.drop("loss per sample")
    hook = {"sgd": None, "hooks": _keep_gradients, "ghost": _keep_norms}[execution]
    with held.phase("first backward"):
        if execution == "ghost":
            held["loss"] = held["loss per sample"].mean()
        held["dL/dloss"] = torch.ones(())
        held["dL/d(loss per sample)"] = held["dL/dloss"].expand(batch) / batch
        _through_loss(held)
        _through_layers(held, names, choices, hook, keep_graph=execution == "ghost")
        held.drop("dL/dloss", "loss")
    if execution == "ghost":
        with held.phase("clip factors"):
            for i in layers:
                held[f"gradient {i}"].zero_()  # kept as zeros: zero_grad(set_to_none=False)
            _find_factors(held, layers, clip)
            held["weighted loss per sample"] = held["factors"] * held["loss per sample"]
            held["weighted loss"] = held["weighted loss per sample"].sum()
        with held.phase("second backward"):
            held["dL/dloss"] = torch.ones(())
            held["dL/d(loss per sample)"] = held["dL/dloss"] * held["factors"]
            _through_loss(held)
            _through_layers(held, names, choices, hook=None, keep_graph=False)
    with held.phase("step"):
        if execution == "hooks":
            _clip_and_sum(held, layers, clip)
        if execution != "sgd":
            _add_noise(held, layers, choices, clip * noise_multiplier, batch, generator)
        for i in layers:
            update = f"gradient {i}" if execution == "sgd" else f"noised {i}"
            held[f"W{i}"].add_(held[update], alpha=-lr)
    return held


def _through_loss(held: _Held) -> None:
    """From the gradient of each example's loss to the output's."""
    out = held["y"].shape[1]
    held["dL/d(loss per element)"] = held["dL/d(loss per sample)"].unsqueeze(1).expand(-1, out) / out  # (batch, out)
    held.drop("dL/d(loss per sample)")
    none = 0  # ATen's number for reduction="none"
    held["dL/dy"] = torch.ops.aten.mse_loss_backward(held["dL/d(loss per element)"], held["y"], held["target"], none)
    held.drop("dL/d(loss per element)")


def _through_layers(held: _Held, names: list[str], choices: Choices, hook: Callable | None, keep_graph: bool) -> None:
    """Backward from the last layer to the first, in the order in which autograd makes and frees."""
    for i in reversed(range(1, len(names))):
        gradient = f"dL/d{names[i]}"
        read = names[i - 1]
        early = i == 1 and not choices.late_first_hook
        if hook and early:
            _run_hook(hook, held, i, gradient, read, choices)
        if i > 1:
            held[f"dL/d{read}"] = held[gradient] @ held[f"W{i}"]  # (batch, in)
        held[f"dL/dW{i}"] = held[gradient].T @ held[read]  # (out, in)
        if hook and not early:
            _run_hook(hook, held, i, gradient, read, choices)
        held.drop(gradient)
        if i > 1 and not keep_graph:
            held.drop(read)
        if f"gradient {i}" in held:
            held[f"gradient {i}"].add_(held[f"dL/dW{i}"])
            held.drop(f"dL/dW{i}")
        else:
            held.rename(f"dL/dW{i}", f"gradient {i}")


def _run_hook(hook: Callable, held: _Held, i: int, gradient: str, read: str, choices: Choices) -> None:
    batch = held["x"].shape[0]  # a mean loss has divided each example's own gradient by it
    if choices.copy_backprops:
        held[f"copy of {gradient}"] = held[gradient] * batch
        hook(held, i, held[f"copy of {gradient}"], held[read], choices)
        held.drop(f"copy of {gradient}")
    else:
        hook(held, i, held[gradient], held[read], choices).mul_(batch)


def _keep_gradients(held: _Held, i: int, g: torch.Tensor, a: torch.Tensor, choices: Choices) -> torch.Tensor:
    held[f"product {i}"] = torch.einsum("bo,bi->boi", g, a)  # (batch, out, in)
    if choices.double_buffer:
        held[f"per-sample {i}"] = torch.zeros(held[f"product {i}"].shape)
        held[f"per-sample {i}"].copy_(held[f"product {i}"])
        held.drop(f"product {i}")
    else:
        held.rename(f"product {i}", f"per-sample {i}")
    return held[f"per-sample {i}"]


def _keep_norms(held: _Held, i: int, g: torch.Tensor, a: torch.Tensor, choices: Choices) -> torch.Tensor:
    held["|g|²"] = torch.einsum("bo,bo->b", g, g)  # (batch,)
    held["|a|²"] = torch.einsum("bi,bi->b", a, a)
    held["|g|²|a|²"] = held["|g|²"] * held["|a|²"]
    held[f"norm {i}"] = held["|g|²|a|²"].sqrt()
    held.drop("|g|²", "|a|²", "|g|²|a|²")
    return held[f"norm {i}"]


def _find_factors(held: _Held, layers: range, clip: float) -> None:
    held["all norms"] = torch.stack([held[f"norm {i}"] for i in layers])  # (layers, batch)
    held["norms"] = torch.linalg.vector_norm(held["all norms"], dim=0)  # (batch,)
    held.drop("all norms")
    held["norms + ε"] = held["norms"] + 1e-6
    held["1/(norms + ε)"] = held["norms + ε"].reciprocal()
    held["clip/(norms + ε)"] = held["1/(norms + ε)"] * clip
    held.drop("norms + ε", "1/(norms + ε)")
    held["factors"] = held["clip/(norms + ε)"].clamp(max=1)
    held.drop("clip/(norms + ε)")


def _clip_and_sum(held: _Held, layers: range, clip: float) -> None:
    for i in layers:
        held[f"norm {i}"] = torch.linalg.vector_norm(held[f"per-sample {i}"].flatten(1), dim=1)  # (batch,)
    _find_factors(held, layers, clip)
    for i in layers:
        held[f"sum {i}"] = torch.einsum("b,boi->oi", held["factors"], held[f"per-sample {i}"])  # (out, in)
    held.drop("norms", "factors", *(f"norm {i}" for i in layers))


def _add_noise(held: _Held, layers: range, choices: Choices, std: float, batch: int, generator) -> None:
    if choices.deepcopy_grad:
        for i in layers:
            if f"sum {i}" not in held:
                held[f"sum {i}"] = held[f"gradient {i}"].clone()
    for i in layers:
        shape = held[f"W{i}"].shape
        if choices.noise_buffer:
            held["zeros"] = torch.zeros(shape)
        held[f"noise {i}"] = torch.normal(0.0, std, shape, generator=generator)
        if choices.noise_buffer:
            held.drop("zeros")
        if i > 1:
            held.drop(f"noise {i - 1}")  # a loop's variable lives until the next turn assigns it
        clipped = f"sum {i}" if f"sum {i}" in held else f"gradient {i}"
        held[f"noised {i}"] = held[clipped] + held[f"noise {i}"]
        if clipped != f"gradient {i}":
            held.drop(f"gradient {i}")  # else it stays: clipped sum and .grad were one tensor
        held[f"noised {i}"].div_(batch)
    held.drop(f"noise {layers[-1]}")


class _ShareableMode(FakeTensorMode):
    """``copy.deepcopy`` of a fake tensor copies its mode too, and two modes do not mix: this one stays one."""

    def __deepcopy__(self, memo):
        return self


def measure(step: Callable[[MemoryTimeline], object], *, fake: bool = True) -> MemoryTimeline:
    """Run a training step and record its memory.

    Parameters
    ----------
    step
        Called with the open timeline; it names its own phases (``with timeline.phase("forward"): …``). Everything
        that it builds inside has no data if ``fake`` is true.
    """
    mode = _ShareableMode() if flag("fake", fake) else contextlib.nullcontext()
    with mode, MemoryTimeline() as timeline:
        step(timeline)
    return timeline
