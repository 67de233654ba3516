"""Low-rank residual transmission (PrivateLoRA): M on the device, everything else in the cloud, a wire between them.

The names a notebook imports; each loads on first use, so that a mechanism needs no socket.
"""

from typing import TYPE_CHECKING

from plpkg.imports import on_first_use

if TYPE_CHECKING:
    from plpkg.residual import attacks, bases, cost, drafts, exercises, migrate, plots, waits, widget
    from plpkg.residual.cut.cloud_part import CloudPart
    from plpkg.residual.cut.device_part import DevicePart
    from plpkg.residual.cut.parts import release, split
    from plpkg.residual.methods import LadderConfig, PrivateLoraConfig, convert_to_lora, load, matrices
    from plpkg.residual.programs import training
    from plpkg.residual.wire.cloud import CloudServer
    from plpkg.residual.wire.connection import RefusedError
    from plpkg.residual.wire.device import DeviceClient
    from plpkg.residual.wire.messages import Counter
    from plpkg.residual.wire.terms import Limits
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "CloudPart",
    "CloudServer",
    "Counter",
    "DeviceClient",
    "DevicePart",
    "LadderConfig",
    "Limits",
    "PrivateLoraConfig",
    "RefusedError",
    "attacks",
    "bases",
    "convert_to_lora",
    "cost",
    "drafts",
    "exercises",
    "load",
    "matrices",
    "migrate",
    "plots",
    "release",
    "split",
    "training",
    "waits",
    "widget",
]
