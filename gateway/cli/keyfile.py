"""Changes to a key file that keep everything else in it: comments, order, the operator's way of writing.

The text is edited at the places that the YAML parser names. What comes out is read again before it is
written, so that a file in a style that this module does not know is left alone. It is written beside and
renamed, readable by its owner only; two who write at once wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from gateway.cli.failures import Failure
from policies.document import ProblemsError, load

MODE = 0o600
LOCK_SECONDS = 10.0
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
HEADER = "# Keys of applications. `dualgauge keys` edits this file; a gateway reads it again by itself.\n"

Value = str | bool | list[str] | dict[str, str]
Entry = Mapping[str, Value]


def entries(text: str, file: str) -> list[dict[str, Any]]:
    """The keys of a file's text as plain values. Raises ProblemsError."""
    value = load(text, file).value
    keys = value.get("keys") if isinstance(value, dict) else None
    return [key for key in keys if isinstance(key, dict)] if isinstance(keys, list) else []


def with_key(text: str, entry: Entry, file: str) -> str:
    """The text with one more key at its end. Raises Failure, ProblemsError."""
    return _only(add(text, entry), [*entries(text, file), dict(entry)], text, file)


def with_fields(text: str, name: str, fields: Mapping[str, Value | None], file: str) -> str:
    """The text with some fields of a key set, or taken out where they are None. Raises Failure,
    ProblemsError."""
    wanted = entries(text, file)
    for key in wanted:
        if key.get("name") == name:
            key.update(fields)
            for field in [field for field, value in key.items() if value is None]:
                del key[field]
    return _only(change(text, name, fields), wanted, text, file)


def _only(text: str, wanted: list[dict[str, Any]], before: str, file: str) -> str:
    """The new text, if it says what is wanted and no more."""
    rest = load(before, file).value or {}
    try:
        right = load(text, file).value == {**rest, "keys": wanted}
    except ProblemsError:
        right = False
    if not right:
        raise Failure(f"{file} is written in a way that this command cannot change safely: edit it by hand")
    return text


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only one that writes into the folder of `path`. Raises Failure, OSError."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Failure(f"another process is writing in {path.parent}: try again") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(folder)


def write(path: Path, text: str) -> None:
    """Replace the file in one step, with mode 600 and the owner it had. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(
            os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE), "w", encoding="utf-8"
        ) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            owner = path.stat()
            if (owner.st_uid, owner.st_gid) != (os.getuid(), os.getgid()):
                os.chown(beside, owner.st_uid, owner.st_gid)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def add(text: str, entry: Mapping[str, Value]) -> str:
    """The text with one more key at the end of its list."""
    if not text.strip() or yaml.compose(text, yaml.SafeLoader) is None:
        return f"{text.rstrip()}\n\n{HEADER if not text.strip() else ''}keys:\n{_item(entry, 2)}\n".lstrip()
    keys = _keys(text)
    if keys is None:
        return f"{text.rstrip()}\nkeys:\n{_item(entry, 2)}\n"
    if isinstance(keys, yaml.SequenceNode) and keys.value:
        last = _end(keys.value[-1], text)
        if keys.flow_style:
            return f"{text[:last]}, {_flow(entry)}{text[last:]}"
        at = _line_end(text, last)
        return f"{text[:at]}\n{_item(entry, keys.start_mark.column)}{text[at:]}"
    # `keys: []`, or `keys:` with nothing behind it.
    start, end = keys.start_mark.index, keys.end_mark.index
    if _root(text).flow_style:
        return f"{text[:start]} [{_flow(entry)}]{text[end:]}"
    colon = text.rindex(":", 0, start) + 1
    at = _line_end(text, end)
    return f"{text[:colon]}{text[end:at]}\n{_item(entry, 2)}{text[at:]}"


def change(text: str, name: str, fields: Mapping[str, Value | None]) -> str:
    """The text with fields of one key set, or taken out where they are None; a field that is set and not
    there is added at the end of its key."""
    for field, value in fields.items():
        entry = _entry(text, name)
        found = next(((k, v) for k, v in entry.value if k.value == field), None)
        if found is not None:
            text = _replace(text, entry, found, value)
        elif value is not None:
            text = _append(text, entry, field, value)
    return text


def _append(text: str, entry: yaml.MappingNode, field: str, value: Value) -> str:
    at = _end(entry.value[-1][1], text)
    if entry.flow_style:
        return f"{text[:at]}, {field}: {_flow(value)}{text[at:]}"
    at = _line_end(text, at)
    indent = " " * entry.value[0][0].start_mark.column
    return f"{text[:at]}\n{indent}{field}: {_flow(value)}{text[at:]}"


def _replace(
    text: str, entry: yaml.MappingNode, found: tuple[yaml.Node, yaml.Node], value: Value | None
) -> str:
    key, old = found
    start, end = old.start_mark.index, _end(old, text)
    if value is not None:
        return f"{text[:start]}{_flow(value)}{text[end:]}"
    position = entry.value.index(found)
    if position + 1 < len(entry.value):
        return text[: key.start_mark.index] + text[entry.value[position + 1][0].start_mark.index :]
    return text[: _end(entry.value[position - 1][1], text)] + text[end:]


# where things stand


def _root(text: str) -> yaml.MappingNode:
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    return root


def _keys(text: str) -> yaml.Node | None:
    found: Iterator[yaml.Node] = (value for key, value in _root(text).value if key.value == "keys")
    return next(found, None)


def _entry(text: str, name: str) -> yaml.MappingNode:
    keys = _keys(text)
    assert keys is not None
    for entry in keys.value:
        if any(key.value == "name" and value.value == name for key, value in entry.value):
            assert isinstance(entry, yaml.MappingNode)
            return entry
    raise KeyError(name)


def _end(node: yaml.Node, text: str) -> int:
    """Behind the last character of a value; a block collection's own mark stands behind comments too."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    end: int = node.end_mark.index
    while end > node.start_mark.index and text[end - 1] in "\r\n":
        end -= 1
    return end


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


# how things are written


def _item(entry: Mapping[str, Value], indent: int) -> str:
    lines = [f"{field}: {_flow(value)}" for field, value in entry.items()]
    return " " * indent + f"\n{' ' * (indent + 2)}".join(["- " + lines[0], *lines[1:]])


def _flow(value: Value | Entry) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{field}: {_flow(inner)}" for field, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if _is_plain(value) else json.dumps(value)


def _is_plain(text: str) -> bool:
    """Whether a text is read as itself without quotes: a digest of digits and one `e` would be a number."""
    try:
        return PLAIN.fullmatch(text) is not None and bool(load(text, "").value == text)
    except ProblemsError:
        return False
