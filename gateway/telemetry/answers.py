"""Answers of a collector over HTTP, as far as its exporter must not have them: endless, late, or elsewhere.

OpenTelemetry's exporter reads an answer whatever its length, waits for each of its bytes, and takes a
redirect for a success.
"""

from __future__ import annotations

import time
from typing import Any

import requests

MOST_BYTES = 4096
"""Of an answer: it names at most why some spans were not taken."""

MOST_SHOWN = 200
REDIRECTION = 3
"""The first digit of its statuses."""


class Session(requests.Session):
    """`seconds` is what a collector has to answer, and then again for the body of its answer."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._settings: Any = None

    def merge_environment_settings(self, *asked: Any, **more: Any) -> Any:
        """Proxies and certificates by the environment, which is read once: all requests go to one place, and
        Requests would look through all variables for each."""
        if self._settings is None:
            self._settings = super().merge_environment_settings(*asked, **more)
        return self._settings

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Raises requests.RequestException, also where an answer is none."""
        answer = super().send(request, **{**options, "stream": True, "allow_redirects": False})
        try:
            # As Requests has it where all was read at once.
            answer._content = self._body(answer)
        except BaseException:
            answer.close()
            raise
        if answer.status_code // 100 == REDIRECTION:
            where = answer.headers.get("location", "nowhere")[:MOST_SHOWN]
            raise requests.HTTPError(f"it redirects to {where}, name that in `telemetry.otlp`")
        return answer

    def _body(self, answer: requests.Response) -> bytes:
        body, end = bytearray(), time.monotonic() + self._seconds
        # A byte at a time: more would be waited for as long as one comes now and then.
        for byte in answer.iter_content(1):
            body += byte
            if len(body) > MOST_BYTES or time.monotonic() > end:
                raise requests.HTTPError("its answer does not end")
        return bytes(body)
