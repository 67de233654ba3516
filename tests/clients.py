"""OpenAI's clients of other versions and makers against ``plpkg serve``: a table of client and call.

The clients get a virtual environment, since their versions exclude this project's. ``make clients`` starts the service
and runs this file there with ``--call``; it ends with 1 if a call fails, or a client is told another text than the
others.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

BEFORE = "openai==2.54.0"
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
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import fetches a table of prices, three times over
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


def called(url, names) -> list[dict]:
    """What the clients of these names say in this environment."""
    rows = []
    for name in names:
        for call, ask in CLIENTS[name](url):
            row = {"client": f"{name} {importlib.metadata.version(name)}", "call": call}
            try:
                said = ask()
                rows.append(row | {"said": said, "right": said is True or (isinstance(said, str) and said != "")})
            except Exception as error:
                rows.append(row | {"said": f"{type(error).__name__}: {error}", "right": False})
    return rows


def model_with_a_template(folder: Path) -> None:
    from plpkg.backbones import load_backbone

    model, tokenizer = load_backbone("plpkg-small")
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answers(folder: Path, url: str) -> list[dict]:
    """What all clients say: those of ``clients.txt``, and ``openai`` of the major version before in front of them."""
    python, before = folder / "clients" / "bin" / "python", folder / "before"
    venv.create(folder / "clients")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "-r", Path(__file__).with_suffix(".txt")], check=True)
    subprocess.run([*pip, "--no-deps", "--target", before, BEFORE], check=True)
    rows = []
    for path, names in ((before, ["openai"]), ("", CLIENTS)):
        command = [python, __file__, "--call", url, *names]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> int:
    import pandas as pd  # the clients' environment has none

    with tempfile.TemporaryDirectory() as folder:
        model_with_a_template(Path(folder, "model"))
        command = [sys.executable, "-m", "plpkg", "serve", "--model", f"{folder}/model", "--store", f"{folder}/store"]
        command += ["--adapter", Path(__file__).parents[1] / "data" / "serving" / "numpy", "--listen", "127.0.0.1:0"]
        service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            told = pd.DataFrame(answers(Path(folder), re.search(r"http://\S+", service.stdout.readline())[0]))
        finally:
            service.terminate()
            service.wait()
    for kind in ("complete", "chat"):  # in whatever way a text comes, it is the same one
        texts = told["call"].isin([kind, f"{kind}, stream"])
        told["right"] &= ~texts | (told["said"] == told.loc[texts, "said"].iloc[0])
    table = told.assign(told=told["right"].map({True: "ok", False: "FAILED"}))
    print(table.pivot_table("told", "call", "client", aggfunc="first", sort=False).fillna("-").to_string())
    for row in told[~told["right"]].itertuples():
        print(f"{row.client}, {row.call}: {row.said!r}")
    return int(not told["right"].all())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:
        print(json.dumps(called(sys.argv[2], sys.argv[3:])))
    else:
        sys.exit(main())
