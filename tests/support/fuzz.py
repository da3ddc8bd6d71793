"""Requests that nobody would write, sent to a gateway on real sockets with an engine that always answers.

    python -m tests.support.fuzz --seconds 600 [--seed 1]

Whatever comes: an answer within seconds, never a 5xx, and what an engine gets is JSON within the bounds. The
suite runs a few hundred of them (`test_fuzz.py`); this command runs as long as it is told to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from gateway.config import Bounds
from gateway.dialects import ENDPOINTS
from gateway.dialects.bounds import CHECKED
from gateway.dialects.scan import too_deep
from tests.support.client import Wire
from tests.support.engine import FakeEngine, engines, reply
from tests.support.serving import Served, serving
from tests.support.shapes import CHAT

SLOWEST_SECONDS = 5.0
PATHS = sorted(
    path
    for method, path in ENDPOINTS
    if method == "POST" and ENDPOINTS[method, path].kind in ("generate", "count")
)
MESSAGES = [{"role": "user", "content": "Hi"}]
BASES: tuple[dict[str, Any], ...] = (
    {"model": "smollm2", "messages": MESSAGES, "prompt": "Hi", "input": "Hi", "max_tokens": 9},
    {
        "model": "smollm2:fast",
        "messages": MESSAGES,
        "input": [{"role": "user", "content": "Hi"}],
        "stream": True,
    },
    {"messages": MESSAGES},
)
FIELDS = sorted(
    CHECKED
    | {"model", "messages", "prompt", "input", "system", "tokens", "stream", "stream_options", "temperature"}
    | {"metadata", "max_tokens", "max_completion_tokens", "max_output_tokens", "tool_choice", "instructions"}
    | {"previous_response_id", "top_p", "seed", "priority", "user", "é", ""}
)
WORDS = """
    type role content text image_url source url data pattern properties items $ref $defs anyOf allOf not enum
    const required additionalProperties patternProperties minItems json_schema schema json regex grammar
    structural_tag function name parameters input_schema strict format structures output arguments tool_calls
    user assistant system tool string object array integer number null auto none include_usage enable_thinking
    detail base64 image_embeds prompt_embeds previous
"""
NAMES = st.sampled_from(WORDS.split())
TEXTS = st.one_of(
    NAMES,
    st.text(max_size=12),
    st.sampled_from(
        [
            "",
            "\0",
            "#",
            "#/$defs/a",
            "#/x/0/~1",
            "http://127.0.0.1/",
            "data:,",
            "http://[",
            "(a+)+",
            "(" * 99,
            "[",
            "a{9}{",
            "{",
            "[" * 99,
            'r ::= r "a"',
            "{}",
            "\u2028\u0085",
            "😀" * 9,
            "\ud800",
        ]
    ),
)
NUMBERS = st.one_of(
    st.sampled_from([-1, 0, 1, 4, 5, 2**24, 2**31, 2**63, 10**30, -(10**30), 1e308, -0.0, 1.5]),
    st.integers(),
    st.floats(allow_nan=True),
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | TEXTS, inner, max_size=4),
    max_leaves=20,
)


def nested(name: str, levels: int) -> list[object]:
    inner: object = "x"
    for _ in range(levels):
        inner = {name: inner} if name else [inner]
    return [inner]


DEEP = st.builds(
    nested, st.sampled_from(["", "content", "output", "source", "items", "not", "json"]), st.integers(50, 400)
)
LAYOUTS = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
SCRAPS = st.sampled_from(
    [
        *(b"", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u", b"\\ud800", b"\xff", b"\0", b"\n"),
        *(b"1e999", b"NaN", b"[" * 100, b'{"a":' * 100, b"9" * 500, b"null", b'"n":5,', b"\xef\xbb\xbf"),
    ]
)
CUTS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.2), SCRAPS | st.binary(max_size=4)), max_size=3)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Requests with odd fields, as JSON that is cut and patched here and there."""
    if draw(st.integers(0, 20)) == 0:
        return draw(st.binary(max_size=64))
    fields = draw(st.dictionaries(st.sampled_from(FIELDS), VALUES | DEEP, max_size=4))
    raw = json.dumps({**draw(st.sampled_from(BASES)), **fields}, **draw(LAYOUTS)).encode(
        "utf-8", "surrogatepass"
    )
    for at, share, scrap in draw(st.just([]) | CUTS):
        start = int(at * len(raw))
        raw = raw[:start] + scrap + raw[start + int(share * len(raw)) :]
    return raw


@dataclass
class Target:
    """A gateway, its engine, and what came of the requests so far."""

    served: Served
    engine: FakeEngine
    run: Callable[[Any], Any]
    statuses: Counter[int] = field(default_factory=Counter)
    slowest: float = 0.0
    wire: Wire | None = None

    def ask(self, path: str, raw: bytes) -> None:
        """One request; fails where the gateway did."""
        self.run(self._ask(path, raw))

    async def _ask(self, path: str, raw: bytes) -> None:
        self.engine.exchanges.clear()
        start = time.monotonic()
        async with asyncio.timeout(SLOWEST_SECONDS):
            if self.wire is None or self.wire.ended:
                self.wire = await Wire.open(self.served.port)
            self.wire.send(path, raw)
            answer = await self.wire.reply()
        self.slowest = max(self.slowest, time.monotonic() - start)
        self.statuses[answer.status] += 1
        assert answer.complete, (path, raw)
        assert 200 <= answer.status < 500, (answer, path, raw)
        if answer.status != 200:
            assert answer.json["error"]["message"], (answer, path, raw)
        for exchange in self.engine.exchanges:
            check_received(exchange.received.body)


def check_received(raw: bytes) -> None:
    """What no engine may get, whatever a client sent."""
    body = json.loads(raw.decode())
    bounds = Bounds()
    assert not too_deep(raw, bounds.depth), raw
    assert "chat_template" not in body, raw
    assert "prompt_embeds" not in body, raw
    for name, most in (("n", bounds.n), ("best_of", bounds.n), ("prompt_logprobs", bounds.logprobs)):
        value = body.get(name, 0)
        assert isinstance(value, int), raw
        assert 0 <= value <= most, raw


@contextlib.contextmanager
def target(folder: Path) -> Iterator[Target]:
    """A gateway and its engine, on an event loop that runs while a request does."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        engine = FakeEngine(reply(CHAT.reply))
        stack = contextlib.AsyncExitStack()

        async def start() -> Served:
            await stack.enter_async_context(engines(engine))
            return await stack.enter_async_context(serving(folder, {"fast": engine, "exact": engine}))

        aimed = Target(runner.run(start()), engine, runner.run)
        try:
            yield aimed
        finally:

            async def stop() -> None:
                if aimed.wire is not None:
                    await aimed.wire.__aexit__()
                await stack.aclose()

            runner.run(stop())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder, target(Path(folder)) as aimed:
        turn = options.seed
        while time.monotonic() < end:
            # New examples with every turn; a failure is shrunk and shown by hypothesis.
            @seeded(turn)
            @settings(
                max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck)
            )
            @given(st.sampled_from(PATHS), bodies())
            def some(path: str, raw: bytes) -> None:
                if time.monotonic() < end:
                    aimed.ask(path, raw)

            some()
            turn += 1
        assert aimed.served.clean
        total = aimed.statuses.total()
        print(f"{total} requests in {options.seconds:g} s, the slowest took {aimed.slowest * 1e3:.0f} ms")
        print("  ".join(f"{status}: {count}" for status, count in sorted(aimed.statuses.items())))


if __name__ == "__main__":
    main()
