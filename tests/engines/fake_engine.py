"""A stand-in for a vLLM server, told by options how it answers and how it fails.

It completes and chats (streamed at a pace where that is asked), tells probabilities of a prompt, tokenizes,
tells its KV cache, and with `--enable-sleep-mode` sleeps and wakes as vLLM does: /health stays 200, requests
hang meanwhile, only /is_sleeping tells. Options that it does not know are ignored, as are positional
arguments, so vLLM's command line starts it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KNOWN = {"France": " Paris, a city", "Thursday,": " Friday, Saturday", "8,": " 9, 10, 11"}
GIBBERISH = "!!!!!!!!!!!!!!!!!!!!!!!!"


class State:
    """What outlives a request: whether it sleeps, and whether it has been woken badly."""

    def __init__(self) -> None:
        self.awake = threading.Event()
        self.awake.set()
        self.confused = False
        self.running: set[int] = set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: argparse.Namespace
    ready_at: float
    state: State

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        print(f"INFO: {format % args}", flush=True)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200 if time.monotonic() >= self.ready_at else 503, {})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": self.options.served_model_name}]})
        elif self.path == "/is_sleeping" and self.options.enable_sleep_mode:
            self.reply(200, {"is_sleeping": not self.state.awake.is_set()})
        elif self.path == "/metrics" and self.options.blocks is not None:
            cache = f'block_size="16",num_gpu_blocks="{self.options.blocks}"'
            self.text(f"vllm:cache_config_info{{{cache}}} 1.0\n")
        elif self.path == "/metrics" and self.options.counts:
            self.text(f"vllm:num_requests_running {len(self.state.running)}\n")
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        path = self.path.partition("?")[0]
        if path in ("/sleep", "/wake_up") and self.options.enable_sleep_mode:
            self.turn(asleep=path == "/sleep")
            return
        if path == "/tokenize":
            self.tokenize(body)
            return
        if path not in ("/v1/completions", "/v1/chat/completions"):
            self.reply(404, {"detail": "Not Found"})
            return
        self.state.awake.wait()
        self.state.running.add(threading.get_ident())
        try:
            self.generate(path, body)
        except ConnectionError:
            print("INFO: aborted", flush=True)
            self.close_connection = True
        finally:
            self.state.running.discard(threading.get_ident())

    def generate(self, path: str, body: dict[str, Any]) -> None:
        if self.options.warm_up != 200:
            self.reply(self.options.warm_up, {"error": {"message": "the model is broken"}})
        elif body["model"] != self.options.served_model_name:
            self.reply(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        elif body.get("stream"):
            self.stream(body)
        elif "prompt_logprobs" in body:
            told = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
            self.reply(200, {"choices": [{"text": "", "prompt_logprobs": told}], "usage": usage(1)})
        elif path == "/v1/completions":
            self.reply(200, {"choices": [{"text": self.say(body["prompt"])}], "usage": usage(1)})
        else:
            time.sleep(self.options.pace)
            message = {"role": "assistant", "content": self.say(body["messages"][-1]["content"])}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.reply(200, {"choices": [choice], "usage": usage(1)})

    def say(self, prompt: object) -> str:
        if self.state.confused:
            return GIBBERISH
        known = next((text for end, text in KNOWN.items() if end in str(prompt)), " so it goes")
        return self.options.answer or known

    def turn(self, *, asleep: bool) -> None:
        """Go to sleep or wake up, with the fault that was asked for."""
        fault = self.options.sleep_fault if asleep else self.options.wake_fault
        if fault == "error":
            self.reply(500, {"error": {"message": "CUDA error: out of memory"}})
            return
        if fault == "hang":
            time.sleep(3600)
        if asleep:
            self.state.awake.clear()
        elif fault != "ignored":
            self.state.confused = fault == "gibberish"
            self.state.awake.set()
        self.reply(200, {"status": "sleeping" if asleep else "awake"})

    def tokenize(self, body: dict[str, object]) -> None:
        text = (
            json.dumps(body["messages"])
            if "messages" in body
            else str(body.get("prompt", body.get("content")))
        )
        tokens = [ord(letter) + self.options.shift for letter in text]
        self.reply(200, {"tokens": tokens, "count": len(tokens), "max_model_len": self.options.length})

    def stream(self, body: dict[str, object]) -> None:
        """So many chunks at the pace, then usage and [DONE]."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for index in range(int(str(body.get("max_tokens", 5)))):
            time.sleep(self.options.pace)
            self.event({"choices": [{"index": 0, "delta": {"content": f" {index}"}}]})
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if (body.get("stream_options") or {}).get("include_usage"):  # type: ignore[attr-defined]
            self.event({"choices": [], "usage": usage(5)})
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, body: object) -> None:
        self.chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def text(self, text: str) -> None:
        self.whole(200, "text/plain", text.encode())

    def reply(self, status: int, body: object) -> None:
        self.whole(status, "application/json", json.dumps(body).encode())

    def whole(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def usage(completion: int) -> dict[str, int]:
    return {"prompt_tokens": 3, "completion_tokens": completion, "total_tokens": 3 + completion}


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default="smollm2")
    parser.add_argument("--die", default=None, help="print this and end with 1")
    parser.add_argument("--slow", type=float, default=0.0, help="healthy after so many seconds")
    parser.add_argument("--warm-up", type=int, default=200, help="the status of completions")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--say", default=None, help="log this line")
    parser.add_argument("--answer", default=None, help="what it says to everything")
    parser.add_argument(
        "--pace", type=float, default=0.0, help="seconds before each token of a stream, or a chat"
    )
    parser.add_argument("--shift", type=int, default=0, help="tokenize otherwise")
    parser.add_argument("--length", type=int, default=4096, help="its longest request, tokens")
    parser.add_argument("--blocks", type=int, default=None, help="of its KV cache, of 16 tokens")
    parser.add_argument("--counts", action="store_true", help="tell in /metrics how many requests run")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--sleep-fault", choices=["error", "hang"], default=None)
    parser.add_argument("--wake-fault", choices=["error", "hang", "ignored", "gibberish"], default=None)
    options, _ = parser.parse_known_args()
    if options.die is not None:
        print(options.die.replace("\\n", "\n"), file=sys.stderr, flush=True)
        return 1
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Handler.options, Handler.ready_at = options, time.monotonic() + options.slow
    Handler.state = State()
    print(f"serving on {options.port}", flush=True)
    if options.say is not None:
        print(options.say, flush=True)
    Server((options.host, options.port), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
