"""The two processes: bytes beside the formula, speed beside one process, a limited link beside its estimate.

* bytes: what the TCP stream carries for each byte of payload, counted by a relay, with LLaMA-7B's hidden size, number
  of layers and ranks (its other dimensions are cut down: they never cross) and with plpkg-small.
* round trip: a message there and back on loopback (``round_trips.py``): a bare socket, gRPC, this package's messages.
* speed: tokens per second of the split model beside the same model in one process, interleaved.
  Also with a cloud that computes q, k and v only after the answer has come, to see what the overlap is worth.
* link: the time that a token spends on a limited link beside Traffic.seconds, for low ranks and full activations; and
  as said by the link itself, which knows how long messages were under way. Without a delay that is less than what
  tokens differ among themselves: there also for many sequences at once, with a model that computes next to nothing.
* namespaces: the same between two network namespaces whose ends `tc tbf` limits (as root, else left out), over TLS.

Run: ``python -m benchmarks.residual.wire`` (about 20 minutes on two idle cores; each process computes with one thread).
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from transformers import DynamicCache

from benchmarks import record
from benchmarks.residual import round_trips
from benchmarks.residual.processes import MANY, build, client, cloud
from benchmarks.serving.relay import UNLIMITED, Relay
from plpkg import communication
from plpkg.catalog import Link, ModelShape
from plpkg.decoding import cache_argument
from plpkg.residual import DeviceClient

PROMPT = 16
HOSTS = ("10.213.0.1", "10.213.0.2")


def prompt(model, batch: int = 1, seq: int = PROMPT) -> torch.Tensor:
    vocab = model.get_base_model().config.vocab_size
    return torch.randint(1, vocab, (batch, seq), generator=torch.Generator().manual_seed(0))


def rows_of_bytes(name: str, rank: int, tls: str | None) -> list[dict]:
    """TCP-stream bytes over payload bytes, both ways together."""
    model = build(name, rank)
    shape = ModelShape.from_config(model.get_base_model().config, name)
    with (
        cloud(name, rank, tls) as address,
        Relay(address) as relay,
        client(relay.address, model, tls, None) as device,
    ):

        def mark():
            time.sleep(0.02)  # let the relay see what is still on its way
            return relay.uplink_bytes + relay.downlink_bytes, device.traffic

        def ratio(before, after, formula, what):
            payload = after[1].sent_bytes + after[1].received_bytes - before[1].sent_bytes - before[1].received_bytes
            if 8 * payload != formula.total_bits:
                raise AssertionError(f"{payload} payload bytes, the formula says {formula.total_bits / 8}")
            return row(what, payload, after[0] - before[0])

        def row(what, payload, tcp):
            case = f"{name}, r={rank}, {'TLS' if tls else 'plain'}"
            return {"section": "bytes", "case": case, "what": what, "payload_bytes": payload, "tcp_bytes": tcp,
                    "ratio": round(tcp / payload, 4)}  # fmt: skip

        # One adapter message each way: between two answers in the middle of a pass.
        original, seen = device.part.residual, []

        def counted(group, u, **options):
            time.sleep(0.002)
            seen.append((group, relay.uplink_bytes + relay.downlink_bytes))
            return original(group, u, **options)

        device.generate(prompt(model), 2, eos_token_id=-1)
        device.part.residual = counted
        device.generate(prompt(model), 12, eos_token_id=-1)
        device.part.residual = original
        layers = shape.num_layers
        pairs = [(a, b) for a, b in zip(seen[layers:], seen[layers + 1 :], strict=False) if b[0] == a[0] + 1]
        message = 3 * rank * 2
        rows = [row("adapter message", 2 * message * len(pairs), sum(b[1] - a[1] for a, b in pairs))]

        marks = []
        device.generate(prompt(model), 21, eos_token_id=-1, on_token=lambda _: marks.append(mark()))
        decoded = communication.low_rank(shape, rank, tokens=20)
        rows.append(ratio(marks[0], marks[-1], decoded, "decoded token"))
        before = mark()
        device.generate(prompt(model, seq=256), 1, eos_token_id=-1)
        prefill = communication.low_rank(shape, rank, phase="prefill", tokens=256)
        rows.append(ratio(before, mark(), prefill, "prefill of 256 tokens"))
        return rows


def token_seconds(device: DeviceClient, ids: torch.Tensor, count: int) -> list[float]:
    times = []
    device.generate(ids, count + 1, eos_token_id=-1, on_token=lambda _: times.append(time.perf_counter()))
    return [b - a for a, b in itertools.pairwise(times)]


@torch.no_grad()
def one_process(model, ids: torch.Tensor, count: int) -> list[float]:
    cache, times, step = DynamicCache(config=model.config), [], ids
    for _ in range(count + 1):
        logits = model(input_ids=step, **cache_argument(cache), use_cache=True, logits_to_keep=1).logits
        step = logits[:, -1:].argmax(-1)
        times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


def rows_of_speed(tls: str, runs: int = 7, count: int = 20) -> list[dict]:
    name, rank = "12 x 768", 64
    model = build(name, rank)
    ids = prompt(model)
    with (
        cloud(name, rank) as plain,
        cloud(name, rank, tls) as secure,
        cloud(name, rank, overlap=False) as waiting,
        client(plain, model, None, None) as device,
        client(waiting, model, None, None) as serial,
        client(secure, model, tls, None) as encrypted,
    ):
        measures = {
            "one process": lambda: one_process(model, ids, count),
            "split": lambda: token_seconds(device, ids, count),
            "split, q, k, v after the answer": lambda: token_seconds(serial, ids, count),
            "split, TLS": lambda: token_seconds(encrypted, ids, count),
        }
        speeds: dict[str, list[float]] = {what: [] for what in measures}
        for _, (what, measure) in itertools.product(range(runs + 1), measures.items()):
            speeds[what].append(1 / statistics.median(measure()))
    medians = {what: statistics.median(values[1:]) for what, values in speeds.items()}  # the first warms up
    return [
        {"section": "speed", "case": f"{name}, r={rank}, fp32", "what": what,
         "tokens_per_s": round(median, 2), "ratio": round(median / medians["one process"], 3)}
        for what, median in medians.items()
    ]  # fmt: skip


LINKS = {1: {0: 1, 5: 1, 20: 3}, MANY: {0: 4}}
"""By sequences at once and RTT in milliseconds: in every how many rounds tokens are timed there."""


def held_s(device: DeviceClient) -> float:
    """How long its messages were under way."""
    return sum(lane.held_s for lane in device.wire.lanes)


class OnLinks:
    """A token's time over limited links beside its time over one without limits.

    Rank 0 is full activations. Each block of tokens on a limited link is compared with the block without limits a few
    seconds before: the machine's speed drifts.
    """

    def __init__(self, stack: contextlib.ExitStack, rank: int, batch: int):
        idle = "12 x 768, thinnest" if rank else "12 x 768, thin"  # full activations are as wide as q, k and v
        name = "12 x 768" if batch == 1 else idle
        self.rank, self.batch = rank, batch
        self.count, seq = (10, PROMPT) if batch == 1 else (3, 1)
        model = build(name, rank)
        self.ids = prompt(model, batch, seq)
        shape = ModelShape.from_config(model.get_base_model().config, name)
        if rank:
            self.traffic = communication.low_rank(shape, rank)
        else:
            self.traffic = communication.full_activations(shape, 3, endpoints=True, baseline="actual")
        address = stack.enter_context(cloud(name, rank))
        self.free = stack.enter_context(client(address, model, None, UNLIMITED))
        self.links = {ms: Link(f"60/100 Mb/s, RTT {ms} ms", 60e6, 100e6, ms / 1e3) for ms in LINKS[batch]}
        self.limited = {ms: stack.enter_context(client(address, model, None, link)) for ms, link in self.links.items()}
        self.measured: dict[int, list[dict]] = {rtt_ms: [] for rtt_ms in self.limited}
        for device in (self.free, *self.limited.values()):
            device.generate(self.ids, 2, eos_token_id=-1)  # warm up

    def block(self, device: DeviceClient) -> tuple[float, float]:
        """Seconds of a sequence's token: in all (median), and of these on the link (mean)."""
        start = held_s(device)
        device.generate(self.ids, 1, eos_token_id=-1)  # what the block begins with, by itself
        first = held_s(device) - start
        seconds = statistics.median(token_seconds(device, self.ids, self.count))
        return seconds / self.batch, (held_s(device) - start - 2 * first) / self.count

    def measure(self, turn: int) -> None:
        due = [rtt_ms for rtt_ms, every in LINKS[self.batch].items() if turn % every == 0]
        if not due:
            return
        fast, unheld = self.block(self.free)
        for rtt_ms in due:
            slow, held = self.block(self.limited[rtt_ms])
            self.measured[rtt_ms].append({"token": slow, "beyond": slow - fast, "held": held - unheld})

    def rows(self) -> list[dict]:
        return [self.row(rtt_ms) for rtt_ms in self.measured]

    def row(self, rtt_ms: int) -> dict:
        blocks = self.measured[rtt_ms]
        link = self.links[rtt_ms]
        expected = sum(self.traffic.seconds(link).values())
        token, beyond, held = (statistics.median(block[key] for block in blocks) for key in ("token", "beyond", "held"))
        low, _, high = statistics.quantiles([block["beyond"] / expected for block in blocks], n=4, method="inclusive")
        row = {
            "section": "link", "case": link.name, "what": f"r={self.rank}" if self.rank else "full activations",
            "batch": self.batch, "blocks": len(blocks), "ms_per_token": round(1e3 * beyond, 2),
            "formula_ms": round(1e3 * expected, 2), "ratio": round(beyond / expected, 3), "ratio_q1": round(low, 3),
            "ratio_q3": round(high, 3), "tokens_per_s": round(1 / token, 2),
        }  # fmt: skip
        return row | {"held_ms": round(1e3 * held, 2), "held_ratio": round(held / expected, 3)}


def rows_of_links(rounds: int = 24) -> list[dict]:
    """All links take turns, so that each sees all that the machine does in the meantime."""
    with contextlib.ExitStack() as stack:
        links = [OnLinks(stack, *at) for at in itertools.product((16, 64, 0), LINKS)]
        for turn, link in itertools.product(range(rounds), links):
            link.measure(turn)
        return [row for link in links for row in link.rows()]


def rows_of_namespaces(tls: str, count: int = 20) -> list[dict]:
    """Two network namespaces, each end limited by ``tc tbf``: the kernel's own queue and TCP.

    For :data:`MANY` sequences at once.
    """

    def ip(*arguments: str) -> None:
        subprocess.run(arguments, check=True)

    name, rows, spaces = "12 x 768, thinnest", [], ("plpkg-device", "plpkg-cloud")
    try:
        for space in spaces:
            ip("ip", "netns", "add", space)
        ends = ["plpkg0", "netns", spaces[0], "type", "veth", "peer", "name", "plpkg1", "netns", spaces[1]]
        ip("ip", "link", "add", *ends)
        for i, space in enumerate(spaces):
            ip("ip", "-n", space, "address", "add", f"{HOSTS[i]}/30", "dev", f"plpkg{i}")
            ip("ip", "-n", space, "link", "set", f"plpkg{i}", "up")
        for rank in (16, 64):
            run = ["ip", "netns", "exec"]
            shape = ModelShape.from_config(build(name, rank).get_base_model().config, name)
            address = f"{HOSTS[1]}:7070"
            times = {False: [], True: []}
            with cloud(name, rank, tls, prefix=[*run, spaces[1]], address=address):
                for limited in 3 * (False, True):
                    for i, rate in enumerate(("60mbit", "100mbit") if limited else ()):
                        limit = ["tbf", "rate", rate, "burst", "1600", "latency", "200ms"]
                        ip("tc", "-n", spaces[i], "qdisc", "add", "dev", f"plpkg{i}", "root", *limit)
                    task = json.dumps({"name": name, "rank": rank, "tls": tls, "address": address, "count": count})
                    command = [*run, spaces[0], sys.executable, "-m", "benchmarks.residual.wire", "--device", task]
                    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                    times[limited] += json.loads(printed)
                    for i, space in enumerate(spaces if limited else ()):
                        ip("tc", "-n", space, "qdisc", "del", "dev", f"plpkg{i}", "root")
            expected = sum(communication.low_rank(shape, rank).seconds(Link("tbf", 60e6, 100e6, 0.0)).values())
            slow = statistics.median(times[True])
            spent = slow - statistics.median(times[False])
            rows.append(
                {"section": "namespaces", "case": "60/100 Mb/s by tc tbf, TLS", "what": f"r={rank}",
                 "batch": MANY, "ms_per_token": round(1e3 * spent, 2),
                 "formula_ms": round(1e3 * expected, 2), "ratio": round(spent / expected, 3),
                 "tokens_per_s": round(1 / slow, 2)}
            )  # fmt: skip
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], stderr=subprocess.DEVNULL)
    return rows


def visit(name: str, rank: int, tls: str, address: str, count: int) -> None:
    """The device of :func:`rows_of_namespaces`: prints the seconds of each token."""
    model = build(name, rank)
    ids = prompt(model, MANY, 1)
    with client(address, model, tls, None) as device:
        token_seconds(device, ids, 3)
        print(json.dumps([seconds / MANY for seconds in token_seconds(device, ids, count)]))


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tls = f"{folder}/tls"
        os.mkdir(tls)
        names = f"subjectAltName=IP:127.0.0.1,IP:{HOSTS[1]}"
        line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=cloud".split()  # noqa: SIM905 (a list would be twelve lines)
        line += ["-addext", names, "-keyout", f"{tls}/key.pem", "-out", f"{tls}/cert.pem"]
        subprocess.run(line, check=True, capture_output=True)
        rows = round_trips.rows() + rows_of_speed(tls)
        for name in ("LLaMA-7B sizes", "plpkg-small"):
            for encrypted in (None, tls):
                rows += rows_of_bytes(name, 64, encrypted)
        rows += rows_of_links()
        if os.geteuid() == 0 and shutil.which("tc"):
            rows += rows_of_namespaces(tls)
    record.write("residual.wire", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device:
        visit(**json.loads(arguments.device))
    else:
        main()
