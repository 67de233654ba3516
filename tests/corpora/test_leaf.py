import json
import re
from functools import reduce
from operator import delitem, getitem, setitem
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from plpkg.corpora import SPLITS, leaf_femnist, leaf_shakespeare

from rounding import assert_close


def femnist(scale: float = 255, **users: int) -> dict:
    """LEAF's layout with ``users`` of that many random images, pixels 0 to 255 divided by ``scale``."""
    random = np.random.default_rng(0)
    data = {}
    for user, count in users.items():
        pixels, labels = random.integers(0, 256, (count, 784)), random.integers(0, 62, count)
        data[user] = {"x": (pixels / scale).tolist(), "y": labels.tolist()}
    return {"users": list(users), "num_samples": list(users.values()), "user_data": data}


def shakespeare(**users: list[str]) -> dict:
    """LEAF's layout: windows of 80 characters of each user's texts, and the character after each."""
    data = {}
    for user, texts in users.items():
        windows = [text[i : i + 80] for text in texts for i in range(len(text) - 80)]
        data[user] = {"x": windows, "y": [character for text in texts for character in text[80:]]}
    return {"users": list(data), "num_samples": [len(d["x"]) for d in data.values()], "user_data": data}


def rebuilt(writer) -> str:
    return "".join(document.text for split in SPLITS for document in writer.split(split))


def letters(count: int, seed: int = 0) -> str:
    return "".join(np.random.default_rng(seed).choice(list("abcdefghij \né"), count))


def dump(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_femnist_images_are_the_files_numbers(tmp_path):
    content = femnist(b=3, a=2)
    users = leaf_femnist(dump(tmp_path / "all_data_0.json", content))
    assert list(users) == ["b", "a"]
    for user, images in users.items():
        data = content["user_data"][user]
        assert (images.images.dtype, images.labels.dtype) == (torch.float32, torch.int64)
        assert images.images.shape == (len(data["y"]), 1, 28, 28)
        assert np.array_equal(images.images.flatten(1).numpy(), np.array(data["x"], dtype=np.float32))
        assert images.labels.tolist() == data["y"]
    assert users["b"].images[1, 0, 2, 5] == np.float32(content["user_data"]["b"]["x"][1][2 * 28 + 5])


@pytest.mark.parametrize("kind", [int, float])
def test_a_file_of_0_to_255_is_scaled_as_a_whole(tmp_path, kind):
    content, reference = femnist(1, a=2, b=1), femnist(a=2, b=1)
    content["user_data"]["b"]["x"] = [[1] * 784]  # dark in its file, white in another
    for data in content["user_data"].values():
        data["x"] = [[kind(value) for value in row] for row in data["x"]]
    users = leaf_femnist(dump(tmp_path / "f.json", content))
    assert_close(users["a"].images.flatten(1), torch.tensor(reference["user_data"]["a"]["x"]), terms=2)
    assert_close(users["b"].images, torch.full((1, 1, 28, 28), 1 / 255), terms=2)


def test_a_folder_is_read_file_by_file(tmp_path):
    dump(tmp_path / "all_data_1.json", femnist(1, c=2))
    dump(tmp_path / "all_data_0.json", femnist(a=1, b=3))
    (tmp_path / "README.md").write_text("not JSON")
    users = leaf_femnist(tmp_path)
    assert {user: len(images) for user, images in users.items()} == {"a": 1, "b": 3, "c": 2}
    assert all(0 <= images.images.min() < 0.1 < 0.9 < images.images.max() <= 1 for images in users.values())


def test_a_user_in_two_files_is_named_with_both(tmp_path):
    dump(tmp_path / "all_data_0.json", femnist(a=1, b=3))
    dump(tmp_path / "all_data_1.json", femnist(c=1, b=3))
    with pytest.raises(ValueError, match=r"the user 'b' is in .*all_data_0\.json and in .*all_data_1\.json"):
        leaf_femnist(tmp_path)


def test_nothing_to_read(tmp_path):
    with pytest.raises(ValueError, match=r"holds no \.json file"):
        leaf_femnist(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        leaf_femnist(tmp_path / "nowhere.json")


def put(value, *place):
    """A change that puts ``value`` at a place in the content."""
    return lambda content: setitem(reduce(getitem, place[:-1], content), place[-1], value)


def take(*place):
    """A change that deletes what is at a place in the content."""
    return lambda content: delitem(reduce(getitem, place[:-1], content), place[-1])


KINDS = ("list", "string", "integer", "number", "dictionary")
LIST, STRING, WHOLE, NUMBER, DICTIONARY = (f"Input should be a valid {kind}" for kind in KINDS)
ONLY = "is only one of users and of user_data's keys"
STRUCTURE = [
    (take("users"), "users: Field required"),
    (take("num_samples"), "num_samples: Field required"),
    (take("user_data"), "user_data: Field required"),
    (put({"f0": 1}, "users"), f"users: {LIST}, got {{'f0': 1}}"),
    (put([], "users"), "users: List should have at least 1 item"),
    (put(7, "users", 1), f"users[1]: {STRING}, got 7"),
    (put("f0", "users", 1), 'users has "f0" twice'),
    (put("f9", "users", 1), f'"f1" {ONLY}'),
    (put({"x": [], "y": []}, "user_data", "f2"), 'user_data["f2"]: 0 samples in x, 0 in y'),
    (lambda content: content["user_data"].update(f2=content["user_data"]["f1"]), f'"f2" {ONLY}'),
    (put(3, "num_samples"), f"num_samples: {LIST}, got 3"),
    (take("num_samples", 1), "num_samples has 1 entries for 2 users"),
    (put("\ud800", "users", 1), f'users[1]: {STRING}, unable to parse raw data as a unicode string, got "\\ud800"'),
    (put("u" * 1001, "users", 1), "users[1]: String should have at most 1000 characters"),
    (put(4, "num_samples", 1), 'num_samples[1]: 4, but user_data["f1"] has 3 samples'),
    (put(3.0, "num_samples", 1), f"num_samples[1]: {WHOLE}, got 3.0"),
    (put([], "user_data"), "user_data: Input should be a valid dictionary, got []"),
    (put([1], "user_data", "f1"), 'user_data["f1"]: Input should be a valid dictionary'),
    (take("user_data", "f1", "x"), 'user_data["f1"].x: Field required'),
    (take("user_data", "f1", "y"), 'user_data["f1"].y: Field required'),
    (put("abc", "user_data", "f1", "x"), f'user_data["f1"].x: {LIST}, got "abc"'),
    (put(None, "user_data", "f1", "y"), f'user_data["f1"].y: {LIST}, got None'),
    (take("user_data", "f1", "y", 0), 'user_data["f1"]: 3 samples in x, 2 in y'),
]

PIXELS = [
    (put("abc", "x", 1), f'.x[1]: {LIST}, got "abc"'),
    (take("x", 1, 0), ".x[1]: List should have at least 784 items after validation, not 783"),
    *((put(value, "x", 2, 17), f".x[2][17]: {NUMBER}, got {shown}") for value, shown in (
        (True, "True"), ("0.5", '"0.5"'), (None, "None"), ([0.5], "[0.5]"), (10**400, "1000000000"),
    )),
    (put(float("nan"), "x", 2, 17), ".x[2][17]: Input should be less than or equal to 255, got nan"),
    (put(float("inf"), "x", 2, 17), ".x[2][17]: Input should be less than or equal to 255, got inf"),
    (put(-0.25, "x", 2, 17), ".x[2][17]: Input should be greater than or equal to 0, got -0.25"),
    (put(256, "x", 2, 17), ".x[2][17]: Input should be less than or equal to 255, got 256"),
    (put(1.5, "x", 2, 17), '.x[2][17]: 1.5 beside user_data["f0"].x[0][0]: 0.'),
    (put(62, "y", 1), ".y[1]: Input should be less than 62, got 62"),
    (put(-1, "y", 1), ".y[1]: Input should be greater than or equal to 0, got -1"),
    *((put(value, "y", 1), f".y[1]: {WHOLE}, got {shown}") for value, shown in (
        (3.0, "3.0"), (False, "False"), ("a", '"a"'),
    )),
]  # fmt: skip

CHARACTERS = [
    (put("a" * 79, "x", 1), ".x[1]: String should have at least 80 characters"),
    (put("a" * 81, "x", 1), ".x[1]: String should have at most 80 characters"),
    (put([0.5], "x", 1), f".x[1]: {STRING}, got [0.5]"),
    (put("ab", "y", 1), '.y[1]: String should have at most 1 character, got "ab"'),
    (put("", "y", 1), '.y[1]: String should have at least 1 character, got ""'),
    (put(4, "y", 1), f".y[1]: {STRING}, got 4"),
    (put("\ud83d", "y", 1), f'.y[1]: {STRING}, unable to parse raw data as a unicode string, got "\\ud83d"'),
]

FAULTS = [(leaf_femnist, None, *fault) for fault in STRUCTURE]
FAULTS += [(leaf_femnist, "f1", *fault) for fault in PIXELS]
FAULTS += [(leaf_shakespeare, "f1", *fault) for fault in CHARACTERS]


@pytest.mark.parametrize(("read", "user", "change", "message"), FAULTS, ids=[message for *_, message in FAULTS])
def test_a_fault_is_located(tmp_path, read, user, change, message):
    content = femnist(f0=2, f1=3) if read is leaf_femnist else shakespeare(f0=[letters(100)], f1=[letters(90)])
    change(content["user_data"][user] if user else content)
    place = f'user_data["{user}"]' if user else ""
    with pytest.raises(ValueError, match=re.escape(f"f.json: {place}{message}")):
        read(dump(tmp_path / "f.json", content))


ONE_USER = '{"users": ["a"], "num_samples": [1], "user_data": %s}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"users": [],\n "num_samples": [1,, 2]}', "not JSON: line 2, column 20: Expecting value"),
        ("", "not JSON: line 1, column 1"),
        ('{"users":\n["café"]}', "is not UTF-8: byte 15, in line 2"),
        ("[1]", "Input should be a valid dictionary"),
        ("[" * 100_000, "lists or objects are nested too deeply"),
        ("[1" + "0" * 5000 + "]", ": Exceeds the limit"),
        ('{"users": [], "users": []}', 'Input should be a valid dictionary, got the key "users" twice'),
        (ONE_USER % '{"a": {}, "b": {}, "a": {}}', f'user_data: {DICTIONARY}, got the key "a" twice'),
        (ONE_USER % '{"a": {"x": [], "y": [], "x": []}}', f'user_data["a"]: {DICTIONARY}, got the key "x" twice'),
    ],
    ids=range(9),
)
def test_a_fault_in_the_json_is_located(tmp_path, text, message):
    (tmp_path / "f.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"f.json.*{re.escape(message)}"):
        leaf_femnist(tmp_path / "f.json")


def test_other_keys_and_users_called_x_and_y_are_fine(tmp_path):
    content = femnist(x=1, y=2) | {"hierarchies": ["a", "b"]}
    content["user_data"]["x"]["raw"] = "text"
    assert list(leaf_femnist(dump(tmp_path / "f.json", content))) == ["x", "y"]


# LEAF's Shakespeare


def test_a_text_is_rebuilt_and_split_in_time(tmp_path):
    text = letters(1000)
    (romeo,) = leaf_shakespeare(dump(tmp_path / "f.json", shakespeare(ROMEO=[text])))
    assert romeo.name == "ROMEO"
    assert {split: [(d.name, d.text) for d in romeo.split(split)] for split in SPLITS} == {
        "train": [("ROMEO[0:800]", text[:800])],
        "validation": [("ROMEO[800:900]", text[800:900])],
        "test": [("ROMEO[900:1000]", text[900:])],
    }


def test_a_gap_begins_a_document(tmp_path):
    texts = [letters(n, seed=n) for n in (700, 150, 81, 69 + 80)]
    content = shakespeare(A=texts, B=[letters(100, seed=1)])
    a, b = leaf_shakespeare(dump(tmp_path / "f.json", content))
    assert [d.name for split in SPLITS for d in a.split(split)] == [
        "A[0:700]", "A[700:850]", "A[850:864]", "A[864:931]", "A[931:972]", "A[972:1080]",
    ]  # fmt: skip
    assert rebuilt(a) == "".join(texts)
    assert [d.name for d in b.split("test")] == ["B[90:100]"]


NAMES = st.text(st.characters(codec="utf-8"), max_size=5)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters=","), min_size=81, max_size=200)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # in one folder
@given(st.dictionaries(NAMES, st.lists(TEXTS, min_size=1, max_size=4), min_size=1, max_size=3))
def test_any_text_survives(tmp_path, users):
    # The comma tells where a text begins: one that goes on where another ends is rightly joined to it.
    users = {user: ["," + text for text in texts] for user, texts in users.items()}
    writers = leaf_shakespeare(dump(tmp_path / "f.json", shakespeare(**users)))
    assert {writer.name: rebuilt(writer) for writer in writers} == {user: "".join(t) for user, t in users.items()}
    assert [writer.name for writer in writers] == list(users)


def test_blanks_before_a_line_are_no_text(tmp_path):
    lines = [" " * 80 + line for line in ("To be, or not to be\n", "\n", "that is the question")]
    (hamlet,) = leaf_shakespeare(dump(tmp_path / "f.json", shakespeare(HAMLET=lines)))
    assert rebuilt(hamlet) == "To be, or not to be\n\nthat is the question"
    assert hamlet.split("train")[1].text == "\n"


def test_what_another_user_trains_on_is_masked(tmp_path):
    shared = letters(60, seed=5)
    content = shakespeare(A=[shared + letters(940, seed=6)], B=[letters(930, seed=7) + shared + letters(10, seed=8)])
    b = leaf_shakespeare(dump(tmp_path / "f.json", content))[1]
    assert b.split("test")[0].masked == ((30, 90),)


def test_a_text_too_short_to_split(tmp_path):
    content = shakespeare(A=[" " * 80 + "ab"])
    with pytest.raises(ValueError, match=r"2 characters of the user 'A' in .*f\.json: too few"):
        leaf_shakespeare(dump(tmp_path / "f.json", content))
