"""Keys, and what one account can learn of another: nothing, not by what is computed or downloaded either."""

import os

import pytest

from plpkg.backbones import random_backbone
from plpkg.serving.prefixes import BLOCK
from plpkg.serving.service.http.accounts import Keys
from plpkg.serving.service.store import Store

from served import served

ALICE, ALICES_OTHER, BOB, OPERATOR = "alice-" + "a" * 12, "alice-" + "b" * 12, "bob-" + "a" * 14, "operator-" + "a" * 9
LINES = [f"alice {ALICE}", "", f"  bob\t{BOB}  ", f"alice {ALICES_OTHER}", f"operator {OPERATOR}"]


def header(key):
    return {"Authorization": f"Bearer {key}"}


# Keys


@pytest.mark.parametrize(
    ("authorization", "account"),
    [
        (f"Bearer {ALICE}", "alice"),
        (f"bearer  {ALICES_OTHER} ", "alice"),
        (f"Bearer {BOB}", "bob"),
        (f"Bearer {BOB}x", None),
        (f"Bearer {BOB[:-1]}", None),
        (f"Basic {BOB}", None),
        (BOB, None),
        ("Bearer", None),
        ("Bearer ", None),
        ("Bearer ключ", None),
        ("", None),
        (None, None),
    ],
)
def test_whose_a_key_is(authorization, account):
    assert Keys(LINES).account(authorization) == account


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("alice", "line 3.*is not an account and a key"),
        ("alice short-secret", "line 3.*at least 16"),
        ("alice secret-secret-secret secret", "line 3"),
        ("../alice secret-secret-secret", "line 3"),
        ("# secret-secret-secret", "line 3"),
        (f"mallory {BOB}", "line 3.*of another account"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_only(line, said):
    with pytest.raises(ValueError, match=said) as caught:
        Keys([f"bob {BOB}", "", line])
    assert not any(word in str(caught.value) for word in ("secret", "mallory", "alice", BOB))


def test_a_file_of_keys_has_keys_and_the_keys_are_not_kept(tmp_path):
    (tmp_path / "keys").touch(0o600)
    for content in ("", "\n \n"):
        (tmp_path / "keys").write_text(content)
        with pytest.raises(ValueError, match="no key"):
            Keys.read(tmp_path / "keys")
    (tmp_path / "keys").write_text("\n".join(LINES))
    keys = Keys.read(tmp_path / "keys")
    assert keys.account(f"Bearer {ALICE}") == "alice"
    assert ALICE not in repr(vars(keys))
    Keys([f"bob {BOB}", f"bob {BOB}"])  # twice the same is no error


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"bob secret-secret-secret\nal \xff\xfe-secret-secret", "line 2 of the keys is not UTF-8"),
        ("bob sécret-sécret-sécret".encode(), "line 1 .* at least 16 ASCII characters"),
        ("bob secret-secret-secret\x85al other-other-other-1".encode(), "line 1 of the keys"),
        (b"bob secret-\0secret-secret", "line 1 .* at least 16 ASCII characters"),
        (b"#" * (2**20 + 1), "has 1,048,577 bytes, at most 1,048,576 are allowed"),
    ],
)
def test_what_no_header_can_carry_is_no_key(tmp_path, content, said):
    (tmp_path / "keys").touch(0o600)
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        Keys.read(tmp_path / "keys")
    assert "ecret" not in str(caught.value)


def test_keys_that_others_can_read_and_a_pipe(tmp_path):
    (tmp_path / "keys").write_text(f"bob {BOB}\r\n")
    (tmp_path / "keys").chmod(0o640)
    with pytest.warns(UserWarning, match=r"others than its owner can read the keys in .*: chmod 600"):
        assert Keys.read(tmp_path / "keys").account(f"Bearer {BOB}") == "bob"
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "", "nothing"):
        with pytest.raises(ValueError, match=r"is not a regular file|is missing"):
            Keys.read(tmp_path / name)


# Accounts over HTTP


class CountingStore(Store):
    """Which paths were downloaded."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.fetched = []

    async def fetch(self, path, *arguments):
        self.fetched.append(path)
        return await super().fetch(path, *arguments)


@pytest.fixture(scope="module")
def model(base):
    sizes = dict(num_layers=1, hidden=16, num_heads=2, intermediate=24, vocab=len(base[1]), max_positions=128)
    model = random_backbone("llama", **sizes)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def adapters(model, tools):
    return [tools.adapted(model, 2, seed=seed)[1] for seed in range(2)]


@pytest.fixture
def service(base, model, adapters, tmp_path):
    """Alice and Bob have an equal adapter each, ``mine``; Alice has another, ``hers``."""
    with served(model, base[1], CountingStore(tmp_path), keys=Keys(LINES)) as service:
        for account, key in (("alice", ALICE), ("bob", BOB)):
            uploaded = service.upload("mine", adapters[0], account, headers=header(key))
            assert uploaded.status_code == 201
        assert service.upload("hers", adapters[1], "alice", headers=header(ALICES_OTHER)).status_code == 201
        yield service


def test_nobody_gets_in_without_a_key(service):
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/v1/models/base"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/accounts/alice/adapters"),
        ("POST", "/v1/accounts/alice/adapters/mine"),
        ("DELETE", "/v1/accounts/alice/adapters/mine"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
    ):
        for headers in ({}, header("x" * 16)):
            assert service.client.request(method, path, headers=headers).status_code == 401, path
    assert service.client.get("/health").status_code == 200


def test_accounts_see_nothing_of_each_other(service, adapters):
    client, bob = service.client, header(BOB)
    hers, never = "alice/adapters/hers", "nobody/adapters/hers"

    def told(method, path, **options):
        response = client.request(method, path, headers=bob, **options)
        return response.status_code, response.text

    for method in ("GET", "DELETE"):
        (status, said), (other, other_said) = (told(method, f"/v1/accounts/{each}") for each in (hers, never))
        assert status == other == 404
        assert said.replace("alice", "nobody") == other_said  # as absent as what never was
    assert told("GET", "/v1/accounts/alice/adapters")[0] == 404
    assert service.upload("hers", adapters[0], "alice", headers=bob).status_code == 404
    version = adapters[1].digest
    for name in ("hers", f"hers@{version}", f"mine@{version}", "alice/hers", f"../alice/hers@{version}"):
        status, said = told("POST", "/v1/completions", json=dict(model=name, prompt="a", max_tokens=1))
        assert status == 404
        assert "alice" not in said.replace(name.partition("@")[0], "")
        assert told("GET", f"/v1/models/{name}")[0] == 404
    listed = client.get("/v1/models", headers=bob).json()["data"]
    assert [each["id"] for each in listed] == ["base", "mine"]
    assert [each["id"] for each in client.get("/v1/accounts/bob/adapters", headers=bob).json()["data"]] == ["mine"]
    assert client.delete("/v1/accounts/bob/adapters/mine", headers=bob).status_code == 200
    for key in (ALICE, ALICES_OTHER):  # both of hers, and nothing of it has gone
        listed = client.get("/v1/accounts/alice/adapters", headers=header(key)).json()["data"]
        assert sorted(each["id"] for each in listed) == ["hers", "mine"]
    answered = dict(model="mine", prompt="a", max_tokens=1)
    assert client.post("/v1/completions", json=answered, headers=header(ALICE)).status_code == 200


def test_only_the_operator_reads_metrics_and_they_name_nobody(service):
    for key in (ALICE, BOB):
        refused = service.client.get("/metrics", headers=header(key))
        assert refused.status_code == 404
    answered = dict(model="hers", prompt="a", max_tokens=1)
    assert service.client.post("/v1/completions", json=answered, headers=header(ALICE)).status_code == 200
    metrics = service.client.get("/metrics", headers=header(OPERATOR)).text
    assert 'vllm:lora_adapter_loaded{engine="0",level="slot",rank="2"} 1.0' in metrics
    assert not any(word in metrics for word in ("alice", "bob", "hers", "mine"))


# What an answer's time could tell


@pytest.fixture
def computed(service, monkeypatch):
    """A call that completes a prompt, and how many tokens went through the model for it."""
    engine = service.replica.engine
    forward, rows_of = engine._forward, []

    def counted(texts, rows):
        rows_of.append(sum(len(row.positions) for row in rows))
        return forward(texts, rows)

    monkeypatch.setattr(engine, "_forward", counted)

    def complete(key, model, prompt, new=3):
        rows_of.clear()
        body = dict(model=model, prompt=prompt, max_tokens=new)
        assert service.client.post("/v1/completions", json=body, headers=header(key)).status_code == 200
        return sum(rows_of)

    return complete


@pytest.mark.parametrize("name", ["base", "mine"])
def test_what_one_account_has_asked_saves_another_nothing(computed, name):
    prompt, new = [*range(40, 40 + 2 * BLOCK + 5)], 3
    all_of_it, known = len(prompt) + new - 1, 2 * BLOCK
    assert computed(ALICE, name, prompt) == all_of_it
    assert computed(BOB, name, prompt) == all_of_it  # though Alice has asked the same
    assert computed(ALICES_OTHER, name, prompt) == all_of_it - known  # though it is another of her keys
    assert computed(BOB, name, [*prompt[:BLOCK], *prompt]) == all_of_it  # a block more, of which he knows one
    assert computed(ALICE, "hers", prompt) == all_of_it  # another adapter's keys and values are not these


def test_what_one_account_has_loaded_is_downloaded_anew_for_another(service, computed, adapters):
    paths = [f"{account}/mine/{adapters[0].digest}" for account in ("alice", "bob")]
    for key, fetched in ((ALICE, paths[:1]), (ALICE, paths[:1]), (BOB, paths), (BOB, paths)):
        computed(key, "mine", [9])
        assert service.replica.tiers.store.fetched == fetched
    assert {*paths} <= {*service.replica.tiers.host}
    assert {*paths} <= {*service.replica.engine.adapters}
