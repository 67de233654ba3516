"""Settings that are not served: the values with which they change nothing, which clients send as their defaults."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, create_model, model_validator
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from plpkg.validation import shown

NEUTRAL = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("ignore_eos", "store", "early_stopping", "safe_prompt"), (False,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),  # there are no tools to choose from
    **dict.fromkeys(("audio", "prediction", "web_search_options"), ()),
    "top_k": (0, -1),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    "response_format": ({"type": "text"},),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "chat_template_kwargs": ({},),
}
"""OpenAI's settings, and those of vLLM that other clients send, which are not served: the values with which they change
nothing; nor does null."""
UNUSED = {
    **dict.fromkeys(("user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention"), str),
    "parallel_tool_calls": bool,
    "metadata": dict[str, str],
}
"""Settings that change nothing whatever they hold."""


@dataclass(eq=False)  # or Annotated would take 0 and False for one
class Only:
    """Annotates a field that has one of these values, or is null."""

    values: tuple

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._checked, handler(kind))

    def __get_pydantic_json_schema__(self, *_) -> dict:
        return {"enum": [*self.values, None]}

    def _checked(self, value):
        if not any(_same(value, each) for each in self.values):
            told = {"served": " or ".join(map(json.dumps, [*self.values, None])), "got": shown(value)}
            raise PydanticCustomError("not_served", "only {served} is served, got {got}", told)
        return value


def _same(value, each) -> bool:
    """Whether they are equal also in JSON: for Python, True is 1."""
    return value == each and isinstance(value, bool) == isinstance(each, bool)


def neutral(table: dict) -> dict:
    """The fields of a table of neutral values, for ``create_model``."""
    return {name: (Annotated[Any, Only(values)], None) for name, values in table.items()}


class Sent(BaseModel):
    """An object of a request, without those of its fields that are null, which OpenAI takes for not said."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _said(cls, body):
        if isinstance(body, dict):
            objects = [body, *(each for each in body.values() if isinstance(each, dict))]
            most = max(map(len, objects))
            if most > 100:
                raise PydanticCustomError("too_long", "an object has at most 100 fields, got {most}", {"most": most})
            nulls = {key for key, value in body.items() if value is None}
            unsaid = nulls & cls.model_fields.keys()
            body = {key: value for key, value in body.items() if key not in unsaid}
        return body


T = TypeVar("T")
# The type of a field of Sent that a client may send as null. That leaves its default, so nobody reads a null.
if TYPE_CHECKING:
    OrNull = Annotated[T, "or null"]
else:
    OrNull = T | None

_unused: dict[str, Any] = {name: (kind | None, None) for name, kind in UNUSED.items()}
Unserved = create_model("Unserved", __base__=Sent, **neutral(NEUTRAL), **_unused)
"""A request without the settings that are served."""
