"""Settings that are not served: the values with which they change nothing, which clients send as their defaults."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, WithJsonSchema, create_model, model_validator
from pydantic_core import PydanticCustomError

from plpkg.validation import shown

NEUTRAL = {
    name: values
    for values, names in (
        # How a token is chosen
        ((0,), "presence_penalty frequency_penalty min_p top_a penalty_alpha xtc_probability mirostat dry_multiplier"),
        ((0,), "dynatemp_range epsilon_cutoff eta_cutoff"),
        ((1,), "repetition_penalty repeat_penalty length_penalty typical_p tfs_z guidance_scale num_beams"),
        ((0, -1), "top_k no_repeat_ngram_size"),
        ((False,), "use_beam_search early_stopping ignore_eos"),
        (([],), "bad_words allowed_token_ids logits_processors stop_token_ids"),
        ((), "structured_outputs guided_json guided_regex guided_choice guided_grammar"),
        ((), "json_schema grammar regex ebnf prediction"),
        (({"type": "text"},), "response_format"),
        (("none",), "reasoning_effort"),
        (("medium",), "verbosity"),
        ((["text"],), "modalities"),
        # What is read
        (([],), "documents tools functions"),
        (("none", "auto"), "tool_choice function_call"),  # there are no tools to choose from
        (({},), "chat_template_kwargs mm_processor_kwargs vllm_xargs"),
        ((False,), "safe_prompt"),
        ((), "chat_template truncate_prompt_tokens prompt_embeds kv_transfer_params web_search_options"),
        # What is told and kept
        ((0,), "min_tokens min_length priority"),
        ((True,), "skip_special_tokens spaces_between_special_tokens detokenize"),
        ((False,), "include_stop_str_in_output return_token_ids return_tokens_as_token_ids prompt_logprobs"),
        ((False,), "store background"),
        ((), "audio"),
    )
    for name in names.split()
}
"""Settings that are not served, and the values with which they change nothing; nor does null."""
UNUSED = {
    **dict.fromkeys(("user", "safety_identifier", "service_tier", "request_id", "cache_salt"), str),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), str),
    **dict.fromkeys(("parallel_tool_calls", "cache_prompt", "include_reasoning"), bool),
    "metadata": dict[str, str],
}
"""Settings that change nothing whatever they hold."""


def only(values: tuple):
    """The type of a field that has one of these values, or is null."""

    def check(value):
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values):
            told = {"served": " or ".join(map(json.dumps, [*values, None])), "got": shown(value)}
            raise PydanticCustomError("not_served", "only {served} is served, got {got}", told)
        return value

    return Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": [*values, None]})]


def neutral(table: dict) -> dict:
    """The fields of a table of neutral values, for ``create_model``."""
    return {name: (only(values), None) for name, values in table.items()}


class Sent(BaseModel):
    """An object of a request, without those of its fields that are null, which OpenAI takes for not said."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _said(cls, body):
        if isinstance(body, dict):
            most = max(len(each) for each in (body, *body.values()) if isinstance(each, dict))
            if most > 100:
                raise PydanticCustomError("too_long", "an object has at most 100 fields, got {most}", {"most": most})
            body = {key: value for key, value in body.items() if value is not None or key not in cls.model_fields}
        return body


Unserved = create_model(
    "Unserved", __base__=Sent, **neutral(NEUTRAL), **{name: (kind | None, None) for name, kind in UNUSED.items()}
)
"""A request without the settings that are served."""
