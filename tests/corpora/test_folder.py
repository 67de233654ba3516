from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from plpkg.corpora import SPLITS, folder, text_folder


def write(folder: Path, **texts: str | bytes) -> Path:
    """Files ``anna__may.md`` as ``anna/may.md``: keywords have neither slashes nor dots."""
    for name, text in texts.items():
        file = folder / (name.replace("__", "/") + ".md")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def many(writer: str, count: int = 10) -> dict[str, str]:
    return {f"{writer}__{i}": f"{writer} writes number {i}" for i in range(count)}


def names(writer) -> dict[str, list[str]]:
    return {split: [document.name for document in writer.split(split)] for split in SPLITS}


def test_a_subfolder_is_a_writer_and_a_file_a_document(tmp_path):
    write(tmp_path / "notes", **many("ben"), anna__2024__a="A", anna__b="B", anna__2024__x__c="C", d="D", e="E", f="F")
    (tmp_path / "notes/anna/picture.png").write_bytes(b"\xff")
    (tmp_path / "notes/anna/g.TXT").write_text("G")
    anna, ben, notes = text_folder(tmp_path / "notes")
    assert (anna.name, ben.name, notes.name) == ("anna", "ben", "notes")
    texts = {d.name: d.text for split in SPLITS for d in anna.split(split)}
    assert texts == {"anna/2024/a.md": "A", "anna/b.md": "B", "anna/2024/x/c.md": "C", "anna/g.TXT": "G"}
    assert sorted(chain(*names(notes).values())) == ["d.md", "e.md", "f.md"]
    assert [len(ben.split(split)) for split in SPLITS] == [8, 1, 1]


def test_whole_files_go_to_the_splits_by_the_seed_alone(tmp_path, monkeypatch):
    write(tmp_path, **many("anna", 20), **many("ben", 20))
    anna, ben = text_folder(tmp_path, shares=(0.5, 0.3, 0.2))
    assert [len(anna.split(split)) for split in SPLITS] == [10, 6, 4]
    assert sorted(chain(*names(anna).values())) == sorted(f"anna/{i}.md" for i in range(20))
    assert names(anna) == names(text_folder(tmp_path, shares=(0.5, 0.3, 0.2))[0])
    assert names(anna) != names(text_folder(tmp_path, shares=(0.5, 0.3, 0.2), seed=1)[0])
    assert names(anna)["test"] != [name.replace("ben", "anna") for name in names(ben)["test"]]
    listed = folder._text_files
    monkeypatch.setattr(folder, "_text_files", lambda root: reversed(list(listed(root))))
    assert names(anna) == names(text_folder(tmp_path, shares=(0.5, 0.3, 0.2))[0])
    write(tmp_path, **many("aaron"))
    assert names(anna) == names(text_folder(tmp_path, shares=(0.5, 0.3, 0.2))[1])


def test_what_training_text_has_is_masked_elsewhere(tmp_path):
    shared = "This sentence of more than fifty characters stands in every single file."
    write(tmp_path, **{key: shared + key for key in (*many("anna"), *many("ben"))})
    for writer in text_folder(tmp_path):
        assert not any(document.masked for document in writer.split("train"))
        for document in writer.split("validation") + writer.split("test"):
            assert document.unmasked() == [document.name[-len("0.md") : -len(".md")]]


def test_training_text_of_another_writer_masks_too(tmp_path):
    anna, ben = ("anna's own sentence, which is longer than fifty characters", "ben's " + "own words " * 9)
    write(tmp_path, **dict.fromkeys(many("anna", 3), anna), **dict.fromkeys(many("ben", 3), ben))
    held_out = text_folder(tmp_path)[0].split("test")[0].name
    (tmp_path / held_out).write_text(ben)
    assert text_folder(tmp_path)[0].split("test")[0].masked == ((0, len(ben)),)


def test_links_hidden_and_blank_files_are_left_out(tmp_path):
    outside = write(tmp_path / "outside", secret="SECRET")
    folder = write(tmp_path / "notes", **many("anna"))
    write(folder, **many(".git"), anna__blank=" \n", **{"anna__.hidden": "HIDDEN", "anna__.trash__old": "OLD"})
    (folder / "pictures").mkdir()
    (folder / "pictures/a.png").write_bytes(b"")
    (folder / "anna/link.md").symlink_to(outside / "secret.md")
    (folder / "anna/links").symlink_to(outside)
    (folder / "linked").symlink_to(outside)
    (writer,) = text_folder(folder)
    assert sorted(chain(*names(writer).values())) == sorted(f"anna/{i}.md" for i in range(10))
    (tmp_path / "here").symlink_to(folder)
    assert names(text_folder(tmp_path / "here")[0]) == names(writer)


@pytest.mark.parametrize(
    ("count", "shares", "sizes"),
    [(30, (1, 0, 0), [30, 0, 0]), (1, (1, 0, 0), [1, 0, 0]), (1, (0, 0, 1), [0, 0, 1]), (5, (0.9, 0.1, 0), [4, 1, 0])],
)
def test_a_split_without_a_share_gets_nothing(tmp_path, count, shares, sizes):
    (writer,) = text_folder(write(tmp_path, **{f"note{i}": f"Text {i}" for i in range(count)}), shares=shares)
    assert [len(writer.split(split)) for split in SPLITS] == sizes
    assert len(writer.to_frame()) == 3


def test_a_file_name_that_is_not_utf8_can_be_hashed(tmp_path):
    write(tmp_path, a="A", b="B")
    Path(str(tmp_path) + "/caf\udce9.md").write_text("C")
    (writer,) = text_folder(tmp_path, shares=(0.2, 0.2, 0.6))
    assert r"caf\xe9.md" in chain(*names(writer).values())
    assert len(writer.to_frame()) == 3


def test_two_folders_whose_names_are_not_utf8_are_two_writers(tmp_path):
    root = Path(str(tmp_path) + "/all\udce9")
    for odd in ("caf\udce8", "caf\udce9"):
        Path(root, odd).mkdir(parents=True)
        Path(root, odd, "a.md").write_text(ascii(odd))
    Path(root, "b.md").write_text("B")
    writers = text_folder(root, shares=(1, 0, 0))
    assert [writer.name for writer in writers] == [r"all\xe9", r"caf\xe8", r"caf\xe9"]
    assert all(len(writer.split("train")) == 1 for writer in writers)


def test_a_file_that_is_not_utf8_is_named_with_byte_and_line(tmp_path):
    write(tmp_path, **many("anna"), anna__bad=b"\xc3\xa9 fine\r\n" + b"x" * 99_990 + b"\ncaf\xe9 bad\n")
    with pytest.raises(
        ValueError, match=r"/anna/bad.md is not UTF-8: byte 100003, in line 3, invalid continuation byte"
    ):
        text_folder(tmp_path)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ({"anna__a": "A", "anna__b": "B", "anna__c": " "}, {}, "2 text files of the writer 'anna' in .*: too few"),
        ({"a": "A", **many("anna")}, {}, "1 text files of the writer 'root' in .*: too few"),
        ({"a": "A", "b": "B", "c": "C", **many("root")}, {}, "holds files and a sub-folder 'root': two writers"),
        ({}, {}, "root holds no .txt or .md file with text in it"),
        ({"a": ""}, {}, "root holds no .txt or .md file with text in it"),
        (many("anna"), dict(seed=-1), "seed must be a whole number of at least 0, got -1"),
        (many("anna"), dict(shares=(0.8, 0.1, 0.2)), "shares must be three numbers that add up to 1"),
    ],
)
def test_what_makes_no_writer_is_an_error(tmp_path, texts, options, message):
    (tmp_path / "root").mkdir()
    with pytest.raises(ValueError, match=message):
        text_folder(write(tmp_path / "root", **texts), **options)


def test_what_is_no_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        text_folder(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match="file"):
        text_folder(tmp_path / "file")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # in one folder
@example([b"\xef\xbb\xbfone\r\ntwo"] * 3)  # a byte order mark, and an end of a line that is none of it
@given(st.lists(st.binary(max_size=30) | st.text(max_size=20).map(str.encode), min_size=3, max_size=6))
def test_any_bytes_are_the_text_that_they_stand_for_or_a_named_error(tmp_path, files):
    texts = {f"{i}.md": data for i, data in enumerate(files)}
    for name in (f"{i}.md" for i in range(6)):  # those of the example before go
        (tmp_path / name).unlink(missing_ok=True)
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
    error, writers = None, []
    try:
        writers = text_folder(tmp_path)
    except ValueError as raised:
        error = str(raised)
    bad = [name for name, data in texts.items() if data.decode(errors="replace").encode() != data]
    if bad:
        assert any(f"{name} is not UTF-8" in error for name in bad)
        return
    # As Python opens a text: any end of a line is a newline, and a byte order mark is none of it.
    decoded = {n: d.decode().replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff") for n, d in texts.items()}
    filled = {name: text for name, text in decoded.items() if text.strip()}
    assert (error is None) == (len(filled) >= 3)
    assert {d.name: d.text for w in writers for split in SPLITS for d in w.split(split)} == (filled if writers else {})
