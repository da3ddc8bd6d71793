"""Regular expressions that an engine would be asked to compile into a grammar.

Refused are those that do not compile, those whose counted repetitions multiply to more than a bound, those
that repeat a repetition (`(a+)+`), and groups nested too deeply. What takes engines down this way: CVE-2025-
48943 (a pattern that does not compile), CVE-2026-25048 (nested groups).
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

_TOKEN = re.compile(
    r"(?P<flags>\(\?[a-zA-Z]+\))"
    r"|(?P<open>\((?:\?(?:P?<[^=!][^>]*>|<[=!]|[a-zA-Z-]*:|[=!>]))?)"
    r"|(?P<close>\))"
    r"|(?P<times>\{(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\}|[*+?])[?+]?"
    r"|(?P<either>\|)"
    r"|(?P<atom>\\(?:[pP]\{[^}]*\}|u\{[^}]*\}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]|.)",
    re.DOTALL,
)
# What JSON Schema's dialect (ECMA 262) spells otherwise than Python's.
_ECMA = re.compile(
    r"\\[pP]\{[^}]*\}|\\u\{[^}]*\}|\\c[A-Za-z]|\\k<(?P<back>\w+)>|\(\?<(?P<name>\w+)>|\\.", re.DOTALL
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
    return _expansion(pattern, most, depth) or _uncompilable(pattern)


def _expansion(pattern: str, most: int, depth: int) -> str | None:
    groups = [_Group()]
    for token in _TOKEN.finditer(pattern):
        here = groups[-1]
        if token["open"] is not None:
            groups.append(_Group())
            if len(groups) > depth:
                return f"nests groups deeper than {depth} levels (bounds.depth)"
        elif token["close"] is not None:
            if len(groups) > 1:
                here.end_alternative()
                groups.pop()
                groups[-1].add(max(1, here.size), here.looped)
        elif token["either"] is not None:
            here.end_alternative()
        elif token["times"] is not None:
            least = int((token["least"] or "0")[:9])
            endless = token["times"] in "*+" or bool(token["comma"] and not token["most"])
            if endless and here.loops:
                return f"repeats a repetition (`{pattern[: token.end()][-40:]}`)"
            times = max(1, least, int((token["most"] or "0")[:9]))
            here.size += here.last * (times - 1)
            here.last *= times
            here.loops = here.loops or endless
            if here.size > most:
                return f"repeats to more than {most} characters (bounds.pattern)"
        elif token["atom"] is not None:
            here.add(1, False)
    return None


def _uncompilable(pattern: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(_ECMA.sub(_python, pattern))
    except (re.error, RecursionError, OverflowError) as exc:
        return f"is no regular expression: {exc}"
    return None


def _python(match: re.Match[str]) -> str:
    text = match[0]
    if match["name"] is not None:
        return f"(?P<{match['name']}>"
    if match["back"] is not None:
        return f"(?P={match['back']})"
    return r"\w" if text[:3] in (r"\p{", r"\P{", r"\u{") or text[:2] == r"\c" else text
