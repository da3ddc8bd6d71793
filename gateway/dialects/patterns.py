"""Regular expressions that an engine would be asked to compile into a grammar.

Refused are those that do not compile, those whose counted repetitions multiply to more than a bound, those
that repeat a repetition (`(a+)+`), and groups nested too deeply. What takes engines down this way: CVE-2025-
48943 (a pattern that does not compile), CVE-2026-25048 (nested groups).
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from threading import Lock

_QUIETLY = Lock()
_TOKEN = re.compile(
    r"(?P<plain>[^\\\[(){*+?|]+)"
    r"|(?P<flags>\(\?[a-zA-Z]+\))"
    r"|(?P<open>\((?:\?(?:P?<[^=!>][^>]{0,64}>|<[=!]|[a-zA-Z-]*:|[=!>]))?)"
    r"|(?P<close>\))"
    r"|(?:\{(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\}|[*+?])[?+]?(?P<times>)"
    r"|(?P<either>\|)"
    r"|(?P<atom>\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.)",
    re.DOTALL,
)
# What JSON Schema's dialect (ECMA 262) spells otherwise than Python's.
_ECMA = re.compile(
    r"(?P<one>\\[pP]\{[^}]{0,64}\}|\\u\{[^}]{0,8}\}|\\c[A-Za-z])|\\k<(?P<back>\w{1,64})>|\(\?<(?P<name>\w{1,64})>"
    # A hyphen beside a class of characters is itself, no range.
    r"|(?P<before>-)(?=\\[dDsSwW])|(?P<after>\\[dDsSwW])-(?!\])|\\.",
    re.DOTALL,
)


@dataclass(slots=True)
class _Group:
    """`size` is what it expands to; `last` the size of its last part; `loops`: that part is a repetition
    alone; `parts`: of the alternative that is read; `looped`: an alternative is a repetition and no more."""

    size: int = 0
    last: int = 0
    loops: bool = False
    parts: int = 0
    looped: bool = False

    def add(self, size: int, loops: bool) -> None:
        self.size += size
        self.last = size
        self.loops = loops
        self.parts += 1

    def end_alternative(self) -> None:
        self.looped = self.looped or (self.parts == 1 and self.loops)
        self.parts = 0


def problem(pattern: str, most: int, depth: int) -> str | None:
    """What is wrong with a pattern, as the end of a sentence; None where nothing is.

    `most` bounds the characters that it has with its counted repetitions written out, `depth` its groups.
    """
    if len(pattern) > most:
        return f"is {len(pattern)} characters long, at most {most} (bounds.pattern)"
    if "\0" in pattern:
        return "holds a NUL character"
    if _opened(pattern) > depth:
        return f"nests groups deeper than {depth} levels (bounds.depth)"
    pattern = _ECMA.sub(_python, pattern)
    try:
        # What is ignored is the whole process's, and large bodies are read in another thread.
        with _QUIETLY, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as exc:
        return f"is no regular expression: {exc}"
    return _expansion(pattern, most)


def _opened(pattern: str) -> int:
    """How deep groups nest at most: brackets in classes and escapes are counted as if they were groups."""
    level = deepest = 0
    for character in pattern:
        if character == "(":
            level += 1
            deepest = max(deepest, level)
        elif character == ")":
            level -= 1
    return deepest


def _expansion(pattern: str, most: int) -> str | None:
    """What repeats too much in a pattern that compiles."""
    groups = [_Group()]
    for token in _TOKEN.finditer(pattern):
        here, kind = groups[-1], token.lastgroup
        if kind == "plain":
            here.size += len(token[0]) - 1
            here.parts += len(token[0]) - 1
            here.add(1, False)
        elif kind == "atom":
            here.add(1, False)
        elif kind == "open":
            groups.append(_Group())
        elif kind == "close" and len(groups) > 1:
            here.end_alternative()
            groups.pop()
            groups[-1].add(max(1, here.size), here.looped)
        elif kind == "either":
            here.end_alternative()
        elif kind == "times":
            least = int((token["least"] or "0")[:9])
            endless = token["least"] is None and token[0][0] in "*+"
            endless = endless or bool(token["comma"] and not token["most"])
            if endless and here.loops:
                return f"repeats a repetition (`{pattern[: token.end()][-40:]}`)"
            times = max(1, least, int((token["most"] or "0")[:9]))
            here.size += here.last * (times - 1)
            here.last *= times
            here.loops = here.loops or endless
        if here.size > most:
            return f"repeats to more than {most} characters (bounds.pattern)"
    return f"repeats to more than {most} characters (bounds.pattern)" if groups[0].size > most else None


def _python(match: re.Match[str]) -> str:
    text = match[0]
    if match["name"] is not None:
        return f"(?P<{match['name']}>"
    if match["back"] is not None:
        return f"(?P={match['back']})"
    if match["after"] is not None:
        return match["after"] + r"\-"
    if match["before"] is not None:
        return r"\-"
    return r"\w" if match["one"] is not None else text
