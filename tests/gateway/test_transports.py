"""Engines behind a unix socket, and behind TLS."""

import ssl
from pathlib import Path

import pytest

from gateway.relay.upstream import Pool, RequestHead
from tests.support.client import Wire, ask, until
from tests.support.engine import FakeEngine, engines, hang, reply, stream
from tests.support.serving import serving
from tests.support.shapes import CHAT, IDS, SHAPES, Shape, check_error

TLS = Path(__file__).parent.parent / "support" / "tls"


def tls_engine() -> FakeEngine:
    """Its certificate is self-made, for localhost."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    return FakeEngine(tls=context)


def make(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    if kind == "unix":
        return FakeEngine(uds=str(folder / "engine.sock"))
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "cert.pem"))
    return tls_engine()


@pytest.mark.parametrize("kind", ["unix", "tls"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_requests_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape, kind: str
) -> None:
    engine = make(kind, tmp_path, monkeypatch)
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        engine.script = reply(shape.reply)
        answer = await ask(served.port, shape.path, shape.ask())
        assert (answer.status, bytes(answer.body)) == (200, shape.reply)
        engine.script = stream(shape.stream[:500], shape.stream[500:])
        fields = {"stream_options": {"include_usage": True}} if shape.mark == b"data: " else {}
        answer = await ask(served.port, shape.path, shape.ask(stream=True, **fields))
        assert answer.body == shape.stream
        assert engine.last.headers["host"] == ("localhost" if kind == "unix" else f"localhost:{engine.port}")
        assert engine.connections == 1
        engine.close_idle()
        engine.script = reply(shape.reply)
        assert (await ask(served.port, shape.path, shape.ask())).status == 200


@pytest.mark.parametrize("kind", ["unix", "tls"])
async def test_a_client_that_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    engine = make(kind, tmp_path, monkeypatch)
    engine.script = hang
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask())
        await until(lambda: engine.generations == 1)
        left = wire.leave()
        await until(lambda: served.clean and engine.exchanges[0].closed_at is not None)
        assert (engine.exchanges[0].closed_at or 0) - left < 0.25


async def test_a_certificate_that_is_not_trusted(tmp_path: Path) -> None:
    engine = tls_engine()
    async with engines(engine), serving(tmp_path, {"fast": engine}, wait=False) as served:
        await until(lambda: "certificate" in served.engine("fast-0").reason.lower())
        served.mark("fast-0", "ready")
        check_error(await ask(served.port, CHAT.path, CHAT.ask()), 503)
        assert engine.generations == 0


async def test_a_unix_socket_that_is_not_there(tmp_path: Path) -> None:
    url = f"unix:{tmp_path}/nothing.sock"
    async with serving(tmp_path, {"fast": url}, wait=False) as served:
        served.mark("fast-0", "ready")
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        check_error(answer, 503)
        assert "cannot connect to its socket" in served.engine("fast-0").reason
        assert b".sock" not in answer.body


@pytest.mark.parametrize(
    ("url", "first", "host"),
    [
        ("http://10.0.0.1:8101", b"GET /health HTTP/1.1", b"host: 10.0.0.1:8101"),
        ("http://[::1]:8101/", b"GET /health HTTP/1.1", b"host: [::1]:8101"),
        ("https://api.example.org", b"GET /health HTTP/1.1", b"host: api.example.org"),
        ("https://api.example.org/v1", b"GET /health HTTP/1.1", b"host: api.example.org"),
        ("http://h:80/base/v1/", b"GET /base/health HTTP/1.1", b"host: h"),
        ("unix:/run/e.sock", b"GET /health HTTP/1.1", b"host: localhost"),
    ],
)
def test_the_head_of_a_request(url: str, first: bytes, host: bytes) -> None:
    head = RequestHead(Pool(url).address, "sk-x").build("GET", "/health", b"a: b\r\n", b"")
    lines = head.split(b"\r\n")
    assert lines[:2] == [first, host]
    assert b"authorization: Bearer sk-x" in lines
    assert b"a: b" in lines
    assert lines[-2:] == [b"", b""]
