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
from typing import Any, NamedTuple, TypeGuard

from plpkg.validation import shown

MAX_HEADER_BYTES = 2**20
MAX_TENSORS = 4096
MAX_CONFIG_BYTES = 2**16
MAX_BYTES = 2**31
MAX_DEPTH = 100  # Python's json stops at less than 1,000 before 3.14, and at some 100,000 since
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The numbers that weights are made of, and their bytes."""
MAGIC = {b"\x80": "a pickle", b"PK\x03\x04": "a zip archive, as torch.save writes", b"version ": "a Git LFS pointer"}


def sentences(faults: dict[str, list[str]]) -> list[str]:
    """Reasons with the names that they hold for, as sentences: one for each reason, however many names it has."""
    said = []
    for reason, names in faults.items():
        if not names:
            said.append(reason)
            continue
        short = ", ".join(map(shown, names[:3]))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        said.append(f"{short}{more}: {reason}")
    return said


def brief(reasons: list[str]) -> str:
    """Reasons as one sentence of about 300 characters at most: the first ones, and how many more there are."""
    text = reasons[0][:280]
    rest = reasons[1:]
    while rest and len(text) + len(rest[0]) < 280:
        text += f"; {rest.pop(0)}"
    if rest:
        text += f"; and {len(rest)} more"
    return text


def printable(text: str) -> str:
    """Text of others without the characters that a terminal would obey; lines stay."""
    characters = []
    for c in text.expandtabs(4):
        visible = c.isprintable() or c == "\n"
        characters.append(c if visible else "\ufffd")
    return "".join(characters)


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
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{path.name} has {size:,} bytes, at most {limit:,} are allowed")
        content = bytearray(size)
        done = 0
        while done < size:
            count = file.readinto(memoryview(content)[done:])
            if not count:
                break
            done += count
        if done < size or file.read(1):
            raise ValueError(f"{path.name} changed while it was read")
    return content


def read_header(path: Path) -> tuple[bytes, int]:
    """Read the first 8 + N bytes of a safetensors file; with them comes the size of the whole file."""
    with open_regular(path) as file:
        start = file.read(8)
        header = start + file.read(header_length(start))
        size = os.fstat(file.fileno()).st_size
        return header, size


def header_length(start: bytes | bytearray) -> int:
    """N, from a safetensors file's first 8 bytes."""
    length = int.from_bytes(start[:8], "little")
    if len(start) >= 8 and 2 <= length <= MAX_HEADER_BYTES:
        return length
    what = f"give their header {length:,} bytes" if len(start) >= 8 else f"are {len(start)} bytes"
    # The kind only explains: a valid length can begin with the same bytes.
    hint = ""
    for magic, kind in MAGIC.items():
        if bytes(start[:8]).startswith(magic):
            hint = f" (they begin like {kind})"
            break
    raise ValueError(f"the weights {what}, and no header of 2 to {MAX_HEADER_BYTES:,}{hint}")


def strict_json(data: bytes | bytearray) -> dict:
    """A JSON object in UTF-8: no name twice, at most 100 deep, its numbers finite and of at most 40 characters."""
    try:
        hooks: dict[str, Any] = dict(parse_int=_number, parse_float=_number, parse_constant=_number)
        value = json.loads(bytes(data).decode(), object_pairs_hook=_unique, **hooks)
        if _deeper_than(MAX_DEPTH, value):
            raise ValueError("nested too deeply")
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


def _deeper_than(depth: int, value: object) -> bool:
    """Whether more than so many lists and objects stand in each other."""
    level = [value]
    for _ in range(depth + 1):
        level = [each for each in level if isinstance(each, list | dict)]
        if not level:
            return False
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return True


def require_characters(data: bytes | bytearray, value: object) -> None:
    """Refuse JSON that escapes half of a character, which no file, terminal or tokenizer could take."""
    try:
        if b"\\ud" in data.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a string has half a character, {error.object[error.start]!a}") from None


def _unique(pairs: list[tuple]) -> dict:
    """A JSON object of its names and values; json itself would keep the last of two with one name."""
    values = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{shown(name)} stands there twice")
        values[name] = value
    return values


def _number(text: str) -> int | float:
    """A JSON number. Python's json would take NaN, Infinity, and integers of any length, which take long to parse."""
    if len(text) > 40 or not math.isfinite(float(text)):
        raise ValueError(f"{shown(text)} is not a finite number of at most 40 characters")
    return int(text) if text.lstrip("-").isdigit() else float(text)


class Entry(NamedTuple):
    """A tensor in a header; ``begin`` and ``end`` count bytes from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def entries(header: bytes | bytearray, size: int) -> tuple[dict[str, Entry], list[str]]:
    """The tensors in the first 8 + N bytes of a safetensors file of ``size`` bytes, and why it is not a sound one.

    Without reasons, the tensors cover the rest of the file, each byte once; with some, they are those described.
    """
    try:
        table, body = _table(header, size)
    except ValueError as error:
        text = str(error)
        return {}, [text if text.startswith("the weights") else f"the header of the weights: {text}"]
    faults: dict[str, list[str]] = {}  # the names that a reason holds for; none, if it is of the whole header
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        faults[f"__metadata__ may only hold strings, got {shown(metadata)}"] = []
    found = {}
    spans = []
    for name, row in table.items():
        reason = _row_fault(row, size, body)
        if reason is None:
            entry = Entry(row["dtype"], tuple(row["shape"]), *row["data_offsets"])
            found[name] = entry
            reason = _length_fault(entry)
        if reason is not None:
            faults.setdefault(reason, []).append(name)
        span = row.get("data_offsets") if isinstance(row, dict) else None
        if _is_span(span, body):
            spans.append(span)
    if len(spans) == len(table):  # else a hole is only the place of a tensor whose range is not known
        hole = _hole(spans, body)
        if hole is not None:
            faults[hole] = []
    return found, sentences(faults)


def _table(header: bytes | bytearray, size: int) -> tuple[dict, int]:
    """The JSON object of a header, and how many bytes of tensors follow it; ValueError if it is none."""
    body = size - 8 - header_length(header)
    if body < 0 or len(header) < size - body:
        raise ValueError(f"it ends after {min(size, len(header)):,} of {size - body:,} bytes")
    if header[8:9] != b"{":  # JSON would allow a space here, safetensors does not
        raise ValueError(f"it begins with {shown(bytes(header[8:9]))}, not with a brace")
    table = strict_json(header[8 : size - body])
    count = len(table) - ("__metadata__" in table)
    if count > MAX_TENSORS:
        raise ValueError(f"it has {count:,} tensors, at most {MAX_TENSORS:,} are allowed")
    return table, body


def _row_fault(row: object, size: int, body: int) -> str | None:
    """Why a row of the table describes no tensor in a file of ``size`` bytes, of which ``body`` follow the header."""
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        return f"an entry is a dtype, a shape and data_offsets, got {shown(row)}"
    dtype = row["dtype"]
    shape = row["shape"]
    if not _is_span(row["data_offsets"], body):
        return f"data_offsets={shown(row['data_offsets'])} is no range of the {body:,} bytes after the header"
    # Few and small dimensions, so that their product is small, too.
    if not _whole(shape, 1, size) or not 1 <= len(shape) <= 8:
        return f"shape={shown(shape)} is not a tensor's in this file"
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        return f"dtype={shown(dtype)} is not one of {', '.join(ITEM_BYTES)}"
    return None


def _length_fault(entry: Entry) -> str | None:
    """Why a tensor's range has not the bytes of its shape."""
    expected = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
    if entry.end - entry.begin == expected:
        return None
    span = [entry.begin, entry.end]
    return f"{entry.dtype} of shape {list(entry.shape)} has {expected:,} bytes, data_offsets={span}"


def _hole(spans: list[list[int]], body: int) -> str | None:
    """Where ranges of bytes do not cover ``body`` bytes, each once."""
    position = 0
    for begin, end in [*sorted(spans), [body, body]]:
        if begin != position:
            what = "overlap" if begin < position else "leave a gap"
            return f"the tensors {what}: bytes {min(begin, position):,} to {max(begin, position):,} of {body:,}"
        position = end
    return None


def _is_span(value: object, body: int) -> TypeGuard[list[int]]:
    """Whether it is [begin, end], a range of ``body`` bytes."""
    return _whole(value, 0, body) and len(value) == 2 and value[0] <= value[1]


def _whole(values: object, low: int, high: int) -> TypeGuard[list[int]]:
    """Whether it is a list of whole numbers between these; True, which Python counts as 1, is none."""
    return isinstance(values, list) and all(type(value) is int and low <= value <= high for value in values)


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict:
    """Read a configuration: a JSON object of at most ``limit`` bytes, 64 KiB by default."""
    try:
        return strict_json(read_file(path, limit))
    except ValueError as error:
        text = str(error)
        if not text.startswith(path.name):
            text = f"{path.name}: {text}"
        raise ValueError(text) from None


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
    misaligned = [name for name, each in found.items() if (len(header) + each.begin) % ITEM_BYTES[each.dtype]]
    if misaligned:  # a view could not be had, and a copy would double the memory
        reasons += sentences({"is not aligned as safetensors writes it": misaligned})
    if not reasons:
        content = read_file(path, MAX_BYTES)
        if len(content) != size or content[: len(header)] != header:
            reasons.append(f"{path.name} changed while it was read")
    if reasons:
        raise ValueError(brief(reasons))
    tensors = {name: tensor(content, entry) for name, entry in found.items()}
    infinite = [name for name, values in tensors.items() if not finite(values)]
    if infinite:
        raise ValueError(sentences({"has values that are not finite in float32": infinite})[0])
    return tensors, hashlib.sha256(content).hexdigest()


def tensor(weights: bytearray, entry: Entry):
    """A tensor of a safetensors file that is in memory: a view of it, where it is aligned."""
    import torch

    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    dtype = dtypes[entry.dtype]
    begin = 8 + header_length(weights) + entry.begin
    if begin % dtype.itemsize:  # torch wants its numbers aligned, safetensors does not: a copy is
        weights = weights[begin : begin + entry.end - entry.begin]
        begin = 0
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
    missing = [name for name in needed if name not in given]
    if missing:
        faults["is missing"] = missing
    for name, shape in given.items():
        if name not in needed:
            faults.setdefault("does not belong here", []).append(name)
        elif tuple(shape) != tuple(needed[name]):
            reason = f"has shape {tuple(shape)}, and must have {tuple(needed[name])}"
            faults.setdefault(reason, []).append(name)
    return sentences(faults)[:20]
