"""Conditions as written: tests of signals and fields, joined by `all`, `any` and `not`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from policies import times
from policies.document import Diagnostic, Document, Path, unknown
from policies.expressions import (
    COMPARISONS,
    NAMES,
    PAIRS,
    TESTS,
    AllOf,
    AnyOf,
    ClassName,
    Expression,
    FieldKind,
    FieldTest,
    Not,
    PatternTest,
    SignalTest,
    operand_of,
    text_of,
)
from policies.patterns import PLACES, pattern_signal
from policies.signals import DIALECTS, SIGNALS, Signal
from policies.times import Window

T = TypeVar("T")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class Reader:
    """Reads parts of a document and keeps what is wrong with them in `problems`."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.problems: list[Diagnostic] = []

    def problem(self, path: Path, message: str, *, key: bool = False) -> None:
        self.problems.append(self._document.problem(path, message, key=key))

    def unknown(self, path: Path, kind: str, name: object, known: Iterable[str]) -> None:
        """What stands where one of the `known` names should."""
        if isinstance(name, str):
            self.problem(path, unknown(kind, name, known))
        else:
            self.problem(path, f"expected the name of a {kind}: {', '.join(known)}")

    def known_keys(self, path: Path, mapping: Mapping[str, Any], known: Iterable[str]) -> None:
        known = tuple(known)
        for key in mapping:
            if key not in known:
                self.problem((*path, key), unknown("key", key, known), key=True)


class ConditionReader(Reader):
    """`references` are the names of classes that were met, and where."""

    def __init__(self, document: Document) -> None:
        super().__init__(document)
        self.references: list[tuple[Path, str]] = []

    def expression(self, path: Path, value: Any) -> Expression | None:
        if isinstance(value, str):
            self.references.append((path, value))
            return ClassName(value)
        if not isinstance(value, dict) or not value:
            self.problem(path, f"a condition is the name of a class or a test: {', '.join(TESTS)}")
            return None
        tests = [key for key in value if key in TESTS]
        if len(tests) != 1:
            if tests:
                both = " and ".join(f"`{test}`" for test in tests)
                self.problem(path, f"one test at a time, not {both}: join them with `all` or `any`")
            else:
                key = next(iter(value))
                self.problem((*path, key), unknown("test", key, TESTS), key=True)
            return None
        test = tests[0]
        if test != "signal":
            for key in value:
                if key != test:
                    self.problem((*path, key), f"`{key}` does not belong beside `{test}`", key=True)
        return self._test(test, path, value)

    def _test(self, test: str, path: Path, value: dict[str, Any]) -> Expression | None:
        inner = (*path, test)
        if test == "not":
            part = self.expression(inner, value["not"])
            return None if part is None else Not(part)
        if test == "signal":
            return self._signal(path, value)
        if test == "matches":
            return self._matches(inner, value[test])
        if test == "time":
            return self._time(inner, value[test])
        if test in PAIRS:
            return self._pairs(test, inner, value[test])
        if test in NAMES:
            names = self._values(inner, value[test])
            return None if names is None else self._names(test, inner, value[test], names)
        if not isinstance(value[test], list) or not value[test]:
            self.problem(inner, f"`{test}` is a list of at least one condition")
            return None
        read = [self.expression((*inner, index), item) for index, item in enumerate(value[test])]
        parts = tuple(part for part in read if part is not None)
        if len(parts) != len(read):
            return None
        return AllOf(parts) if test == "all" else AnyOf(parts)

    def _names(self, test: str, path: Path, value: Any, names: frozenset[str]) -> Expression | None:
        if test == "dialect":
            each = value if isinstance(value, list) else [value]
            for index, name in enumerate(each):
                if name not in DIALECTS:
                    at = (*path, index) if isinstance(value, list) else path
                    self.unknown(at, "dialect", name, DIALECTS)
        return FieldTest(test, "", names)  # type: ignore[arg-type]  # NAMES is part of FieldKind

    def _pairs(self, test: str, path: Path, value: Any) -> Expression | None:
        kind: FieldKind = "header" if test == "header" else "metadata"
        if isinstance(value, str):
            if kind == "header" and not self._is_header(path, value):
                return None
            return FieldTest(kind, value.lower() if kind == "header" else value, None)
        if not isinstance(value, dict) or not value:
            self.problem(path, f"`{test}` is a name, or a mapping from names to values")
            return None
        parts: list[Expression] = []
        for key, item in value.items():
            if kind == "header" and not self._is_header((*path, key), key):
                continue
            values = self._values((*path, key), item)
            if values is not None:
                folded = frozenset(one.casefold() for one in values)
                parts.append(FieldTest(kind, key.lower() if kind == "header" else key, folded))
        if len(parts) != len(value):
            return None
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _is_header(self, path: Path, name: str) -> bool:
        """Whether a header can have this name (a token, RFC 9110)."""
        if _HEADER.fullmatch(name):
            return True
        self.problem(path, f"no header is called `{name}`: write letters, digits and `-`", key=True)
        return False

    def _matches(self, path: Path, value: Any) -> Expression | None:
        if not isinstance(value, dict):
            return self._patterns(path, "user", value)
        self.known_keys(path, value, PLACES)
        read = [self._patterns((*path, place), place, value[place]) for place in PLACES if place in value]
        parts = tuple(part for part in read if part is not None)
        if not value or len(parts) < len(value):
            if not value:
                self.problem(path, "`matches` is a pattern, or a mapping with the keys `user` and `system`")
            return None
        return parts[0] if len(parts) == 1 else AllOf(parts)

    def _patterns(self, path: Path, place: str, value: Any) -> Expression | None:
        """One pattern, or a list of which one must be found."""
        each = value if isinstance(value, list) else [value]
        parts: list[Expression] = []
        for index, pattern in enumerate(each):
            at = (*path, index) if isinstance(value, list) else path
            if not isinstance(pattern, str):
                self.problem(at, "expected a pattern (RE2), or a list of patterns")
                continue
            try:
                pattern_signal(place, pattern)
            except ValueError as error:
                self.problem(at, str(error))
                continue
            parts.append(PatternTest(place, pattern))
        if not each:
            self.problem(path, "the list is empty, so this would never hold")
        if not parts or len(parts) < len(each):
            return None
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def _time(self, path: Path, value: Any) -> Expression | None:
        keys = ("from", "to", "days", "zone")
        if not isinstance(value, dict) or not value:
            self.problem(path, "write `time: {from: 08:00, to: 18:00, days: mon-fri, zone: Europe/Berlin}`")
            return None
        before = len(self.problems)
        self.known_keys(path, value, keys)
        begin = self._parsed((*path, "from"), value.get("from", "00:00"), times.clock)
        end = self._parsed((*path, "to"), value.get("to", "24:00"), times.clock)
        days: frozenset[int] = frozenset()
        given = value.get("days", ["mon-sun"])
        for index, item in enumerate(given if isinstance(given, list) else [given]):
            at = (*path, "days", index) if isinstance(given, list) else (*path, "days")
            days |= self._parsed(at, item, times.days) or frozenset()
        zone = value.get("zone", "UTC")
        self._parsed((*path, "zone"), zone, lambda name: times.zone(str(name)))
        if len(self.problems) > before or begin is None or end is None:
            return None
        if not days or begin == end:
            self.problem(path, "the window is empty, so this would never hold")
            return None
        return Window(begin, end, days, zone)

    def _parsed(self, path: Path, value: Any, parse: Callable[[Any], T]) -> T | None:
        try:
            return parse(value)
        except ValueError as error:
            self.problem(path, str(error))
            return None

    def _values(self, path: Path, value: Any) -> frozenset[str] | None:
        """The texts that a field may have: one or a list; true, false and numbers stand for their text."""
        each = value if isinstance(value, list) else [value]
        texts: set[str] = set()
        for index, item in enumerate(each):
            if isinstance(item, str | bool | int | float):
                texts.add(text_of(item))
            else:
                at = (*path, index) if isinstance(value, list) else path
                self.problem(at, "expected a text or a list of texts")
                return None
        if not texts:
            self.problem(path, "the list is empty, so this would never hold")
            return None
        return frozenset(texts)

    def _signal(self, path: Path, value: dict[str, Any]) -> Expression | None:
        name = value["signal"]
        signal = SIGNALS.get(name) if isinstance(name, str) else None
        if signal is None:
            self.unknown((*path, "signal"), "signal", name, SIGNALS)
            return None
        parts: list[Expression] = []
        good = True
        for key, operand in value.items():
            if key == "signal":
                continue
            if key not in COMPARISONS:
                self.problem((*path, key), unknown("comparison", key, COMPARISONS), key=True)
                good = False
                continue
            try:
                parts.append(SignalTest(name, key, operand_of(signal, key, operand)))
            except ValueError as error:
                self.problem((*path, key), str(error))
                good = False
        if not good:
            return None
        if not parts:
            return self._bare(path, signal)
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _bare(self, path: Path, signal: Signal) -> Expression | None:
        if signal.kind == "flag":
            return SignalTest(signal.name, "equals", True)
        if signal.kind == "count":
            return SignalTest(signal.name, "at_least", 1)
        wanted = "`equals` or `in`" if signal.kind == "text" else "`at_least`, `above`, `at_most` or `below`"
        self.problem((*path, "signal"), f"the signal `{signal.name}` needs a comparison: {wanted}")
        return None
