"""Live bytes over time, per phase and category: on real tensors, or on fake ones of any size.

A :class:`MemoryTimeline` sees every operation through a ``TorchDispatchMode``. It counts storages,
not tensors: a view is free, and a storage counts until nothing refers to it any more. Under
PyTorch's ``FakeTensorMode`` the same code measures models and batches that no machine here could
hold, because fake tensors have sizes but no data. Fake and real agree to the byte as long as the
same kernels run. PyTorch's fused attention (``sdpa``) is chosen by looking at real tensors: on fake
ones it becomes another kernel, so choose one by name (``torch.nn.attention.sdpa_kernel``), or use
``attn_implementation="eager"``.

Left out: what an allocator adds by rounding and caching (on CUDA the allocator's own peak is
recorded beside ours), nested tensors, workspaces inside kernels, and memory that PyTorch does not allocate.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plpkg.results import Tabular
from plpkg.validation import one_of

CATEGORIES = (
    "parameters",
    "optimizer",
    "gradients",
    "per-sample gradients",
    "KV cache",
    "activations",
    "inputs",
    "temporaries",
)
"""The purposes of a storage. A new one is temporary until something says otherwise: autograd saves it
(activation), it becomes a parameter's ``.grad`` (gradient), or :meth:`MemoryTimeline.label` is called."""

MIB = 2**20


@dataclass(frozen=True)
class Phase:
    """One named stretch of time, in bytes.

    Attributes
    ----------
    start_bytes, peak_bytes, end_bytes
        Live bytes when it began, at most, and when it ended.
    cuda_peak_bytes
        The CUDA allocator's own peak of allocated bytes, or ``None`` if CUDA was not in use.
    """

    name: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    cuda_peak_bytes: int | None = None

    @property
    def increase_bytes(self) -> int:
        """The peak above the start: the bytes that the phase needs in addition."""
        return self.peak_bytes - self.start_bytes


class MemoryTimeline(Tabular):
    """Record live bytes while the ``with`` block runs.

    Parameters
    ----------
    label_saved
        Label the tensors that autograd saves as activations. ``torch.func`` cannot run meanwhile.

    Attributes
    ----------
    phases
        The finished :class:`Phase` objects, in order.
    peak_bytes
        The most that was live at once.

    Examples
    --------
    >>> with MemoryTimeline() as timeline:
    ...     timeline.track(model)
    ...     with timeline.phase("forward"):
    ...         loss = model(x).square().mean()
    ...     with timeline.phase("backward"):
    ...         loss.backward()
    """

    def __init__(self, *, label_saved: bool = True) -> None:
        self.phases: list[Phase] = []
        self.peak_bytes = 0
        self._live: dict[int, tuple[int, str]] = {}  # storage → (bytes, category)
        self._total = 0
        self._by_category: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self._history: list[tuple[str, tuple[int, ...]]] = []
        self._open: list[list] = []  # [name, start, peak] of the phases that are running
        self._hooks: list = []
        self._mode = _Watch(self)
        self._entered = False
        self._label_saved = label_saved
        self._closed = False

    def __enter__(self) -> "MemoryTimeline":
        if self._entered:
            raise RuntimeError("this MemoryTimeline has been used; make a new one")
        self._entered = True
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._saved = hooks if self._label_saved else nullcontext()
        self._saved.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._mode.__exit__(*error)
        self._saved.__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._closed = True

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens inside; phases may nest."""
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._open.append([name, self._total, self._total])
        self._note()
        try:
            yield
        finally:
            _, start, peak = self._open.pop()
            allocator = torch.cuda.max_memory_allocated() if cuda else None
            self.phases.append(Phase(name, start, peak, self._total, allocator))

    def track(self, *things) -> None:
        """Count storages that existed before, and label those that will belong to them.

        Parameters
        ----------
        *things
            Modules (their parameters and buffers, and from now on their gradients), optimizers
            (their state after each step), or tensors (inputs).

        Raises
        ------
        TypeError
            Something else.
        """
        for thing in things:
            if isinstance(thing, torch.nn.Module):
                self._track_module(thing)
            elif isinstance(thing, torch.optim.Optimizer):
                self._label_state(thing)
                hook = thing.register_step_post_hook(lambda optimizer, *_: self._label_state(optimizer))
                self._hooks.append(hook)
            elif isinstance(thing, torch.Tensor):
                self.label([thing], "inputs")
            else:
                raise TypeError(f"a module, an optimizer or a tensor is wanted, got {type(thing).__name__}")

    def _track_module(self, module: torch.nn.Module) -> None:
        self.label([*module.parameters(), *module.buffers()], "parameters")
        for parameter in module.parameters():
            if parameter.grad is not None:
                self.label([parameter.grad], "gradients")
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(GradientLabel(self))
                self._hooks.append(hook)

    def label(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Set the purpose of some tensors' storages (one of :data:`CATEGORIES`).

        Raises
        ------
        ValueError
            An unknown category.
        """
        one_of("category", category, CATEGORIES)
        for tensor in tensors:
            for part in _dense_parts(tensor):
                self._label_storage(part, category)

    def _label_storage(self, tensor: torch.Tensor, category: str) -> None:
        self._see(tensor, category)
        key = tensor.untyped_storage()._cdata
        size, before = self._live[key]
        if before != category:
            self._live[key] = (size, category)
            self._by_category[before] -= size
            self._by_category[category] += size
            self._note()

    def to_frame(self):
        """The timeline as a ``pandas.DataFrame``: a row an event, with its phase, MiB by category and in total."""
        import pandas as pd

        frame = pd.DataFrame([sizes for _, sizes in self._history], columns=list(CATEGORIES)) / MIB
        frame.insert(0, "phase", [name for name, _ in self._history])
        frame["total"] = frame[list(CATEGORIES)].sum(axis=1)
        return frame.rename_axis("event")

    def rows(self) -> list[dict]:
        if not self.phases:
            peak = self.peak_bytes / MIB
            return [{"phase": "none", "start_mib": 0.0, "peak_mib": peak, "increase_mib": 0.0, "end_mib": 0.0}]
        rows = []
        for phase in self.phases:
            row = {
                "phase": phase.name,
                "start_mib": phase.start_bytes / MIB,
                "peak_mib": phase.peak_bytes / MIB,
                "increase_mib": phase.increase_bytes / MIB,
                "end_mib": phase.end_bytes / MIB,
            }
            rows.append(row)
        return rows

    def __repr__(self) -> str:
        text = f"MemoryTimeline: peak {self.peak_bytes / MIB:.2f} MiB"
        if self.phases:
            parts = ", ".join(f"{phase.name} +{phase.increase_bytes / MIB:.2f}" for phase in self.phases)
            text += f" ({parts} MiB)"
        return text

    def _label_state(self, optimizer: torch.optim.Optimizer) -> None:
        tensors = [leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, torch.Tensor)]
        self.label(tensors, "optimizer")

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        for part in _dense_parts(tensor):
            _, category = self._live.get(part.untyped_storage()._cdata, (0, "temporaries"))
            if category == "temporaries":
                self.label([part], "activations")
        return tensor.detach()  # the tensor itself would keep its own graph alive

    def _see(self, tensor: torch.Tensor, category: str = "temporaries") -> None:
        """Count a tensor's storage if it is new or has been resized; a known storage keeps its category."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self._live:
            known, category = self._live[key]
            if known == size:
                return
            self._change(known, category, -1)  # resized in place
        else:
            weakref.finalize(storage, self._forget, key)
        self._live[key] = (size, category)
        self._change(size, category, +1)

    def _forget(self, key: int) -> None:
        size, category = self._live.pop(key)
        if not self._closed:  # a storage that is released after the block belongs to no phase
            self._change(size, category, -1)

    def _change(self, size: int, category: str, sign: int) -> None:
        self._total += sign * size
        self._by_category[category] += sign * size
        self.peak_bytes = max(self.peak_bytes, self._total)
        for phase in self._open:
            phase[2] = max(phase[2], self._total)
        if size:
            self._note()

    def _note(self) -> None:
        """Write down the sizes by category, under the innermost phase."""
        phase = self._open[-1][0] if self._open else ""
        self._history.append((phase, tuple(self._by_category.values())))


class GradientLabel:
    """A hook that labels a parameter's gradient in a timeline, without reading the gradient's numbers."""

    def __init__(self, timeline: MemoryTimeline) -> None:
        self._timeline = timeline

    def __call__(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # another hook may have taken it
            self._timeline.label([parameter.grad], "gradients")


class _Watch(TorchDispatchMode):
    """Shows every tensor that an operation returns to the timeline."""

    def __init__(self, timeline: MemoryTimeline) -> None:
        super().__init__()
        self._timeline = timeline

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                for part in _dense_parts(leaf):
                    self._timeline._see(part)
        return result


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a tensor's numbers: itself, or the indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()  # nested and other layouts: left out
