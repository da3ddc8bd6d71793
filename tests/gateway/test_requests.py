"""What of a client's request reaches an engine, and what is refused before one is asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Wire, ask
from tests.support.engine import FakeEngine, engines, reply
from tests.support.serving import serving
from tests.support.shapes import ANTHROPIC, CHAT, COMPLETIONS, IDS, RESPONSES, SHAPES, Shape, check_error

OWNED = ("priority", "cache_salt", "request_id", "kv_transfer_params", "vllm_xargs", "mm_processor_kwargs")


def strict(field: str) -> Any:
    """As vLLM answers a field that it does not want beside others."""

    async def script(exchange: Any) -> None:
        body = exchange.received.json
        refused = field in body and not body.get("stream")
        await reply({"error": {"message": f"{field}!"}} if refused else {}, 400 if refused else 200)(exchange)

    return script


async def test_c04_stream_options_without_stream_are_dropped(tmp_path: Path) -> None:
    engine = FakeEngine(strict("stream_options"))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        body = CHAT.ask(stream=False, stream_options={"include_usage": True})
        answer = await ask(served.port, CHAT.path, body)
        assert answer.status == 200
        assert engine.last.json == CHAT.ask(stream=False)
        assert answer.headers["x-dualgauge-dropped"] == "stream_options"


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_c05_nulls_are_dropped(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine(reply(shape.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        nulls = {"tools": None, "tool_choice": None, "response_format": None, "stream": None}
        answer = await ask(served.port, shape.path, shape.ask(**nulls))
        assert answer.status == 200
        assert answer.body == shape.reply
        assert engine.last.json == shape.ask()


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_gateway_owned_fields_are_dropped_and_named(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine(reply(shape.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, shape.path, shape.ask(**dict.fromkeys(OWNED, 1)))
        assert answer.status == 200
        assert engine.last.json == shape.ask()
        assert sorted(answer.headers["x-dualgauge-dropped"].split(", ")) == sorted(OWNED)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_what_the_gateway_does_not_read_passes_unchanged(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine(reply(shape.reply))
    raw = json.dumps(shape.ask())[:-1].encode() + (
        b', "seed": 123456789012345678901234567890, "top_p": 0.10000000000000000555, "x": [ 1,2 ],'
        b' "metadata": {"critical": "false"}, "user": "\\ud83d\\ude00 caf\\u00e9", "unknown": {"a": null}}'
    )
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, shape.path, raw)
        assert answer.status == 200
        assert engine.last.body == raw
        assert "x-dualgauge-dropped" not in answer.headers


async def test_only_the_model_is_replaced_where_an_engine_has_another_name(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    raw = b'{"seed":123456789012345678901234567890,"model":"smollm2:fast","messages":[ ],"top_p":1e-07}'
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        assert (await ask(served.port, CHAT.path, raw)).status == 200
        assert engine.last.body == raw.replace(b'"smollm2:fast"', b'"smollm2"')


async def test_c23_a_chat_template_is_refused(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        template = "{% for i in range(10**9) %}x{% endfor %}"
        for shape in SHAPES:
            answer = await ask(served.port, shape.path, shape.ask(chat_template=template))
            message = check_error(answer, 400, shape=shape, param="chat_template")
            assert "chat_template" in message
        assert engine.generations == 0


@pytest.mark.parametrize(
    ("shape", "fields", "param"),
    [
        (CHAT, {"n": 1_000_000_000}, "n"),
        (CHAT, {"n": 10**30}, "n"),
        (COMPLETIONS, {"n": 1_000_000_000}, "n"),
        (COMPLETIONS, {"best_of": 1_000_000_000}, "best_of"),
        (COMPLETIONS, {"prompt_embeds": "x"}, "prompt_embeds"),
        (COMPLETIONS, {"prompt": ["x"] * 1024}, "prompt"),
        (CHAT, {"stop": ["x"] * 1000}, "stop"),
        (CHAT, {"top_logprobs": 1000}, "top_logprobs"),
    ],
    ids=lambda value: value.name if isinstance(value, Shape) else str(value)[:30],
)
async def test_c24_shapes_that_hurt_engines_are_refused(
    tmp_path: Path, shape: Shape, fields: dict[str, Any], param: str
) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, shape.path, shape.ask(**fields))
        assert param in check_error(answer, 400, shape=shape, param=param)
        assert engine.generations == 0


async def test_a_chat_template_is_seen_behind_escapes_and_duplicates(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        for field in (b'"chat\\u005ftemplate": "x"', b'"chat_template": null, "chat_template": "x"'):
            raw = json.dumps(CHAT.ask())[:-1].encode() + b", " + field + b"}"
            check_error(await ask(served.port, CHAT.path, raw), 400, param="chat_template")
        assert engine.generations == 0


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/embeddings"])
async def test_a_chat_template_is_refused_where_tokens_are_counted(tmp_path: Path, path: str) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, path, CHAT.ask(chat_template="x"))
        shape = ANTHROPIC if "messages" in path else CHAT
        check_error(answer, 400, shape=shape, param="chat_template")
        assert engine.generations == 0


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"enable_thinking": False, "thinking": True, "reasoning_effort": "low"}, None),
        ({"chat_template": "x"}, "chat_template_kwargs.chat_template"),
        ({"enable_thinking": True, "tokenize": True}, "chat_template_kwargs.tokenize"),
        ("x", "chat_template_kwargs"),
    ],
)
async def test_template_kwargs_are_those_of_a_list(tmp_path: Path, kwargs: Any, param: str | None) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(chat_template_kwargs=kwargs))
        if param is None:
            assert answer.status == 200
            assert engine.last.json["chat_template_kwargs"] == kwargs
        else:
            check_error(answer, 400, param=param)
            assert engine.generations == 0


@pytest.mark.parametrize(
    ("shape", "fields", "param"),
    [
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"stream": True, "stream_options": []}, "stream_options"),
        (CHAT, {"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        (CHAT, {"n": "2"}, "n"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 1.5}, "n"),
        (CHAT, {"max_tokens": -1}, "max_tokens"),
        (CHAT, {"max_tokens": "9"}, "max_tokens"),
        (CHAT, {"max_completion_tokens": True}, "max_completion_tokens"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"metadata": "x"}, "metadata"),
        (CHAT, {"response_format": "json"}, "response_format"),
        (CHAT, {"model": 7}, "model"),
        (CHAT, {"model": None}, "model"),
        (CHAT, {"model": ""}, "model"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"n": -1}, "n"),
        (RESPONSES, {"input": None}, "input"),
        (RESPONSES, {"max_output_tokens": -5}, "max_output_tokens"),
        (RESPONSES, {"max_output_tokens": "5"}, "max_output_tokens"),
        (RESPONSES, {"instructions": 5}, "instructions"),
        (RESPONSES, {"text": "x"}, "text"),
        (RESPONSES, {"stream": 1}, "stream"),
        (ANTHROPIC, {"messages": None}, "messages"),
        (ANTHROPIC, {"messages": {}}, "messages"),
        (ANTHROPIC, {"system": 5}, "system"),
        (ANTHROPIC, {"max_tokens": -1}, "max_tokens"),
        (ANTHROPIC, {"tool_choice": "auto"}, "tool_choice"),
        (ANTHROPIC, {"stream": "no"}, "stream"),
        (ANTHROPIC, {"temperature": []}, "temperature"),
    ],
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)
async def test_wrong_types_of_fields_that_are_read(
    tmp_path: Path, shape: Shape, fields: dict[str, Any], param: str
) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, shape.path, shape.ask(**fields))
        assert param in check_error(answer, 400, shape=shape, param=param)
        assert engine.generations == 0


PRIVATE = {
    "authorization": "Bearer sk-of-the-client",
    "x-api-key": "sk-of-the-client",
    "cookie": "a=b",
    "x-request-id": "mine",
    "accept-encoding": "gzip, br",
    "connection": "keep-alive",
    "te": "trailers",
    "x-forwarded-for": "203.0.113.7",
    "x-data-parallel-rank": "1",
    "x-stainless-lang": "python",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "tools-2024",
}


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_only_named_headers_reach_an_engine(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine(reply(shape.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, shape.path, shape.ask(), headers=PRIVATE)
        headers = dict(engine.last.headers)
        assert headers.pop("host") == f"127.0.0.1:{engine.port}"
        assert headers.pop("content-type") == "application/json"
        assert headers.pop("content-length") == str(len(engine.last.body))
        assert headers.pop("x-request-id") == answer.headers["x-request-id"] != "mine"
        forwarded = {"anthropic-version", "anthropic-beta"} if shape.anthropic else set()
        assert set(headers) == forwarded


async def test_an_engine_gets_the_key_of_its_configuration(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine):
        part = {"name": "e", "tier": "fast", "kind": "external", "precision": "awq", "api_key": "${KEY}"}
        own = [{**part, "url": f"http://127.0.0.1:{engine.port}/base/v1", "api_key": "sk-engine"}]
        async with serving(tmp_path, {"fast": engine}, engines=own) as served:
            await ask(served.port, CHAT.path, CHAT.ask(), headers={"authorization": "Bearer sk-client"})
            assert engine.last.headers["authorization"] == "Bearer sk-engine"
            assert engine.last.path == "/base/v1/chat/completions"


async def test_c29_anthropic_requests_are_served_in_anthropics_shapes(tmp_path: Path) -> None:
    keys = "keys: [{name: ci, key: sk-ant}]"
    headers = {"x-api-key": "sk-ant", "anthropic-version": "2023-06-01"}
    body = ANTHROPIC.ask(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        tools=[{"name": "weather", "input_schema": {"type": "object"}}],
    )
    counted = {"model": "smollm2", "messages": body["messages"], "system": body["system"]}
    engine = FakeEngine(reply(ANTHROPIC.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, keys=keys) as served:
        answer = await ask(served.port, "/v1/messages?beta=true", body, headers=headers)
        assert answer.status == 200
        assert answer.json["type"] == "message"
        assert answer.body == ANTHROPIC.reply
        assert engine.last.path == "/v1/messages"
        assert engine.last.json == body
        assert engine.last.headers["anthropic-version"] == "2023-06-01"

        engine.script = reply({"input_tokens": 37})
        answer = await ask(served.port, "/v1/messages/count_tokens?beta=true", counted, headers=headers)
        assert answer.json == {"input_tokens": 37}
        assert engine.last.path == "/v1/messages/count_tokens"

        engine.script = reply(
            {"type": "error", "error": {"type": "BadRequestError", "message": "max_tokens is too large"}}, 400
        )
        answer = await ask(served.port, "/v1/messages?beta=true", body, headers=headers)
        assert check_error(answer, 400, shape=ANTHROPIC) == "max_tokens is too large"
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            check_error(await ask(served.port, path, body), 401, shape=ANTHROPIC)
            check_error(
                await ask(served.port, path, {**body, "messages": 1}, headers=headers), 400, shape=ANTHROPIC
            )
        served.mark("fast-0", "down")
        check_error(await ask(served.port, "/v1/messages", body, headers=headers), 503, shape=ANTHROPIC)


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/tokenize", {"prompt": "Hi there"}, {"count": 2, "max_model_len": 4096, "tokens": [26843, 665]}),
        ("/detokenize", {"tokens": [1, 2]}, {"prompt": "<|im_start|><|im_end|>"}),
        ("/v1/embeddings", {"input": "x"}, {"data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3}}),
    ],
)
async def test_other_endpoints_are_passed_on(tmp_path: Path, path: str, body: Any, answer: Any) -> None:
    engine = FakeEngine(reply(answer))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        got = await ask(served.port, path, {"model": "smollm2:fast", **body})
        assert got.status == 200
        assert got.json == answer
        assert engine.last.json == {"model": "smollm2", **body}
        assert engine.last.path == path


async def test_counting_goes_to_any_ready_tier_and_costs_nothing(tmp_path: Path) -> None:
    policy = """
version: 1
rules: [{name: all, send: fast, if_unavailable: fail}]
plans: {default: {requests: 1/day, tokens: 10/day}}
"""
    fast, exact = FakeEngine(reply({"count": 1})), FakeEngine(reply({"count": 2}))
    async with (
        engines(fast, exact),
        serving(tmp_path, {"fast": fast, "exact": exact}, policy=policy) as served,
    ):
        for _ in range(3):
            assert (await ask(served.port, "/tokenize", {"model": "smollm2", "prompt": "x"})).json[
                "count"
            ] == 1
        served.mark("fast-0", "down")
        assert (await ask(served.port, "/tokenize", {"model": "smollm2", "prompt": "x"})).json["count"] == 2
        answer = await ask(served.port, "/tokenize", {"model": "smollm2:fast", "prompt": "x"})
        check_error(answer, 503)


async def test_the_body_may_come_in_pieces(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    body = json.dumps(CHAT.ask(padding="x" * 200_000)).encode()
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.raw(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 30_000):
            part = body[start : start + 30_000]
            wire.raw(b"%x\r\n%b\r\n" % (len(part), part))
        wire.raw(b"0\r\n\r\n")
        assert (await wire.reply()).status == 200
        assert engine.last.body == body


async def test_requests_share_a_connection_and_may_be_pipelined(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply, delay=0.02))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        for _ in range(3):
            wire.send(CHAT.path, CHAT.ask())
        answers = b""
        while answers.count(b"HTTP/1.1 200 OK") < 3 or not answers.endswith(CHAT.reply):
            answers += await wire.some()
        assert answers.count(CHAT.reply) == 3
        assert engine.connections == 1
