"""Bodies that clients send, in OpenAI's and vLLM's words; what would change the answer and is not served is refused."""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Json,
    Tag,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from plpkg.serving.service.http.neutral import Only, OrNull, Sent, Unserved, neutral

# The first wrong item says enough: a list of a million would make a million errors
SEVERAL = Field(min_length=1, max_length=64, fail_fast=True)
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Text = Annotated[str, Field(min_length=1)]
TOP = 20
"""Likeliest tokens that are told at most."""


class Usage(Sent):
    """Whether the last event of a stream counts tokens."""

    include_usage: bool = False
    include_obfuscation: bool = Field(default=False, description="Not used.")


def _listed(value):
    """One text, or one text's ids, as a list of one."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        return value
    kinds = {isinstance(each, str) for each in value[:65]}
    if len(kinds) > 1:
        raise PydanticCustomError("mixed", "has either texts or lists of ids")
    return [value] if isinstance(value[0], int) else value


TAGS = ("<text>", "<ids>")
"""Stand in an error's place, and are no fields."""
Prompt = Annotated[
    Annotated[Text, Tag(TAGS[0])] | Annotated[Ids, Tag(TAGS[1])],
    Discriminator(lambda value: TAGS[not isinstance(value, str)]),
]
Listed = BeforeValidator(_listed, Text | Ids | Annotated[list[Text], SEVERAL] | Annotated[list[Ids], SEVERAL])


def _one(value):
    return [value] if isinstance(value, str) else value


OneOrSeveral = BeforeValidator(_one, Stop | list[Stop] | None)


class Settings(Unserved):
    """Fields that completions and chats have in common."""

    model: str = Field(description="The base's name, or NAME or NAME@SHA256 of one of the account's adapters.")
    lora: Text | None = Field(None, description="Workers AI's way: an adapter, where model is the base's name.")
    max_tokens: int | None = Field(None, ge=0, description="With 0 the prompt is read, and nothing written.")
    max_completion_tokens: int | None = Field(None, ge=0, description="The newer name of max_tokens.")
    temperature: OrNull[float] = Field(1.0, ge=0, le=2)
    top_p: OrNull[float] = Field(1.0, ge=0, le=1, description="0 leaves the likeliest token.")
    seed: int | None = Field(None, ge=-1, lt=2**63, description="-1 draws one; each of n answers has the next.")
    stop: Annotated[OrNull[list[Stop]], Field(max_length=16), OneOrSeveral] = []  # noqa: RUF012 (pydantic copies it)
    stream: OrNull[bool] = False
    stream_options: OrNull[Usage] = Usage()
    n: OrNull[int] = Field(1, ge=1, le=64)
    logit_bias: dict[str, Annotated[Any, Only((0,))]] | None = None


class Completion(Settings):
    """A request to continue one or more texts, or ids."""

    prompt: Annotated[list[Prompt], SEVERAL, Listed]
    best_of: OrNull[int] = Field(1, ge=1, le=64, description="1, or as many as n.")
    echo: OrNull[bool] = Field(False, description="The prompt's text comes first, and its log-probabilities.")
    logprobs: Annotated[int | None, Field(ge=0, le=TOP), BeforeValidator(lambda v: None if v is False else v)] = None
    suffix: Annotated[Any, Only(("",))] = ""

    @field_validator("best_of")
    @classmethod
    def _as_many(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n")
        if best_of not in (None, 1, n):
            raise PydanticCustomError("not_served", "must be 1 or n={n}, got {got}", {"n": n, "got": best_of})
        return best_of


class Function(Sent):
    """A function that a model called."""

    name: str
    arguments: Annotated[Json[dict[str, Any]], BeforeValidator(lambda v: "{}" if v == "" else v)]


class ToolCall(Sent):
    """A call that a model has made."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: Function


class ContentPart(Sent):
    """A part of a message."""

    type: Literal["text"]
    text: str


Parts = Annotated[
    list[ContentPart],
    Field(min_length=1, max_length=2**11, fail_fast=True),
    BeforeValidator(lambda v: [{"type": "text", "text": v}] if isinstance(v, str) else v, str | list[ContentPart]),
]


TURN = {"refusal": ("",), "annotations": ([],), "audio": (), "function_call": (), "provider_specific_fields": ({},)}


class ChatMessage(create_model("Turn", __base__=Sent, **neutral(TURN))):
    """A turn of a chat."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Parts | None = Field(None, description="An assistant's may be null.")
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=64, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says(self):
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("not_said", "content is missing from a message of {role}", {"role": self.role})
        return self

    @property
    def turn(self) -> dict:
        """As chat templates have it: the content's parts in one text, and only what was said."""
        said = self.model_dump(exclude_none=True, exclude={*TURN})
        return said | {"content": "".join(part.text for part in self.content or [])}


class Chat(Settings):
    """A request to answer, through the tokenizer's chat template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=2**11, fail_fast=True)]
    logprobs: OrNull[bool] = False
    top_logprobs: OrNull[int] = Field(0, ge=0, le=TOP, description="With logprobs only.")

    @field_validator("top_logprobs")
    @classmethod
    def _of_what(cls, top_logprobs: int | None, info: ValidationInfo) -> int | None:
        if top_logprobs and not info.data.get("logprobs"):
            raise PydanticCustomError("not_served", "needs logprobs=true")
        return top_logprobs
