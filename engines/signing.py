"""Signatures over whole model folders, as OpenSSF model signing makes them: a Sigstore bundle, `model.sig`.

Made and checked by its own command in an environment of its own, with a pair of keys on a NIST curve (P-256,
P-384, P-521). https://github.com/sigstore/model-transparency
"""

from __future__ import annotations

import ast
import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from engines import env_pip
from engines.manifest import SIGNATURE, StoppedError

_POLL = 0.2
_SAID = re.compile(r"(?:Signing|Verification) failed with error: ")
_MISMATCH = re.compile(r"Signature mismatch: (\[.*\])")
_NO_CURVE = "has no attribute 'curve'"


class SigningError(Exception):
    """A folder that could not be signed, or whose signature does not hold; the message says why."""


def sign(folder: Path, private_key: Path, *, python: Path) -> Path:
    """Write the signature of everything in the folder, its manifest included. Raises SigningError.

    `python` is that of the environment `model-signing`.
    """
    signature = folder / SIGNATURE
    arguments = ["sign", "key", str(folder), "--private_key", str(private_key), "--signature", str(signature)]
    _run(python, arguments, f"{folder} cannot be signed with {private_key}", None)
    return signature


def verify(folder: Path, public_key: Path, *, python: Path, stop: threading.Event | None = None) -> None:
    """Raises SigningError where the folder is not as the owner of the key signed it: a file changed, added,
    missing or a link, another key, no signature; StoppedError soon after `stop` is set."""
    signature = folder / SIGNATURE
    if not signature.is_file():
        raise SigningError(f"{folder} has no signature ({SIGNATURE}): `dualgauge models sign` makes one")
    arguments = ["verify", "key", str(folder), "--public_key", str(public_key), "--signature", str(signature)]
    _run(python, arguments, f"the signature of {folder} does not hold for {public_key}", stop)


def _run(python: Path, arguments: Sequence[str], failed: str, stop: threading.Event | None) -> None:
    with subprocess.Popen(
        [str(python), "-I", "-m", "model_signing", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env_pip.clean_environment(),
    ) as process:
        try:
            said = _follow(process, stop)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise SigningError(f"{failed}: {_words(said, process.returncode)}")


def _follow(process: subprocess.Popen[str], stop: threading.Event | None) -> str:
    while True:
        try:
            return process.communicate(timeout=_POLL)[1]
        except subprocess.TimeoutExpired:
            if stop is not None and stop.is_set():
                raise StoppedError from None


def _words(said: str, code: int) -> str:
    if _NO_CURVE in said:
        return "keys are of a NIST curve: openssl ecparam -name prime256v1 -genkey -noout -out private.pem"
    last = _SAID.sub("", said.strip().rpartition("\n")[2])
    mismatch = _MISMATCH.fullmatch(last)
    if mismatch is not None:  # a list of sentences that end with digests, as Python prints it
        return "; ".join(part.partition(": Expected ")[0] for part in ast.literal_eval(mismatch[1]))
    return last.strip() or f"exit code {code}"
