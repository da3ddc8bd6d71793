"""How likely a text wants code or calculation: 0..1."""

from __future__ import annotations

import re

_WORDS = re.compile(r"[^\W\d_]+")
_CODE = frozenset(
    [
        "code",
        "coding",
        "script",
        "function",
        "regex",
        "sql",
        "python",
        "javascript",
        "typescript",
        "java",
        "bash",
        "shell",
        "html",
        "css",
        "json",
        "yaml",
        "api",
        "bug",
        "debug",
        "compile",
        "compiler",
        "refactor",
        "unittest",
        "class",
        "method",
        "algorithm",
        "query",
        "database",
        "stacktrace",
        "скрипт",
        "код",
        "функцию",
        "функция",
        "функции",
        "запрос",
        "программу",
        "код",
        "регулярное",
    ]
)
_MATH = frozenset(
    [
        "solve",
        "equation",
        "integral",
        "derivative",
        "prove",
        "theorem",
        "probability",
        "calculate",
        "sum",
        "fraction",
    ]
)


def code_score(text: str) -> float:
    """The likelihood that a text asks for code or shows it."""
    words = {word.lower() for word in _WORDS.findall(text)}
    hits = len(words & _CODE) + 2 * ("```" in text)
    return min(1.0, hits / 4 + 0.25 * (hits > 0))


def math_score(text: str) -> float:
    """The likelihood that a text asks for a calculation, a proof or reasoning over numbers."""
    words = {word.lower() for word in _WORDS.findall(text)}
    return min(1.0, len(words & _MATH) / 3)
