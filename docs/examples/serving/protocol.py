"""OpenAI's completions and chats: validation of requests, format of responses."""

from __future__ import annotations

import reprlib
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from docs.examples.serving.text import Tokenizer

MAX_CHOICES, MAX_STOPS, MAX_STOP_LEN = 16, 4, 256
MAX_TEXT_LEN, MAX_MESSAGES = 1 << 20, 1024  # characters of all messages
MAX_LABELS, MAX_LABEL_LEN = 16, 512

# Parameters accepted at a value without effect, with that value.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
_KNOWN = frozenset(
    {"max_tokens", "model", "n", "seed", "stop", "stream", "stream_options", "temperature", "top_p"}
)
_LABELS = frozenset({"metadata", "user"})  # without effect on answers
_ROLES = ("system", "developer", "user", "assistant")


class BadRequestError(ValueError):
    """An invalid request; ``param`` is the wrong argument."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    def body(self) -> dict[str, Any]:
        return error_body(str(self), "invalid_request_error", self.param, self.code)


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Asked:
    """A checked request."""

    prompt: list[int]
    is_chat: bool
    max_tokens: int
    n: int
    temperature: float
    top_p: float
    stops: tuple[str, ...]
    seed: int | None
    stream: bool
    include_usage: bool


def parse(body: object, *, is_chat: bool, tokenizer: Tokenizer, model: str, max_len: int) -> Asked:
    """Check a request's JSON.

    Raises:
        BadRequestError: it can't be answered as it is; nothing is left out silently.
    """
    if not isinstance(body, dict):
        raise BadRequestError("the body is no JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    _check_names(given, is_chat=is_chat)
    if given.get("model", model) != model:
        raise BadRequestError(
            f"the model {_short(given['model'])} does not exist: there is {model!r}",
            "model", status=404, code="model_not_found",
        )  # fmt: skip
    prompt = _messages(given, tokenizer) if is_chat else _prompt(given, tokenizer, max_len)
    limit = _limit(given, is_chat=is_chat, room=max_len - len(prompt))
    if limit < 1 or len(prompt) + limit > max_len:
        raise BadRequestError(
            f"the prompt has {len(prompt)} tokens and {max(limit, 1)} more are asked for: expected "
            f"at most {max_len} together",
            "messages" if is_chat else "prompt", code="context_length_exceeded",
        )  # fmt: skip
    stream = _flag(given, "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise BadRequestError("stream_options: expected {'include_usage': ..}", "stream_options")
    if options and not stream:
        raise BadRequestError("stream_options are for stream=true", "stream_options")
    return Asked(
        prompt, is_chat, limit,
        n=_integer(given, "n", 1, 1, MAX_CHOICES),
        temperature=_number(given, "temperature", 0.0, 2.0),
        top_p=_share(given),
        stops=_stops(given.get("stop", [])),
        seed=_integer(given, "seed", 0, -(1 << 63), (1 << 63) - 1) if "seed" in given else None,
        stream=stream,
        include_usage=_flag(options, "include_usage"),
    )  # fmt: skip


def _check_names(given: Mapping[str, Any], *, is_chat: bool) -> None:
    own = {"messages", "max_completion_tokens"} if is_chat else {"prompt"}
    for name, value in given.items():
        if name in _NEUTRAL:
            if not any(_is_same(value, neutral) for neutral in _NEUTRAL[name]):
                raise BadRequestError(f"{name}={_short(value)} is not supported", name)
        elif name not in _KNOWN | _LABELS | own:
            raise BadRequestError(f"unknown parameter: {_short(name)}", name[:MAX_LABEL_LEN])
    _check_labels(given)


def _is_same(value: object, neutral: object) -> bool:
    """Whether JSON's values are equal; true is no number."""
    return isinstance(value, bool) is isinstance(neutral, bool) and value == neutral


def _check_labels(given: Mapping[str, Any]) -> None:
    user, metadata = given.get("user", ""), given.get("metadata", {})
    if not isinstance(user, str) or len(user) > MAX_LABEL_LEN:
        raise BadRequestError(f"user: expected a string, up to {MAX_LABEL_LEN} characters", "user")
    is_fine = isinstance(metadata, dict) and len(metadata) <= MAX_LABELS
    if not is_fine or not all(
        isinstance(value, str) and max(len(name), len(value)) <= MAX_LABEL_LEN
        for name, value in metadata.items()
    ):
        raise BadRequestError(
            f"metadata: expected up to {MAX_LABELS} strings, each up to {MAX_LABEL_LEN} characters",
            "metadata",
        )


def _short(value: object) -> str:
    """Return a value as a message shows it: its beginning and end."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def _prompt(given: Mapping[str, Any], tokenizer: Tokenizer, max_len: int) -> list[int]:
    prompt = given.get("prompt")
    if isinstance(prompt, str):
        if len(prompt) > MAX_TEXT_LEN:
            raise BadRequestError(
                f"prompt has {len(prompt)} characters: expected at most {MAX_TEXT_LEN}", "prompt"
            )
        try:
            tokens = tokenizer.encode(prompt)
        except UnicodeError as error:  # JSON has halves of characters, UTF-8 has none
            raise BadRequestError(f"prompt: {error}", "prompt") from error
        if not tokens:
            raise BadRequestError("prompt has no tokens", "prompt")
        return tokens
    if not isinstance(prompt, list) or not prompt or not all(map(_is_integer, prompt)):
        raise BadRequestError(
            "prompt: expected a string or a list of tokens, one prompt a request", "prompt"
        )
    if len(prompt) > max_len:
        raise BadRequestError(
            f"prompt has {len(prompt)} tokens: expected at most {max_len}",
            "prompt", code="context_length_exceeded",
        )  # fmt: skip
    for token in prompt:
        if not 0 <= token < tokenizer.vocabulary:
            raise BadRequestError(
                f"prompt has the token {_short(token)}: expected 0 to {tokenizer.vocabulary - 1}",
                "prompt",
            )
    return prompt


def _messages(given: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadRequestError(f"messages: expected a list of 1 to {MAX_MESSAGES}", "messages")
    turns = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise BadRequestError(f"{where}: expected a role of {', '.join(_ROLES)}", where)
        extra = {name for name, value in message.items() if value is not None}
        extra -= {"role", "content", "name"}
        if extra:
            listed = _short(", ".join(sorted(extra)))
            raise BadRequestError(f"{where} has {listed}: not supported", where)
        name = message.get("name") or ""
        if not isinstance(name, str) or len(name) > MAX_LABEL_LEN:
            raise BadRequestError(f"{where}.name: expected a short string", f"{where}.name")
        turns.append({"role": message["role"], "content": _content(message.get("content"), where)})
    if sum(len(turn["content"]) for turn in turns) > MAX_TEXT_LEN:
        raise BadRequestError(
            f"messages: expected at most {MAX_TEXT_LEN} characters together", "messages"
        )
    try:
        return tokenizer.encode_chat(turns)
    except Exception as error:  # templates raise errors of their own
        raise BadRequestError(f"messages: {error}", "messages") from error


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(
            isinstance(text, str) and part.get("type") == "text"
            for text, part in zip(parts, content, strict=True)
        ):
            return "".join(map(str, parts))
    raise BadRequestError(f"{where}.content: expected a string, or parts of text", where)


def _limit(given: Mapping[str, Any], *, is_chat: bool, room: int) -> int:
    names = ["max_completion_tokens", "max_tokens"] if is_chat else ["max_tokens"]
    found = [_integer(given, name, 0, 1, 1 << 31) for name in names if name in given]
    if not found:
        return room if is_chat else min(16, max(room, 1))
    if len(set(found)) > 1:
        raise BadRequestError("max_tokens and max_completion_tokens differ", "max_tokens")
    return found[0]


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LEN for stop in stops)
    ):
        raise BadRequestError(
            f"stop: expected a string or up to {MAX_STOPS}, each of 1 to {MAX_STOP_LEN} characters",
            "stop",
        )
    return tuple(stops)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(given: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = given.get(name, default)
    if name in given and (not _is_integer(value) or not least <= value <= most):
        raise BadRequestError(
            f"{name}={_short(value)}: expected an integer, {least} to {most}", name
        )
    return int(value)


def _number(given: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = given.get(name, 1.0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise BadRequestError(f"{name}={_short(value)}: expected a number, {least} to {most}", name)
    return float(value)


def _share(given: Mapping[str, Any]) -> float:
    top_p = _number(given, "top_p", 0.0, 1.0)
    if top_p == 0.0:
        raise BadRequestError("top_p=0: expected more; temperature=0 takes the best", "top_p")
    return top_p


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise BadRequestError(f"{name}={_short(value)}: expected true or false", name)
    return value


@dataclass
class Answers:
    """Format of the answers to a request, whole and streamed."""

    is_chat: bool
    model: str

    def __post_init__(self) -> None:
        self._id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(
        self, texts: list[str], reasons: list[str], usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        choices = []
        for i, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            said: dict[str, Any] = {"text": text}
            if self.is_chat:
                said = {"message": {"role": "assistant", "content": text}}
            choices.append({"index": i, **said, "logprobs": None, "finish_reason": reason})
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._body(kind, choices) | {"usage": usage}

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the chunk with the role, for chats only."""
        if not self.is_chat:
            return None
        return self._piece({"index": index, "delta": {"role": "assistant", "content": ""}})

    def piece(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if self.is_chat:
            said = {"delta": {"content": text} if text else {}}
        return self._piece({"index": index, **said}, reason)

    def last(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return self._body(self._kind_of_piece, []) | {"usage": usage}

    @property
    def _kind_of_piece(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _piece(self, choice: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self._body(
            self._kind_of_piece, [{**choice, "logprobs": None, "finish_reason": reason}]
        )

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "choices": choices,
        }


def usage_of(num_prompt: int, num_generated: int, num_reused: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_reused},
    }
