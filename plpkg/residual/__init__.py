"""Low-rank residual transmission (PrivateLoRA): M on the device, everything else in the cloud, a wire between them.

The names a notebook imports; each loads on first use, so that a mechanism needs no socket.
"""

from plpkg.lazy import on_first_use

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
    "matrices",
    "migrate",
    "plots",
    "release",
    "split",
    "training",
    "widget",
]

__getattr__ = on_first_use(
    __name__,
    PrivateLoraConfig="adapter",
    convert_to_lora="adapter",
    matrices="adapter",
    bases="bases",
    split="parts",
    release="parts",
    CloudPart="cloud_part",
    DevicePart="device_part",
    cost="cost",
    migrate="migrate",
    CloudServer="wire.cloud",
    DeviceClient="wire.device",
    RefusedError="wire.connection",
    Counter="wire.messages",
    Limits="wire.terms",
    Relay="wire.relay",
    certificates="wire.certificates",
    training="wire.training",
    attacks="privacy.attacks",
    defences="privacy.defences",
    exercises="exercises",
    plots="plots",
    widget="widget",
)
