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
from plpkg.communication import Traffic
from plpkg.communication.formulas import projection_dims, ranks
from plpkg.communication.run import RunSettings
from plpkg.validation import flag, number, one_of, whole_number

METHODS = ("low_rank", "ladder")
"""``low_rank``: every layer exchanges residuals with the device. ``ladder``: the device adds one, at the end."""


@dataclass(frozen=True, init=False)
class Split:
    """The arrangement whose speed is estimated.

    Attributes
    ----------
    model, link, device, cloud
        Objects of :mod:`plpkg.catalog`, given as such or by their names.
    rank, r_c2d, r_d2c, projections, adapted_layers
        As in :func:`plpkg.communication.low_rank`; ``rank`` fills ``r_c2d`` and ``r_d2c``. A ladder's
        layers send ``r_c2d`` numbers and get none (``r_d2c`` is 0), whatever ``projections`` says.
    rtt_s
        Round-trip time in seconds; ``None`` takes the link's own (0 for ``"5g-published"``).
    bits, phone_bits, cloud_bits, cache_bits
        Bits of a transmitted value, of a weight on the phone, of a weight on the cloud, of a value in its KV cache.
    method
        One of :data:`~plpkg.throughput.METHODS`.
    width
        Hidden units of the gated layer beside the matrix of a ladder's M; ``None`` is a matrix alone.
    late, folded
        As in :func:`plpkg.communication.low_rank`; folded adapters are of ``down_proj``, the last B is on the phone.

    Raises
    ------
    ValueError
        A value is out of range, a name unknown, or the model an encoder. Or the model has experts in place of the one
        ``down_proj`` a layer that a ladder and a folded adapter need.
    """

    model: ModelShape
    rank: int
    link: Link
    rtt_s: float
    r_c2d: int
    r_d2c: int
    device: Device
    cloud: Device
    bits: int
    phone_bits: int
    cloud_bits: int
    cache_bits: int
    projections: int
    adapted_layers: int
    method: str
    width: int | None
    late: bool
    folded: bool

    def __init__(
        self,
        model: str | ModelShape,
        rank: int = 64,
        link: str | Link = "5g-published",
        rtt_s: float | None = None,
        r_c2d: int | None = None,
        r_d2c: int | None = None,
        device: str | Device = "iphone-13-pro-max",
        cloud: str | Device = "a100-80gb-pcie",
        bits: int = 16,
        phone_bits: int = 16,
        cloud_bits: int = 16,
        cache_bits: int = 16,
        projections: int = 3,
        adapted_layers: int | None = None,
        method: str = "low_rank",
        width: int | None = None,
        late: bool = False,
        folded: bool = False,
    ) -> None:
        def settle(**fields) -> None:
            for name, value in fields.items():
                object.__setattr__(self, name, value)

        model = find_model(model)
        link = find_link(link)
        if model.encoder:
            raise ValueError(f"{model.name} is an encoder: it does not generate")
        settle(model=model, rank=rank, link=link, device=find_device(device), cloud=find_device(cloud))
        settle(rtt_s=link.rtt_s if rtt_s is None else number("rtt_s", rtt_s))
        settle(late=flag("late", late), folded=flag("folded", folded))
        settle(width=None if width is None else whole_number("width", width, 1))
        ladder = one_of("method", method, METHODS) == "ladder"
        settle(method=method)
        of_other_method = dict(r_d2c=r_d2c, late=late, folded=folded) if ladder else dict(width=width)
        for name, value in of_other_method.items():
            if value not in (None, 0):  # False is 0, too
                raise ValueError(f"{name}={value!r} is not for method={method!r}")
        if (ladder or folded) and model.expert_parameters:
            raise ValueError(f"{model.name} has experts, not one down_proj a layer: no ladder, and nothing folded")
        r_c2d, r_d2c = ranks(model, rank, r_c2d, None if ladder else r_d2c)
        settle(r_c2d=r_c2d, r_d2c=0 if ladder else r_d2c)
        widths = dict(bits=bits, phone_bits=phone_bits, cloud_bits=cloud_bits, cache_bits=cache_bits)
        settle(**{name: whole_number(name, value, 1, 64) for name, value in widths.items()})
        projection_dims(model, projections)
        settle(projections=projections)
        settle(adapted_layers=communication.Run(model, adapted_layers=adapted_layers).crossing_layers)
        self.traffic()  # refuses what cannot be folded

    @property
    def m_parameters(self) -> int:
        """Weights of the phone's part of the adapter: all Ms, and the B of a folded layer."""
        if self.method == "ladder":
            inputs = self.adapted_layers * self.r_c2d
            hidden = self.model.hidden
            gated = (self.width or 0) * (2 * (inputs + 1) + hidden)  # up and gate with their biases, and down
            return inputs * hidden + gated
        ms = self.adapted_layers * self.projections * self.r_c2d * self.r_d2c
        return ms + self._b_parameters if self.folded else ms

    @property
    def a_and_b_parameters(self) -> int:
        """Weights of all As and Bs, on the cloud."""
        on_down_proj = self.folded or self.method == "ladder"
        inputs = self.model.intermediate if on_down_proj else self.projections * self.model.hidden
        layers_with_b = self.adapted_layers - 1 if self.folded else self.adapted_layers  # a folded B is on the phone
        return self.adapted_layers * inputs * self.r_c2d + layers_with_b * self._b_parameters

    @property
    def _b_parameters(self) -> int:
        """Weights of one layer's Bs."""
        outputs = self.model.hidden if self.folded else sum(projection_dims(self.model, self.projections))
        return outputs * self.r_d2c

    def traffic(self, seq: int = 1, batch: int = 1, logits: str = "all") -> Traffic:
        """The traffic of one pass over ``batch · seq`` positions.

        ``logits`` says which positions meet the LM head: ``"all"``, or the ``"last"`` of each sequence.
        """
        run = RunSettings(
            phase="prefill", tokens=seq, batch=batch, final_hidden=logits, adapted_layers=self.adapted_layers
        )
        if self.method == "ladder":
            return communication.ladder(self.model, self.r_c2d, self.bits, **run)
        return communication.low_rank(
            self.model, self.rank, self.projections, True, self.bits,
            r_c2d=self.r_c2d, r_d2c=self.r_d2c, late=self.late, folded=self.folded, **run,
        )  # fmt: skip

    def pass_seconds(self, seq: int, batch: int, logits: str, context: int = 0) -> dict[str, float]:
        """Seconds of one pass by term (:data:`~plpkg.throughput.TERMS`); arguments as in :meth:`traffic`.

        Each sequence has ``context`` positions in the cloud's KV cache.
        """
        model = self.model
        link = self.link
        positions = batch * seq
        head_positions = positions if logits == "all" else batch
        m_positions = head_positions if self.method == "ladder" else positions
        sent = self.traffic(seq, batch, logits)
        # The end points: the word embedding goes up, the final hidden state comes down.
        end_up_bits = positions * model.hidden * self.bits
        end_down_bits = head_positions * model.hidden * self.bits
        return {
            "decoder": self._cloud_s(model.decoder_parameters, positions),
            "lm_head": roofline_s(model.embedding_parameters, head_positions, self.device, self.phone_bits),
            "m": roofline_s(self.m_parameters, m_positions, self.device, self.phone_bits),
            "a_and_b": roofline_s(self.a_and_b_parameters, positions, self.cloud, self.cloud_bits),
            "endpoints": end_up_bits / link.uplink_bits_per_s + end_down_bits / link.downlink_bits_per_s,
            "uplink": (sent.uplink_bits - end_up_bits) / link.uplink_bits_per_s,
            "downlink": (sent.downlink_bits - end_down_bits) / link.downlink_bits_per_s,
            "round_trips": sent.round_trips * self.rtt_s,
            "kv_cache": self.cache_s(context, positions, batch),
        }

    def cache_bytes(self, context: int, batch: int = 1) -> float:
        """Bytes of the keys and values that each sequence's layers hold after ``context`` positions."""
        return 2 * self.model.kv_dim * self.model.cached_positions(context) * batch * self.cache_bits / 8

    def cache_s(self, context: int, positions: int = 1, batch: int = 1) -> float:
        """Seconds of the cloud for one pass over the cache: reading it once, or computing with it, the longer.

        Each of ``positions`` queries is multiplied with each key and weighs each value: four operations a number.
        """
        operations = 4 * self.model.query_dim * self.model.cached_positions(context) * positions
        read_s = self.cache_bytes(context, batch) / self.cloud.memory_bandwidth_bytes_per_s
        return max(read_s, operations / self.cloud.flops_per_s)

    def gpu_tokens_per_s(self, gpu: str | float | None, positions: int = 1) -> tuple[float, str]:
        """The whole model's tokens per second on the cloud alone, and the origin of that figure.

        ``gpu`` as in :func:`~plpkg.throughput.decode`; ``positions`` count for the roofline only.
        """
        model = self.model
        cloud = self.cloud
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
        return positions / self._cloud_s(model.computing_parameters, positions), "roofline"

    def _cloud_s(self, parameters: int, positions: int) -> float:
        """Seconds of the cloud for ``parameters`` weights, all experts included.

        Each position computes with the experts that it chooses; those that any position chose are read once.
        """
        active = parameters - self.model.unread_parameters(1)
        read = parameters - self.model.unread_parameters(positions)
        return roofline_s(active, positions, self.cloud, self.cloud_bits, read)

    def unfit(self, cache_bytes: float = 0.0) -> tuple[str, ...]:
        """A sentence for each side whose memory does not hold its part.

        The cloud holds the layers, As and Bs and the cache; the phone holds the word embedding, the LM head and the Ms.
        """
        model = self.model
        tables = 1 if model.tied_embeddings else 2
        on_cloud = (model.decoder_parameters + self.a_and_b_parameters) * self.cloud_bits / 8 + cache_bytes
        on_phone = (tables * model.embedding_parameters + self.m_parameters) * self.phone_bits / 8
        return (*does_not_fit(on_cloud, self.cloud), *does_not_fit(on_phone, self.device))


def roofline_s(parameters: float, positions: int, device: Device, bits: int, read: float | None = None) -> float:
    """Seconds to multiply ``parameters`` weights with ``positions`` positions: reading or arithmetic, the longer.

    ``read`` weights are read once for all positions; ``None`` means ``parameters``.
    """
    if read is None:
        read = parameters
    read_s = read * bits / 8 / device.memory_bandwidth_bytes_per_s
    compute_s = 2 * parameters * positions / device.flops_per_s
    return max(read_s, compute_s)


def does_not_fit(num_bytes: float, device: Device) -> tuple[str, ...]:
    """A sentence if ``num_bytes`` are more than the device's memory, else none."""
    if num_bytes <= device.memory_bytes:
        return ()
    return (f"{num_bytes / 1e9:.3g} GB do not fit the {device.memory_bytes / 1e9:g} GB of {device.name}",)
