"""How fast smollm2 reads and writes on one thread, in which precision, and whether it still writes the same.

``speed``: a prompt of 230 tokens and 64 tokens after it, every way once a round, medians of five rounds. ``texts``: on
how many of 50 questions about notes the greedy text, of up to 24 tokens, is float32's. ``speed`` needs an idle machine,
``texts`` does not. A way that does not work here says why.

torch's own kernels for packed weights have no public name. They take bfloat16; in float32 they fall back to loops that
need half a minute for such a prompt. torchao's are those that the installed wheel has, without torch.compile.

Run: ``python -m benchmarks.backbones.speed`` (about 5 minutes for ``speed``, 20 for ``texts``), with torchao 0.18
installed. It makes a temporary environment for llama.cpp and downloads its file; ``--python`` and ``--gguf`` name them
where they are there, ``--rounds`` and ``--questions`` make it shorter. Not part of ``make bench``.
"""

import argparse
import copy
import io
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version

import torch

from benchmarks import record
from benchmarks.backbones import hands
from benchmarks.backbones.llama_server import LONGEST, LlamaCpp, asked, llama_cpp, parse, without_end
from plpkg.backbones import load_backbone

PROMPT_TOKENS = 230
WRITTEN_TOKENS = 64
GROUP = 32
"""Weights that share a scale in 4 bits, as many as in a block of the GGUF file."""


class Int8(torch.nn.Module):
    """A linear layer whose weights are 8-bit integers, with one scale for each output."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.float()
        scale = (weight.abs().amax(1) / 127).clamp(min=1e-8)  # not 0 where all weights are
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(linear.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        return torch._weight_int8pack_mm(rows, self.weight, self.scale).unflatten(0, x.shape[:-1])


class Int4(torch.nn.Module):
    """A linear layer whose weights are 4-bit integers: :data:`GROUP` of them share a scale and a middle.

    The least and the greatest weight of a group become 0 and 15. So did Q4_1 choose its blocks, and what was unpacked
    from it goes back into the same integers.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        groups = linear.weight.float().unflatten(1, (-1, GROUP))  # (outputs, groups, GROUP)
        least = groups.amin(2)
        scale = ((groups.amax(2) - least) / 15).clamp(min=1e-8)  # not 0 where all weights are the same
        whole = ((groups - least[..., None]) / scale[..., None]).round().int().flatten(1)
        middle = least + 8 * scale  # the kernel computes (integer - 8) * scale + middle
        inner_tiles = 1  # a number that the CPU's kernel takes and does not use
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, inner_tiles))
        both = torch.stack([scale, middle], 2).transpose(0, 1)  # (groups, outputs, 2)
        self.register_buffer("scale_and_middle", both.contiguous().to(linear.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        made = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, GROUP, self.scale_and_middle)
        return made.unflatten(0, x.shape[:-1])


Make = Callable[[torch.nn.Module], torch.nn.Module]
"""Makes a model out of smollm2 in float32; the one it is given stays as it is."""


def in_dtype(model, dtype: torch.dtype):
    return copy.deepcopy(model).to(dtype)


def packed(model, kind: type[torch.nn.Module], *, but_the_head: bool = False):
    """The model in bfloat16, its linear layers packed. The head shares its weights with the embedding if it is not."""
    model = in_dtype(model, torch.bfloat16)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and not (but_the_head and name == "lm_head"):
                setattr(module, name, kind(child))
    return model


def dynamic(model, *, per_channel: bool):
    """Activations and weights are 8-bit integers, by torch's older quantization."""
    quantization = torch.ao.quantization
    setting = quantization.per_channel_dynamic_qconfig if per_channel else quantization.default_dynamic_qconfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces that it will be removed
        return quantization.quantize_dynamic(copy.deepcopy(model), {torch.nn.Linear: setting})


def by_torchao(model, dtype: torch.dtype, name: str, module: str = "torchao.quantization", **settings):
    """The model after torchao's ``quantize_`` with a configuration of that name."""
    from torchao.quantization import quantize_

    configuration = getattr(import_module(module), name)(**settings)
    model = in_dtype(model, dtype)
    quantize_(model, configuration)
    return model


def torchao_version() -> str:
    return f"torchao {version('torchao')}"


PROTOTYPE = "torchao.prototype.quantization.int4"
INT8 = "Int8WeightOnlyConfig"
INT8_BOTH = "Int8DynamicActivationInt8WeightConfig"
WAYS: dict[str, Make] = {
    "float32": partial(in_dtype, dtype=torch.float32),
    "bfloat16": partial(in_dtype, dtype=torch.bfloat16),
    "quantize_dynamic, int8": partial(dynamic, per_channel=False),
    "quantize_dynamic, int8 by channel": partial(dynamic, per_channel=True),
    "torchao, int8 weights": partial(by_torchao, dtype=torch.bfloat16, name=INT8),
    "torchao, int8 weights and activations": partial(by_torchao, dtype=torch.bfloat16, name=INT8_BOTH),
    "torchao, int8 weights and activations, float32": partial(by_torchao, dtype=torch.float32, name=INT8_BOTH),
    "torchao, int4 weights": partial(by_torchao, dtype=torch.bfloat16, name="Int4WeightOnlyConfig", group_size=GROUP),
    "torchao, int4 weights, prototype": partial(
        by_torchao, dtype=torch.bfloat16, name="PrototypeInt4WeightOnlyConfig", module=PROTOTYPE, group_size=GROUP
    ),
    "torchao, int4 weights and int8 activations, prototype": partial(
        by_torchao,
        dtype=torch.bfloat16,
        name="Int8DynamicActivationInt4WeightConfig",
        module=PROTOTYPE,
        group_size=GROUP,
    ),
    "_weight_int8pack_mm": partial(packed, kind=Int8),
    "_weight_int4pack_mm_for_cpu": partial(packed, kind=Int4),
    "_weight_int4pack_mm_for_cpu, but the head": partial(packed, kind=Int4, but_the_head=True),
}


class Clock:
    """Notes when ``generate`` takes the prompt, and when it has written each token: a streamer."""

    def __init__(self) -> None:
        self.times = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generated(model, ids: list[int], **options) -> list[int]:
    """What is written greedily after ``ids``."""
    given = torch.tensor([ids])
    with torch.inference_mode():
        made = model.generate(
            input_ids=given, attention_mask=torch.ones_like(given), do_sample=False, pad_token_id=0, **options
        )
    return made[0, len(ids) :].tolist()


def timed(model, ids: list[int], count: int = WRITTEN_TOKENS) -> tuple[float, float]:
    """Seconds until the first token is written, and tokens a second from then on."""
    clock = Clock()
    generated(model, ids, max_new_tokens=count, min_new_tokens=count, streamer=clock)
    begun, first, *_, last = clock.times
    return first - begun, (count - 1) / (last - first)


def timed_by_llama(llama: LlamaCpp, ids: list[int], count: int = WRITTEN_TOKENS) -> tuple[float, float]:
    """The same of llama.cpp, by its own clock, which also begins to count tokens after the first."""
    timings = llama.written(ids, count, ends=False)["timings"]
    if timings["prompt_n"] != len(ids) or timings["predicted_n"] != count:
        raise RuntimeError(f"llama.cpp was to read {len(ids)} and write {count} tokens: {timings}")
    return timings["prompt_ms"] / 1e3, (count - 1) / (timings["predicted_ms"] / 1e3)


def megabytes(model) -> float:
    """Of a model's file; weights that two layers share count once."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell() / 1e6


def working(model) -> Iterator[tuple[str, torch.nn.Module | str]]:
    """Each way with its model, one after the other, or with the reason why it does not work here."""
    for way, make in WAYS.items():
        try:
            made = make(model)
            generated(made, [1, 2, 3], max_new_tokens=2)
        except Exception as error:  # each library has its own
            made = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        yield way, made


def speed(model, tokenizer, llama: LlamaCpp, rounds: int) -> Iterator[dict]:
    notes = "\n\n".join(hands.collections("hand1")[0].notes)
    ids = tokenizer(notes)["input_ids"][:PROMPT_TOKENS]
    models, reasons = {}, {}
    for way, made in working(model):
        (reasons if isinstance(made, str) else models)[way] = made
    ways = {"llama.cpp": partial(timed_by_llama, llama, ids)}
    ways |= {way: partial(timed, made, ids) for way, made in models.items()}
    measured = {way: [] for way in ways}
    for number in range(1 + rounds):
        for way, measure in ways.items():
            pair = measure()
            if number:  # the first round warms up
                measured[way].append(pair)
                print(f"round {number}, {way}: {pair[0]:.2f} s, {pair[1]:.1f} tokens/s", flush=True)
    sizes = {"llama.cpp": llama.megabytes} | {way: megabytes(made) for way, made in models.items()}
    remarks = {"llama.cpp": llama.about} | {way: torchao_version() for way in models if "torchao" in way}
    for way, pairs in measured.items():
        seconds, rates = zip(*pairs, strict=True)
        yield {
            "way": way,
            "prompt_s": round(statistics.median(seconds), 3),
            "tokens_per_s": round(statistics.median(rates), 2),
            "slowest": round(min(rates), 2),
            "fastest": round(max(rates), 2),
            "megabytes": round(sizes[way], 1),
            "rounds": rounds,
            "remark": remarks.get(way, ""),
        }
    for way, reason in reasons.items():
        yield {"way": way, "remark": reason}


def texts(model, tokenizer, llama: LlamaCpp, count: int) -> Iterator[dict]:
    prompts = [each.ids for each in asked(tokenizer, count)]
    expected = [without_end(generated(model, ids, max_new_tokens=LONGEST)) for ids in prompts]

    def row(way: str, written: list[list[int]]) -> dict:
        same = sum(without_end(one) == other for one, other in zip(written, expected, strict=True))
        return {"way": way, "texts": count, "same": same}

    yield row("llama.cpp", [llama.written(ids, LONGEST)["tokens"] for ids in prompts])
    for way, made in working(model):
        if not isinstance(made, str):
            yield row(way, [generated(made, ids, max_new_tokens=LONGEST) for ids in prompts])


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=50)
    options = parse(parser)
    model, tokenizer = load_backbone("smollm2")
    with llama_cpp(options.python, options.gguf) as llama:
        sections = {
            "speed": partial(speed, model, tokenizer, llama, options.rounds),
            "texts": partial(texts, model, tokenizer, llama, options.questions),
        }
        record.sections("backbones.speed", sections, __doc__)
