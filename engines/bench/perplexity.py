"""Perplexity of texts, asked of a running engine: e to the mean of -log p of all tokens but the first.

vLLM tells the probabilities of a prompt's tokens (`prompt_logprobs`). llama-server does not: there every
token is asked for by itself, behind those before it, and made the only choice by a bias, which changes what
is chosen and not the probability that is told. Its prompt cache keeps what was read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from engines.bench.load import SCRIPTS
from engines.bench.results import Score
from engines.making import MakingError

if TYPE_CHECKING:
    import httpx2

Dialect = Literal["vllm", "llama.cpp"]
TIMEOUT = 600.0
_BIAS = 10_000.0
_SHOWN = 200


def text_of(name: str) -> str:
    """One of `TEXTS`, written for this."""
    return (SCRIPTS / "benchmark" / "texts" / f"{name}.txt").read_text(encoding="utf-8")


def perplexity(logarithms: Sequence[float]) -> float:
    """Of natural logarithms of probabilities. Raises ValueError where there are none."""
    if not logarithms:
        raise ValueError("a text of one token has no perplexity")
    return math.exp(-math.fsum(logarithms) / len(logarithms))


async def score(client: httpx2.AsyncClient, dialect: Dialect, model: str, name: str, limit: int) -> Score:
    """Perplexity of the first `limit` tokens of a text. Raises MakingError, httpx2.HTTPError."""
    text = text_of(name)
    body = {"model": model, "prompt": text, "content": text, "add_special": True}
    ids: list[int] = (await _post(client, "/tokenize", body))["tokens"][:limit]
    by = _of_prompt(client, model, ids) if dialect == "vllm" else _by_token(client, ids)
    found = await by
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]
    return Score(perplexity(found), len(ids), digest)


async def _of_prompt(client: httpx2.AsyncClient, model: str, ids: list[int]) -> list[float]:
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    reply = await _post(client, "/v1/completions", body)
    told = reply["choices"][0]["prompt_logprobs"]
    return [float(place[str(token)]["logprob"]) for token, place in zip(ids[1:], told[1:], strict=True)]


async def _by_token(client: httpx2.AsyncClient, ids: list[int]) -> list[float]:
    found = []
    for at in range(1, len(ids)):
        body = {"prompt": ids[:at], "n_predict": 1, "n_probs": 1, "temperature": 0, "cache_prompt": True}
        body |= {"id_slot": 0, "logit_bias": [[ids[at], _BIAS]]}
        reply = await _post(client, "/completion", body)
        told = reply["completion_probabilities"][0]
        if told["id"] != ids[at]:
            raise MakingError(f"llama-server chose token {told['id']} where {ids[at]} was forced")
        found.append(float(told["logprob"]))
    return found


async def _post(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    reply = await client.post(path, json=body, timeout=TIMEOUT)
    if reply.status_code != 200:
        raise MakingError(f"{path} got {reply.status_code}: {reply.text[:_SHOWN]}")
    return reply.json()
