"""Terms that the two ends agree on before they begin, and limits of what a cloud allows.

The messages are in ``wire.proto``. A device says its ``Terms`` first; a difference is refused with both values.
"""

import re
from dataclasses import dataclass

from peft import PeftModel

from plpkg.backbones import fingerprint
from plpkg.residual.cut.device_part import DevicePart
from plpkg.residual.cut.parts import is_adapted
from plpkg.residual.methods import fingerprint_of_bases
from plpkg.residual.wire.tensors import PRECISIONS
from plpkg.residual.wire.wire_pb2 import Terms
from plpkg.validation import number, one_of, whole_number

OPTIONS = dict(
    model="--model", targets="--target", r_c2d="--rank", r_d2c="--rank", projection_seed="--seed",
    precision="--precision", first_k="--first-k", last_k="--last-k", riders="--ladder, --fold or --rank",
)  # fmt: skip
"""Options that a reader of a refusal can change, by field; the other fields have their own names."""

FINGERPRINTS = dict(model="another --model", bases="other A and B")
"""Words for fields that differ, where the values would tell a reader nothing."""

PROTOCOL = 4
"""Raised whenever an older peer would misunderstand."""


@dataclass(frozen=True)
class Limits:
    """Limits of what a cloud allows.

    Attributes
    ----------
    sessions
        Devices at the same time.
    tokens
        The longest sequence: what is in the KV cache and the step together.
    batch
        The most sequences in a step.
    message_bytes
        The longest message.
    answer_s
        How long a device may take to answer within a step.
    idle_s
        How long it may say nothing between two steps.
    """

    sessions: int = 16
    tokens: int = 4096
    batch: int = 64
    message_bytes: int = 64 * 2**20
    answer_s: float = 30.0
    idle_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("sessions", "tokens", "batch", "message_bytes"):
            whole_number(name, getattr(self, name), 1)
        for name in ("answer_s", "idle_s"):
            number(name, getattr(self, name), open_low=True)


def terms(
    model: PeftModel,
    device: DevicePart,
    riders: list[int],
    adapter_name: str,
    cut: tuple[int, int],
    precision: str,
) -> Terms:
    """Terms that the other side must have as well: the model, its parts, and ``(first_k, last_k)``."""
    one_of("precision", precision, tuple(PRECISIONS))
    config = model.peft_config[adapter_name]
    adapted = [name for name, module in model.named_modules() if is_adapted(module, adapter_name)]
    kinds: set[str] = set()
    layers: set[int] = set()
    for name in adapted:
        kinds.add(name.rpartition(".")[2])
        layers |= {int(number) for number in re.findall(r"\.(\d+)\.", name)}
    first_k, last_k = cut
    r_c2d, r_d2c = device.ranks
    return Terms(
        protocol=PROTOCOL,
        model=fingerprint(model.get_base_model()),
        hidden=device.embedding.embedding_dim,
        targets=f"{', '.join(sorted(kinds))} of layers {', '.join(map(str, sorted(layers)))}",
        projections=[len(group) for group in device.matrices],
        r_c2d=r_c2d,
        r_d2c=r_d2c,
        init=getattr(config, "init", "lora"),
        projection_seed=getattr(config, "projection_seed", 0),
        precision=precision,
        first_k=first_k,
        last_k=last_k,
        bases=fingerprint_of_bases(model, adapter_name),
        riders=riders,
        late=getattr(config, "late", False),
    )


def differences(device: Terms, cloud: Terms) -> str:
    """A sentence for each field in which the two differ, both values in it, for the device; empty if they agree."""
    sentences: list[str] = []
    for field in Terms.DESCRIPTOR.fields:
        here = getattr(device, field.name)
        there = getattr(cloud, field.name)
        if here == there:
            continue
        if field.name == "bases" and sentences:  # A and B follow from all the other fields
            continue
        if field.name in FINGERPRINTS:
            sentences.append(f"{FINGERPRINTS[field.name]} here than on the cloud")
        else:
            option = OPTIONS.get(field.name, field.name)
            sentences.append(f"{option} {_shown(here)} here, {_shown(there)} on the cloud")
    return "; ".join(dict.fromkeys(sentences))  # one rank is two fields


def _shown(value) -> str:
    """A field's value; of a list, which a stranger may have made endless, the beginning."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return repr(value)
    return repr(list(value[:50]))
