"""The public port before an engine is asked: routes, keys, bodies, model names, and their order."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects import ENDPOINTS
from tests.support.client import Wire, ask, get, request
from tests.support.engine import FakeEngine, engines, reply
from tests.support.serving import PLAIN, Served, serving
from tests.support.shapes import ANTHROPIC, CHAT, IDS, SHAPES, Shape, check_error, check_openai

KEYS = """
keys:
  - {name: all, key: sk-all}
  - {name: fast, key: sk-fast, tiers: [fast]}
  - {name: exact, key: sk-exact, tiers: [exact]}
  - {name: other, key: sk-other, models: [another]}
  - {name: pinned, key: sk-pinned, models: ["smollm2:exact"]}
  - {name: gone, key: sk-gone, disabled: true}
  - {name: old, key: sk-old, expires: 2020-01-01}
"""
ROUTES = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{id}"),
    ("POST", "/v1/responses/{id}/cancel"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{id}"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_routes_are_these() -> None:
    assert set(ENDPOINTS) == ROUTES


async def test_c16_unknown_routes_methods_bodies_and_types(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        check_error(await get(served.port, "/v1/nope"), 404, code="unknown_url")
        answer = await ask(served.port, CHAT.path, {}, method="PUT")
        check_error(answer, 405, code="method_not_allowed")
        assert answer.headers["allow"] == "POST"
        check_error(await ask(served.port, CHAT.path, b"not json"), 400)
        text = {"content-type": "text/plain"}
        check_error(await ask(served.port, CHAT.path, CHAT.ask(), headers=text), 415)
        check_error(await ask(served.port, CHAT.path, b" " * 50_000_000), 413, code="body_too_large")
        assert engine.generations == 0


async def test_c16_a_body_that_declares_its_size_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        head = {"content-length": "50000000", "content-type": "application/json", "expect": "100-continue"}
        wire.send(CHAT.path, headers=head)
        check_error(await wire.reply(), 413)


async def test_c16_a_body_of_unknown_size_is_refused_while_it_is_read(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.raw(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(11):
            wire.raw(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
        check_error(await wire.reply(), 413)


async def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, bounds={"read": "1s"}) as served:
        for shape in (CHAT, ANTHROPIC):
            async with await Wire.open(served.port) as wire:
                wire.send(shape.path, headers={"content-type": "application/json", "content-length": "100"})
                for _ in range(8):
                    wire.raw(b"{")
                    await asyncio.sleep(0.1)
                check_error(await wire.reply(), 408, shape=shape, code="body_too_slow")
                assert await wire.closed()
        assert engine.generations == 0
        assert served.clean


async def test_bounds_body_is_the_limit(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    bounds = {"body": 1000}
    async with engines(engine), serving(tmp_path, {"fast": engine}, bounds=bounds) as served:
        body = json.dumps(CHAT.ask()).encode()
        assert (await ask(served.port, CHAT.path, body.ljust(1000))).status == 200
        check_error(await ask(served.port, CHAT.path, body.ljust(1001)), 413)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b'{"model": "smollm2"} x',
        b'{"model": "smollm2", "messages": [],}',
        b'{"model": "smollm2", "messages": ["\xff"]}',
        b'{"model": "smollm2", "messages": NaN}',
        b'{"model": "smollm2", "messages": ' + b"[" * 100_000,
        b'{"model": "smollm2", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'\xef\xbb\xbf{"model": "smollm2", "messages": []}',
    ],
    ids=lambda body: str(body[:40]),
)
@pytest.mark.parametrize("shape", [CHAT, ANTHROPIC], ids=["chat", "messages"])
async def test_a_body_that_is_not_a_json_object_is_a_400(tmp_path: Path, shape: Shape, body: bytes) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        check_error(await ask(served.port, shape.path, body), 400, shape=shape)
        assert engine.generations == 0


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("text/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/jsonp", 415),
        ("", 415),
    ],
)
async def test_content_types(tmp_path: Path, given: str, status: int) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(), headers={"content-type": given})
        if status == 200:
            assert answer.status == 200
        else:
            check_error(answer, status)


async def test_a_body_without_a_content_type_is_read_as_json(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        body = json.dumps(CHAT.ask()).encode()
        wire.raw(b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (CHAT.path.encode(), len(body)) + body)
        assert (await wire.reply()).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/invocations"),
        ("POST", "/collective_rpc"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/is_sleeping"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/pooling"),
        ("POST", "/score"),
        ("GET", "/metrics"),
        ("GET", "/health"),
        ("GET", "/version"),
        ("GET", "/server_info"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/responses/x/../../sleep"),
        ("POST", "/v1/responses/%2e%2e/cancel/../../../sleep"),
        ("GET", "/v1/responses/.."),
        ("GET", "/v1/responses/"),
        ("GET", "/v1/models/"),
        ("GET", "/"),
        ("GET", "//v1/models"),
        ("GET", "/v1/models/a/b"),
        ("POST", "/v1/chat/completions/"),
        ("GET", "/admin/status"),
        ("GET", "/v1/responses/" + "x" * 2000),
    ],
)
async def test_c25_what_is_not_in_the_table_is_a_404(tmp_path: Path, method: str, path: str) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        body = {} if method == "POST" else None
        check_error(await ask(served.port, path, body, method=method), 404)
        assert engine.generations == 0
        assert {probe.path for probe in engine.probes} <= {"/health", "/metrics"}


@pytest.mark.parametrize("path", sorted({path for _, path in ROUTES}))
async def test_every_route_refuses_other_methods(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        allowed = {method for method, route in ROUTES if route == path}
        for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - allowed:
            shape = ANTHROPIC if "messages" in path else CHAT
            answer = await ask(served.port, path.replace("{id}", "resp_1"), method=method)
            check_error(answer, 405, shape=shape)
            assert answer.headers["allow"] == ", ".join(sorted(allowed))


async def test_what_is_not_http_is_a_400(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        answer = await wire.reply()
        assert answer.status == 400
        assert answer.headers["connection"] == "close"
        check_openai(answer.json["error"])


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": "Bearer"},
        {"authorization": ""},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic sk-all"},
        {"authorization": "sk-all"},
        {"authorization": "Bearer sk-gone"},
        {"authorization": "Bearer sk-old"},
        {"authorization": "Bearer sk-all x"},
        {"authorization": "Bearer SK-ALL"},
        {"x-api-key": ""},
        {"x-api-key": "wrong"},
        {"authorization": "Bearer wrong", "x-api-key": "sk-all"},
        {"authorization": "Bearer \xff\xfe"},
        {"authorization": "Bearer " + "x" * 8000},
    ],
    ids=lambda headers: str(headers)[:60],
)
async def test_c26_keys_that_are_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}, keys=KEYS) as served:
        answer = await raw_ask(served, CHAT.path, CHAT.ask(), headers)
        message = check_error(answer, 401, code="invalid_api_key")
        empty = await ask(served.port, CHAT.path, CHAT.ask(), headers=bearer(""))
        assert empty.json == answer.json
        assert "sk-" not in message
        assert engine.generations == 0


async def raw_ask(served: Served, path: str, body: Any, headers: dict[str, str]) -> Any:
    """As `ask`, with header values in Latin-1."""
    async with await Wire.open(served.port) as wire:
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
        wire.raw(request(path, body).replace(b"host: gateway\r\n", b"host: gateway\r\n" + fields))
        return await wire.reply()


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-all"},
        {"authorization": "bearer  sk-all "},
        {"x-api-key": "sk-all"},
        {"authorization": "Bearer sk-all", "x-api-key": "wrong"},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_keys_that_are_taken(tmp_path: Path, shape: Shape, headers: dict[str, str]) -> None:
    engine = FakeEngine(reply(shape.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, keys=KEYS) as served:
        assert (await ask(served.port, shape.path, shape.ask(), headers=headers)).status == 200


async def test_health_needs_no_key_and_everything_else_does(tmp_path: Path) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, keys=KEYS, wait=False) as served:
        assert (await get(served.port, "/healthz")).status == 200
        assert (await get(served.port, "/readyz")).status == 503
        for method, path in ROUTES - {("GET", "/healthz"), ("GET", "/readyz")}:
            shape = ANTHROPIC if "messages" in path else CHAT
            answer = await ask(served.port, path.replace("{id}", "resp_1"), method=method)
            check_error(answer, 401, shape=shape)


async def test_the_order_of_the_checks(tmp_path: Path) -> None:
    """404 route, 405, 401, 413, 415, 400, 403, 404 model, 429, then an engine."""
    policy = PLAIN + "plans: {default: {requests: 1/day}}"
    engine = FakeEngine(reply(CHAT.reply))
    tiers, bounds = {"fast": engine, "exact": engine}, {"body": 500}
    async with engines(engine), serving(tmp_path, tiers, policy=policy, keys=KEYS, bounds=bounds) as served:
        port, key, text = served.port, bearer("sk-fast"), {"content-type": "text/plain"}
        large, wrong = b"x" * 501, b"not json"
        served.mark("fast-0", "down")
        check_error(await ask(port, "/v1/nope", large, method="PUT", headers=text), 404, code="unknown_url")
        check_error(await ask(port, CHAT.path, large, method="PUT", headers=text), 405)
        check_error(await ask(port, CHAT.path, large, headers=text), 401)
        check_error(await ask(port, CHAT.path, large, headers=key | text), 413)
        check_error(await ask(port, CHAT.path, wrong, headers=key | text), 415)
        check_error(await ask(port, CHAT.path, wrong, headers=key), 400)
        pinned = CHAT.ask(model="smollm2:exact")
        check_error(await ask(port, CHAT.path, pinned, headers=key), 403, code="tier_not_allowed")
        nope = CHAT.ask(model="nope")
        check_error(await ask(port, CHAT.path, nope, headers=key), 404, code="model_not_found")
        check_error(await ask(port, CHAT.path, CHAT.ask(), headers=key), 503)
        check_error(await ask(port, CHAT.path, CHAT.ask(), headers=key), 429, code="rate_limit_exceeded")
        assert engine.generations == 0


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_an_unknown_model_is_a_404(tmp_path: Path, shape: Shape) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        for model in ("nope", "smollm2:", "smollm2:nope", "SMOLLM2", "x" * 10_000, "\u2028"):
            answer = await ask(served.port, shape.path, shape.ask(model=model))
            message = check_error(answer, 404, shape=shape, code="model_not_found", param="model")
            assert "smollm2:fast" in message
            assert len(message) < 500


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("sk-all", ["smollm2", "smollm2:fast", "smollm2:exact"]),
        ("sk-fast", ["smollm2", "smollm2:fast"]),
        ("sk-exact", ["smollm2", "smollm2:exact"]),
        ("sk-other", []),
        ("sk-pinned", ["smollm2:exact"]),
    ],
)
async def test_the_list_of_models_is_what_a_key_may_use(tmp_path: Path, key: str, names: list[str]) -> None:
    tiers = dict.fromkeys(["fast", "exact"], "http://127.0.0.1:9")
    async with serving(tmp_path, tiers, keys=KEYS, wait=False) as served:
        answer = await get(served.port, "/v1/models", bearer(key))
        assert answer.status == 200
        assert answer.json["object"] == "list"
        assert [model["id"] for model in answer.json["data"]] == names
        assert all(model["object"] == "model" for model in answer.json["data"])
        for name in ("smollm2", "smollm2:fast", "smollm2:exact", "nope"):
            one = await get(served.port, f"/v1/models/{name}", bearer(key))
            if name in names:
                assert one.json["id"] == name
            else:
                check_error(one, 404, code="model_not_found")


async def test_a_model_that_a_key_may_not_use_is_a_403(tmp_path: Path) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, keys=KEYS, wait=False) as served:
        for shape in SHAPES:
            answer = await ask(served.port, shape.path, shape.ask(), headers=bearer("sk-other"))
            check_error(answer, 403, shape=shape, param="model")
            answer = await ask(
                served.port, shape.path, shape.ask(model="smollm2:fast"), headers=bearer("sk-exact")
            )
            check_error(answer, 403, shape=shape, code="tier_not_allowed", param="model")


async def test_a_gateway_without_any_engine_up_answers(tmp_path: Path) -> None:
    tiers = {"fast": "http://127.0.0.1:9", "exact": "http://127.0.0.1:9"}
    async with serving(tmp_path, tiers, wait=False) as served:
        for port in (served.port, served.admin):
            assert (await get(port, "/healthz")).json == {"status": "ok"}
            ready = await get(port, "/readyz")
            assert ready.status == 503
            assert ready.json["ready"] is False
            assert "exact-0" in ready.json["tiers"]["exact"]
        assert (await get(served.port, "/v1/models")).status == 200
        check_error(await ask(served.port, CHAT.path, CHAT.ask()), 503, code="no_engine_ready")


async def test_readiness_names_the_tier_that_is_missing(tmp_path: Path) -> None:
    engine = FakeEngine()
    tiers = {"fast": engine, "exact": engine}
    async with engines(engine), serving(tmp_path, tiers) as served:
        assert (await get(served.port, "/readyz")).json == {
            "ready": True,
            "tiers": {"fast": "ready", "exact": "ready"},
        }
        served.mark("exact-0", "down", "it does not answer")
        answer = await get(served.port, "/readyz")
        assert answer.status == 503
        assert answer.json["tiers"] == {"fast": "ready", "exact": "exact-0: down, it does not answer"}
