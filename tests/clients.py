"""OpenAI's clients of other versions and makers against ``plpkg serve``: a table of client and call.

Each set of ``ENVIRONMENTS`` gets a virtual environment of its own, since their versions exclude each other and this
project's. ``python tests/clients.py`` starts the service and runs this file there with ``--call``; it ends with 1 if a
call fails, or a client is told another text than the others.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ENVIRONMENTS = (("openai<3",), ("openai", "litellm", "langchain-openai"))
PROMPT, SAID = "Return the", dict(max_tokens=8, temperature=0)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] if m['content'] is string else m['content'][0]['text'] }} {% endfor %}"
)


def of_openai(url):
    """By call, the text that comes, or True."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    complete, chat = client.completions.create, client.chat.completions.create
    asked, talk = dict(model="numpy", prompt=PROMPT) | SAID, dict(model="numpy", messages=CHAT) | SAID

    def unknown():
        try:
            complete(**asked | dict(model="nobody"))
        except openai.NotFoundError as error:
            return "nobody" in str(error)

    yield "models", lambda: "numpy" in [model.id for model in client.models.list()]
    yield "complete", lambda: complete(**asked).choices[0].text
    yield "complete, stream", lambda: "".join(event.choices[0].text for event in complete(**asked, stream=True))
    yield "complete, ids", lambda: len(complete(**asked | dict(prompt=[1, 2, 3])).choices) == 1
    yield "complete, n and logprobs", lambda: len(complete(**asked, n=2, logprobs=1).choices[1].logprobs.tokens) == 8
    yield "chat", lambda: chat(**talk).choices[0].message.content
    yield "chat, stream", lambda: "".join(e.choices[0].delta.content or "" for e in chat(**talk, stream=True))
    told = dict(stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2)
    yield "chat, usage and logprobs", lambda: [*chat(**talk, **told)][-1].usage.completion_tokens == 8
    yield "no such adapter", unknown


def of_litellm(url):
    import litellm

    asked = dict(model="openai/numpy", messages=CHAT, api_base=f"{url}/v1", api_key="none") | SAID
    text = dict(model="text-completion-openai/numpy", prompt=PROMPT, api_base=f"{url}/v1", api_key="none") | SAID
    yield "chat", lambda: litellm.completion(**asked).choices[0].message.content
    yield (
        "chat, stream",
        lambda: "".join(e.choices[0].delta.content or "" for e in litellm.completion(**asked, stream=True)),
    )
    yield "complete", lambda: litellm.text_completion(**text).choices[0].text


def of_langchain(url):
    from langchain_openai import ChatOpenAI, OpenAI

    options = dict(model="numpy", base_url=f"{url}/v1", api_key="none") | SAID
    yield "chat", lambda: ChatOpenAI(**options).invoke(CHAT).content
    yield "chat, stream", lambda: "".join(part.content for part in ChatOpenAI(**options).stream(CHAT))
    yield "complete", lambda: OpenAI(**options).invoke(PROMPT)
    yield "complete, stream", lambda: "".join(OpenAI(**options).stream(PROMPT))


CLIENTS = {"openai": of_openai, "litellm": of_litellm, "langchain-openai": of_langchain}


def called(url) -> list[dict]:
    """What the clients of this environment say."""
    rows = []
    for name, client in CLIENTS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for call, ask in client(url):
            try:
                said = ask()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            rows.append({"client": f"{name} {version}", "call": call, "said": said})
    return rows


def model_with_a_template(folder: Path) -> None:
    from plpkg.backbones import load_backbone

    model, tokenizer = load_backbone("plpkg-small")
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model_with_a_template(Path(folder, "model"))
        command = [sys.executable, "-m", "plpkg", "serve", "--model", f"{folder}/model", "--store", f"{folder}/store"]
        command += ["--adapter", Path(__file__).parents[1] / "data" / "serving" / "numpy", "--listen", "127.0.0.1:0"]
        service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            url = re.search(r"http://\S+", service.stdout.readline())[0]
            for number, wanted in enumerate(ENVIRONMENTS):
                place = Path(folder, str(number))
                venv.create(place, with_pip=True)
                subprocess.run([place / "bin" / "pip", "install", "--quiet", *wanted], check=True)
                done = subprocess.run(
                    [place / "bin" / "python", __file__, "--call", url], stdout=subprocess.PIPE, check=True
                )
                rows += json.loads(done.stdout.splitlines()[-1])
        finally:
            service.terminate()
            service.wait()
    texts = {kind: next(r["said"] for r in rows if r["call"] == kind) for kind in ("complete", "chat")}
    failed = 0
    for row in rows:
        right = row["said"] is True or row["said"] == texts.get(row["call"].partition(",")[0])
        failed += not right
        print(f"{row['client']:28} {row['call']:28} {'ok' if right else row['said']}")
    return min(failed, 1)


if __name__ == "__main__":
    if "--call" in sys.argv:
        print(json.dumps(called(sys.argv[-1])))
    else:
        sys.exit(main())
