"""The requests that are understood, field by field; the OpenAPI document comes from here.

A field that is not here is refused by name. So are those of ``NOT_SUPPORTED``, unless they say what is done anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

#: Fields of OpenAI's API that are not supported, and values with which they may still be given, beside null.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": (),
    "functions": (),
    "metadata": (),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "suffix": (),
    "verbosity": (),
    "web_search_options": (),
}


def _whole(given: Any) -> Any:
    """JSON has one kind of number: 4.0 is 4."""
    return int(given) if type(given) is float and given.is_integer() else given


def _not_many(given: Any) -> Any:
    """Refuse an object with more items than any field takes, before each of them is looked at."""
    if isinstance(given, dict) and len(given) > _MOST_ITEMS:
        raise PydanticCustomError("too_many", "it may have up to {most} items", {"most": _MOST_ITEMS})
    return given


_WHOLE = BeforeValidator(_whole)
_MOST_ITEMS = 10_000
#: More than any object of a request may have.
_MOST_FIELDS = 100
# ``fail_fast`` below: a body has room for a million bad items, of which each would be an error of its own.
Id = Annotated[int, Field(ge=0, lt=2**31), _WHOLE]
Text = Annotated[str, Field(max_length=4_000_000)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Ids = Annotated[list[Id], Field(min_length=1, fail_fast=True)]
Biases = Annotated[dict[str, Annotated[Finite, Field(ge=-100, le=100)]], Field(max_length=_MOST_ITEMS)]


class Strict(BaseModel):
    """Nothing is converted, and nothing unknown passes."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        """Refuse by the first name a body that is full of unknown ones."""
        if isinstance(given, dict) and len(given) > _MOST_FIELDS:
            known = {field.alias or name for name, field in cls.model_fields.items()} | NOT_SUPPORTED.keys()
            name = next(name for name in given if name not in known)
            raise PydanticCustomError("unknown_field", "{name} is not known here; leave it out", {"name": name})
        return given


class StreamOptions(Strict):
    """What a stream has beside tokens."""

    include_usage: bool | None = None
    """A last chunk with the usage."""
    include_obfuscation: Literal[False] | None = None
    """Random padding is never added."""


class Speculation(Strict):
    """How this request is speculated on. Answers follow the same distribution whatever it says."""

    enabled: bool | None = None
    """False decodes plainly."""
    k: Annotated[int, Field(ge=0, le=16), _WHOLE] | None = None
    """Draft tokens in a round; without it the engine chooses."""
    statistics: bool | None = None
    """Answer with an object ``speculation``: what was drafted and accepted."""
    tokens: bool | None = None
    """Streams only: each chunk has an object ``speculation``: its tokens, where they came from, and the round's k."""


class Prediction(Strict):
    """A text that much of the answer will probably repeat."""

    type: Literal["content"]
    content: Text | Annotated[list[TextPart], Field(max_length=1000, fail_fast=True)]


class TextPart(Strict):
    """A part of a message that is text."""

    type: Literal["text"]
    text: Text


class FunctionCall(Strict):
    """A call of a function by the model."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text
    """A JSON object."""


class ToolCall(Strict):
    """A call of a tool by the model."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"]
    function: FunctionCall


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=1000, fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=128, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    name: None = None
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """Whether arguments have to follow the schema; where ``tool_choice`` forces a call they do anyway."""


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class ChosenName(Strict):
    """The name of a function."""

    name: Annotated[str, Field(min_length=1, max_length=256)]


class ChosenTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: ChosenName


class JsonSchema(Strict):
    """A JSON schema that the answer has to follow."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """Of no effect: answers follow the schema always."""


class AsText(Strict):
    """Any text."""

    type: Literal["text"]


class AsJson(Strict):
    """Some JSON object."""

    type: Literal["json_object"]


class AsSchema(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class Generation(Strict):
    """What all requests for text have in common."""

    asks: ClassVar[str] = "prompt"
    """The field that holds the prompt."""
    model: Annotated[str, Field(max_length=1024)] | None = None
    n: Annotated[int, Field(ge=1, le=128), _WHOLE] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), _WHOLE] | None = None
    stop: Annotated[str, Field(min_length=1, max_length=1000)] | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), _WHOLE] | None = None
    """0 or -1: all tokens."""
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[Biases | None, BeforeValidator(_not_many)] = None
    """By token id."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), _WHOLE] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), _WHOLE] | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    guided_regex: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    """A regular expression that the answer has to match."""
    guided_grammar: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    """A context-free grammar in Lark's notation that the answer has to follow."""
    response_format: Annotated[AsText | AsJson | AsSchema, Field(discriminator="type")] | None = None
    prediction: Prediction | None = None
    speculation: Speculation | None = None
    store: Literal[False] | None = None
    """False keeps this request out of captures."""
    user: Annotated[str, Field(max_length=1024)] | None = None
    """For logs only."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Refuse what is not supported by its name; drop it where it says what is done anyway."""
        if not isinstance(given, dict):
            return given
        kept = dict(given)
        for name, neutral in NOT_SUPPORTED.items():
            if name in kept and name not in cls.model_fields:
                value = kept.pop(name)
                if value is not None and not any(type(value) is type(v) and value == v for v in neutral):
                    raise PydanticCustomError("not_supported", "{name} is not supported; leave it out", {"name": name})
        return kept


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]],
    Field(max_length=16),
]


class CompletionRequest(Generation):
    """``POST /v1/completions``."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=128, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=128, fail_fast=True)]
    )
    echo: bool | None = None
    """Begin the answer's text with the prompt."""
    logprobs: Annotated[int, Field(ge=0, le=20), _WHOLE] | None = None
    return_token_ids: bool | None = None
    """Each choice has `token_ids`: those of its answer, one that ended it included. Not in streams."""


class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    asks = "messages"
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31), _WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), _WHOLE] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None


for _model in (Prediction, Generation, CompletionRequest, ChatRequest):
    _model.model_rebuild()
