"""RE2 patterns over the last user turn or the system prompt: time linear in the text, whatever the pattern.

RE2's engine is imported where a policy has a pattern, and only there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from policies.facts import Facts
from policies.signals import Memo, Signal

PLACES: Mapping[str, str] = {"user": "the last user turn", "system": "the system prompt"}
MAX_PATTERN = 1000
MAX_PROGRAM = 3000
"""Instructions of a compiled pattern: where RE2 cannot keep its states, a character takes up to that many."""
MAX_MEMORY = 8 << 20
READ = 16_000
"""Characters of a text that are searched at its head, and again at its tail: a long one holds nobody up. No
match reaches over the gap."""

_GAP = "\n\0\n"


def pattern_signal(place: str, pattern: str) -> Signal:
    """Whether a pattern is found in a place, as a flag. Raises ValueError where it is no pattern of RE2's."""
    found = _search(pattern)

    def user(facts: Facts, _memo: Memo) -> bool:
        return found(facts.last_user_text())

    def system(facts: Facts, _memo: Memo) -> bool:
        return found(facts.system_text())

    return Signal(
        f"matches {place}: {pattern}",
        "flag",
        f"whether {PLACES[place]} matches",
        user if place == "user" else system,
        reads_text=True,
    )


def _search(pattern: str) -> Callable[[str], bool]:
    if not 0 < len(pattern) <= MAX_PATTERN:
        raise ValueError(f"a pattern has 1 to {MAX_PATTERN} characters")
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_MEMORY
    try:
        # As bytes: with text, the engine would translate the place of every match into characters.
        compiled = re2.compile(pattern.encode("utf-8", "surrogatepass"), options)
    except re2.error as error:
        raise ValueError(f"not a pattern of RE2: {_shown(error)}") from None
    if compiled.programsize > MAX_PROGRAM:
        raise ValueError("too large for RE2 to search every request: lower counted repetitions as `{0,300}`")
    search = compiled.search

    def found(text: str) -> bool:
        if len(text) > 2 * READ:
            # One text, so that `^` and `$` hold at its own ends only.
            text = f"{text[:READ]}{_GAP}{text[-READ:]}"
        return search(text.encode("utf-8", "replace")) is not None

    return found


def _shown(error: Exception) -> str:
    said = error.args[0] if error.args else error
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
