"""Keys, and what one account can learn of another: nothing, not by what is computed or downloaded either."""

import pytest

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
    [(f"Bearer {ALICE}", "alice"), (f"bearer  {ALICES_OTHER} ", "alice"), (f"Bearer {BOB}", "bob")],
)
def test_whose_a_key_is(authorization, account):
    assert Keys(LINES).account(authorization) == account


@pytest.mark.parametrize("key", [f"Bearer {BOB}x", f"Bearer {BOB[:-1]}", f"Basic {BOB}", BOB, "Bearer ключ"])
def test_what_is_nobodys_key(key):
    for authorization in (key, "Bearer", "Bearer ", "", None):
        assert Keys(LINES).account(authorization) is None


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


def test_keys_that_others_can_read(tmp_path):
    (tmp_path / "keys").write_text(f"bob {BOB}\r\n")
    (tmp_path / "keys").chmod(0o640)
    with pytest.warns(UserWarning, match=r"others than its owner can read the keys in .*: chmod 600"):
        assert Keys.read(tmp_path / "keys").account(f"Bearer {BOB}") == "bob"


# Accounts over HTTP


@pytest.fixture
def adapters(tiny):
    return [tiny[1][name] for name in ("adapter-1", "adapter-4")]  # of rank 2


@pytest.fixture
def service(base, tiny, adapters, tmp_path):
    """Alice and Bob have an equal adapter each, ``mine``; Alice has another, ``hers``."""
    with served(tiny[0], base[1], Store(tmp_path), keys=Keys(LINES)) as service:
        for name, number, account, key in (
            ("mine", 0, "alice", ALICE),
            ("mine", 0, "bob", BOB),
            ("hers", 1, "alice", ALICES_OTHER),
        ):
            assert service.upload(name, adapters[number], account, headers=header(key)).status_code == 201
        yield service


def test_nobody_gets_in_without_a_key(service):
    paths = ["GET /v1/models", "GET /v1/models/base", "POST /v1/completions", "POST /v1/chat/completions"]
    paths += ["GET /version", "HEAD /v1/models"]
    paths += [f"{method} /v1/accounts/alice/adapters/mine" for method in ("POST", "DELETE")]
    for path in (*paths, "GET /v1/accounts/alice/adapters", "GET /metrics", "GET /openapi.json", "GET /nowhere"):
        for headers in ({}, header("x" * 16)):
            assert service.client.request(*path.split(), headers=headers).status_code == 401, path
    assert {service.client.get(path).status_code for path in ("/health", "/ping")} == {200}


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
    assert [each["id"] for each in client.get("/v1/models", headers=bob).json()["data"]] == ["base"]
    for key in (ALICE, ALICES_OTHER):  # both of hers, and nothing of it has gone
        listed = client.get("/v1/accounts/alice/adapters", headers=header(key)).json()["data"]
        assert sorted(each["id"] for each in listed) == ["hers", "mine"]
    answered = dict(model="mine", prompt="a", max_tokens=1)
    assert client.post("/v1/completions", json=answered, headers=header(ALICE)).status_code == 200


def test_only_the_operator_reads_metrics_and_they_name_nobody(service):
    for key in (ALICE, BOB):
        assert service.client.get("/metrics", headers=header(key)).status_code == 404
    answered = dict(model="hers", prompt="a", max_tokens=1)
    assert service.client.post("/v1/completions", json=answered, headers=header(ALICE)).status_code == 200
    metrics = service.client.get("/metrics", headers=header(OPERATOR)).text
    assert 'vllm:lora_adapter_loaded{engine="0",level="slot",rank="2"} 1.0' in metrics
    assert not any(word in metrics for word in ("alice", "bob", "hers", "mine"))


# What an answer's time could tell


@pytest.fixture
def computed(service, tiny):
    """A call that completes a prompt, and how many tokens went through the model for it."""
    read = []
    hook = tiny[0].get_input_embeddings().register_forward_hook(lambda _, given, out: read.append(given[0].numel()))

    def complete(key, model, prompt, new=3):
        read.clear()
        body = dict(model=model, prompt=prompt, max_tokens=new)
        assert service.client.post("/v1/completions", json=body, headers=header(key)).status_code == 200
        return sum(read)

    yield complete
    hook.remove()


@pytest.mark.parametrize("name", ["base", "mine"])
def test_what_one_account_has_asked_saves_another_nothing(computed, name):
    prompt, new = [*range(40, 40 + 2 * BLOCK + 5)], 3
    all_of_it, known = len(prompt) + new - 1, 2 * BLOCK
    assert computed(ALICE, name, prompt) == all_of_it
    assert computed(BOB, name, prompt) == all_of_it  # though Alice has asked the same
    assert computed(ALICES_OTHER, name, prompt) == all_of_it - known  # though it is another of her keys
    assert computed(BOB, name, [*prompt[:BLOCK], *prompt]) == all_of_it  # a block more, of which he knows one
    assert computed(ALICE, "hers", prompt) == all_of_it  # another adapter's keys and values are not these


def test_what_one_account_has_loaded_is_downloaded_anew_for_another(service, computed, adapters, monkeypatch):
    tiers, fetched = service.replica.tiers, []
    fetch = tiers.store.fetch
    monkeypatch.setattr(tiers.store, "fetch", lambda path, *others: fetched.append(path) or fetch(path, *others))
    paths = [f"{account}/mine/{adapters[0].digest}" for account in ("alice", "bob")]
    for key, expected in ((ALICE, paths[:1]), (ALICE, paths[:1]), (BOB, paths), (BOB, paths)):
        computed(key, "mine", [9])
        assert fetched == expected
    assert {*paths} <= {*tiers.host}
    assert {*paths} <= {*service.replica.engine.adapters}
