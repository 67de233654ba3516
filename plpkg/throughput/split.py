"""One way of dividing a model between a phone and a cloud, and the time of one pass through it.

Every computing term is a roofline: the longer of reading the weights and doing the arithmetic.
"""

from dataclasses import dataclass

from plpkg import communication
from plpkg.catalog import (
    Device,
    Link,
    ModelShape,
    device as find_device,
    link as find_link,
    model as find_model,
    published_gpu_tokens_per_s,
)
from plpkg.communication.formulas import projection_dims, ranks
from plpkg.validation import number, one_of, whole_number


@dataclass(frozen=True)
class Split:
    """The arrangement whose speed is estimated.

    Attributes
    ----------
    model, link, device, cloud
        Objects of :mod:`plpkg.catalog`, or their names.
    rank, r_c2d, r_d2c, projections, adapted_layers
        As in :func:`plpkg.communication.low_rank`; ``rank`` fills ``r_c2d`` and ``r_d2c``.
    rtt_s
        Round-trip time in seconds; ``None`` takes the link's own (0 for ``"5g-published"``).
    bits, phone_bits, cloud_bits
        Bits of a transmitted value, of a weight on the phone, of a weight on the cloud.

    Raises
    ------
    ValueError
        A value is out of range, a name unknown, or the model an encoder.
    """

    model: str | ModelShape
    rank: int = 64
    link: str | Link = "5g-published"
    rtt_s: float | None = None
    r_c2d: int | None = None
    r_d2c: int | None = None
    device: str | Device = "iphone-13-pro-max"
    cloud: str | Device = "a100-80gb-pcie"
    bits: int = 16
    phone_bits: int = 16
    cloud_bits: int = 16
    projections: int = 3
    adapted_layers: int | None = None

    def __post_init__(self) -> None:
        def settle(**fields) -> None:
            for name, value in fields.items():
                object.__setattr__(self, name, value)

        settle(model=find_model(self.model), link=find_link(self.link))
        if self.model.encoder:
            raise ValueError(f"{self.model.name} is an encoder: it does not generate")
        settle(device=find_device(self.device), cloud=find_device(self.cloud))
        settle(rtt_s=self.link.rtt_s if self.rtt_s is None else number("rtt_s", self.rtt_s))
        r_c2d, r_d2c = ranks(self.model, self.rank, self.r_c2d, self.r_d2c)
        settle(r_c2d=r_c2d, r_d2c=r_d2c)
        settle(
            **{name: whole_number(name, getattr(self, name), 1, 64) for name in ("bits", "phone_bits", "cloud_bits")}
        )
        projection_dims(self.model, self.projections)
        settle(adapted_layers=communication.Run(self.model, adapted_layers=self.adapted_layers).crossing_layers)

    @property
    def m_parameters(self) -> int:
        """Weights of all Ms, on the phone."""
        return self.adapted_layers * self.projections * self.r_c2d * self.r_d2c

    @property
    def a_and_b_parameters(self) -> int:
        """Weights of all As and Bs, on the cloud."""
        a = self.projections * self.model.hidden * self.r_c2d
        b = sum(projection_dims(self.model, self.projections)) * self.r_d2c
        return self.adapted_layers * (a + b)

    def pass_seconds(self, seq: int, batch: int, logits: str) -> dict[str, float]:
        """Seconds of one pass over ``batch · seq`` positions, by term (:data:`~plpkg.throughput.TERMS`).

        ``logits`` says which positions meet the LM head: ``"all"``, or the ``"last"`` of each sequence.
        """
        model, positions = self.model, batch * seq
        head_positions = positions if logits == "all" else batch
        run = dict(bits=self.bits, phase="prefill", tokens=seq, batch=batch)
        residuals = communication.low_rank(
            model, self.rank, self.projections, False,
            r_c2d=self.r_c2d, r_d2c=self.r_d2c, adapted_layers=self.adapted_layers, **run,
        ).seconds(self.link, self.rtt_s)  # fmt: skip
        ends = communication.layer_cut(model, 0, final_hidden=logits, **run).seconds(self.link, self.rtt_s)
        return {
            "decoder": roofline_s(model.decoder_parameters, positions, self.cloud, self.cloud_bits),
            "lm_head": roofline_s(model.embedding_parameters, head_positions, self.device, self.phone_bits),
            "m": roofline_s(self.m_parameters, positions, self.device, self.phone_bits),
            "a_and_b": roofline_s(self.a_and_b_parameters, positions, self.cloud, self.cloud_bits),
            "endpoints": ends["uplink"] + ends["downlink"],
            "uplink": residuals["uplink"],
            "downlink": residuals["downlink"],
            "round_trips": residuals["round_trips"] + ends["round_trips"],
        }

    def gpu_tokens_per_s(self, gpu: str | float | None, positions: int = 1) -> tuple[float, str]:
        """The whole model's tokens per second on the cloud alone, and where that figure comes from.

        ``gpu`` as in :func:`~plpkg.throughput.decode`; ``positions`` count for the roofline only.
        """
        model, cloud = self.model, self.cloud
        if gpu is None or gpu == "published":
            speed = published_gpu_tokens_per_s(model, cloud)
            if speed is not None and self.cloud_bits == 16:
                return speed, "published"
            if gpu == "published":
                raise ValueError(
                    f"no published speed of {model.name} on {cloud.name} at {self.cloud_bits} bit; "
                    "give a number, or gpu='roofline'"
                )
        elif isinstance(gpu, str):
            one_of("gpu", gpu, ("published", "roofline"))
        else:
            return number("gpu", gpu, open_low=True), "given"
        return positions / roofline_s(model.computing_parameters, positions, cloud, self.cloud_bits), "roofline"


def roofline_s(parameters: int, positions: int, device: Device, bits: int) -> float:
    """Seconds to multiply ``parameters`` weights with ``positions`` positions: reading or arithmetic, the longer."""
    read_s = parameters * bits / 8 / device.memory_bandwidth_bytes_per_s
    return max(read_s, 2 * parameters * positions / device.flops_per_s)
