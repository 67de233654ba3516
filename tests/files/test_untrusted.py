"""Files from strangers: what adapters do not already test of them."""

import json
import os
import socket
import struct

import pytest
from hypothesis import given, strategies as st

from plpkg.files import untrusted


def test_a_file_is_read_whole_and_bounded(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert untrusted.read_file(file, 5) == b"12345"
    with pytest.raises(ValueError, match="file has 5 bytes, at most 4 are allowed"):
        untrusted.read_file(file, 4)


@pytest.mark.parametrize("change", [b"more than it was said to have", b"less"])
def test_a_file_that_changes_while_it_is_read_is_refused(change, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"1234567890")
    stat = os.fstat

    def then_change(number):
        result = stat(number)
        with open(file, "rb+") as other:
            other.truncate(0)
            other.write(change)
        return result

    descriptor = untrusted.open_regular(file)
    monkeypatch.setattr(untrusted, "open_regular", lambda path: descriptor)
    monkeypatch.setattr(untrusted.os, "fstat", then_change)
    with pytest.raises(ValueError, match="changed while it was read"):
        untrusted.read_file(file, 1000)


def test_what_is_put_in_a_file_s_place_is_not_waited_for(tmp_path, monkeypatch):
    file = tmp_path / "file"
    os.mkfifo(file)
    (tmp_path / "regular").touch()
    stat = os.stat
    monkeypatch.setattr(untrusted.os, "stat", lambda path: stat(tmp_path / "regular"))  # as it was a moment before
    with pytest.raises(ValueError, match="file is not a regular file"):
        untrusted.open_regular(file)


def test_what_is_no_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path may not be long
    (tmp_path / "link").symlink_to("link")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for said in ("socket is not a regular file", "link cannot be opened: Too many levels", "nothing is missing"):
            with pytest.raises(ValueError, match=said):
                untrusted.open_regular(tmp_path / said.split()[0])


def test_a_message_echoes_no_megabyte():
    for value in ("x\n" * 10**6, ["y" * 10**6] * 10**4, {"z" * 10**6: [[["w"] * 10**6]]}, 10**39):
        assert len(untrusted.shown(value)) <= 300
        assert "\n" not in untrusted.shown(value)
    faults = {"long": list("abcd"), "short": []}
    assert untrusted.sentences(faults) == ["'a', 'b', 'c' and 1 more: long", "short"]


@given(st.recursive(st.none() | st.booleans() | st.integers(-(10**38), 10**38) | st.text(), st.lists))
def test_sound_json_is_read_as_json_does(value):
    assert untrusted.strict_json(json.dumps({"key": value}).encode()) == {"key": value}


@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ('{"a":', "}")])
def test_how_deep_json_may_be_does_not_depend_on_python(opened, closed):
    """Python 3.14 itself would take a hundred times what 3.11 does."""

    def nested(depth):
        return b'{"a":' + (opened * (depth - 2) + "[]" + closed * (depth - 2)).encode() + b"}"

    assert untrusted.strict_json(nested(untrusted.MAX_DEPTH))
    for depth in (untrusted.MAX_DEPTH + 1, 10_000, 100_000):
        with pytest.raises(ValueError, match=r"^nested too deeply$"):
            untrusted.strict_json(nested(depth))


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_a_header_or_have_reasons(data, size):
    for header in (data, struct.pack("<Q", len(data)) + data, struct.pack("<Q", len(data) + 2) + b"{" + data + b"}"):
        found, reasons = untrusted.entries(header, size)
        assert reasons or sum(entry.end - entry.begin for entry in found.values()) == size - len(header)
