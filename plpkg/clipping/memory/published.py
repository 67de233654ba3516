"""The published memory of gradient clipping, *reported*, beside what we compute.

The same settings are computed twice: by the emulation of 2024's data flow (:func:`synthetic_table`), and by running
the Opacus that is installed (:func:`opacus_step`, :func:`bert_table`).

Source: the Opacus article, "Clipping in Opacus" (PyTorch blog, 2024-08-20), in ``data/published/``.
``method`` has Opacus's own words for it: ``sgd``, ``hooks`` ("vanilla": every per-sample gradient is kept),
``fast`` (FGC: one layer's at a time) and ``ghost`` (GC: norms from factors).

Left out: what the article does not say. Its BERT table has no sequence length. MB in its synthetic table
are MiB (the weights of 5120 → 2560 → 1280 are 62.5 MiB); of the BERT table's MB and GB we assume the same, with
1 GB read as 1000 of them.
"""

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import torch

from plpkg import catalog
from plpkg.clipping.memory.dataflow import PHASES, WIDTHS, checked_widths, emulate, measure
from plpkg.memory import MIB, MemoryTimeline
from plpkg.validation import one_of, whole_number

OUT_OF_MEMORY = "OOM"
PUBLISHED = ("sgd", "hooks", "fast", "ghost")
"""The executions in Opacus's own words."""
P100_MIB = 16 * 1024
_IN_MB = {"": Decimal(1), "MB": Decimal(1), "GB": Decimal(1000)}


def synthetic():
    """The table of the two-layer network: how far memory rises in each phase of a training step.

    Returns
    -------
    pandas.DataFrame
        A row a cell: ``batch``, ``method``, ``phase``, ``printed`` (text), ``reported_mib`` and
        ``tolerance_mib``, half a unit of the last printed digit (both NaN where the article prints OOM).
    """
    return _with_numbers(catalog.published("clipping_synthetic"))


def bert():
    """The table of fine-tuning BERT's last layer, pooler and classifier: most memory and time of an iteration.

    Returns
    -------
    pandas.DataFrame
        A row a cell: ``method``, ``batch``, ``printed`` (text), ``reported_mib`` and ``tolerance_mib`` as in
        :func:`synthetic`, ``seconds`` on one P100.
    """
    return _with_numbers(catalog.published("clipping_bert"))


def figure_and_tolerance(printed: str) -> tuple[float, float]:
    """The number in a printed cell, and half a unit of its last digit.

    Parameters
    ----------
    printed
        A number with or without thousands separators and a unit (MB or GB), or ``OOM``.

    Returns
    -------
    tuple of float
        Both in the article's MB; ``(nan, nan)`` for ``OOM``.

    Raises
    ------
    ValueError
        It is something else.
    """
    if printed == OUT_OF_MEMORY:
        return float("nan"), float("nan")
    digits, _, unit = printed.replace(",", "").partition(" ")
    if unit not in _IN_MB or not digits.replace(".", "", 1).isdecimal():
        raise ValueError(f"a printed figure must be a number with MB, GB or no unit, or OOM, got {printed!r}")
    value = Decimal(digits)
    decimals = len(digits.partition(".")[2])
    half_unit = Decimal(5).scaleb(-decimals - 1)
    return float(value * _IN_MB[unit]), float(half_unit * _IN_MB[unit])


def _with_numbers(table):
    figures = [figure_and_tolerance(printed) for printed in table["printed"]]
    after = table.columns.get_loc("printed") + 1
    table.insert(after, "reported_mib", [value for value, _ in figures])
    table.insert(after + 1, "tolerance_mib", [tolerance for _, tolerance in figures])
    return table


@dataclass(frozen=True)
class PublishedTask:
    """A model to train on one batch, built inside the measurement.

    Attributes
    ----------
    build
        Returns the model, in training mode, what is not trained frozen.
    data
        Returns inputs and targets, the examples along their first dimension.
    criterion
        Called with outputs and targets; reads its attribute ``reduction``, ``"mean"`` or ``"none"`` (one loss an
        example), as PyTorch's losses do.
    """

    build: Callable[[], torch.nn.Module]
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    criterion: Callable


class _SquaredError:
    """The mean squared error, with one loss an example for ``reduction="none"``."""

    reduction = "mean"

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(outputs, targets, reduction="none").mean(dim=1)
        return loss.mean() if self.reduction == "mean" else loss


def two_layer_task(batch: int, widths: tuple[int, ...] = WIDTHS) -> PublishedTask:
    """The article's synthetic network as modules, with the loss of :func:`~plpkg.clipping.memory.dataflow.emulate`."""
    batch = whole_number("batch", batch, 1)
    widths = checked_widths(widths)

    def build() -> torch.nn.Module:
        layers = [torch.nn.Linear(read, out, bias=False) for read, out in itertools.pairwise(widths)]
        return torch.nn.Sequential(*layers)

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, widths[0]), torch.randn(batch, widths[-1])

    return PublishedTask(build, data, _SquaredError())


class _Classifier(torch.nn.Module):
    """BERT for sequences of whole length: ids in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoConfig, BertForSequenceClassification

        config: Any = AutoConfig.for_model("bert", num_labels=3, attn_implementation="eager")
        self.bert: Any = BertForSequenceClassification(config)  # whose pooler may be None, says its annotation
        self.bert.requires_grad_(False)
        for part in (self.bert.bert.encoder.layer[-1], self.bert.bert.pooler, self.bert.classifier):
            part.requires_grad_(True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=ids).logits


def bert_task(batch: int, seq: int) -> PublishedTask:
    """BERT-base with its last layer, pooler and classifier trainable (7.7 million of 109), as in the article.

    Parameters
    ----------
    seq
        Tokens of each example, none of them padding. The article does not state it.
    """
    batch = whole_number("batch", batch, 1)
    seq = whole_number("seq", seq, 1, 512, "max_position_embeddings")

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(batch, seq, dtype=torch.long), torch.zeros(batch, dtype=torch.long)

    return PublishedTask(lambda: _Classifier().train(), data, torch.nn.CrossEntropyLoss())


def opacus_step(task: PublishedTask, execution: str) -> Callable[[MemoryTimeline], None]:
    """One training step of the installed Opacus, for :func:`measure`.

    Its phases are those of :data:`plpkg.clipping.memory.dataflow.PHASES` that the execution has, and then
    ``"iteration"``: all of them but the model.

    Parameters
    ----------
    execution
        ``"sgd"`` (plain PyTorch), ``"hooks"``, ``"fast"`` (the ghost engine with ``use_ghost_clipping=False``) or
        ``"ghost"``.

    Raises
    ------
    ValueError
        An unknown execution.
    """
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    one_of("execution", execution, PUBLISHED)

    def step(timeline: MemoryTimeline) -> None:
        with timeline.phase("model"):
            model = task.build()
        inputs, targets = task.data()
        criterion = copy.copy(task.criterion)
        timeline.track(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        private: dict[str, Any] = dict(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(inputs))
        if execution == "hooks":
            model = GradSampleModule(model)
            optimizer = DPOptimizer(optimizer, **private)
        elif execution != "sgd":
            model = GradSampleModuleFastGradientClipping(
                model,
                max_grad_norm=1.0,  # pyright: ignore[reportArgumentType] (an int, says Opacus)
                use_ghost_clipping=execution == "ghost",
            )
            optimizer = DPOptimizerFastGradientClipping(optimizer, **private)
            criterion = DPLossFastGradientClipping(model, optimizer, criterion)
        with timeline.phase("iteration"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")  # the first layer's input needs none
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy looks
            with timeline.phase("forward"):
                outputs = model(inputs)
            with timeline.phase("loss"):
                loss = criterion(outputs, targets)
            _backward(timeline, loss, model, optimizer, twice=execution in ("fast", "ghost"))
            with timeline.phase("step"):
                optimizer.step()

    return step


def _backward(timeline: MemoryTimeline, loss, model, optimizer, twice: bool) -> None:
    """``loss.backward()``; where Opacus hides two passes in it, what it calls between them starts the next phase."""
    with contextlib.ExitStack() as phase:

        def begin(name: str) -> None:
            phase.close()
            phase.enter_context(timeline.phase(name))

        def beginning(name: str, call: Callable) -> Callable:
            def begun() -> None:
                begin(name)
                call()

            return begun

        if twice:
            optimizer.zero_grad = beginning("clip factors", optimizer.zero_grad)
            model.disable_hooks = beginning("second backward", model.disable_hooks)
        begin("first backward")
        loss.backward()


def synthetic_table():
    """The article's table of the two-layer network, reported beside computed.

    Returns
    -------
    pandas.DataFrame
        :func:`synthetic` with ``computed_mib`` and ``matches``: whether the two agree at
        the printed precision, or what was printed as OOM would not fit the 16 GB of the article's P100.
    """
    table = synthetic()
    settings = set(zip(table["batch"], table["method"], strict=True))
    steps = {(batch, method): emulate(method, batch) for batch, method in settings}
    computed = []
    for batch, method, phase in zip(table["batch"], table["method"], table["phase"], strict=True):
        computed.append(steps[batch, method].increase_bytes(phase) / MIB)
    table["computed_mib"] = computed
    close = (table["computed_mib"] - table["reported_mib"]).abs() <= table["tolerance_mib"]
    table["matches"] = close | (table["reported_mib"].isna() & (table["computed_mib"] > P100_MIB))
    return table


def side_by_side(table):
    """The rows of :func:`synthetic_table` in the article's shape: in each cell what is printed | what is computed."""
    both = table["printed"] + " | " + table["computed_mib"].map("{:,.2f}".format)
    shape = table.assign(both=both).pivot(index=["batch", "method"], columns="phase", values="both")
    return shape[[phase for phase in PHASES if phase in shape]].fillna("")


def bert_table(batch: int = 128, seq: int = 100, executions: tuple[str, ...] = PUBLISHED):
    """One batch size of the article's BERT table beside the installed Opacus on fake tensors.

    Returns
    -------
    pandas.DataFrame
        Rows of :func:`bert` with ``seq``, ``computed_mib`` (the peak of one iteration
        above the model and the batch) and ``ratio``, computed over reported (NaN where the article prints OOM).

    Raises
    ------
    ValueError
        A batch size that the article does not list, a sequence length outside 1 … 512, an unknown execution.
    """
    table = bert()
    one_of("batch", batch, tuple(table["batch"].unique().tolist()))
    for execution in executions:
        one_of("execution", execution, PUBLISHED)
    table = table[(table["batch"] == batch) & table["method"].isin(executions)]
    steps = [opacus_step(bert_task(batch, seq), execution) for execution in table["method"]]
    peaks = [measure(step).phases[-1].increase_bytes / MIB for step in steps]
    table = table.assign(seq=seq, computed_mib=peaks).reset_index(drop=True)
    return table.assign(ratio=table["computed_mib"] / table["reported_mib"])


PROBES = (80, 100, 120)
"""Sequence lengths at which :func:`fit_seq` measures."""


def fit_seq(batch: int = 128):
    """Which sequence length explains a row of the BERT table best: the article does not state it.

    Each method's peak is measured at the three lengths of :data:`PROBES`; between them a parabola is exact as long as
    the same tensors make the peak, because attention is quadratic in the length and all else linear.

    Returns
    -------
    pandas.DataFrame
        By ``seq``, from the lowest to the highest probe: each method's ratio computed over reported, and
        ``deviation``, the root of the mean squared logarithm of the ratios. ``["deviation"].idxmin()`` is the fit.

    Raises
    ------
    ValueError
        A batch size that the article does not list or prints as OOM for every method.
    """
    import numpy as np
    import pandas as pd

    reported = bert().query("batch == @batch").set_index("method")["reported_mib"].dropna()
    if reported.empty:
        raise ValueError(f"the article reports no memory for batch={batch}")
    ratios = pd.DataFrame()  # a row a method, a column a sequence length
    for seq in PROBES:
        ratios[seq] = bert_table(batch, seq, tuple(reported.index)).set_index("method")["ratio"]
    seqs = np.arange(min(PROBES), max(PROBES) + 1)
    curves = {}
    for method, row in ratios.iterrows():
        parabola = np.polyfit(PROBES, row, 2)
        curves[method] = np.polyval(parabola, seqs)
    table = pd.DataFrame(curves, index=pd.Index(seqs, name="seq"))
    return table.assign(deviation=np.sqrt((np.log(table) ** 2).mean(axis=1)))
