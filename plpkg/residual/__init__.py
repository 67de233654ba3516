"""Low-rank residual transmission (PrivateLoRA): M on the device, everything else in the cloud, a wire between them.

The names a notebook imports; each loads on first use, so that a mechanism needs no socket.
"""

from plpkg.imports import on_first_use

PLACES = dict(
    PrivateLoraConfig="methods",
    LadderConfig="methods",
    convert_to_lora="methods",
    load="methods",
    matrices="methods",
    attacks="attacks",
    bases="bases",
    drafts="drafts",
    split="cut.parts",
    release="cut.parts",
    CloudPart="cut.cloud_part",
    DevicePart="cut.device_part",
    cost="cost",
    migrate="migrate",
    CloudServer="wire.cloud",
    DeviceClient="wire.device",
    RefusedError="wire.connection",
    Counter="wire.messages",
    Limits="wire.terms",
    training="programs.training",
    exercises="exercises",
    plots="plots",
    waits="waits",
    widget="widget",
)

__all__ = list(PLACES)
__getattr__ = on_first_use(__name__, **PLACES)
