"""Metrics for Prometheus, under the names that vLLM uses; no account's or adapter's name is among them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

SECONDS = [0.001 * 2**k for k in range(18)]
LABELS = {"lora_adapter_loaded": ("level", "rank")}


class Metrics:
    """Counters and histograms of requests, and gauges of replicas."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._gauges: Sequence[Mapping[tuple[str, ...], float]] = ()
        self._registry.register(self)
        made: dict[str, Any] = {"registry": self._registry}
        self.first_s = Histogram("vllm:time_to_first_token_seconds", "From the request.", buckets=SECONDS, **made)
        self.between_s = Histogram("vllm:inter_token_latency_seconds", "Between tokens.", buckets=SECONDS, **made)
        self.prompt = Counter("vllm:prompt_tokens", "Tokens of prompts.", **made)
        self.written = Counter("vllm:generation_tokens", "Tokens written.", **made)
        self.success = Counter("vllm:request_success", "Requests that were answered.", ["finished_reason"], **made)

    def text(self, gauges: Sequence[Mapping[tuple[str, ...], float]]) -> bytes:
        """In Prometheus's format; ``gauges`` are each replica's, by name and the values of :data:`LABELS`."""
        self._gauges = gauges
        return generate_latest(self._registry)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges, for the registry."""
        families: dict[str, GaugeMetricFamily] = {}
        for engine, values in enumerate(self._gauges):
            for (name, *labels), value in values.items():
                if name not in families:
                    label_names = ("engine", *LABELS.get(name, ()))
                    families[name] = GaugeMetricFamily(f"vllm:{name}", "As it is now.", labels=label_names)
                families[name].add_metric([str(engine), *labels], value)
        return iter(families.values())
