"""Proofs of running engines, by stand-ins on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx2
import pytest

from engines import parity, proving
from engines.allowed import Allowance
from engines.checkpoint import Facts
from engines.hardware import GIB, Machine
from engines.kv_cache import Cache, Layer
from engines.launch import Command, EngineProbe, ProbeError, ProcessLauncher, Proof, wait_ready
from engines.overhead import Width
from engines.plan import Placement, arrange
from engines.proving import CacheSize, Prover, compare_cache
from engines.sleeping import Sleeper
from engines.spec import EngineSpec
from tests.engines.test_launch import FAKE, free_port

DEMO = "demo/smollm2-135m-awq"


def spec(name: str, port: int, model: str = "/models/mine") -> EngineSpec:
    return EngineSpec(name, "fast", "vllm", f"http://127.0.0.1:{port}", "smollm2", "awq", model=model)


def placed(engine: EngineSpec) -> Placement:
    """On the CPU, with a cache of 1 GiB: 65,536 bytes a token of blocks of 32."""
    facts = Facts(weights=GIB, width=Width(8, 8, 8, four_bit=True), cache=Cache((Layer(1024),) * 32))
    (placement,) = arrange([engine], Machine((), (0,), 8 * GIB, 8 * GIB), lambda _: facts).placements
    return placement


def with_engine(folder: Path, options: tuple[str, ...], use: Callable[[int], Awaitable[None]]) -> None:
    """Run `use` with the port of a stand-in that was started with these options."""

    async def main() -> None:
        at = free_port()
        command = Command((sys.executable, str(FAKE), "--port", str(at), *options), dict(os.environ))
        child = await ProcessLauncher().start(command, folder / "log")
        try:
            probe = EngineProbe(f"http://127.0.0.1:{at}", "smollm2")
            await wait_ready(child, probe, timeout=30, on_warming=lambda: None, sleep=asyncio.sleep)
            await use(at)
        finally:
            child.kill()
            await child.wait()

    asyncio.run(main())


async def prove(prover: Prover, engine: EngineSpec, placement: Placement | None = None) -> Proof:
    from engines.launch import client

    async with client(engine.url) as asking:
        return await prover.prove(asking, engine, placement, None)


def test_a_well_engine_is_proven(tmp_path: Path) -> None:
    async def use(port: int) -> None:
        engine = spec("fast-0", port, DEMO)
        assert await prove(Prover(), engine, placed(engine)) == Proof()

    with_engine(tmp_path, (), use)


def test_a_connection_that_was_closed_meanwhile_is_made_anew() -> None:
    """The engine counts, then closes what the client keeps, and counts when it is asked again."""
    reply = b'HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n{"tokens":[1]}'
    asked: list[int] = []
    answering: list[asyncio.Task[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.suppress(asyncio.IncompleteReadError):
            for turn in range(2):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                asked.append(turn)
                if turn == 1 and len(asked) == 2:
                    break
                writer.write(reply)
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        from engines.launch import client

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as asking:
            found = await proving.count(asking, spec("fast-0", 1))
        await asyncio.gather(*answering)
        assert found["chat_template"] == {"token ids of conversations": [[1], [1]]}

    asyncio.run(main())
    assert asked == [0, 1, 0, 1]


def llama(
    model: str = "<s>", template: str = "<{role}>{content}", *, strict: bool = False
) -> httpx2.AsyncClient:
    """What llama-server answers: a token a character, and the begin of a text only where it is asked for."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.headers["authorization"] == "Bearer k"
        body = json.loads(request.content or b"{}")
        match request.url.path:
            case "/props":
                return httpx2.Response(200, json={"default_generation_settings": {"n_ctx": 8192}})
            case "/apply-template" if strict and body["messages"][0]["role"] == "system":
                return httpx2.Response(400)
            case "/apply-template":
                text = "".join(template.format(**message) for message in body["messages"])
                return httpx2.Response(200, json={"prompt": text})
            case "/tokenize":
                begin = model if body.get("add_special") else ""
                return httpx2.Response(200, json={"tokens": [ord(c) for c in begin + body["content"]]})
        return httpx2.Response(404)

    return httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://llama")


def test_a_llama_server_counts_as_vllm_does() -> None:
    """With what begins a text, and by the template that it runs, which may refuse a conversation."""
    engine = replace(spec("fast-1", 1), kind="llama.cpp", api_key="k")

    async def main() -> None:
        async with llama() as asking:
            found = await proving.count(asking, engine)
        assert found["tokenizer"] == {"token ids of a text": [ord(c) for c in "<s>" + proving.TEXT]}
        first, second = (found["chat_template"] or {})["token ids of conversations"]
        assert "".join(map(chr, first)).startswith("<s><system>Be brief.<user>What is 2+2?")
        assert second == [ord(c) for c in "<s><user>Hello."]
        assert found["max_length"] == {"tokens": 8192}
        async with llama(template="[{role}]{content}") as asking:
            other = await proving.count(asking, engine)
        async with llama(strict=True) as asking:
            stricter = await proving.count(asking, engine)
        for unlike in (other, stricter):
            assert [d.aspect for d in parity.differences("a", found, "b", unlike)] == ["chat_template"]
        assert list(parity.differences("b", stricter, "c", stricter)) == []

    asyncio.run(main())


@pytest.mark.parametrize("answer", ["!!!!!!!!!!!!!!!!!!!!!!", "\ufffd\ufffd", "東京 Привет hi"])
def test_gibberish_is_refused_of_any_model(tmp_path: Path, answer: str) -> None:
    async def use(port: int) -> None:
        with pytest.raises(ProbeError, match="its answers make no sense"):
            await prove(Prover(), spec("fast-0", port))

    with_engine(tmp_path, ("--answer", answer), use)


def test_wrong_answers_are_refused_of_a_known_model_alone(tmp_path: Path) -> None:
    async def use(port: int) -> None:
        await prove(Prover(), spec("fast-0", port))
        with pytest.raises(ProbeError, match=r"it said ' well, well'"):
            await prove(Prover(), spec("fast-0", port, DEMO))

    with_engine(tmp_path, ("--answer", " well, well"), use)


@pytest.mark.parametrize(
    ("options", "aspects"),
    [
        (("--shift", "1"), ["tokenizer", "chat_template"]),
        (("--length", "2048"), ["max_length"]),
    ],
)
def test_an_engine_that_counts_otherwise_is_refused(
    tmp_path: Path, options: tuple[str, ...], aspects: list[str]
) -> None:
    prover, lenient = Prover(), Prover(Allowance(frozenset(aspects)))
    told: list[str] = []

    async def first(port: int) -> None:
        for each in (prover, lenient):
            await prove(each, spec("fast-0", port))

    async def second(port: int) -> None:
        with pytest.raises(ProbeError) as caught:
            await prove(prover, spec("exact-0", port))
        assert all(f"{aspect}: fast-0 and exact-0 differ" in str(caught.value) for aspect in aspects)
        proof = await prove(lenient, spec("exact-0", port))
        assert len(proof.notes) == len(aspects)
        told.extend(re.findall(r"sha256:[0-9a-f]{64}", str(caught.value)))

    async def first_anew(port: int) -> None:
        await prove(narrow, spec("fast-0", port))

    async def second_anew(port: int) -> None:
        proof = await prove(narrow, spec("exact-0", port))
        assert len(proof.notes) == len(aspects)

    with_engine(tmp_path, (), first)
    with_engine(tmp_path, options, second)
    narrow = Prover(Allowance(accepted=frozenset(told)))
    with_engine(tmp_path, (), first_anew)
    with_engine(tmp_path, options, second_anew)


def test_one_that_is_changed_and_started_again_is_held_against_the_other(tmp_path: Path) -> None:
    prover = Prover()

    async def start(name: str, port: int) -> None:
        await prove(prover, spec(name, port))

    for name in ("fast-0", "exact-0"):
        with_engine(tmp_path, (), partial(start, name))
    with pytest.raises(ProbeError, match="max_length: exact-0 and fast-0 differ"):
        with_engine(tmp_path, ("--length", "2048"), partial(start, "fast-0"))


def test_one_alone_may_change(tmp_path: Path) -> None:
    prover = Prover()

    async def use(port: int) -> None:
        await prove(prover, spec("fast-0", port))

    with_engine(tmp_path, (), use)
    with_engine(tmp_path, ("--length", "2048"), use)


def test_the_cache_is_held_against_the_plan(tmp_path: Path) -> None:
    async def use(port: int) -> None:
        engine = spec("fast-0", port)
        proof = await prove(Prover(), engine, placed(engine))
        assert proof.notes == ()
        (warning,) = proof.warnings
        assert warning.startswith("KV cache: 512 blocks of 16 tokens, 50% fewer than the 512 of the plan: ")

    with_engine(tmp_path, ("--blocks", "512"), use)


ENGINE = spec("fast-0", 1)
LOG = "INFO Model loading took 1.5 GiB memory and 2.1 seconds\nINFO Available KV cache memory: 0.60 GiB\n"


@pytest.mark.parametrize(
    ("size", "log", "text", "far"),
    [
        (CacheSize(512, 32), "", "KV cache: 512 blocks of 32 tokens, as planned", False),
        (CacheSize(500, 32), "", "KV cache: 500 blocks of 32 tokens, as planned", False),
        (CacheSize(460, 32), LOG, "10% fewer than the 512 of the plan: the weights took 1.5 GiB", False),
        (CacheSize(300, 32), LOG, "for the cache were left 0.6 GiB, planned 1.0 GiB", True),
        (CacheSize(900, 32), "", "76% more than the 512 of the plan: the engine found other needs", True),
        (CacheSize(10, 32, forced=True), LOG, "given by --num-gpu-blocks-override", True),
    ],
)
def test_a_cache_that_is_off_is_explained(size: CacheSize, log: str, text: str, far: bool) -> None:
    line, is_far = compare_cache(placed(ENGINE), size, log)
    assert text in line
    assert is_far is far


def test_of_a_model_that_the_plan_cannot_count_the_engine_tells() -> None:
    unknown = Facts(weights=GIB, unknown="recurrent layers")
    (placement,) = arrange([ENGINE], Machine((), (0,), 8 * GIB, 8 * GIB), lambda _: unknown).placements
    line = "KV cache: 77 blocks of 16 tokens, read from the engine"
    assert compare_cache(placement, CacheSize(77, 16), "") == (line, False)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="5"} 1.0\n', CacheSize(5, 16)),
        (
            'x 1\nvllm:cache_config_info{num_gpu_blocks="5",block_size="16",num_gpu_blocks_override="5"} 1.0',
            CacheSize(5, 16, forced=True),
        ),
        (
            'vllm:cache_config_info{num_gpu_blocks="5",block_size="16",num_gpu_blocks_override="None"} 1.0',
            CacheSize(5, 16),
        ),
        ('vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1.0', None),
        ("llamacpp:requests_processing 0\n", None),
        ("", None),
    ],
)
def test_the_cache_is_read_from_the_metrics(text: str, size: CacheSize | None) -> None:
    assert proving.cache_size(text) == size


# sleep and wake


def test_it_sleeps_and_wakes(tmp_path: Path) -> None:
    async def use(port: int) -> None:
        sleeper = Sleeper(spec("exact-0", port))
        await sleeper.sleep()
        assert await sleeper.asleep() is True
        await sleeper.wake()
        assert await sleeper.asleep() is False

    with_engine(tmp_path, ("--enable-sleep-mode",), use)


@pytest.mark.parametrize(
    ("options", "asleep", "why"),
    [
        ((), True, "it has no sleep mode: write --enable-sleep-mode into its `args`"),
        (("--enable-sleep-mode", "--sleep-fault", "error"), True, "it would not go to sleep: 500"),
        (("--enable-sleep-mode", "--sleep-fault", "hang"), True, "it did not go to sleep"),
        (("--enable-sleep-mode", "--wake-fault", "error"), False, "it would not wake up: 500"),
        (("--enable-sleep-mode", "--wake-fault", "hang"), False, "it did not wake up"),
        (("--enable-sleep-mode", "--wake-fault", "ignored"), False, "it did not wake up within 0.5 s"),
    ],
)
def test_an_engine_that_does_not_do_as_it_is_told(
    tmp_path: Path, options: tuple[str, ...], asleep: bool, why: str
) -> None:
    async def use(port: int) -> None:
        # What answers may take its time on a busy machine.
        seconds = 0.5 if "did not" in why else 30.0
        sleeper = Sleeper(
            spec("exact-0", port), sleep_seconds=seconds if asleep else 30.0, wake_seconds=seconds
        )
        if not asleep:
            await sleeper.sleep()
        with pytest.raises(ProbeError) as caught:
            await (sleeper.sleep() if asleep else sleeper.wake())
        assert why in str(caught.value)

    with_engine(tmp_path, options, use)


def test_who_does_not_tell_is_not_believed_to_sleep(tmp_path: Path) -> None:
    async def use(port: int) -> None:
        assert await Sleeper(spec("exact-0", port)).asleep() is None

    with_engine(tmp_path, (), use)
