"""Files from strangers: regular files only, bounded reads, strict JSON, the tensors of a safetensors file.

A safetensors file is 8 bytes with the length N of its header (little-endian), N bytes of JSON, the tensors' bytes; the
header is read first, and a range of a remote file is enough for it. Stricter than safetensors 0.8, which lets through
other dtypes, any number of tensors, and tensors without elements. Every refusal is a ValueError with a sentence.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from plpkg.validation import shown

MAX_HEADER_BYTES, MAX_TENSORS, MAX_CONFIG_BYTES, MAX_BYTES = 2**20, 4096, 2**16, 2**31
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""What weights are made of."""
MAGIC = {b"\x80": "a pickle", b"PK\x03\x04": "a zip archive, as torch.save writes", b"version ": "a Git LFS pointer"}


def sentences(faults: dict[str, list[str]]) -> list[str]:
    """Reasons with the names that they hold for, as sentences: one for each reason, however many names it has."""
    short = {reason: ", ".join(map(shown, names[:3])) for reason, names in faults.items()}
    more = {reason: f" and {len(names) - 3} more" if len(names) > 3 else "" for reason, names in faults.items()}
    return [f"{short[reason]}{more[reason]}: {reason}" if short[reason] else reason for reason in faults]


def brief(reasons: list[str]) -> str:
    """Reasons as one sentence of about 300 characters at most: the first ones, and how many more there are."""
    shown, rest = reasons[0][:280], reasons[1:]
    while rest and len(shown) + len(rest[0]) < 280:
        shown += f"; {rest.pop(0)}"
    return f"{shown}; and {len(rest)} more" if rest else shown


def printable(text: str) -> str:
    """What others have written, without what a terminal would obey; lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.expandtabs(4))


def open_regular(path: Path):
    """Open a regular file, or a link to one, unbuffered. A fifo, a device or a folder is refused at once."""
    try:  # looked at before it is opened, since that alone can make a device do something
        if stat.S_ISREG(os.stat(path).st_mode):
            # What took its place since then must not make this wait, as a fifo without a writer would.
            # It is returned open, for the caller's with.
            file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file
            file.close()
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be opened: {error.strerror}"
        raise ValueError(f"{path.name} {reason}") from None
    raise ValueError(f"{path.name} is not a regular file")


def read_file(path: Path, limit: int) -> bytearray:
    """Read all of a file of at most ``limit`` bytes, unless it changes meanwhile."""
    with open_regular(path) as file:
        size, done = os.fstat(file.fileno()).st_size, 0
        if size > limit:
            raise ValueError(f"{path.name} has {size:,} bytes, at most {limit:,} are allowed")
        content = bytearray(size)
        while done < size and (count := file.readinto(memoryview(content)[done:])):
            done += count
        if done < size or file.read(1):
            raise ValueError(f"{path.name} changed while it was read")
    return content


def read_header(path: Path) -> tuple[bytes, int]:
    """Read the first 8 + N bytes of a safetensors file; with them comes the size of the whole file."""
    with open_regular(path) as file:
        start = file.read(8)
        return start + file.read(header_length(start)), os.fstat(file.fileno()).st_size


def header_length(start: bytes) -> int:
    """N, from a safetensors file's first 8 bytes."""
    length = int.from_bytes(start[:8], "little")
    if len(start) >= 8 and 2 <= length <= MAX_HEADER_BYTES:
        return length
    # The kind only explains: a valid length can begin with the same bytes.
    kind = next(
        (f" (they begin like {kind})" for magic, kind in MAGIC.items() if bytes(start[:8]).startswith(magic)), ""
    )
    what = f"give their header {length:,} bytes" if len(start) >= 8 else f"are {len(start)} bytes"
    raise ValueError(f"the weights {what}, and no header of 2 to {MAX_HEADER_BYTES:,}{kind}")


def strict_json(data: bytes) -> dict:
    """A JSON object in UTF-8, no name in it twice, its numbers finite and of at most 40 characters."""
    try:
        hooks = dict(parse_int=_number, parse_float=_number, parse_constant=_number)
        value = json.loads(bytes(data).decode(), object_pairs_hook=_unique, **hooks)
        require_characters(data, value)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"not an object, but {shown(value)}")
    return value


def require_characters(data: bytes, value: object) -> None:
    """Refuse JSON that escapes half of a character, which no file, terminal or tokenizer could take."""
    try:
        if b"\\ud" in data.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a string has half a character, {error.object[error.start]!a}") from None


def _unique(pairs: list[tuple]) -> dict:
    if len(result := dict(pairs)) == len(pairs):
        return result
    names = set()
    raise ValueError(f"{shown(next(name for name, _ in pairs if name in names or names.add(name)))} stands there twice")


def _number(text: str) -> int | float:
    if len(text) > 40 or not math.isfinite(float(text)):
        raise ValueError(f"{shown(text)} is not a finite number of at most 40 characters")
    return int(text) if text.lstrip("-").isdigit() else float(text)


class Entry(NamedTuple):
    """A tensor in a header; ``begin`` and ``end`` count bytes from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def entries(header: bytes, size: int) -> tuple[dict[str, Entry], list[str]]:
    """The tensors in the first 8 + N bytes of a safetensors file of ``size`` bytes, and why it is not a sound one.

    Without reasons, the tensors cover the rest of the file, each byte once; with some, they are those described.
    """
    try:
        body = size - 8 - header_length(header)
        if body < 0 or len(header) < size - body:
            raise ValueError(f"it ends after {min(size, len(header)):,} of {size - body:,} bytes")
        if header[8:9] != b"{":  # JSON would allow a space here, safetensors does not
            raise ValueError(f"it begins with {shown(bytes(header[8:9]))}, not with a brace")
        table = strict_json(header[8 : size - body])
        if (count := len(table) - ("__metadata__" in table)) > MAX_TENSORS:
            raise ValueError(f"it has {count:,} tensors, at most {MAX_TENSORS:,} are allowed")
    except ValueError as error:
        text = str(error)
        return {}, [text if text.startswith("the weights") else f"the header of the weights: {text}"]
    faults, sound, spans = {}, {}, []
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        faults[f"__metadata__ may only hold strings, got {shown(metadata)}"] = []
    for name, row in table.items():
        dtype, shape, span = map((row if isinstance(row, dict) else {}).get, ("dtype", "shape", "data_offsets"))
        reason = None
        if span_fits := _whole(span, 0, body) and len(span) == 2 and span[0] <= span[1]:
            spans.append(span)
        if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
            reason = f"an entry is a dtype, a shape and data_offsets, got {shown(row)}"
        elif not span_fits:
            reason = f"data_offsets={shown(span)} is no range of the {body:,} bytes after the header"
        elif not _whole(shape, 1, size) or not 1 <= len(shape) <= 8:
            # few and small ones, so that their product is small, too
            reason = f"shape={shown(shape)} is not a tensor's in this file"
        elif not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            reason = f"dtype={shown(dtype)} is not one of {', '.join(ITEM_BYTES)}"
        else:
            sound[name] = Entry(dtype, tuple(shape), *span)
            if span[1] - span[0] != (expected := math.prod(shape) * ITEM_BYTES[dtype]):
                reason = f"{dtype} of shape {shape} has {expected:,} bytes, data_offsets={span}"
        if reason:
            faults.setdefault(reason, []).append(name)
    position = 0
    for begin, end in [*sorted(spans), [body, body]] if len(spans) == len(table) else []:
        if begin != position:
            what = "overlap" if begin < position else "leave a gap"
            faults[f"the tensors {what}: bytes {min(begin, position):,} to {max(begin, position):,} of {body:,}"] = []
            break
        position = end
    return sound, sentences(faults)


def _whole(values: object, low: int, high: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and low <= value <= high for value in values)


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict:
    """Read a configuration: a JSON object of at most ``limit`` bytes, 64 KiB by default."""
    try:
        return strict_json(read_file(path, limit))
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(path.name) else f"{path.name}: {error}") from None


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file, by name, from its header alone."""
    found, reasons = entries(*read_header(path))
    if reasons:
        raise ValueError(brief(reasons))
    return {name: entry.shape for name, entry in found.items()}


def read_tensors(path: Path) -> tuple[dict, str]:
    """Read a safetensors file of finite numbers: its tensors by name, views of it, and its SHA-256 in hex."""
    header, size = read_header(path)
    found, reasons = entries(header, size)
    odd = [name for name, each in found.items() if (len(header) + each.begin) % ITEM_BYTES[each.dtype]]
    if odd:  # a view could not be had, and a copy would double the memory
        reasons += sentences({"is not aligned as safetensors writes it": odd})
    if not reasons:
        content = read_file(path, MAX_BYTES)
        if len(content) != size or content[: len(header)] != header:
            reasons.append(f"{path.name} changed while it was read")
    if reasons:
        raise ValueError(brief(reasons))
    tensors = {name: tensor(content, entry) for name, entry in found.items()}
    if wrong := [name for name, values in tensors.items() if not finite(values)]:
        raise ValueError(sentences({"has values that are not finite in float32": wrong})[0])
    return tensors, hashlib.sha256(content).hexdigest()


def tensor(weights: bytearray, entry: Entry):
    """A tensor of a safetensors file that is in memory: a view of it, where it is aligned."""
    import torch

    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    dtype, begin = dtypes[entry.dtype], 8 + header_length(weights) + entry.begin
    if begin % dtype.itemsize:  # torch wants its numbers aligned, safetensors does not
        weights, begin = weights[begin : begin + entry.end - entry.begin], 0
    return torch.frombuffer(weights, dtype=dtype, count=math.prod(entry.shape), offset=begin).view(entry.shape)


def finite(values, dtype=None, scale: float = 1.0) -> bool:
    """Whether all values are finite, and so in ``dtype`` (float32), multiplied with ``scale`` or not."""
    import torch

    low, high = (bound.item() for bound in values.aminmax())  # both are NaN if any value is
    bounds = torch.tensor([low, high, low * scale, high * scale], dtype=torch.float64)
    return bool(bounds.to(dtype or torch.float32).isfinite().all())


def misfits(given: Mapping[str, tuple[int, ...]], needed: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Why tensors of these names and shapes are not exactly those that are needed."""
    faults: dict[str, list[str]] = {}
    for name in [name for name in needed if name not in given]:
        faults.setdefault("is missing", []).append(name)
    for name, shape in given.items():
        if name not in needed:
            faults.setdefault("does not belong here", []).append(name)
        elif tuple(shape) != tuple(needed[name]):
            reason = f"has shape {tuple(shape)}, and must have {tuple(needed[name])}"
            faults.setdefault(reason, []).append(name)
    return sentences(faults)[:20]
