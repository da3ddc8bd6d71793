"""What an engine must show between its start and its first request: answers that make sense, and that it
counts as its neighbours do. What it has for a KV cache is held against the plan.

The folders have been compared before (`parity`); here the running engines are, which also sees what only an
engine knows: the template that it chose, the longest request that it can hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines import canary, launch, parity
from engines.allowed import NOTHING, Allowance
from engines.hardware import GIB, gib
from engines.launch import ProbeError, Proof
from engines.parity import Traits
from engines.plan import Placement
from engines.spec import EngineSpec, bearer

if TYPE_CHECKING:
    import httpx2

CLOSE = 0.05
"""A KV cache within this share of the plan is as planned."""
FAR = 0.20
"""One that differs by more is a warning."""
ASK_SECONDS = 60.0
TEXT = "Grüße, the naïve 東京 résumé: привет 👋🏽 def f(x):\n\treturn x ** 2  # 12345.67 <|im_start|> </s>"
CHATS = (
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "4."},
        {"role": "user", "content": "  Zwei Zeilen,\n東京. "},
    ),
    ({"role": "user", "content": "Hello."},),
)
"""Some templates write a system message of their own where there is none."""
_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\} 1", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_LOADED = re.compile(r"Model loading took ([\d.]+) GiB")
_LEFT = re.compile(r"Available KV cache memory: (-?[\d.]+) GiB")


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What an engine says of its KV cache; `forced`: its number of blocks was given, not measured."""

    blocks: int
    block: int
    forced: bool = False

    @property
    def tokens(self) -> int:
        return self.blocks * self.block


class Prover:
    """Proves the engines of one deployment: each must count tokens as another one does that was proven."""

    def __init__(self, allowed: Allowance = NOTHING) -> None:
        self._allowed = allowed
        self._proven: dict[str, Traits] = {}

    async def prove(
        self, client: httpx2.AsyncClient, spec: EngineSpec, placement: Placement | None, log: Path | None
    ) -> Proof:
        """Raises ProbeError where the engine must not serve."""
        await check_answers(client, spec)
        allowed = self._compare(spec.name, await count(client, spec))
        lines = () if placement is None else await _cache(client, placement, log)
        notes, warnings = (tuple(text for text, far in lines if far is wanted) for wanted in (False, True))
        return Proof((*allowed, *notes), warnings)

    def _compare(self, name: str, found: Traits) -> tuple[str, ...]:
        if all(value is None for value in found.values()):
            return ()
        other = next(((known, traits) for known, traits in self._proven.items() if known != name), None)
        differences = [] if other is None else list(parity.differences(*other, name, found))
        refused = [difference for difference in differences if not self._allowed.covers(difference)]
        if refused:
            raise ProbeError(parity.explain(refused))
        self._proven[name] = found
        return tuple(f"allowed by `parity`: {difference}" for difference in differences)


async def check_answers(client: httpx2.AsyncClient, spec: EngineSpec) -> None:
    """Raises ProbeError where the engine's answers make no sense."""

    async def ask(prompt: str, tokens: int) -> str | None:
        body = {"model": spec.served_model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        status, reply = await _ask(client, spec, "/v1/completions", body)
        if status == 404:
            return None
        try:
            return str(reply["choices"][0]["text"])
        except (KeyError, IndexError, TypeError):
            raise ProbeError(f"a test question got {status} and no text") from None

    wrong = await canary.problem(ask, answers=canary.known(spec))
    if wrong is not None:
        raise ProbeError(f"its answers make no sense: {wrong}")


async def count(client: httpx2.AsyncClient, spec: EngineSpec) -> Traits:
    """How the engine tokenizes a text and a conversation, and its longest request; None for what it does not
    tell."""
    return await (_count_llamacpp if spec.kind == "llama.cpp" else _count_vllm)(client, spec)


async def _count_vllm(client: httpx2.AsyncClient, spec: EngineSpec) -> Traits:
    text = await _answer(client, spec, "/tokenize", {"model": spec.served_model, "prompt": TEXT})
    chats = []
    for messages in CHATS:
        asked = {"model": spec.served_model, "messages": messages, "add_generation_prompt": True}
        chats.append((await _answer(client, spec, "/tokenize", asked)).get("tokens"))
    return _traits(text.get("tokens"), chats, text.get("max_model_len"))


async def _count_llamacpp(client: httpx2.AsyncClient, spec: EngineSpec) -> Traits:
    """llama-server writes a conversation as a text, and adds what begins a text when it tokenizes that."""

    async def tokens(text: Any) -> Any:
        asked = {"content": text, "add_special": True}
        return (await _answer(client, spec, "/tokenize", asked)).get("tokens") if text else None

    written = [await _answer(client, spec, "/apply-template", {"messages": messages}) for messages in CHATS]
    chats = [await tokens(answer.get("prompt")) for answer in written]
    slot = (await _answer(client, spec, "/props")).get("default_generation_settings")
    return _traits(await tokens(TEXT), chats, slot.get("n_ctx") if isinstance(slot, dict) else None)


def _traits(text: Any, chats: Sequence[Any], length: Any) -> Traits:
    return {
        "tokenizer": _known("token ids of a text", text or None),
        "chat_template": _known("token ids of conversations", list(chats) if any(chats) else None),
        "max_length": _known("tokens", length),
    }


def _known(name: str, value: Any) -> Mapping[str, Any] | None:
    return None if value is None else {name: value}


async def _answer(
    client: httpx2.AsyncClient, spec: EngineSpec, path: str, body: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Its answer, a GET's without a body; empty where it has none to give. Raises ProbeError."""
    status, reply = await _ask(client, spec, path, body)
    return reply if status == 200 and isinstance(reply, dict) else {}


async def _ask(
    client: httpx2.AsyncClient, spec: EngineSpec, path: str, body: Mapping[str, Any] | None
) -> tuple[int, Any]:
    """Status and JSON body. Raises ProbeError where there is no answer."""
    import httpx2

    method = "GET" if body is None else "POST"
    ask = partial(client.request, method, path, json=body, headers=bearer(spec.api_key), timeout=ASK_SECONDS)
    try:
        try:
            reply = await ask()
        except httpx2.RemoteProtocolError:
            # A slow machine lets the client's kept connection grow older than the engine keeps it.
            reply = await ask()
    except httpx2.HTTPError as error:
        raise ProbeError(f"{path} got no answer: {type(error).__name__} {error}".strip()) from None
    try:
        return reply.status_code, reply.json()
    except ValueError:
        return reply.status_code, None


async def _cache(
    client: httpx2.AsyncClient, placement: Placement, log: Path | None
) -> tuple[tuple[str, bool], ...]:
    import httpx2

    try:
        told = (await client.get("/metrics")).text
    except httpx2.HTTPError:
        return ()
    size = cache_size(told)
    return () if size is None else (compare_cache(placement, size, launch.tail(log) if log else ""),)


def cache_size(metrics: str) -> CacheSize | None:
    """Of the text of vLLM's /metrics; None where it does not say."""
    match = _CACHE.search(metrics)
    labels = dict(_LABEL.findall(match[1])) if match else {}
    try:
        blocks, block = int(labels["num_gpu_blocks"]), int(labels["block_size"])
    except (KeyError, ValueError):
        return None
    return CacheSize(blocks, block, labels.get("num_gpu_blocks_override", "None") != "None")


def compare_cache(placement: Placement, size: CacheSize, log: str) -> tuple[str, bool]:
    """One line on the KV cache, with the reason where it is not as planned; whether it is far off."""
    has = f"KV cache: {size.blocks:,} blocks of {size.block} tokens"
    pool = placement.pool
    if pool is None or pool.blocks <= 0:
        return f"{has}, read from the engine", False
    off = size.tokens / (pool.blocks * pool.block) - 1
    if abs(off) <= CLOSE:
        return f"{has}, as planned", False
    line = f"{has}, {abs(off):.0%} {'more' if off > 0 else 'fewer'} than the {pool.blocks:,} of the plan"
    return f"{line}: {'; '.join(_reasons(placement, size, log))}", abs(off) > FAR


def _reasons(placement: Placement, size: CacheSize, log: str) -> Iterator[str]:
    if size.forced:
        yield "the number of blocks is given by --num-gpu-blocks-override"
        return
    told = False
    for pattern, planned, what in (
        (_LOADED, placement.facts.weights, "the weights took"),
        (_LEFT, placement.kv, "for the cache were left"),
    ):
        match = pattern.search(log)
        if match is not None and planned is not None:
            told = True
            yield f"{what} {gib(int(float(match[1]) * GIB))}, planned {gib(planned)}"
    if not told:
        yield "the engine found other needs than the plan, see its log"
    if placement.share is not None:
        yield "if other programs used the GPU while it started, restart it; else set `share`"
