"""Whatever is sent, the service answers as its own OpenAPI description says, and never with an error of its own."""

import copy
import json
import urllib.parse

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from plpkg.serving.service.store import Store

from served import served
from waiting import wait_until


@pytest.fixture(scope="module")
def service(base, tiny, tmp_path_factory):
    """With one adapter."""
    tokenizer = copy.deepcopy(base[1])
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    with served(tiny[0], tokenizer, Store(tmp_path_factory.mktemp("store"), max_versions=999)) as service:
        assert service.upload("mine", tiny[1]["adapter-0"]).status_code == 201
        yield service


OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_name}"),
    ("GET", "/v1/accounts/{account}/adapters"),
    ("POST", "/v1/accounts/{account}/adapters/{adapter}"),
    ("GET", "/v1/accounts/{account}/adapters/{adapter}"),
    ("DELETE", "/v1/accounts/{account}/adapters/{adapter}"),
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/version"),
]


@pytest.fixture(scope="module")
def described(service):
    return schemathesis.openapi.from_url(f"{service.url}/openapi.json")


def test_all_operations_are_tried(described):
    assert {(each.ok().method.upper(), each.ok().path) for each in described.get_all_operations()} == {*OPERATIONS}


CASES = [(*each, GenerationMode.POSITIVE) for each in OPERATIONS]
CASES += [(*each, GenerationMode.NEGATIVE) for each in OPERATIONS if each[0] == "POST"]  # a path is any string
# Or nearly all would be 404, or too long
SERVED = dict(max_tokens=3, max_completion_tokens=None, lora=None)
CHANGES = [{}, SERVED | dict(model="base"), SERVED | dict(model="mine"), SERVED | dict(model="mine", stream=True)]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_whatever_is_sent(service, described, method, path, mode):
    operation = described[path][method]
    fixed = {"account": "local"} if "{account}" in path else None

    @given(case=operation.as_strategy(mode, path_parameters=fixed), changes=st.sampled_from(CHANGES))
    @settings(max_examples=25, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    def check(case, changes):
        if mode.is_positive and isinstance(case.body, dict) and "model" in case.body:
            case.body |= changes
        # No schema says which texts are too long, or which adapters there are
        case.call_and_validate(timeout=20, excluded_checks=[positive_data_acceptance])

    check()
    wait_until(lambda: service.inside == (0, 0, 0))


FIELDS = [b'"temperature": NaN', b'"temperature": 1e999', b'"stop": "\\ud800"']
FIELDS += [b'"seed": 1' + b"0" * 5000, b'"max_tokens": 1' + b"0" * 300]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "base", "prompt": "\\ud800"}',
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"prompt": "a\\uDFFF"}',
        b'{"model": "base", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"\\ud800": 1, "model": "base", "prompt": "a"}',
        b'{"model": "base", "prompt": [[]]}',
        b'{"model": "base", "prompt": [[1], "a"]}',
        b'{"model": "base", "prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        *(b'{"model": "base", "prompt": "a", ' + field + b"}" for field in FIELDS),
    ],
    ids=lambda body: repr(body[:40]),
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data", ""])
def test_no_body_is_an_error_of_the_service(service, body, kind):
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/accounts/local/adapters/bad"):
        response = service.client.post(path, content=body, headers={"Content-Type": kind})
        assert 400 <= response.status_code < 500, (path, response.text)
        assert response.json()["error"]["code"] == response.status_code


@pytest.mark.parametrize("name", ["\ud800", "\x00", "a\nb", "a%2fb", "..", "A" * 10_000])
def test_no_name_is_an_error_of_the_service(service, name):
    body = json.dumps(dict(model=name, prompt="a")).encode()
    quoted = urllib.parse.quote(name.encode("utf-8", "surrogatepass"), safe="")
    answers = [service.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})]
    for place in ("/v1/models/", "/v1/accounts/local/adapters/", "/v1/accounts/"):
        answers.append(service.client.get(f"{place}{quoted}" + "/adapters" * (place == "/v1/accounts/")))
    assert {each.status_code for each in answers} <= {400, 404, 422}
