"""A person's own model, as learning leaves it: what was trained, kept in a file beside the public model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plpkg.adapters import Adapter, Factors, base_fingerprint
from plpkg.autonomy.nets import plain
from plpkg.autonomy.scope import personal_copy
from plpkg.files import checkpoints
from plpkg.fingerprints import digest
from plpkg.results import Tabular

FILE = "personal.safetensors"


@dataclass(frozen=True)
class Transfer(Tabular):
    """A person's own model.

    Attributes
    ----------
    model
        It shares what was not trained with the public model.
    state
        The trained tensors, by name: all that the device has to keep.
    log
        One dict for each evaluation on the validation examples: step, loss, accuracy; step 0 is the public model.
    step
        The step that ``state`` is of.
    epsilon
        Of a private task: the ε that ``state`` has spent, for a δ. Else None.
    scope, public
        The scope that was trained, and the :func:`plpkg.fingerprints.digest` of the public model.
    """

    model: nn.Module
    state: dict[str, torch.Tensor]
    log: list[dict]
    step: int
    epsilon: Callable[[float], float] | None = None
    scope: str | None = None
    public: str | None = None

    def adapter(self) -> Adapter:
        """The LoRA adapter that was trained: ``save(folder)`` writes it as PEFT does, and an engine serves it.

        Raises
        ------
        ValueError
            Something else was trained: keep ``state``, which :class:`~plpkg.autonomy.transfer.Task` takes as ``start``.
        """
        model: Any = self.model
        factors = {}
        for name in self.state:
            if ".lora_A." not in name:
                continue
            path = name.partition(".lora_")[0]
            factors[path] = Factors(
                down=self.state[f"{path}.lora_A.default.weight"],
                up=self.state[f"{path}.lora_B.default.weight"],
                scale=model.get_submodule(path).scaling["default"],
            )
        if not factors:
            raise ValueError(f"{min(self.state)} is no LoRA adapter: keep state, which Task takes as start")
        return Adapter.of(model.peft_config["default"], factors, backbone=base_fingerprint(model))

    def save(self, folder: str | Path) -> None:
        """Write what was trained, its owner's alone: LoRA as PEFT does (:meth:`adapter`), all else for :func:`load`.

        Neither ``log`` nor ε is written.

        Raises
        ------
        ValueError
            Statistics of BatchNorm have changed as well, or LoRA is more than an adapter.
        """
        if self.scope is None:
            raise ValueError("statistics of BatchNorm have changed beside the state: save model.state_dict()")
        if self.scope == "lora":
            self.adapter().save(folder)
            return
        state = dict(scope=self.scope, public=self.public, step=self.step, state=self.state)
        checkpoints.save(Path(folder, FILE), state)

    def rows(self) -> list[dict]:
        return self.log

    def __repr__(self) -> str:
        values = sum(p.numel() for p in self.state.values())
        losses = {row["step"]: row["loss"] for row in self.log}
        result = "from"
        if self.step in losses:
            result = f"validation loss {losses[0]:.4f} → {losses[self.step]:.4f} nats at"
        return f"Transfer({values:,} values trained, {result} step {self.step})"


def load(model: nn.Module, folder: str | Path) -> Transfer:
    """Read what :meth:`Transfer.save` wrote, for the public model it was learnt from; LoRA is for PEFT and engines.

    Raises
    ------
    FileNotFoundError
        The folder lacks the file.
    ValueError
        The file is damaged or of another version, or belongs to another public model.
    """
    model = plain(model)
    public = digest(model)
    path = Path(folder, FILE)
    saved = checkpoints.read(path, ("scope", "public", "step", "state"))
    if saved["public"] != public:
        raise ValueError(
            f"{path} was learnt from a public model {saved['public'][:12]}…, and this one is {public[:12]}…"
        )
    personal, trained = personal_copy(model, saved["scope"])
    with torch.no_grad():
        for name, p in trained.items():
            p.copy_(saved["state"][name])
    return Transfer(personal, saved["state"], [], saved["step"], None, saved["scope"], public)
