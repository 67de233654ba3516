"""Low-rank residual transmission (PrivateLoRA): M on the device, everything else in the cloud, a wire between them.

The names a notebook imports; ``plots``, ``widget``, ``exercises`` and ``recorded`` load on first use.
"""

from plpkg.relay import Relay
from plpkg.residual import attacks, bases, certificates, cost, defences, migrate, training
from plpkg.residual.adapter import PrivateLoraConfig, convert_to_lora
from plpkg.residual.cloud import CloudServer
from plpkg.residual.connection import RefusedError
from plpkg.residual.device import DeviceClient
from plpkg.residual.parts import CloudPart, DevicePart
from plpkg.residual.split import release, split
from plpkg.residual.wire import Counter, Limits

__all__ = [
    "CloudPart",
    "CloudServer",
    "Counter",
    "DeviceClient",
    "DevicePart",
    "Limits",
    "PrivateLoraConfig",
    "RefusedError",
    "Relay",
    "attacks",
    "bases",
    "certificates",
    "convert_to_lora",
    "cost",
    "defences",
    "exercises",
    "migrate",
    "plots",
    "recorded",
    "release",
    "split",
    "training",
    "widget",
]


def __getattr__(name: str):
    if name in ("exercises", "plots", "recorded", "widget"):
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
