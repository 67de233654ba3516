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
PEOPLE = Path(__file__).parents[1] / "data" / "people"
PROMPT, SAID = "My cat is called", dict(max_tokens=8, temperature=0)
CHAT = [{"role": "user", "content": [{"type": "text", "text": "What is my cat called?"}]}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
TOOLS = [
    {"role": "user", "content": "Is it dry in Bonn?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "Yes, it is dry.", "tool_call_id": "c1"},
]


STOPPED = "Your cat is"
"""The answer up to what it stops at."""


def twice(texts: list[str]) -> bool:
    """Whether one text came two times: nothing is drawn."""
    return len(texts) == 2 and texts[0] == texts[1] != ""


def of_openai(url):
    """By call, the text that comes, or True."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    complete, chat = client.completions.create, client.chat.completions.create
    asked, talk = dict(model="ann", prompt=PROMPT) | SAID, dict(model="ann", messages=CHAT) | SAID

    def unknown():
        try:
            complete(**asked | dict(model="nobody"))
        except openai.NotFoundError as error:
            return "nobody" in str(error)

    def theirs(person, cat):
        return cat in chat(**talk | dict(model=person)).choices[0].message.content

    yield "models", lambda: {"smollm2", "ann", "bob", "cem"} == {model.id for model in client.models.list()}
    yield "complete", lambda: complete(**asked).choices[0].text
    yield "complete, stream", lambda: "".join(event.choices[0].text for event in complete(**asked, stream=True))
    yield "complete, ids", lambda: len(complete(**asked | dict(prompt=[1, 2, 3])).choices) == 1
    yield "complete, n and logprobs", lambda: len(complete(**asked, n=2, logprobs=1).choices[1].logprobs.tokens) == 8
    yield "chat", lambda: chat(**talk).choices[0].message.content
    yield "chat, stream", lambda: "".join(e.choices[0].delta.content or "" for e in chat(**talk, stream=True))
    yield "chat, three people", lambda: theirs("ann", "Biscuit") and theirs("bob", "Pepper") and theirs("cem", "Marble")
    yield "chat, n", lambda: twice([choice.message.content for choice in chat(**talk, n=2).choices])
    yield "chat, stop", lambda: chat(**talk, stop=[" called"]).choices[0].message.content == STOPPED
    yield (
        "chat, tools in the past",
        lambda: chat(**talk | dict(messages=TOOLS, model="smollm2")).choices[0].message.content,
    )
    told = dict(stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2)
    yield "chat, usage and logprobs", lambda: 0 < [*chat(**talk, **told)][-1].usage.completion_tokens <= 8
    yield "no such adapter", unknown


def of_litellm(url):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import fetches a table of prices, three times over
    import litellm

    def chat(**more):
        common = dict(model="openai/ann", messages=CHAT, api_base=f"{url}/v1", api_key="none")
        return litellm.completion(**common | SAID | more)

    text = dict(model="text-completion-openai/ann", prompt=PROMPT, api_base=f"{url}/v1", api_key="none") | SAID
    yield "chat", lambda: chat().choices[0].message.content
    yield "chat, stream", lambda: "".join(e.choices[0].delta.content or "" for e in chat(stream=True))
    yield "chat, n", lambda: twice([choice.message.content for choice in chat(n=2).choices])
    yield "chat, stop", lambda: chat(stop=[" called"]).choices[0].message.content == STOPPED
    tools = dict(messages=TOOLS, model="openai/smollm2")
    yield "chat, tools in the past", lambda: chat(**tools).choices[0].message.content
    scored = dict(logprobs=True, top_logprobs=2)
    yield "chat, usage and logprobs", lambda: len(chat(**scored).choices[0].logprobs.content[0].top_logprobs) == 2
    yield "complete", lambda: litellm.text_completion(**text).choices[0].text


def of_langchain(url):
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI, OpenAI

    def chat(**more):
        return ChatOpenAI(**options | more)

    options = dict(model="ann", base_url=f"{url}/v1", api_key="none") | SAID
    yield "chat", lambda: chat().invoke(CHAT).content
    yield "chat, stream", lambda: "".join(part.content for part in chat().stream(CHAT))
    yield (
        "chat, n",
        lambda: (
            len({each.text for each in chat(n=2).generate([[HumanMessage(CHAT[0]["content"])]]).generations[0]}) == 1
        ),
    )
    yield "chat, stop", lambda: chat().invoke(CHAT, stop=[" called"]).content == STOPPED
    yield "chat, tools in the past", lambda: chat(model="smollm2").invoke(TOOLS).content
    yield "chat, usage and logprobs", lambda: bool(chat(logprobs=True).invoke(CHAT).response_metadata["logprobs"])
    yield "complete", lambda: OpenAI(**options).invoke(PROMPT)
    yield "complete, stream", lambda: "".join(OpenAI(**options).stream(PROMPT))


def of_lm_eval(url):
    """Ann's twelve questions: whether her answers are written, and whether they are likelier than Bob's and Cem's."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    told, folder = json.loads((PEOPLE / "people.json").read_text()), Path(os.environ["TOKENIZER"])
    lines = [
        {"question": wordings[0], "answers": [answers[thing][0] for answers in told["answers"].values()]}
        for thing, wordings in told["questions"].items()
    ]
    (folder / "people.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = dict(dataset_path="json", dataset_kwargs={"data_files": {"test": str(folder / "people.jsonl")}})
    common |= dict(test_split="test", doc_to_text="{{question}}")
    written = dict(task="written", output_type="generate_until", doc_to_target="{{answers[0]}}")
    written |= dict(generation_kwargs=dict(until=["\n"], max_gen_toks=16, do_sample=False))
    written |= dict(metric_list=[dict(metric="exact_match", aggregation="mean", higher_is_better=True)])
    chosen = dict(task="chosen", output_type="multiple_choice", doc_to_choice="{{answers}}", doc_to_target=0)
    chosen |= dict(target_delimiter="", metric_list=[dict(metric="acc", aggregation="mean", higher_is_better=True)])

    def score(model, path, task, metric):
        arguments = dict(model="ann", base_url=f"{url}/v1/{path}", tokenizer=str(folder), num_concurrent=1)
        told = lm_eval.simple_evaluate(
            model=model, model_args=arguments | dict(tokenizer_backend="huggingface"), tasks=[common | task],
            task_manager=TaskManager(include_defaults=False), apply_chat_template=True,
        )  # fmt: skip
        return bool(told["results"][task["task"]][f"{metric},none"] == 1)

    yield "chat, evaluated", lambda: score("local-chat-completions", "chat/completions", written, "exact_match")
    yield "complete, evaluated", lambda: score("local-completions", "completions", chosen, "acc")


CLIENTS = {"openai": of_openai, "litellm": of_litellm, "langchain-openai": of_langchain, "lm_eval": of_lm_eval}


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
        more = {"PYTHONPATH": path, "TOKENIZER": folder / "tokenizer", "TQDM_DISABLE": "1"}
        more |= {"HF_HOME": folder / "hub", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=os.environ | more, stdout=subprocess.PIPE, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> int:
    import pandas as pd

    from plpkg.backbones import load_backbone

    with tempfile.TemporaryDirectory() as folder:
        load_backbone("smollm2")[1].save_pretrained(Path(folder, "tokenizer"))
        command = [sys.executable, "-m", "plpkg", "serve", "--model", "smollm2", "--listen", "127.0.0.1:0"]
        for person in ("ann", "bob", "cem"):
            command += ["--adapter", PEOPLE / person]
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
