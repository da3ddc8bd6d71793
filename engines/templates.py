"""Chat templates of a model: where they are, and whether they do more than put messages into text.

A chat template is a program (Jinja) that comes with a model and that the engine runs for every request.
Engines run it in a sandbox; sandboxes have had holes (CVE-2024-56326, CVE-2025-27516), and the known ways
out of one begin with the same few steps, which no honest template takes: names with two underscores,
attributes by computed names, other templates. Those are refused, before an engine starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

DEFAULT = "default"
MAX_TEMPLATE = 1 << 20
"""Bytes; the longest that is shipped with a known model has 40 KB."""
MAX_FACTOR = 10_000
MAX_TURNS = 1_000_000
"""Of loops within loops over ranges."""
_DUNDER = re.compile(r"__\w+?__|^__[a-z]|[a-z]__$")
_WIDE = re.compile(r"%[-#0 +]*\d{5}|\{[^{}]*:[^{}]*\d{5}")
_INTERNAL = frozenset({"mro", "gi_frame", "gi_code", "cr_frame", "cr_code", "f_globals", "f_builtins"})
_OF_JINJA = frozenset({"lipsum", "self"})
_BY_NAME = frozenset({"map", "selectattr", "rejectattr", "groupby", "sort", "unique", "sum", "min", "max"})


class TemplateError(Exception):
    """A chat template that cannot be read."""


def of_folder(folder: Path) -> dict[str, str]:
    """Every chat template of a checkpoint, by name. Raises TemplateError.

    As transformers finds them: `chat_template.jinja` and `additional_chat_templates/*.jinja`, else what
    `tokenizer_config.json` and `chat_template.json` hold. A request may choose among them.
    """
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json", "processor_config.json"):
        found |= _in_json(folder / name)
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = _text(path)
    for path in sorted(folder.glob("*.jinja")):
        found[DEFAULT if path.stem == "chat_template" else path.stem] = _text(path)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path} cannot be read: {error}") from None


def _in_json(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
        given = config.get("chat_template") or {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise TemplateError(f"{path} cannot be read: {error}") from None
    if isinstance(given, str):
        return {DEFAULT: given}
    if isinstance(given, list):
        given = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
    if not isinstance(given, dict) or not all(
        isinstance(part, str) for pair in given.items() for part in pair
    ):
        raise TemplateError(f"{path}: `chat_template` is neither a text nor texts with names")
    return given


def dangers(text: str) -> list[str]:
    """What in a template is refused, each with its line; empty for one that only writes messages."""
    from jinja2 import TemplateSyntaxError

    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE:
        return [f"it is larger than {MAX_TEMPLATE >> 20} MiB"]
    try:
        tree = _parse(text)
        return list(dict.fromkeys((*_walk(tree), *_turns(tree, 1))))
    except TemplateSyntaxError as error:
        return [f"line {error.lineno}: it cannot be read: {error.message}"]
    except RecursionError:
        return ["it is nested too deeply"]


def _parse(text: str) -> nodes.Template:
    """With what transformers gives to templates: loop controls and the tag `generation`."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    extensions = ["jinja2.ext.loopcontrols", Generation]
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions).parse(
        text
    )


def _walk(node: nodes.Node) -> Iterator[str]:
    look = _LOOKS.get(type(node).__name__)
    if look is not None:
        for found in look(node):
            yield f"line {node.lineno}: {found}"
    for child in node.iter_child_nodes():
        yield from _walk(child)


def _attribute(node: Any) -> Iterator[str]:
    yield from _name_of(node.attr)


def _name_of(name: str) -> Iterator[str]:
    if name.startswith("_") or name in _INTERNAL or _DUNDER.search(name):
        yield f"the attribute `{name}`, which leads out of the template"


def _item(node: Any) -> Iterator[str]:
    key, value = node.arg, getattr(node.arg, "value", None)
    if isinstance(value, str):
        yield from _name_of(value)
    elif type(key).__name__ in ("Concat", "Mod") or (type(key).__name__ in ("Add", "Mul") and _of_text(key)):
        # `messages[loop.index0 - 1]` and `names[i]` are usual, a name that is put together is not.
        yield "an item by a name that is put together"
    elif type(key).__name__ in ("Call", "Filter"):
        yield "an item by a name that is reckoned"


def _of_text(node: Any) -> bool:
    return any(isinstance(getattr(side, "value", None), str) for side in (node.left, node.right))


def _constant(node: Any) -> Iterator[str]:
    if isinstance(node.value, str) and (found := _DUNDER.search(node.value)):
        yield f"the text `{found[0]}`, the name of something inside Python"
    if isinstance(node.value, str) and _WIDE.search(node.value):
        yield "a format of great width"


def _sizes(node: Any) -> Iterator[str]:
    """`ljust`, `center`, `indent` and the like make texts as long as they are told."""
    for each in (*(node.args or ()), *(keyword.value for keyword in node.kwargs or ())):
        value = getattr(each, "value", None)
        if isinstance(value, int) and value > MAX_FACTOR:
            yield f"a size of {value:,}"


def _keyword(node: Any) -> Iterator[str]:
    yield from _name_of(node.key)


def _turns(node: Any, times: int) -> Iterator[str]:
    """Loops within loops: each is bounded by the sandbox, what they multiply to is not."""
    if type(node).__name__ == "For" and getattr(getattr(node.iter, "node", None), "name", None) == "range":
        times *= max(
            (n for part in node.iter.args if isinstance(n := getattr(part, "value", 1), int)), default=1
        )
        if times > MAX_TURNS:
            yield f"line {node.lineno}: loops that turn {times:,} times"
            return
    for child in node.iter_child_nodes():
        yield from _turns(child, times)


def _name(node: Any) -> Iterator[str]:
    if node.ctx == "load" and (node.name in _OF_JINJA or node.name.startswith("__")):
        yield f"the name `{node.name}`, from which all of Python can be reached"


def _filter(node: Any) -> Iterator[str]:
    yield from _sizes(node)
    if node.name == "attr":
        if not node.args or not isinstance(getattr(node.args[0], "value", None), str):
            yield "the filter `attr` with a name that is put together"
        else:
            yield from _name_of(node.args[0].value)
    elif node.name in _BY_NAME:
        for keyword in node.kwargs:
            value = getattr(keyword.value, "value", "")
            if keyword.key == "attribute" and isinstance(value, str):
                for part in value.split("."):
                    yield from _name_of(part)


def _other_template(node: Any) -> Iterator[str]:
    yield f"`{type(node).__name__.lower().replace('fromimport', 'from')}` of another template"


def _product(node: Any) -> Iterator[str]:
    for side in (node.left, node.right):
        value = getattr(side, "value", None)
        if isinstance(value, int) and value > MAX_FACTOR:
            yield f"something multiplied by {value:,}"
        if isinstance(value, str) and value.strip("_") == "" != value:
            yield "underscores that are multiplied, as in names of what is inside Python"


def _power(_node: Any) -> Iterator[str]:
    yield "a power, which grows without bounds"


_LOOKS: Mapping[str, Callable[[Any], Iterator[str]]] = {
    "Getattr": _attribute,
    "Getitem": _item,
    "Const": _constant,
    "Name": _name,
    "Filter": _filter,
    "Call": _sizes,
    "Keyword": _keyword,
    "Include": _other_template,
    "Import": _other_template,
    "FromImport": _other_template,
    "Extends": _other_template,
    "Mul": _product,
    "Pow": _power,
}
