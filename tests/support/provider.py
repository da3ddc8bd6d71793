"""A provider that an engine of kind `hosted` can be pointed at: what OpenAI's and Anthropic's APIs answer."""

from __future__ import annotations

import json
from typing import Any

from tests.support.engine import Script, reply, stream


def chat(content: str | None = "Hello.", *, tool: tuple[str, str] | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if tool is not None:
        call = {"id": "call_1", "type": "function", "function": {"name": tool[0], "arguments": tool[1]}}
        message["tool_calls"] = [call]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "gpt-5-2026",
        "choices": [
            {"index": 0, "message": message, "finish_reason": "tool_calls" if tool is not None else "stop"}
        ],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
    }


def _chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-5-2026"}
    return b"data: %b\n\n" % json.dumps({**head, "choices": choices, **more}).encode()


def chat_events(*deltas: dict[str, Any], reason: str = "stop") -> list[bytes]:
    return [
        *(_chunk([{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas),
        _chunk([{"index": 0, "delta": {}, "finish_reason": reason}]),
        _chunk([], usage={"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}),
        b"data: [DONE]\n\n",
    ]


HELLO = ({"role": "assistant", "content": "Hel"}, {"content": "lo."})


def chat_stream(**how: Any) -> Script:
    return stream(*chat_events(*HELLO), **how)


def message(text: str = "Hello.") -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-5",
        "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 12, "output_tokens": 4},
    }


def message_events(*texts: str) -> list[bytes]:
    begun = {
        **message(),
        "content": [],
        "stop_reason": None,
        "usage": {"input_tokens": 12, "output_tokens": 1},
    }
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
            for text in texts
        ),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 4},
        },
        {"type": "message_stop"},
    ]
    return [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events]


def message_stream(**how: Any) -> Script:
    return stream(*message_events("Hel", "lo."), **how)


def refusal(status: int, text: str, **headers: str) -> Script:
    """An error in the shape that both APIs are read in."""
    return reply({"type": "error", "error": {"type": "some_error", "message": text}}, status, **headers)
