"""What `dualgauge doctor` finds of files: who may read and change what decides."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from gateway.cli.findings import FAULT, WARNING, Finding, Level
from gateway.config import Config
from policies.document import ProblemsError, load

SECRETS = ("admin_token", "api_key", "key")
SECRET_VARIABLE = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD)$")
"""Names of environment variables, as an engine's `env` has them."""
PASSWORD = re.compile(r"(?<=://)[^/@]*:[^/@]+(?=@)|(?<=[?&])(?:sentinel_)?password=[^&]+")


def files(config: Config) -> Iterator[Finding]:
    """Who may read and change what decides: the configuration, its keys, its policy, its models."""
    with contextlib.suppress(OSError):  # one that was just moved away
        plain = _written_out(config.path.read_text("utf-8"))
        yield from _file(config.path, f"has {plain} in plain" if plain else None, FAULT)
    folders = {config.folder}
    if config.keys is not None:
        folders.add(config.keys.parent)
        with contextlib.suppress(OSError):  # one that cannot be read is a mistake in the configuration
            plain = _written_out(config.keys.read_text("utf-8"))
            why = "has keys in plain" if plain else "has the keys' hashes"
            yield from _file(config.keys, why, FAULT if plain else WARNING)
    policy = Path(config.policy)
    if policy.is_absolute():
        folders.add(policy.parent)
        with contextlib.suppress(OSError):
            yield from _file(policy)
    for folder in sorted(folders):
        yield from _folder(folder)
    for model in sorted({Path(spec.model or "") for spec in config.engines}):
        if model.is_absolute():
            yield from _model(model)


def _written_out(text: str) -> str | None:
    """The kind of secret that stands in a file of ours, where a `${NAME}` would keep it elsewhere."""
    try:
        value = load(text, "").value
    except ProblemsError:
        return None  # told already
    return next((kind for kind in map(_secret, _pairs(value)) if kind is not None), None)


def _pairs(value: object) -> Iterator[tuple[str, str]]:
    """Each text of a document, with its key."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, each in value.items() if isinstance(value, dict) else ():
        if isinstance(each, str):
            yield str(key), each
        else:
            yield from _pairs(each)


def _secret(pair: tuple[str, str]) -> str | None:
    key, text = pair
    if (key in SECRETS or SECRET_VARIABLE.search(key)) and text and "${" not in text:
        return "a token or key"
    if key == "store" and (match := PASSWORD.search(text)) is not None and "${" not in match[0]:
        return "Redis's password"
    return None


def _file(path: Path, secret: str | None = None, level: Level = FAULT) -> Iterator[Finding]:
    """`secret` is why others must not read it, and `level` how bad that is. Raises OSError."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        # A group may be its owner's alone, as Ubuntu makes them.
        who, how = ("everybody", FAULT) if mode & stat.S_IWOTH else ("its group", WARNING)
        yield Finding(how, f"{path} (mode {mode:o}) can be changed by {who}", f"chmod go-w {path}")
    if secret is not None and mode & (stat.S_IRGRP | stat.S_IROTH):
        who = "everybody" if mode & stat.S_IROTH else "its group"
        yield Finding(level, f"{path} (mode {mode:o}) {secret} and can be read by {who}", f"chmod 600 {path}")


def _folder(path: Path) -> Iterator[Finding]:
    """Who may write a folder may replace what is in it; where it is sticky, as /tmp is, only their own."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            what = f"everybody can replace what is in {path} (mode {mode:o})"
            yield Finding(FAULT, what, f"chmod go-w {path}")


def _model(path: Path) -> Iterator[Finding]:
    try:
        yield from _file(path)
        inside = sorted(file for file in path.iterdir() if file.stat().st_mode & stat.S_IWOTH)
    except FileNotFoundError:
        return  # an engine's own trouble: external ones have their models elsewhere
    except NotADirectoryError:
        return  # a GGUF file
    except OSError as error:
        do = f"let the user that runs the engine read it: chmod -R a+rX {path}"
        yield Finding(FAULT, f"{path} cannot be read: {error.strerror}", do)
        return
    if inside:
        some = f"{inside[0].name} and {len(inside) - 1} others" if len(inside) > 1 else inside[0].name
        yield Finding(FAULT, f"{some} in {path} can be changed by everybody", f"chmod -R go-w {path}")
