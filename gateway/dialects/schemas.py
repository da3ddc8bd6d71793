"""JSON schemas, patterns and grammars that an engine would compile, checked before it is asked.

What takes engines down this way: CVE-2025-48942, -48943 and -48944 (a schema, a pattern or a `type` that is
none), CVE-2025-57809 and -58446 and CVE-2026-25048 (grammars that recurse or nest without end), and `$ref`
with an address, which a validator would fetch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
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
APPLIED = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else"})
"""Keywords whose schemas hold for the same value: a `$ref` that comes back through them alone never ends."""
REFS = ("$ref", "$dynamicRef", "$recursiveRef")
LEAST = ("minItems", "minLength", "minProperties", "minContains")
_KEPT = 1024

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

    def once(self, how: str, raw: bytes, check: Callable[[], None]) -> None:
        """Call `check`, unless it found nothing in the same bytes, `how` being the same."""
        key = (how, hash(raw))
        if key in self._seen:
            return
        check()
        if len(self._seen) >= _KEPT:
            self._seen.pop(next(iter(self._seen)))
        self._seen[key] = None


class Checker:
    """Checks what one field of a request holds. All methods raise InvalidRequest with `param` the field."""

    def __init__(self, field: str, bounds: Bounds) -> None:
        self._field = field
        self._bounds = bounds

    def refuse(self, path: Path, message: str) -> InvalidRequest:
        return InvalidRequest(f"{shown((self._field, *path))} {message}", param=self._field)

    # texts

    def pattern(self, value: object, path: Path) -> None:
        if not isinstance(value, str):
            raise self.refuse(path, "must be a regular expression in a string")
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
        kept = re.sub(r"[^()\[\]{}]", "", re.sub(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]', "", value))
        level = 0
        for character in kept:
            level += 1 if character in "([{" else -1
            if level > self._bounds.depth:
                raise self.refuse(path, f"nests deeper than {self._bounds.depth} levels (bounds.depth)")
        self._no_left_recursion(value, path)

    def _no_left_recursion(self, grammar: str, path: Path) -> None:
        first: dict[str, set[str]] = {}
        rules = re.split(r"^[ \t]*([\w-]+)[ \t]*::=", grammar, flags=re.MULTILINE)
        for name, body in zip(rules[1::2], rules[2::2], strict=True):
            heads = re.findall(r"(?:\A|\|)[\s(]*([A-Za-z_][\w-]*)", re.sub(r'"(?:\\.|[^"\\])*"', '""', body))
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
        told of) may refer to what is not there, and to itself."""
        if isinstance(root, bool) or root is None:
            return
        if not isinstance(root, dict):
            raise self.refuse(path, "must be a JSON schema, an object")
        graph: dict[str, set[str]] = {}
        applied: dict[str, set[str]] = {}
        waiting: list[tuple[str, Any, Path]] = [("#", root, path)]
        while waiting:
            name, schema, at = waiting.pop()
            if name in graph:
                continue
            graph[name] = {self._local(ref, at) for ref in self._walk(schema, at)}
            applied[name] = graph[name] & set(_same_value(schema))
            for ref in graph[name]:
                there, target = _resolve(root, ref)
                if there:
                    waiting.append((ref, target, (*path, ref)))
                elif compiled:
                    raise self.refuse(at, f"refers to {ref[:64]}, which is not there")
        self._definitions(root, path, graph)
        self._ends(applied, path, "refers to itself without end")
        if compiled and not self._bounds.recursion:
            self._ends(graph, path, "refers to itself (bounds.recursion)")

    def _definitions(self, root: dict[str, Any], path: Path, graph: dict[str, set[str]]) -> None:
        """Those that nothing refers to are read by engines too."""
        for keyword in ("$defs", "definitions"):
            some = root.get(keyword)
            for name, schema in some.items() if isinstance(some, dict) else ():
                if f"#/{keyword}/{name}" not in graph:
                    for ref in self._walk(schema, (*path, keyword, name)):
                        self._local(ref, path)

    def _local(self, ref: object, path: Path) -> str:
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise self.refuse(path, "has a $ref that leaves it: only those that begin with # are followed")
        return ref

    def _ends(self, graph: dict[str, set[str]], path: Path, what: str) -> None:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as exc:
            raise self.refuse(
                path, f"{what}: {' -> '.join(str(ref)[:64] for ref in exc.args[1][:4])}"
            ) from None

    def _walk(self, root: Any, path: Path) -> Iterator[object]:
        """Check each schema in `root`, not in what it only defines; gives every reference."""
        waiting: list[tuple[Any, Path]] = [(root, path)]
        while waiting:
            schema, at = waiting.pop()
            if schema is None or isinstance(schema, bool):
                continue
            if not isinstance(schema, dict):
                raise self.refuse(at, "must be a JSON schema, an object")
            self._keywords(schema, at)
            for keyword in REFS:
                if schema.get(keyword) is not None:
                    yield schema[keyword]
            for keyword in MAPS:
                some = schema.get(keyword)
                if some is None:
                    continue
                if not isinstance(some, dict):
                    raise self.refuse((*at, keyword), "must be an object of schemas")
                if keyword not in ("$defs", "definitions"):
                    waiting.extend((inner, (*at, keyword, name)) for name, inner in some.items())
            for keyword in LISTS:
                some = schema.get(keyword)
                if some is None:
                    continue
                if not isinstance(some, list):
                    raise self.refuse((*at, keyword), "must be a list of schemas")
                waiting.extend((inner, (*at, keyword, index)) for index, inner in enumerate(some))
            for keyword in ONES:
                inner = schema.get(keyword)
                if isinstance(inner, list) and keyword == "items":
                    waiting.extend((one, (*at, keyword, index)) for index, one in enumerate(inner))
                elif inner is not None:
                    waiting.append((inner, (*at, keyword)))

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


def _same_value(root: Any) -> Iterator[str]:
    """References that hold for the very value that `root` holds for."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield from (schema[keyword] for keyword in REFS if isinstance(schema.get(keyword), str))
        for keyword in APPLIED:
            inner = schema.get(keyword)
            waiting.extend(inner if isinstance(inner, list) else [inner])


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
