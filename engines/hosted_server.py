"""The process of one hosted engine: `python -m engines.hosted_server SOCKET`, settings on its standard input.

An HTTP server on a unix socket that answers by LiteLLM's SDK. Only the fields named here reach the SDK: many
of its other parameters (`api_base`, `extra_headers`, `mock_response` …) are for whoever configures it, and a
client that could set them could have the provider's key sent to an address of its own. Prompts and replies
are logged nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

Message = MutableMapping[str, Any]
Receive = Callable[[], Coroutine[Any, Any, Message]]
Send = Callable[[Message], Awaitable[None]]
Call = Callable[..., Awaitable[Any]]

_SAMPLING = {"temperature", "top_p", "stream", "user", "metadata", "store"}
_OPENAI = _SAMPLING | {
    *("n", "stop", "max_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "seed"),
    "stream_options",
}
_TOOLS = {"tools", "tool_choice", "parallel_tool_calls"}
# Tell a provider something about the client, or have it keep the reply: not passed on.
_KEPT_BACK = {"metadata", "store", "user"}
# The kinds of trouble for which another engine may be asked.
_ELSEWHERE = ("APIConnectionError", "ServiceUnavailableError")
_UNREACHABLE = ("Connection error", "Cannot connect", "Connection refused", "Name or service not known")
_OVERLOADED = 529
# By version of the SDK.
TRANSLATORS = (
    "litellm.llms.anthropic.messages.adapters.handler",
    "litellm.llms.anthropic.experimental_pass_through.adapters.handler",
)
_MESSAGE_LIMIT = 500
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Route:
    """`call` names an attribute of the SDK; `done` ends a stream."""

    call: str
    fields: frozenset[str]
    done: bytes = b""


ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": Route(
        "acompletion",
        frozenset(
            _OPENAI
            | _TOOLS
            | {"messages", "functions", "function_call", "max_completion_tokens", "top_logprobs"}
            | {"response_format", "reasoning_effort", "verbosity", "modalities", "prediction", "audio"}
        ),
        _DONE,
    ),
    "/v1/completions": Route(
        "atext_completion", frozenset(_OPENAI | {"prompt", "suffix", "echo", "best_of"}), _DONE
    ),
    "/v1/embeddings": Route("aembedding", frozenset({"input", "dimensions", "encoding_format", "user"})),
    "/v1/responses": Route(
        "aresponses",
        frozenset(
            _SAMPLING
            | _TOOLS
            | {
                "input",
                "instructions",
                "max_output_tokens",
                "reasoning",
                "text",
                "truncation",
                "top_logprobs",
            }
        ),
    ),
    "/v1/messages": Route(
        "anthropic_messages",
        frozenset(
            {"messages", "system", "max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p"}
            | {"tools", "tool_choice", "thinking", "metadata"}
        ),
    ),
}


class Refused(Exception):
    """An answer other than 200: status and body in OpenAI's shape; `retry_after` as the provider wrote it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def arguments(route: Route, body: object) -> dict[str, Any]:
    """What of a request reaches the SDK. Raises Refused for fields that it must not or cannot."""
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    given = {name: value for name, value in body.items() if name != "model" and value is not None}
    for name in given:
        if name not in route.fields:
            message = f"`{name}` is not passed to hosted models: leave it out, or ask an engine that knows it"
            raise Refused(400, message, param=name, code="unsupported_field")
    return {name: value for name, value in given.items() if name not in _KEPT_BACK}


def refusal(error: Exception) -> Refused:
    """An error of the SDK in the terms of the gateway: what another engine may mend is a 503."""
    message = str(getattr(error, "message", "") or type(error).__name__)
    status = getattr(error, "status_code", None)
    status = status if isinstance(status, int) and 400 <= status < 600 else 502
    name = type(error).__name__
    unreachable = name == "InternalServerError" and any(sign in message for sign in _UNREACHABLE)
    if unreachable or name in _ELSEWHERE or status == _OVERLOADED:
        status = 503
    elif name == "Timeout":
        status = 504
    headers = getattr(error, "litellm_response_headers", None)
    if headers is None:
        headers = getattr(getattr(error, "response", None), "headers", None)
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return Refused(
        status,
        _words(message, name),
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) and not code.isdigit() else None,
        retry_after=None if headers is None else headers.get("retry-after"),
    )


def _words(message: str, name: str) -> str:
    """Of "litellm.BadRequestError: OpenAIException - what the provider said" the last part; of a fault inside
    the SDK no more than the first line, since the rest may quote a reply."""
    said = message.removeprefix(f"litellm.{name}: ").removeprefix(f"{name}: ")
    return said.partition("Traceback")[0].strip()[:_MESSAGE_LIMIT]


class Server:
    """An ASGI application. `fixed` are the arguments of every call: model, key, address."""

    def __init__(self, calls: Mapping[str, Call], fixed: Mapping[str, Any]) -> None:
        self._calls = calls
        self._fixed = fixed

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/health":
            await _answer(send, 200, b"{}")
            return
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        work = asyncio.create_task(self._serve(scope["path"], body, send))
        gone = asyncio.create_task(receive())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _serve(self, path: str, body: bytes, send: Send) -> None:
        try:
            route = ROUTES.get(path)
            if route is None:
                raise Refused(404, f"hosted models have no {path}")
            given = arguments(route, json.loads(body))
            try:
                reply = await self._calls[route.call](**given, **self._fixed)
                if given.get("stream"):
                    await _stream(send, reply, route.done)
                    return
                await _answer(send, 200, encode(reply))
            except Broken:
                raise
            except Exception as error:  # noqa: BLE001 - the SDK's errors have no common ancestor
                raise refusal(error) from None
        except Refused as refused:
            lines = [] if refused.retry_after is None else [(b"retry-after", refused.retry_after.encode())]
            await _answer(send, refused.status, json.dumps(refused.body).encode(), lines)


class Broken(Exception):
    """A stream that broke off: its connection is closed without an end, of which the gateway tells."""


async def _stream(send: Send, reply: AsyncIterator[Any], done: bytes) -> None:
    """Every event as it comes. The first is awaited before the head: until then, trouble has a status."""
    events = aiter(reply)
    try:
        event = await anext(events, None)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while event is not None:
                await send({"type": "http.response.body", "body": as_event(event), "more_body": True})
                event = await anext(events, None)
        except Exception as error:  # noqa: BLE001 - the SDK's errors have no common ancestor
            raise Broken(type(error).__name__) from None
        await send({"type": "http.response.body", "body": done})
    finally:
        # Whoever leaves early must be missed by the provider: the reply's connection is closed.
        for part in (reply, getattr(reply, "completion_stream", None)):
            close = getattr(part, "aclose", None) or getattr(part, "close", None)
            if close is not None:
                with contextlib.suppress(Exception):
                    closing = close()
                    if hasattr(closing, "__await__"):
                        await closing


def as_event(part: Any) -> bytes:
    """One event as the API has it: OpenAI's unnamed, or with its type as its name; bytes are one already."""
    if isinstance(part, bytes):
        return part
    if isinstance(part, str):
        return part.encode()
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    name = f"event: {getattr(kind, 'value', kind)}\n".encode() if kind else b""
    return name + b"data: " + encode(part) + b"\n\n"


def encode(reply: Any) -> bytes:
    if isinstance(reply, dict):
        return json.dumps(reply).encode()
    text: str = reply.model_dump_json(exclude_none=True, exclude_unset=True)
    return text.encode()


async def _answer(
    send: Send, status: int, body: bytes, lines: list[tuple[bytes, bytes]] | None = None
) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *(lines or ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _messages(native: Call) -> Call:
    """Anthropic's messages. The SDK's own streams of them need its proxy server installed, and read on to
    the end after a client has left; by way of chat completions they do neither."""
    for place in TRANSLATORS:
        with contextlib.suppress(ImportError):
            handler = importlib.import_module(place).LiteLLMMessagesToCompletionTransformationHandler
            translated: Call = handler.async_anthropic_messages_handler
            break
    else:
        translated = native

    async def call(**given: Any) -> Any:
        return await (translated if given.get("stream") else native)(**given)

    return call


def _end_with_input() -> None:
    """The gateway holds the other end: however it ended, this process ends too."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _give_up(why: str) -> NoReturn:
    print(why, file=sys.stderr, flush=True)
    os._exit(1)  # an orderly end would wait for the thread that reads


def main(socket: str) -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    _end_with_input()
    import litellm
    import uvicorn

    logging.disable(logging.CRITICAL)
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    litellm.turn_off_message_logging = True
    fixed = {name: value for name, value in settings.items() if value is not None}
    try:
        litellm.get_llm_provider(fixed["model"], api_base=fixed.get("api_base"))
    except litellm.exceptions.BadRequestError:  # else every client has it, as a 400
        _give_up(f"LiteLLM knows no provider of `{fixed['model']}`: https://docs.litellm.ai/docs/providers")
    # One owner of retries: the gateway.
    fixed |= {"num_retries": 0, "max_retries": 0}
    # Not every provider of OpenAI's API has its newer endpoint, /v1/responses.
    litellm.use_chat_completions_url_for_anthropic_messages = True
    calls = {route.call: getattr(litellm, route.call) for route in ROUTES.values()}
    calls["anthropic_messages"] = _messages(litellm.anthropic_messages)
    config = uvicorn.Config(
        Server(calls, fixed),
        uds=socket,
        log_level="critical",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
    )
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main(sys.argv[1])
