"""What ``plpkg cloud`` and ``plpkg device`` do; the options are in :mod:`plpkg.cli`."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import torch
from grpc import StatusCode
from peft import PeftConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import TextStreamer

from plpkg import corpora
from plpkg.backbones import load_backbone
from plpkg.corpora import Document
from plpkg.corpora.folder import read_utf8
from plpkg.residual.adapter import PrivateLoraConfig
from plpkg.residual.cloud import CloudServer
from plpkg.residual.connection import RefusedError
from plpkg.residual.device import DeviceClient
from plpkg.residual.sampling import warpers
from plpkg.residual.wire import PRECISIONS
from plpkg.validation import one_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapted_model(name: str, adapter: Path | None, dtype: str, device: str, **config):
    """A model with a PrivateLoRA adapter, and its tokenizer.

    Parameters
    ----------
    name
        As for :func:`plpkg.backbones.load_backbone`.
    adapter
        A folder that ``save_pretrained`` wrote, with safetensors; without one a new adapter of ``config``.
    dtype, device
        Of the model: one of the wire's precisions or ``"auto"``, the checkpoint's own; and ``"cpu"`` or ``"cuda"``.
    **config
        Fields of :class:`PrivateLoraConfig`.

    Raises
    ------
    ValueError, FileNotFoundError
        No such model, device or adapter; an adapter that is damaged, of another kind, or for another model.
    """
    dtypes = PRECISIONS | {"auto": "auto"}
    model, tokenizer = load_backbone(name, dtype=dtypes[one_of("dtype", dtype, tuple(dtypes))], device=device)
    if adapter is None:
        return get_peft_model(model, PrivateLoraConfig(**config)), tokenizer
    config = _config(adapter)
    try:
        return PeftModel.from_pretrained(model, adapter, config=config, is_trainable=True), tokenizer
    except RuntimeError as error:  # of another shape
        raise ValueError(f"{adapter} does not fit {name}: {str(error).splitlines()[-1].strip()}") from error
    except SafetensorError as error:
        raise ValueError(f"{adapter / WEIGHTS} is damaged: {error}") from error


def _config(adapter: Path) -> PrivateLoraConfig:
    """What a folder says of its adapter, which is there."""
    for name in (CONFIG, WEIGHTS):
        if not (adapter / name).is_file():  # PEFT would ask the hub
            raise FileNotFoundError(f"{adapter} holds no adapter: it has no {name}")
    try:
        config = PeftConfig.from_pretrained(adapter)
    except KeyError as error:
        raise ValueError(f"{adapter} holds an adapter of a kind that PEFT does not know: {error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{adapter / CONFIG} is damaged: {error}") from error
    if not isinstance(config, PrivateLoraConfig):
        raise ValueError(f"{adapter} holds a {config.peft_type} adapter, not a PrivateLoRA one")
    return config


def serve(server: CloudServer, say: Callable[[str], None]) -> None:
    """Serve until interrupted."""
    with server:
        say(f"listening on {server.address}; end with Ctrl+C")
        try:
            server.wait()
        except KeyboardInterrupt:
            say(f"{server.traffic!r}")


def chat(client: DeviceClient, tokenizer, lines: Iterator[str], max_new_tokens: int, **sampling) -> None:
    """Answer every line, printing as it is written; one that is too long for the cloud is left out.

    A tokenizer with a chat template gets the conversation so far; to any other model each line is the beginning of
    a text that it continues.

    Raises
    ------
    ValueError
        Arguments of :meth:`DeviceClient.generate` that cannot be, before a line is read.
    ConnectionError, RefusedError
        As in :meth:`DeviceClient.generate`.
    """
    warpers(max_new_tokens, **sampling)
    talks = tokenizer.chat_template is not None
    conversation = []
    for line in lines:
        if not line.strip():
            continue
        conversation.append({"role": "user", "content": line})
        if talks:
            ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_tensors="pt")
            ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
        else:
            start = [i for i in (tokenizer.bos_token_id,) if i is not None]
            ids = torch.tensor([start + tokenizer(line, add_special_tokens=False)["input_ids"]])
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)  # prints each word as soon as it is complete
        try:
            found = client.generate(ids, max_new_tokens, on_token=streamer.put, **sampling)
        except RefusedError as refused:
            if refused.code is not StatusCode.OUT_OF_RANGE:
                raise
            print(f"{refused}; the conversation begins anew", file=sys.stderr)
            conversation.clear()
            continue
        streamer.end()
        answer = tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
        conversation.append({"role": "assistant", "content": answer})


def texts(source: str) -> list[Document]:
    """The training text of a writer (``writer:numpy``), of a folder of text files, or one file.

    Raises
    ------
    ValueError, OSError
        No such writer, or nothing that can be read: a file that is not UTF-8, say.
    """
    kind, _, name = source.partition(":")
    if kind == "writer":
        return corpora.writer(name).split("train")
    path = Path(source)
    if path.is_dir():
        return [document for writer in corpora.text_folder(path) for document in writer.split("train")]
    return [Document(path.name, read_utf8(path))]


def prompts(stream: TextIO | None = None) -> Iterator[str]:
    """The lines of a stream, standard input by default, asked for if it is a terminal."""
    stream = sys.stdin if stream is None else stream
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a byte that is no character ends nothing
    while True:
        if stream.isatty():
            print("> ", end="", flush=True)
        line = stream.readline()
        if not line:
            return
        yield line.rstrip("\n")
