"""What clients send, in OpenAI's words; a setting that would change the answer and is not served is refused."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# The first wrong item says enough: a list of a million would make a million errors
SEVERAL = Field(min_length=1, max_length=64, fail_fast=True)
Nothing = Annotated[float, Field(ge=0, le=0)] | None
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Text = Annotated[str, Field(min_length=1)]  # with a length, pydantic also refuses what UTF-8 cannot hold


class Usage(BaseModel):
    """Whether the last event of a stream counts tokens."""

    include_usage: bool = False


class Settings(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="The base's name, or NAME or NAME@SHA256 of one of the account's adapters.")
    lora: Text | None = Field(None, description="Workers AI's way: an adapter, where model is the base's name.")
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of max_tokens.")
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: Usage | None = None
    user: str | None = Field(None, description="Not used.")
    metadata: dict[str, str] | None = Field(None, description="Not used.")
    n: Literal[1, None] = 1
    presence_penalty: Nothing = 0
    frequency_penalty: Nothing = 0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _said(cls, body):
        """The fields that are not null, which OpenAI takes for not said."""
        if isinstance(body, dict):
            most = max(len(each) for each in (body, *body.values()) if isinstance(each, dict))
            if most > 100:
                raise ValueError(f"an object has at most 100 fields, got {most}")
            body = {key: value for key, value in body.items() if value is not None or key not in cls.model_fields}
        return body


class Completion(Settings):
    """A request to continue one or more texts, or ids."""

    prompt: Text | Ids | Annotated[list[Text], SEVERAL] | Annotated[list[Ids], SEVERAL]
    best_of: Literal[1, None] = 1
    echo: Literal[False, None] = False
    logprobs: None = None
    suffix: Literal[""] | None = None


class ContentPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A turn of a chat."""

    role: Literal["developer", "system", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)]
    name: str | None = Field(None, description="Not used.")

    @property
    def text(self) -> str:
        """Its parts in one."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Format(BaseModel):
    """Text, whatever is in it."""

    type: Literal["text"]


class Chat(Settings):
    """A request to answer, through the tokenizer's chat template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    response_format: Format | None = None
