"""A server of a model with transformers alone, without paging: `python -m benchmark.baseline FOLDER …`.

What waits is put into one batch, padded to its longest prompt, whose KV cache is one piece. A request that
comes while a batch is under way waits for the next: nothing joins, and nothing leaves early. Speaks as much
of OpenAI's completions as the measurement asks for, greedy, streamed or not.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import torch
import transformers
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

GATHER = 0.02
"""Seconds that a batch waits for more requests."""


@dataclass(slots=True)
class Asked:
    """One request; its tokens come by `tokens` as they are made, None behind the last."""

    ids: list[int]
    limit: int
    loop: asyncio.AbstractEventLoop
    tokens: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)

    def tell(self, token: int | None) -> None:
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, token)


class Tokens(BaseStreamer):  # type: ignore[misc]
    """Hands every token of a batch to its request."""

    def __init__(self, batch: list[Asked]) -> None:
        self._batch = batch
        self._made = -1  # the prompts come first

    def put(self, value: torch.Tensor) -> None:
        self._made += 1
        if self._made == 0:
            return
        for asked, token in zip(self._batch, value.tolist(), strict=True):
            if self._made <= asked.limit:
                asked.tell(token)
            if self._made == asked.limit:
                asked.tell(None)

    def end(self) -> None:
        pass


class Model:
    """The model and its one thread of work."""

    def __init__(self, folder: str, device: str, dtype: torch.dtype, most: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self._device = device
        self._most = most
        self._pad = self.tokenizer.pad_token_id or 0
        self._waiting: Queue[Asked] = Queue()
        self._busy = threading.Lock()
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self, asked: Asked) -> None:
        self._waiting.put(asked)

    def score(self, ids: list[int]) -> list[float]:
        """The logarithm of the probability of each token but the first."""
        with self._busy, torch.inference_mode():
            tokens = torch.tensor([ids], device=self._device)
            logits = self._model(tokens).logits[0, :-1].float()
            found = torch.log_softmax(logits, dim=-1).gather(1, tokens[0, 1:, None])
            return [float(value) for value in found[:, 0]]

    def _work(self) -> None:
        while True:
            batch = [self._waiting.get()]
            time.sleep(GATHER)
            while len(batch) < self._most and not self._waiting.empty():
                batch.append(self._waiting.get())
            try:
                with self._busy:
                    self._generate(batch)
            except Exception:  # noqa: BLE001 - out of memory, most likely: the next batch may be smaller
                traceback.print_exc()
                for asked in batch:
                    asked.tell(None)

    def _generate(self, batch: list[Asked]) -> None:
        longest = max(len(asked.ids) for asked in batch)
        padding = [longest - len(asked.ids) for asked in batch]
        ids = [[self._pad] * pad + asked.ids for pad, asked in zip(padding, batch, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        steps = max(asked.limit for asked in batch)
        self._model.generate(
            torch.tensor(ids, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=self._pad
            ),
            streamer=Tokens(batch),
        )


class Server:
    def __init__(self, model: Model, name: str) -> None:
        self._model = model
        self._name = name

    async def health(self, _: Request) -> Response:
        return Response()

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": f"{transformers.__version__}, torch {torch.__version__}"})

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        ids = self._model.tokenizer.encode(body["prompt"], add_special_tokens=False)
        return JSONResponse({"tokens": ids, "count": len(ids)})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        ids = self._model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if body.get("prompt_logprobs") is not None:
            found = await asyncio.to_thread(self._model.score, ids)
            told = [{str(token): {"logprob": value}} for token, value in zip(ids[1:], found, strict=True)]
            return JSONResponse({"choices": [{"index": 0, "text": "", "prompt_logprobs": [None, *told]}]})
        asked = Asked(ids, int(body.get("max_tokens") or 16), asyncio.get_running_loop())
        self._model.ask(asked)
        usage = {"prompt_tokens": len(ids), "completion_tokens": asked.limit}
        if body.get("stream"):
            return StreamingResponse(self._events(asked, usage), media_type="text/event-stream")
        text = "".join([self._text(token) async for token in _made(asked)])
        return JSONResponse({"model": self._name, "choices": [{"index": 0, "text": text}], "usage": usage})

    async def _events(self, asked: Asked, usage: dict[str, int]) -> AsyncIterator[str]:
        async for token in _made(asked):
            yield self._event({"choices": [{"index": 0, "text": self._text(token)}]})
        yield self._event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def _event(self, fields: dict[str, Any]) -> str:
        return f"data: {json.dumps({'object': 'text_completion', 'model': self._name, **fields})}\n\n"

    def _text(self, token: int) -> str:
        return str(self._model.tokenizer.decode([token]))


async def _made(asked: Asked) -> AsyncIterator[int]:
    while (token := await asked.tokens.get()) is not None:
        yield token


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, required=True, help="the most requests in one batch")
    parser.add_argument("--cpus", default="", help="the cores to use, by number; none: a GPU")
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG: end with our parent
    cpus = [int(cpu) for cpu in given.cpus.split(",") if cpu]
    if cpus:
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(len(cpus))
    model = Model(given.folder, "cpu" if cpus else "cuda", getattr(torch, given.dtype), given.batch)
    server = Server(model, given.name)
    routes = [
        Route("/health", server.health),
        Route("/version", server.version),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/v1/completions", server.completions, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
