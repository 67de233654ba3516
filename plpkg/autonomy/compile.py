"""Three graphs for a device that learns: forward, loss with its gradients, update.

AutLearn's compiler makes these of a model, so that a device trains without an autograd engine. Here each is a
``torch.export`` program of the example's shapes and a pure function: trained parameters come in, frozen ones are
constants, and gradients go no further than to the first trained layer. Recurrent layers are unrolled. Left out: the
search for fast kernels, which is a runtime's work; dynamic shapes; optimizers other than SGD.
"""

import warnings
from collections.abc import Callable, Mapping

import torch
from torch.export import ExportedProgram, experimental, export
from torch.nn.attention import SDPBackend, sdpa_kernel

from plpkg.results import Tabular
from plpkg.validation import number

Tensors = dict[str, torch.Tensor]


class ThreeGraphs(Tabular):
    """A model's training as three programs, and the trained parameters now, by their names in the model.

    ``programs`` has ``"forward"`` of (parameters, x), ``"loss"`` of (parameters, x, y) and ``"update"`` of (parameters,
    gradients, lr); ``torch.export.save`` writes them.
    """

    def __init__(self, programs: dict[str, ExportedProgram], parameters: Tensors) -> None:
        self.programs = programs
        self.parameters = dict(parameters)
        self._modules = {name: program.module() for name, program in programs.items()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits ``(batch, ..., classes)`` of ``x (batch, ...)``; ValueError for another shape than compiled."""
        return self._run("forward", x=x)

    def gradients(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """The loss ``()``, and its gradient by each parameter; ValueError for another shape than compiled."""
        return self._run("loss", x=x, y=y)

    def update(self, parameters: Tensors, gradients: Tensors, lr: float) -> Tensors:
        """The parameters after a step of SGD, as new tensors; ValueError for other names, or a negative rate."""
        rate = torch.tensor(number("lr", lr), dtype=torch.float64)
        return self._modules["update"](parameters, gradients, rate)

    def step(self, x: torch.Tensor, y: torch.Tensor, lr: float) -> float:
        """Learn from one batch: new values in ``parameters``. Returns the loss before.

        FloatingPointError: they would not be finite, and stay as they are.
        """
        loss, gradients = self.gradients(x, y)
        stepped = self.update(self.parameters, gradients, lr)
        for name, values in stepped.items():
            if not values.isfinite().all():
                raise FloatingPointError(f"a step with a loss of {loss:g} makes {name!r} not finite: take a lower lr")
        self.parameters.update(stepped)
        return loss.item()

    def rows(self) -> list[dict]:
        """Of each graph: its nodes, those that compute, and the tensors that come in and go out."""
        rows = []
        for name, program in self.programs.items():
            nodes = program.graph.nodes
            row = {
                "graph": name,
                "nodes": len(nodes),
                "operators": sum("call" in node.op for node in nodes),
                "inputs": len(program.graph_signature.user_inputs),
                "outputs": len(program.graph_signature.user_outputs),
            }
            rows.append(row)
        return rows

    def __repr__(self) -> str:
        return "ThreeGraphs: " + ", ".join(f"{row['graph']} of {row['operators']:,} operators" for row in self.rows())

    def _run(self, name: str, **inputs: torch.Tensor):
        """A program's outputs; ValueError if an input has not the shape that it was compiled for."""
        # The parameters, then what is given; export keeps them.
        _, *examples = self.programs[name].example_inputs[0]  # pyright: ignore[reportOptionalSubscript] (three_graphs has exported with inputs)
        for (what, given), example in zip(inputs.items(), examples, strict=True):
            if given.shape != example.shape:
                raise ValueError(f"{what} must be {tuple(example.shape)} as compiled, got {tuple(given.shape)}")
        return self._modules[name](self.parameters, *inputs.values())


def three_graphs(
    model: torch.nn.Module, loss: Callable[..., torch.Tensor], example: tuple[torch.Tensor, torch.Tensor]
) -> ThreeGraphs:
    """Compile the training of what has ``requires_grad``, tied weights as one, by ``loss(logits, y)``, one number.

    ``example`` is (x, y), of which the shapes alone stay. ValueError: training mode, a loss that does not depend on
    all that is trained, or compiled gradients that are not autograd's on the example.
    """
    for name, module in model.named_modules():
        if module.training:
            raise ValueError(f"{name or 'the model'!r} is in training mode: call eval()")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    options = {"use_cache": False} if hasattr(model, "get_output_embeddings") else {}

    def logits(parameters, x):
        output = torch.func.functional_call(model, parameters, (x,), options)
        return getattr(output, "logits", output)

    def loss_of(parameters, x, y):
        return loss(logits(parameters, x), y)

    def update(parameters, gradients, lr):
        return {name: parameters[name] - lr * gradients[name] for name in parameters}

    def zeros() -> Tensors:
        return {name: torch.zeros_like(p) for name, p in trained.items()}

    x, y = map(torch.zeros_like, example)
    rate = torch.zeros((), dtype=torch.float64)
    with torch.enable_grad(), warnings.catch_warnings(action="ignore", category=FutureWarning):  # of torch's own code
        gradients = _differentiated(loss_of, trained, *example)
        programs = {
            "forward": _exported(logits, zeros(), x).run_decompositions(),
            "loss": _exported(gradients, zeros(), x, y),
            "update": _exported(update, zeros(), zeros(), rate),  # of two: one tensor would be one input
        }
        return ThreeGraphs(programs, {name: p.detach().clone() for name, p in trained.items()})


def _differentiated(loss: Callable, trained: Mapping[str, torch.Tensor], *example) -> Callable:
    """A loss with its gradients by its first argument; what torch calls unstable is here, and is checked."""
    value = loss(trained, *example)
    if value.dim() or not value.requires_grad:
        raise ValueError(f"the loss must be one number that depends on what is trained, got {value}")
    exact = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    for name, gradient in zip(trained, exact, strict=True):
        if gradient is None:
            raise ValueError(f"the loss does not depend on {name!r}, which is trained")
    with sdpa_kernel(SDPBackend.MATH):  # torch 2.13 decomposes the fused attention so that its gradient is wrong
        joint = experimental._export_forward_backward(_exported(loss, trained, *example))
    constants = [joint.constants[spec.target] for spec in joint.graph_signature.input_specs if spec.target]

    def gradients(parameters, x, y):
        value, *each = joint.graph_module(*constants, *parameters.values(), x, y)
        return value, dict(zip(parameters, each, strict=True))

    _, found = gradients(trained, *example)
    largest = max(map(torch.norm, exact))
    for name, gradient in zip(trained, exact, strict=True):
        error = (found[name] - gradient).norm()
        close = error <= torch.finfo(gradient.dtype).eps ** 0.5 * largest
        if not close:  # NaN is close to nothing
            raise ValueError(f"the compiled gradient of {name!r} is {error:.1g} from autograd's")
    return gradients


def _exported(function: Callable, *inputs) -> ExportedProgram:
    """A function as a program: torch exports modules."""
    graph = torch.nn.Module()
    graph.forward = function
    return export(graph, inputs)
