"""Without a network a model's name is looked up once; with one, the hub is asked as ever. A local server is the hub."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from transformers import LlamaConfig

from waiting import interpreter

LOOK_UPS = {
    "shape": "from plpkg.catalog import ModelShape; ModelShape.from_config('somebody/a-model')",
    "model": "from plpkg.backbones import load_backbone; load_backbone('somebody/a-model')",
}


def refused(code, tmp_path, endpoint):
    """What a look-up says, and what it prints besides."""
    script = f"try:\n    {code}\nexcept FileNotFoundError as error:\n    print(error)"
    environment = dict(HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path), PATH="", NO_PROXY="*")
    return interpreter(f"import sys; sys.stderr = sys.stdout\n{script}", env=environment)


@pytest.fixture
def hub():
    """A hub that has no model: its address, and the paths that it was asked for."""
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_response(200 if self.path == "/" else 404)
            self.end_headers()

        do_GET = do_HEAD  # noqa: N815 (http.server names it)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("code", LOOK_UPS.values(), ids=LOOK_UPS)
def test_a_hub_that_does_not_answer_is_not_asked_again(code, tmp_path, hub):
    said = refused(code, tmp_path, "http://127.0.0.1:9")  # the port of discard, where nobody listens
    assert "'somebody/a-model'" in said
    assert "offline" in said
    assert "Retrying" not in said


@pytest.mark.parametrize("code", LOOK_UPS.values(), ids=LOOK_UPS)
def test_a_hub_that_answers_is_asked_for_the_model(code, tmp_path, hub):
    endpoint, asked = hub
    assert "'somebody/a-model'" in refused(code, tmp_path, endpoint)
    assert "/somebody/a-model/resolve/main/config.json" in asked


def test_a_folder_needs_no_hub(tmp_path, monkeypatch):
    from plpkg.hub import must_be_local

    monkeypatch.setattr("huggingface_hub.utils.get_session", None)
    LlamaConfig().save_pretrained(tmp_path)
    assert must_be_local(str(tmp_path))
