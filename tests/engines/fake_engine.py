"""A stand-in for an engine: `/health`, `/v1/models`, `/v1/completions`; told by options how to fail.

Options that it does not know are ignored, as are positional arguments, so vLLM's command line starts it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: argparse.Namespace
    ready_at: float

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        print(f"INFO: {format % args}", flush=True)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200 if time.monotonic() >= self.ready_at else 503, {})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": self.options.served_model_name}]})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            self.reply(404, {"detail": "Not Found"})
        elif self.options.warm_up != 200:
            self.reply(self.options.warm_up, {"error": {"message": "the model is broken"}})
        elif body["model"] != self.options.served_model_name:
            self.reply(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        else:
            self.reply(200, {"choices": [{"text": " Paris"}], "usage": {"completion_tokens": 1}})

    def reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default="smollm2")
    parser.add_argument("--die", default=None, help="print this and end with 1")
    parser.add_argument("--slow", type=float, default=0.0, help="healthy after so many seconds")
    parser.add_argument("--warm-up", type=int, default=200, help="the status of completions")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    options, _ = parser.parse_known_args()
    if options.die is not None:
        print(options.die.replace("\\n", "\n"), file=sys.stderr, flush=True)
        return 1
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Handler.options, Handler.ready_at = options, time.monotonic() + options.slow
    print(f"serving on {options.port}", flush=True)
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
