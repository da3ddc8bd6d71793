"""YAML text to plain values that remember where they stand, so that every complaint can name a line.

Safe by construction: the scalar types of YAML 1.2's core schema only (`yes`, `on` and `12:30` are strings),
no tags, no merge keys, one document, no duplicate keys, and bounds on size, depth and what aliases expand to.
Everything that is wrong with a text is raised as one `ProblemsError`.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import yaml

MAX_CHARACTERS = 1 << 20
MAX_NODES = 20_000
MAX_DEPTH = 32

Path = tuple[str | int, ...]
Position = tuple[int, int]

_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_STR_TAG = "tag:yaml.org,2002:str"
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNFIT = re.compile("[\0\ud800-\udfff]")
_CORE_TAG = "tag:yaml.org,2002:"
_TAB = "found character '\\t' that cannot start any token"
_STEP = re.compile(r"\.([^.\[]+)|\[([0-9]+)\]|(.)")


@dataclass(frozen=True, slots=True, order=True)
class Diagnostic:
    """One complaint about a file; `line` and `column` count from 1."""

    file: str
    line: int
    column: int
    severity: Literal["error", "warning"]
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.severity}: {self.message}"


class ProblemsError(Exception):
    """A text that cannot be used, with everything that is wrong with it, in the order of the text."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(set(diagnostics)))
        super().__init__("\n".join(map(str, self.diagnostics)))


def decode(raw: bytes, file: str) -> str:
    """The text of a file's content. Raises ProblemsError, with the place, where it is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, len(before) - (before.rfind(b"\n") + 1) + 1
        message = "this is not UTF-8: save it as UTF-8"
        raise ProblemsError([Diagnostic(file, line, column, "error", message)]) from None


def content_hash(text: str) -> str:
    """Names what a file says: 12 hexadecimal digits of its sha256."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that a misspelt name most likely meant, if one is near."""
    found = difflib.get_close_matches(name.lower(), {c.lower(): c for c in candidates}, n=1, cutoff=0.6)
    return {c.lower(): c for c in candidates}[found[0]] if found else None


def unknown(kind: str, name: str, candidates: Iterable[str]) -> str:
    """The message for a name that is not one of the candidates: the nearest one, else all of them."""
    candidates = tuple(candidates)
    meant = nearest(name, candidates)
    if meant is not None:
        return f"unknown {kind} `{name}`; did you mean `{meant}`?"
    if not candidates:
        return f"unknown {kind} `{name}`; none is defined"
    return f"unknown {kind} `{name}`; known: {', '.join(candidates)}"


@dataclass(slots=True)
class _Node:
    value: Any
    at: Position
    size: int = 1
    depth: int = 1
    keys: dict[str, Position] = field(default_factory=dict)
    members: dict[str | int, _Node] = field(default_factory=dict)


class Document:
    """A parsed text: `value` is plain Python data (dict, list, str, int, float, bool, None)."""

    def __init__(self, file: str, root: _Node) -> None:
        self.file = file
        self.value: Any = root.value
        self._root = root

    def position(self, path: Path = (), *, key: bool = False) -> Position:
        """Line and column of the value at `path`, or of its key; of the nearest parent where none is."""
        node = self._root
        for depth, step in enumerate(path):
            if key and depth == len(path) - 1 and step in node.keys:
                return node.keys[str(step)]
            member = node.members.get(step)
            if member is None:
                break
            node = member
        return node.at

    def has(self, path: Path) -> bool:
        """Whether a value stands at `path` exactly."""
        node: _Node | None = self._root
        for step in path:
            node = None if node is None else node.members.get(step)
        return node is not None

    def problem(
        self, path: Path, message: str, *, key: bool = False, severity: Literal["error", "warning"] = "error"
    ) -> Diagnostic:
        """A complaint about what stands at `path`."""
        line, column = self.position(path, key=key)
        return Diagnostic(self.file, line, column, severity, message)


def load(text: str, file: str, *, expand: Callable[[str], str] | None = None) -> Document:
    """Parse one YAML document.

    `expand` rewrites scalar values (not keys) before their type is settled, for `${NAME}` and the like; a
    ValueError from it is reported where the scalar stands. Raises ProblemsError.
    """
    if len(text) > MAX_CHARACTERS:
        message = f"the file is too large: {len(text)} characters, the limit is {MAX_CHARACTERS}"
        raise ProblemsError([Diagnostic(file, 1, 1, "error", message)])
    return _Composer(text, file, expand).document()


def _position(mark: Any) -> Position:
    return (1, 1) if mark is None else (mark.line + 1, mark.column + 1)


class _Composer:
    """Builds nodes from the parser's events: the parser itself does not recurse, depth is ours to bound."""

    def __init__(self, text: str, file: str, expand: Callable[[str], str] | None) -> None:
        self._text = text
        self._file = file
        self._expand = expand
        self._anchors: dict[str, _Node | None] = {}
        self._problems: list[Diagnostic] = []
        self._nodes = 0
        self._last: Position = (1, 1)

    def document(self) -> Document:
        try:
            root = self._compose()
        except yaml.reader.ReaderError as error:
            before = self._text[: error.position]
            at = (before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
            raise self._fatal(at, f"character {chr(error.character)!a} is not allowed in YAML") from None
        except yaml.MarkedYAMLError as error:
            what = ", ".join(part for part in (error.context, error.problem) if part)
            what += ": indent with blanks" if error.problem == _TAB else ""
            at = _position(error.problem_mark or error.context_mark)
            raise self._fatal(at, f"not valid YAML: {what}") from None
        except (ValueError, OverflowError) as error:  # PyYAML lets those of int() and chr() through
            raise self._fatal(self._last, f"not valid YAML: {error}") from None
        if self._problems:
            raise ProblemsError(self._problems)
        return Document(self._file, root)

    def _fatal(self, at: Position, message: str) -> ProblemsError:
        return ProblemsError([*self._problems, Diagnostic(self._file, *at, "error", message)])

    def _problem(self, at: Position, message: str) -> None:
        self._problems.append(Diagnostic(self._file, *at, "error", message))

    def _compose(self) -> _Node:
        events = self._events()
        root = _Node(None, (1, 1))
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._fatal(_position(event.start_mark), "a second document: only one is read")
                root = self._node(next(events), events, 1)
        return root

    def _events(self) -> Iterator[yaml.Event]:
        for event in yaml.parse(self._text, Loader=yaml.SafeLoader):
            self._last = _position(event.start_mark)
            yield event

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> _Node:
        at = _position(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            target = self._anchors.get(event.anchor or "")
            if target is None:
                what = "contains itself" if event.anchor in self._anchors else "is not defined before"
                raise self._fatal(at, f"alias `*{event.anchor}` {what}")
            return target
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise self._fatal(at, f"more than {MAX_NODES} values")
        if depth > MAX_DEPTH:
            raise self._fatal(at, f"nested deeper than {MAX_DEPTH} levels")
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            self._anchors[anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event, at)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._refuse_tag(event.tag, at)
            node = self._sequence(events, at, depth)
        else:
            assert isinstance(event, yaml.MappingStartEvent)
            self._refuse_tag(event.tag, at)
            node = self._mapping(events, at, depth)
        if node.size > MAX_NODES:
            raise self._fatal(at, f"aliases expand to more than {MAX_NODES} values")
        if node.depth > MAX_DEPTH:
            raise self._fatal(at, f"aliases nest deeper than {MAX_DEPTH} levels")
        if anchor is not None:
            self._anchors[anchor] = node
        return node

    def _sequence(self, events: Iterator[yaml.Event], at: Position, depth: int) -> _Node:
        node = _Node([], at)
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            child = self._node(event, events, depth + 1)
            self._add(node, len(node.value), child)
            node.value.append(child.value)
        return node

    def _mapping(self, events: Iterator[yaml.Event], at: Position, depth: int) -> _Node:
        node = _Node({}, at)
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key_at = _position(event.start_mark)
            if not isinstance(event, yaml.ScalarEvent):
                raise self._fatal(key_at, "a key must be a plain name")
            key = self._characters(event.value, key_at)
            child = self._node(next(events), events, depth + 1)
            if key in node.value:
                first = node.keys[key][0]
                self._problem(key_at, f"duplicate key `{key}`: it is already given on line {first}")
                continue
            if key == "<<" and event.style is None:
                self._problem(key_at, "merge keys (`<<`) are not read: write the keys out")
            node.keys[key] = key_at
            self._add(node, key, child)
            node.value[key] = child.value
        return node

    @staticmethod
    def _add(node: _Node, step: str | int, child: _Node) -> None:
        node.members[step] = child
        node.size += child.size
        node.depth = max(node.depth, child.depth + 1)

    def _refuse_tag(self, tag: str | None, at: Position) -> None:
        if tag is not None and tag != "!":
            spelt = f"!!{tag.removeprefix(_CORE_TAG)}" if tag.startswith(_CORE_TAG) else tag
            self._problem(at, f"tags are not read: remove `{spelt}`")

    def _characters(self, text: str, at: Position) -> str:
        """A text in which escapes are characters: two that stand for one, as JSON has them, are made one."""
        if _UNFIT.search(text) is None:
            return text
        try:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._problem(at, "half a surrogate pair is no character: write the character itself")
            return ""
        if "\0" in text:
            self._problem(at, "a text cannot have the character `\\0`: remove it")
        return text

    def _scalar(self, event: yaml.ScalarEvent, at: Position) -> _Node:
        text = self._characters(event.value, at)
        plain = event.style is None and event.tag is None
        if event.tag != _STR_TAG:
            self._refuse_tag(event.tag, at)
        try:
            if self._expand is not None:
                text = self._expand(text)
            return _Node(_resolve(text) if plain else text, at)
        except ValueError as error:
            self._problem(at, str(error))
            return _Node(None, at)


def _resolve(text: str) -> str | int | float | bool | None:
    """The value of a plain scalar by YAML 1.2's core schema; ValueError where a number is not finite."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if _INT.fullmatch(text) or _OCTAL_OR_HEX.fullmatch(text):
        if len(text) > 20:
            raise ValueError("the number is too large")
        return int(text, 0) if _OCTAL_OR_HEX.fullmatch(text) else int(text)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise ValueError("the number is too large")
        return number
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"`{text}` is not a finite number; quote it if it is meant as text")
    return text


def convert(
    document: Document,
    type_: Any,
    *,
    path: Path = (),
    dec_hook: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """The document, or its part at `path`, as an instance of a msgspec struct (or other type).

    Strict: no string is taken for a number. Raises ProblemsError with every problem found, each where it
    stands; names that a struct does not have (`forbid_unknown_fields`) come with the nearest one it has.
    """
    value = document.value
    for step in path:
        value = value[step]
    try:
        return msgspec.convert(value, type_, strict=True, dec_hook=dec_hook)
    except msgspec.ValidationError:
        raise ProblemsError(_Finder(document, dec_hook).problems(type_, value, path)) from None


class _Finder:
    """Goes down a value beside its type, to find each of its problems: msgspec stops at the first."""

    def __init__(self, document: Document, dec_hook: Callable[[Any, Any], Any] | None) -> None:
        self._document = document
        self._dec_hook = dec_hook

    def problems(self, type_: Any, value: Any, path: Path) -> list[Diagnostic]:
        found = list(self._inside(_only(type_), value, path))
        if found:
            return found
        try:
            msgspec.convert(value, type_, strict=True, dec_hook=self._dec_hook)
        except msgspec.ValidationError as error:
            match = _WHERE.match(str(error))
            what, below = (match["what"], match["path"] or "") if match else (str(error), "")
            message = _clearer(what, value, _only(type_))
            return [self._document.problem((*path, *_steps(below)), message)]
        return []

    def _inside(self, type_: Any, value: Any, path: Path) -> Iterator[Diagnostic]:
        origin, arguments = get_origin(type_), get_args(type_)
        if isinstance(value, dict) and isinstance(type_, type) and issubclass(type_, msgspec.Struct):
            yield from self._struct(type_, value, path)
        elif isinstance(value, dict) and origin in (dict, Mapping):
            for key, item in value.items():
                yield from self.problems(arguments[1], item, (*path, key))
        elif (
            isinstance(value, list) and arguments and (origin in (list, Sequence) or arguments[1:] == (...,))
        ):
            for index, item in enumerate(value):
                yield from self.problems(arguments[0], item, (*path, index))

    def _struct(self, type_: type[msgspec.Struct], value: dict[str, Any], path: Path) -> Iterator[Diagnostic]:
        fields = {f.encode_name: f for f in msgspec.structs.fields(type_)}
        if type_.__struct_config__.forbid_unknown_fields:
            for key in value.keys() - fields.keys() - {type_.__struct_config__.tag_field}:
                yield self._document.problem((*path, key), unknown("key", key, fields), key=True)
        for name, f in fields.items():
            if name in value:
                yield from self.problems(f.type, value[name], (*path, name))
            elif f.required:
                yield self._document.problem(path, f"the key `{name}` is missing")


def _only(type_: Any) -> Any:
    """The type without annotations and without None, where one type remains."""
    if get_origin(type_) is Annotated:
        return _only(get_args(type_)[0])
    if get_origin(type_) in (Union, UnionType):
        some = [part for part in get_args(type_) if part is not NoneType]
        if len(some) == 1:
            return _only(some[0])
    return type_


def _steps(path: str) -> Path:
    """The steps of msgspec's `.engines[0].gpu`, as far as it names them (`[...]` is any key)."""
    steps: list[str | int] = []
    for name, index, rest in _STEP.findall(path):
        if rest:
            break
        steps.append(int(index) if index else name)
    return tuple(steps)


def _clearer(what: str, value: Any, type_: Any) -> str:
    if what.startswith("Invalid enum value") and isinstance(value, str):
        names = get_args(type_) or [member.value for member in type_]
        return unknown("value", value, [name for name in names if isinstance(name, str)])
    return what[:1].lower() + what[1:]
