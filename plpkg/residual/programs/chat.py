"""A conversation with a model whose decoder layers a cloud has, line by line."""

import io
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import torch
from grpc import StatusCode
from transformers import TextStreamer

from plpkg.files.untrusted import printable
from plpkg.residual.drafts import chosen
from plpkg.residual.wire.connection import RefusedError
from plpkg.residual.wire.device import DeviceClient
from plpkg.residual.wire.writing import checked_warpers, stops
from plpkg.validation import whole_number


def answer_lines(
    client: DeviceClient,
    tokenizer,
    lines: Iterator[str],
    max_new_tokens: int,
    *,
    draft: str | None = None,
    draft_tokens: int = 6,
    stop_strings: list[str] | None = None,
    **sampling,
) -> None:
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
    checked_warpers(max_new_tokens, **sampling)
    whole_number("draft_tokens", draft_tokens, 0)
    chosen(draft, tokenizer)
    stops(stop_strings, tokenizer)
    client.connect()
    guessing = dict(draft=draft, draft_tokens=draft_tokens)
    options: dict[str, Any] = sampling | guessing | dict(stop_strings=stop_strings, tokenizer=tokenizer)
    conversation = []
    for line in lines:
        if not line.strip():
            continue
        conversation.append({"role": "user", "content": line})
        ids = prompt(tokenizer, conversation)
        streamer = _Printed(tokenizer, skip_special_tokens=True)
        try:
            ids_and_answer = client.generate(ids, max_new_tokens, on_token=streamer.put, **options)
        except RefusedError as refused:
            if refused.code is not StatusCode.OUT_OF_RANGE:
                raise
            print(f"{refused}; the conversation begins anew", file=sys.stderr)
            conversation.clear()
            continue
        streamer.end()
        answer = tokenizer.decode(ids_and_answer[0, ids.shape[1] :], skip_special_tokens=True)
        conversation.append({"role": "assistant", "content": answer})


class _Printed(TextStreamer):
    """Prints each word as soon as it is complete: the cloud has its part in what it is."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text), stream_end)


def prompt(tokenizer, conversation: list[dict]) -> torch.Tensor:
    """The ids ``(1, seq)`` of a conversation; without a chat template those of its last line, a text's beginning."""
    if tokenizer.chat_template is not None:
        ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_tensors="pt")
        return ids if isinstance(ids, torch.Tensor) else ids["input_ids"]  # by transformers' version
    return beginning(tokenizer, conversation[-1]["content"])


def beginning(tokenizer, text: str) -> torch.Tensor:
    """The ids ``(1, seq)`` of a text that is to be continued, as training reads a document's beginning."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id, *ids]
    return torch.tensor([ids])


def lines_of(stream: TextIO | None = None) -> Iterator[str]:
    """The lines of a stream, standard input by default, asked for if it is a terminal; without any there are none."""
    source = sys.stdin if stream is None else stream
    if source is None:
        return
    if isinstance(source, io.TextIOWrapper):
        source.reconfigure(errors="replace")  # a byte that is no character ends nothing
    while True:
        if source.isatty():
            print("> ", end="", flush=True)
        line = source.readline()
        if not line:
            return
        yield line.rstrip("\n")
