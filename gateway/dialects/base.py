"""What one API shape has to answer for: reading a request, counting usage, telling errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import msgspec

from gateway.config import Bounds
from gateway.dialects.body import WHOLE, Body
from gateway.dialects.bounds import check
from gateway.errors import GatewayError, InvalidRequest
from gateway.relay.sse import Usage
from policies.decision import Edits
from policies.facts import Conversation, Role, Turn

# Fields of an engine's own interface: the gateway sets them or nobody does.
GATEWAY_OWNED = (
    "priority",
    "cache_salt",
    "request_id",
    "kv_transfer_params",
    "vllm_xargs",
    "mm_processor_kwargs",
    "ec_transfer_params",
    "data_parallel_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "media_io_kwargs",
    "mm_payload",
    "return_mm_kwargs",
    "guided_decoding_backend",
    "previous_input_messages",
    "id_slot",
    "lora",
)
OWNED = frozenset(GATEWAY_OWNED)

MOST_TOKENS = (1 << 31) - 1
"""Engines count in 32 bits: to llama.cpp 2^32 - 1 is -1, which is no bound."""
FORMATS = ("json_object", "json_schema", "structural_tag")
GUIDED = frozenset({"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"})

ROLES: dict[str, Role] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
}


class Request(msgspec.Struct):
    """One parsed request; `wants_usage` is whether the client itself asked for usage in its stream.

    `answers` is how many an engine makes for it: `n`, or as many as it is to choose the best of, to each
    prompt; `output_tokens` is what was asked for in all: the larger of the two caps, so many times.
    `prompt_tokens` is set where the model's own tokenizer has counted, `usage_injected` by `Dialect.prepare`
    where the gateway asked in the client's stead.
    """

    body: Body
    model: str
    stream: bool
    read: Callable[[], Conversation]
    output_tokens: int | None = None
    n: int = 1
    answers: int = 1
    has_tools: bool = False
    structured: bool = False
    temperature: float | None = None
    metadata: dict[str, object] | None = None
    wants_usage: bool = True
    usage_injected: bool = False
    sent_model: str | None = None
    sent_priority: int = 0
    prompt_tokens: int | None = None
    previous_response_id: str | None = None
    _conversation: Conversation | None = None

    def conversation(self) -> Conversation:
        """What the request says, read once and only where somebody asks."""
        if self._conversation is None:
            self._conversation = self.read()
        return self._conversation


class Sampling(msgspec.Struct):
    """Figures of sampling that engines take with every shape of OpenAI's: read for their types alone."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


class Dialect(ABC):
    """Stateless; one instance a process. `marker` is the bytes that stand once in the event of each streamed
    token, and `overhead` how many of them carry no token; `forwarded` are the client's headers that an engine
    may see, `caps` the fields that bound the output, `said`
    those that hold what is said to the model, `tempered` whether it knows a temperature, and
    `priority_header` whether a priority goes into vLLM's header, since its bodies have no field for it."""

    name: ClassVar[str]
    marker: ClassVar[bytes] = b"\n\n"
    overhead: ClassVar[int] = 0
    forwarded: ClassVar[tuple[bytes, ...]] = ()
    caps: ClassVar[tuple[str, ...]] = ("max_tokens",)
    said: ClassVar[frozenset[str]] = frozenset({"messages"})
    tempered: ClassVar[bool] = True
    priority_header: ClassVar[bool] = False

    def parse(self, body: Body, bounds: Bounds) -> Request:
        """Refuse what would hurt an engine, take out what is the gateway's, read what it needs. Raises
        InvalidRequest, which names the field."""
        check(body, bounds, self.said)
        clean(body)
        return self.read(body, bounds)

    @abstractmethod
    def read(self, body: Body, bounds: Bounds) -> Request:
        """Read and check what is this shape's own. Raises InvalidRequest."""

    def prepare(self, request: Request, served_model: str, priority: int = 0) -> bytes:
        """The body for an engine that knows the model as `served_model`; may be asked again for another.

        `priority` is what the engine may be told, 0 where nothing.
        """
        if priority != request.sent_priority and not self.priority_header:
            request.body.set("priority", priority)
            request.sent_priority = priority
        if (request.sent_model or request.model) != served_model:
            request.body.set("model", served_model)
            request.sent_model = served_model
        return request.body.encode()

    def edit(self, request: Request, edits: Edits) -> str:
        """Apply what a rule changes, and tell what that was: `max_tokens=512, temperature=0`."""
        body, cap, changed = request.body, edits.max_tokens, []
        if cap is not None:
            given = [name for name in self.caps if name in body]
            for name in given or self.caps[:1]:
                asked = body.get(name, WHOLE)
                if asked is None or asked > cap:
                    body.set(name, cap)
                    changed.append(f"{name}={cap}")
            if changed:
                least = body.get("min_tokens", WHOLE)
                if least is not None and least > cap:  # which engines refuse
                    body.set("min_tokens", cap)
                asked = request.output_tokens
                most = cap * request.answers
                request.output_tokens = most if asked is None else min(asked, most)
        warmth = edits.temperature if self.tempered else None
        # Engines refuse several answers at temperature 0: they would all be the same.
        if warmth not in (None, request.temperature) and (warmth or request.n == 1):
            body.set("temperature", warmth)
            request.temperature = warmth
            changed.append(f"temperature={warmth:g}")
        return ", ".join(changed)

    @abstractmethod
    def stream_usage(self, event: dict[str, object], before: Usage | None) -> Usage | None:
        """The usage after this event of a stream, None where it holds none."""

    @abstractmethod
    def reply_usage(self, reply: bytes) -> Usage | None:
        """The usage of a whole JSON reply. Raises msgspec.DecodeError where it is not a JSON object."""

    def error_body(self, error: GatewayError, request_id: str) -> tuple[int, bytes]:
        """Status and body of a failed request."""
        return error.http_status, msgspec.json.encode({"error": openai_error(error)})

    def error_event(self, error: GatewayError) -> bytes:
        """The last event of a stream that broke."""
        return b"data: %b\n\n" % msgspec.json.encode({"error": openai_error(error)})


def openai_error(error: GatewayError) -> dict[str, str | None]:
    return {
        "message": error.message,
        "type": error.error_kind,
        "param": error.param,
        "code": error.error_code,
    }


def number(value: object) -> int:
    """A figure of an engine's usage; 0 for what is none, so that none can give tokens back or overflow."""
    return min(value, MOST_TOKENS) if type(value) is int and value > 0 else 0


def named(model: str | None) -> str:
    if not model:
        raise InvalidRequest("model is missing: name one that GET /v1/models lists", param="model")
    return model


def bound(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MOST_TOKENS:
        what = "not be negative" if value < 0 else f"be at most {MOST_TOKENS}"
        raise InvalidRequest(f"{name} must {what}", param=name)


def clean(body: Body) -> None:
    """Take out what belongs to the gateway."""
    if not OWNED.isdisjoint(body.names):
        for name in GATEWAY_OWNED:
            body.drop(name)


def parts_text(content: object, images: list[int]) -> str:
    """The text of a message's content, a string or a list of typed parts; images are counted."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            text = part.get("text")
            if isinstance(text, str):
                texts.append(text)
            elif "image" in str(part.get("type", "")):
                images[0] += 1
    return "\n".join(texts)


def role_of(name: object) -> Role | None:
    return ROLES.get(name) if isinstance(name, str) else None


def forced(choice: object) -> bool:
    """Whether a `tool_choice` leaves the model no other way than to call a tool."""
    if isinstance(choice, dict):
        allowed = choice.get("allowed_tools", choice)
        return choice.get("type") != "allowed_tools" or allowed.get("mode") == "required"
    return choice == "required"


def tool_texts(body: Body, *names: str) -> list[str]:
    """The definitions of tools, as they came."""
    return [body.value(name).decode("utf-8", "replace") for name in names if body.offers(name)]


def call_text(name: object, arguments: object) -> str:
    """The call of a tool; an engine shows it to its model in much this way."""
    said = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return f'{{"name": "{name}", "arguments": {said}}}'


read_plain = msgspec.json.Decoder(list[Turn]).decode
"""Messages of nothing but a role and a text, as nearly all are, read as the turns that they are."""


def read_messages(messages: object, system: str | None = None, tools: Sequence[str] = ()) -> Conversation:
    """Chat messages of the OpenAI and Anthropic kinds; what has an unknown shape is left out."""
    images = [0]
    results = 0
    more = list(tools)
    turns: list[Turn] = [Turn("system", system)] if system else []
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        name, content = message.get("role"), message.get("content")
        role = ROLES.get(name) if type(name) is str else None
        if role is None:
            continue
        if role == "tool":
            results += 1
        elif role == "assistant":
            more += _calls(message.get("tool_calls"), "function", "arguments")
            more += _calls(content, None, "input")
        if type(content) is str:
            turns.append(Turn(role, content))
            continue
        blocks = [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []
        returned = [b for b in blocks if b.get("type") == "tool_result"]
        if returned:
            results += len(returned)
            turns.extend(Turn("tool", parts_text(b.get("content"), images)) for b in returned)
            content = [b for b in blocks if b.get("type") != "tool_result"]
            if not content:
                continue
        turns.append(Turn(role, parts_text(content, images)))
    return Conversation(tuple(turns), results, images[0], tuple(more))


def _calls(listed: object, inside: str | None, arguments: str) -> Iterator[str]:
    """The calls of tools in a list: OpenAI's `tool_calls`, or Anthropic's blocks of content."""
    for item in listed if isinstance(listed, list) else ():
        call = item.get(inside) if isinstance(item, dict) and inside else item
        if isinstance(call, dict) and isinstance(call.get("name"), str) and arguments in call:
            yield call_text(call["name"], call[arguments])
