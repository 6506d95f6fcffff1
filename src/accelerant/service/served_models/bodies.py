"""Requests of OpenAI's routes, as JSON: what they may ask for, and the refusal, by name, of everything else."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from accelerant.runtime.files import clipped, decode_json
from accelerant.service.errors import Refused

_CHOICES_MOST = 128
_MESSAGES = {
    "prompt": f"must be a text, tokens, or a list of up to {_CHOICES_MOST} of either, none of them empty",
    "input": "must be a text, tokens (not empty), or a list of up to 2,048 of either",
    "stop": "must be a text, or a list of up to 16, of 1 to 256 characters each",
    **dict.fromkeys(("logit_bias", "tools", "tool_choice", "response_format", "store", "suffix"), "is not supported"),
}
_STOPS_MOST, _STOP_LENGTH = 16, 256
_OF_ANSWERS = ("refusal", "annotations", "audio", "function_call", "tool_calls")

Id = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Ids = Annotated[list[Id], Field(min_length=1)]
Stop = Annotated[str, Field(strict=True, min_length=1, max_length=_STOP_LENGTH)]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class StreamOptions(_Body):
    """Options of a stream: a last chunk with the usage."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Generation(_Body):
    """The fields of both routes of generation; an unsupported one may have the value that changes nothing."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=_CHOICES_MOST)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_STOPS_MOST)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=10)] | None = None
    ignore_eos: bool = False
    ledger: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of the engine, those of its sampling under "sampling"."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        )
        return {
            "sampling": {name: value for name in names if (value := getattr(self, name)) is not None},
            "n": self.n or 1, "seed": self.seed, "ignore_eos": self.ignore_eos, "account": self.ledger,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or [],
        }  # fmt: skip

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class Completion(_Generation):
    """The body of /v1/completions."""

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Ids
        | Annotated[
            list[Annotated[str, Field(min_length=1)]] | list[Ids], Field(min_length=1, max_length=_CHOICES_MOST)
        ]
    )
    max_tokens: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, texts or tokens."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """A message of a conversation; what else an answer's message has, and clients send back, must be empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if name not in _OF_ANSWERS or value not in (None, [])}

    def plain(self) -> dict[str, str]:
        """Return it for a chat template."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": "system" if self.role == "developer" else self.role, "content": content, **named}


class TextFormat(_Body):
    """The format of an answer."""

    type: Literal["text"]


class Chat(_Generation):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    store: Literal[False] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None


class Embeddings(_Body):
    """The body of /v1/embeddings."""

    model: str
    input: str | Ids | Annotated[list[str] | list[Ids], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None

    def inputs(self) -> list[str] | list[list[int]]:
        """Return the texts, or their tokens."""
        if isinstance(self.input, str):
            return [self.input]
        return [self.input] if isinstance(self.input[0], int) else self.input


B = TypeVar("B", bound=_Body)


def read_body_as(kind: type[B], body: bytes) -> B:
    """Return the body of a request; Refused, with the parameter's name, for anything that is not supported."""
    try:
        value = decode_json(body, unique=True)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "InvalidJson", f"the body is not JSON: {clipped(str(error), 200)}") from None
    if not isinstance(value, dict):
        raise Refused(400, "InvalidJson", f"the body must be an object, got {clipped(value)}")
    try:
        found = kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(kind, error) from None
    _require_consistent(found)
    return found


def _refusal(kind: type[_Body], error: ValidationError) -> Refused:
    """Return the refusal for the first thing that is wrong, the unsupported ones before others."""
    wrong = sorted(
        error.errors(include_url=False, include_input=False), key=lambda one: one["type"] != "extra_forbidden"
    )
    first = wrong[0]
    if not first["loc"]:
        raise Refused(400, "InvalidJson", "a parameter's name is not a text of Unicode characters")
    given = {0, len(first["loc"]) - 1} if first["type"] == "extra_forbidden" else {0}  # names that a client may choose
    path = [
        part for at, part in enumerate(first["loc"]) if at in given or (part != "str" and "[" not in str(part))
    ]  # without the arms of unions
    name = ".".join(map(str, path[:1] if path[0] in ("prompt", "input", "stop") else path))[:80]
    if first["type"] == "extra_forbidden":
        reason = f"{name!r} is not supported"
        if len(path) == 1:
            reason += f"; supported are {', '.join(kind.model_fields)}"
        return Refused(400, "UnsupportedParameter", reason, param=name)
    if first["type"] == "missing":
        return Refused(400, "MissingParameter", f"{name!r} is required", param=name)
    reason = _MESSAGES.get(str(path[0]), f"is wrong: {first['msg'][:300]}")
    return Refused(400, "InvalidParameter", f"{name!r} {reason}", param=name)


def _require_consistent(body: _Body) -> None:
    """Raise Refused for fields that do not go together."""

    def refuse(param: str, reason: str) -> None:
        raise Refused(400, "UnsupportedParameter", reason, param=param)

    if isinstance(body, _Generation) and body.stream_options is not None and not body.stream:
        refuse("stream_options", "'stream_options' belongs to 'stream': true")
    if isinstance(body, Completion):
        if body.best_of not in (None, body.n or 1):
            refuse("best_of", "'best_of' other than n is not supported: ask for n answers, with logprobs, and choose")
        if body.max_tokens == 0 and not body.echo:
            refuse("max_tokens", "'max_tokens': 0 belongs to 'echo': true")
        if len(body.prompts()) * (body.n or 1) > _CHOICES_MOST:
            refuse("n", f"prompts times n must be at most {_CHOICES_MOST}")
    if isinstance(body, Chat):
        if body.top_logprobs is not None and not body.logprobs:
            refuse("top_logprobs", "'top_logprobs' belongs to 'logprobs': true")
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            refuse("max_tokens", "'max_tokens' and 'max_completion_tokens' mean the same: give one")
