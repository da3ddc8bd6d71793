"""JSON schemas, patterns and grammars that an engine would compile, checked before it is asked.

What takes engines down this way: CVE-2025-48942, -48943 and -48944 (a schema, a pattern or a `type` that is
none), CVE-2025-57809 and -58446 and CVE-2026-25048 (grammars that recurse or nest without end), and `$ref`
with an address, which a validator would fetch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from threading import Lock
from typing import Any
from urllib.parse import unquote

import msgspec

from gateway.config import Bounds
from gateway.dialects import patterns
from gateway.dialects.scan import too_deep
from gateway.errors import InvalidRequest

TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
ONES = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
HOLDING = frozenset({*MAPS, *LISTS, *ONES})
DEFINED = ("$defs", "definitions")
APPLIED = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else"})
"""Keywords whose schemas hold for the same value: a `$ref` that comes back through them alone never ends."""
REFS = ("$ref", "$dynamicRef", "$recursiveRef")
LEAST = ("minItems", "minLength", "minProperties", "minContains")
_KEPT = 1024
# Texts and classes of a grammar, also where they do not end: none is looked at again from its middle.
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"?|\[(?:\\.|[^\]\\\n])*\]?')
_BRACKETS = re.compile(r"[^()\[\]{}]+")
_RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
_HEAD = re.compile(r"(?:\A|\|)[\s(]*([A-Za-z_][\w-]*)")

Path = tuple[str | int, ...]


def shown(path: Path) -> str:
    """`tools[0].function.parameters`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in path).lstrip(".")


class Checked:
    """What was found harmless: a conversation sends the same tools with every turn.

    Holds hashes, never texts. Python's hash of bytes is SipHash with a key of each process's own, so that
    nobody outside can make a body whose hash is another's.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], None] = {}
        # Large bodies are read in a thread of their own.
        self._lock = Lock()

    def once(self, how: str, raw: bytes, check: Callable[[], None]) -> None:
        """Call `check`, unless it found nothing in the same bytes, `how` being the same."""
        key = (how, hash(raw))
        if key in self._seen:
            return
        check()
        with self._lock:
            if len(self._seen) >= _KEPT:
                self._seen.pop(next(iter(self._seen)))
            self._seen[key] = None


class Checker:
    """Checks what one field of a request holds. All methods raise InvalidRequest with `param` the field."""

    def __init__(self, field: str, bounds: Bounds) -> None:
        self._field = field
        self._bounds = bounds
        self._patterns = 0

    def refuse(self, path: Path, message: str) -> InvalidRequest:
        return InvalidRequest(f"{shown((self._field, *path))} {message}", param=self._field)

    # texts

    def pattern(self, value: object, path: Path) -> None:
        if not isinstance(value, str):
            raise self.refuse(path, "must be a regular expression in a string")
        self._patterns += len(value)
        if self._patterns > self._bounds.pattern:
            message = f"and the patterns before it are longer than {self._bounds.pattern} characters"
            raise self.refuse(path, f"{message} (bounds.pattern)")
        found = patterns.problem(value, self._bounds.pattern, self._bounds.depth)
        if found is not None:
            raise self.refuse(path, found)

    def grammar(self, value: object, path: Path) -> None:
        """A grammar in EBNF, GBNF or Lark: its nesting is bounded, and where a rule of the first two would
        have a compiler descend without end, it is refused. Lark's readers take rules that begin so."""
        if not isinstance(value, str):
            raise self.refuse(path, "must be a grammar in a string")
        if "\0" in value:
            raise self.refuse(path, "holds a NUL character")
        kept = _BRACKETS.sub("", _QUOTED.sub("", value))
        level = 0
        for character in kept:
            level += 1 if character in "([{" else -1
            if level > self._bounds.depth:
                raise self.refuse(path, f"nests deeper than {self._bounds.depth} levels (bounds.depth)")
        self._no_left_recursion(value, path)

    def _no_left_recursion(self, grammar: str, path: Path) -> None:
        first: dict[str, set[str]] = {}
        rules = _RULE.split(grammar)
        for name, body in zip(rules[1::2], rules[2::2], strict=True):
            heads = _HEAD.findall(_QUOTED.sub('""', body))
            first.setdefault(name, set()).update(heads)
        try:
            TopologicalSorter(first).prepare()
        except CycleError as exc:
            raise self.refuse(path, f"has a rule that begins with itself: {exc.args[1][0]}") from None

    def json(self, value: object, path: Path) -> Any:
        """What a text of JSON says; other values are what they are."""
        if not isinstance(value, str):
            return value
        try:
            decoded = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            raise self.refuse(path, "must be JSON, nested less deeply") from None
        if too_deep(value.encode(), self._bounds.depth):
            raise self.refuse(path, f"is nested deeper than {self._bounds.depth} levels (bounds.depth)")
        return decoded

    # schemas

    def schema(self, root: object, path: Path, *, compiled: bool = True) -> None:
        """A JSON schema. One that no grammar is made of (`compiled` false: a tool that the model is only
        told of) may refer to what is not there, and to itself.

        Each schema in it is looked at once, however many references lead to it.
        """
        places: dict[int, Path] = {}
        inside: dict[int, list[int]] = {}
        same: dict[int, list[int]] = {}
        referring = False
        waiting: list[tuple[Any, Path]] = [(root, path)]
        while waiting:
            schema, at = waiting.pop()
            if schema is None or isinstance(schema, bool):
                continue
            if not isinstance(schema, dict):
                raise self.refuse(at, "must be a JSON schema, an object")
            here = id(schema)
            if here in places:
                continue
            places[here] = at
            inside[here], same[here] = within, alike = [], []
            self._keywords(schema, at)
            for keyword, inner, below in self._inner(schema, at):
                waiting.append((inner, below))
                if keyword not in DEFINED:
                    within.append(id(inner))
                if keyword in APPLIED:
                    alike.append(id(inner))
            for target in self._targets(schema, root, at, compiled):
                referring = True
                waiting.append((target, at))
                within.append(id(target))
                alike.append(id(target))
        if referring:
            self._ends(same, places, "refers to itself without end")
            if compiled and not self._bounds.recursion:
                self._ends(inside, places, "refers to itself (bounds.recursion)")

    def _ends(self, graph: dict[int, list[int]], places: dict[int, Path], what: str) -> None:
        try:
            TopologicalSorter(
                {one: [o for o in others if o in graph] for one, others in graph.items()}
            ).prepare()
        except CycleError as exc:
            raise self.refuse(places[exc.args[1][0]], what) from None

    def _targets(self, schema: dict[str, Any], root: object, at: Path, compiled: bool) -> Iterator[Any]:
        """What a schema's references lead to."""
        for keyword in REFS:
            ref = schema.get(keyword)
            if ref is None:
                continue
            if not isinstance(ref, str) or not ref.startswith("#"):
                raise self.refuse(at, "has a $ref that leaves it: only those that begin with # are followed")
            there, target = _resolve(root, ref)
            if there:
                yield target
            elif compiled:
                raise self.refuse(at, f"refers to {ref[:64]}, which is not there")

    def _inner(self, schema: dict[str, Any], at: Path) -> Iterator[tuple[str, Any, Path]]:
        """(keyword, schema, place) of each schema right inside another."""
        for keyword in schema.keys() & HOLDING:
            some, below = schema[keyword], (*at, keyword)
            if some is None:
                continue
            if keyword in ONES and not (keyword == "items" and isinstance(some, list)):
                yield keyword, some, below
            elif keyword in MAPS:
                if not isinstance(some, dict):
                    raise self.refuse(below, "must be an object of schemas")
                for name, inner in some.items():
                    yield keyword, inner, (*below, name)
            else:
                if not isinstance(some, list):
                    raise self.refuse(below, "must be a list of schemas")
                for index, inner in enumerate(some):
                    yield keyword, inner, (*below, index)

    def _keywords(self, schema: dict[str, Any], at: Path) -> None:
        if "type" in schema:
            kind = schema["type"]
            kinds = kind if isinstance(kind, list) and kind else [kind]
            if not all(isinstance(one, str) and one in TYPES for one in kinds):
                raise self.refuse((*at, "type"), f"must be one of {', '.join(sorted(TYPES))}")
        if "pattern" in schema:
            self.pattern(schema["pattern"], (*at, "pattern"))
        named = schema.get("patternProperties")
        for pattern in named if isinstance(named, dict) else ():
            self.pattern(pattern, (*at, "patternProperties"))
        for keyword in LEAST:
            value = schema.get(keyword)
            if isinstance(value, int | float) and value > self._bounds.pattern:
                raise self.refuse((*at, keyword), f"must be at most {self._bounds.pattern} (bounds.pattern)")

    # where schemas are found

    def constraints(self, value: Any, path: Path = ()) -> None:
        """Whatever in `value` is made into a grammar, wherever it stands: OpenAI's formats, vLLM's structured
        outputs and structural tags."""
        value = self.json(value, path) if path and path[-1] == "structural_tag" else value
        if isinstance(value, list):
            for index, inner in enumerate(value):
                self.constraints(inner, (*path, index))
        if not isinstance(value, dict):
            return
        for name, inner in value.items():
            here = (*path, name)
            if inner is None:
                continue
            if name == "json_schema" and isinstance(inner, dict) and "schema" in inner:
                self.schema(self.json(inner["schema"], (*here, "schema")), (*here, "schema"))
            elif name in ("schema", "json_schema", "json"):
                self.schema(self.json(inner, here), here)
            elif name in ("regex", "pattern", "whitespace_pattern"):
                self.pattern(inner, here)
            elif name == "grammar" and not (isinstance(inner, dict) and "definition" in inner):
                self.grammar(inner, here)
            elif name == "definition" and "syntax" in value:
                # Of a custom tool of OpenAI's.
                (self.pattern if value.get("syntax") == "regex" else self.grammar)(inner, here)
            elif isinstance(inner, dict | list) or name == "structural_tag":
                self.constraints(inner, here)

    def tools(self, tools: Any, *, forced: bool) -> None:
        """The parameters of each tool, in any dialect's shape; `forced`: the model must call one."""
        for index, tool in enumerate(tools if isinstance(tools, list) else ()):
            if not isinstance(tool, dict):
                raise self.refuse((index,), "must be an object")
            if tool.get("type") == "mcp" or "server_url" in tool:
                raise self.refuse((index,), "is not accepted: engines call no server that clients name")
            inner = tool.get("function")
            wrapped = isinstance(inner, dict)
            made: dict[str, Any] = inner if isinstance(inner, dict) else tool
            path: Path = (index, "function") if wrapped else (index,)
            compiled = forced or made.get("strict") is True
            for name in ("parameters", "input_schema"):
                if name in made:
                    self._size(made[name], (*path, name))
                    self.schema(made[name], (*path, name), compiled=compiled)
            for name in ("format", "custom"):
                self.constraints(made.get(name), (*path, name))

    def _size(self, value: object, path: Path) -> None:
        size = len(msgspec.json.encode(value))
        if size > self._bounds.schema:
            raise self.refuse(path, f"is {size} bytes, at most {self._bounds.schema} (bounds.schema)")


def _resolve(root: Any, ref: str) -> tuple[bool, Any]:
    """(whether it is there, what is there) of a JSON pointer (RFC 6901) in a fragment."""
    target = root
    pointer = unquote(ref[1:])
    if not pointer:
        return True, root
    if not pointer.startswith("/"):
        return False, None
    for step in pointer[1:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isascii() and name.isdigit() and int(name) < len(target):
            target = target[int(name)]
        else:
            return False, None
    return True, target
