"""The API shapes that generate: a smallest request each, and what vLLM 0.32 answered to such (recordings of a
real engine), so that one test can hold for all of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.dialects import DIALECTS
from gateway.dialects.base import Dialect
from gateway.relay.sse import Usage
from tests.support.client import Reply

RECORDINGS = Path(__file__).parent.parent / "gateway" / "recordings"


@dataclass(frozen=True)
class Shape:
    """`reply` is a whole JSON reply and `stream` a whole stream, of `reply_usage` and `stream_usage` tokens;
    `mark` stands in each event of the stream, `cap` is the field that bounds the output."""

    name: str
    path: str
    body: dict[str, Any]
    cap: str
    mark: bytes
    reply_usage: Usage
    stream_usage: Usage

    @property
    def anthropic(self) -> bool:
        return self.name == "messages"

    @property
    def dialect(self) -> Dialect:
        return next(d for d in DIALECTS.values() if d.name.endswith(f".{self.name}"))

    @property
    def stream(self) -> bytes:
        return (RECORDINGS / f"{self.name}.sse").read_bytes()

    @property
    def reply(self) -> bytes:
        return (RECORDINGS / f"{self.name}.json").read_bytes()

    def ask(self, **fields: Any) -> dict[str, Any]:
        return {"model": "smollm2", **self.body, **fields}


MESSAGES = [{"role": "user", "content": "Say hello in one short sentence."}]
CHAT = Shape(
    "chat",
    "/v1/chat/completions",
    {"messages": MESSAGES},
    "max_tokens",
    b"data: ",
    Usage(37, 5),
    Usage(69, 1),
)
COMPLETIONS = Shape(
    "completions", "/v1/completions", {"prompt": "Hi"}, "max_tokens", b"data: ", Usage(1, 5), Usage(30, 8)
)
RESPONSES = Shape(
    "responses",
    "/v1/responses",
    {"input": "Hi"},
    "max_output_tokens",
    b"event: ",
    Usage(31, 5),
    Usage(37, 10, 32),
)
ANTHROPIC = Shape(
    "messages",
    "/v1/messages",
    {"messages": MESSAGES, "max_tokens": 64},
    "max_tokens",
    b"event: ",
    Usage(37, 5),
    Usage(37, 10),
)
SHAPES = (CHAT, COMPLETIONS, RESPONSES, ANTHROPIC)
IDS = [shape.name for shape in SHAPES]

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def events(stream: bytes) -> list[bytes]:
    """The events of a stream whose lines end in LF."""
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]


def check_openai(error: Any) -> None:
    """The one shape of an error in OpenAI's dialects."""
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["type"]
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)


def check_error(
    reply: Reply, status: int, *, shape: Shape = CHAT, code: str | None = None, param: str | None = None
) -> str:
    """Assert the contract of an error reply; returns its message.

    `status` and `code` are OpenAI's; Anthropic's 529 stands for 503, and its errors have no code.
    """
    wanted = 529 if shape.anthropic and status == 503 else status
    assert reply.status == wanted, reply
    assert reply.complete
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")
    if status in (429, 503) and code != "request_exceeds_limit":
        assert int(reply.headers["retry-after"]) >= 1
    body = reply.json
    if shape.anthropic:
        assert set(body) == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert body["request_id"] == reply.headers["x-request-id"]
        assert set(body["error"]) == {"type", "message"}
        assert body["error"]["type"] == ANTHROPIC_TYPES[wanted]
        return str(body["error"]["message"])
    assert set(body) == {"error"}
    check_openai(body["error"])
    if code is not None:
        assert body["error"]["code"] == code
    if param is not None:
        assert body["error"]["param"] == param
    return str(body["error"]["message"])


def check_error_event(event: bytes, shape: Shape) -> str:
    """Assert the contract of the last event of a stream that broke; returns its message."""
    head, _, data = event.removesuffix(b"\n\n").rpartition(b"data: ")
    body = json.loads(data)
    if shape.anthropic:
        assert head == b"event: error\n"
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert body["error"]["type"] in ANTHROPIC_TYPES.values()
        return str(body["error"]["message"])
    if shape.name == "responses":
        assert head == b"event: error\n"
        assert body["type"] == "error"
        check_openai(body["error"])
        assert body["message"] == body["error"]["message"]
        assert "code" in body
        assert "param" in body
        return str(body["message"])
    assert head == b""
    assert set(body) == {"error"}
    check_openai(body["error"])
    return str(body["error"]["message"])
