"""Signals that are measured from the text of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from policies.facts import Facts, Turn
from policies.signals.classifier import Scores, score, shipped_model
from policies.signals.features import NAMES, measure
from policies.signals.script import SCRIPTS, script_of
from policies.signals.seen import Seen
from policies.signals.signal import Memo, Signal
from policies.signals.tokens import estimate_prompt

SHORT = 240
"""Characters of a user turn that may be about the turns before it ("faster?", "add a test")."""

CARRIED = 0.75
"""The part of their score that it takes from them."""

_SCORES = ".scores"
_OTHER, _CLOSING = NAMES.index("other"), NAMES.index("closing")


def _measure(text: str) -> tuple[Scores, bool]:
    """The scores of a turn, and whether it says itself that it is about something else, or the end."""
    features = measure(text)
    return score(features, shipped_model()), _OTHER in features.values or _CLOSING in features.values


_SEEN = Seen(_measure)


def _scores(facts: Facts, memo: Memo) -> Scores:
    """The last user turn decides; a short one also takes part of the score of the two turns before it.

    System prompts do not count: they are about what an application may do, not about what is asked now.
    """
    if _SCORES not in memo:
        memo[_SCORES] = _conversation_scores(facts.turns)
    return memo[_SCORES]  # type: ignore[no-any-return]


def _conversation_scores(turns: Sequence[Turn]) -> Scores:
    last = len(turns) - 1
    while last >= 0 and turns[last].role != "user":
        last -= 1
    if last < 0:
        return Scores(0.0, 0.0)
    text = turns[last].text
    found, apart = _SEEN(text)
    if last == 0 or len(text) > SHORT or apart:
        return found
    before = [turn.text for turn in turns[:last] if turn.role in ("user", "assistant")][-2:]
    earlier = [_SEEN(one)[0] for one in before if one]
    return Scores(
        max((found.code, *(CARRIED * one.code for one in earlier))),
        max((found.math, *(CARRIED * one.math for one in earlier))),
    )


def _code(facts: Facts, memo: Memo) -> float:
    return _scores(facts, memo).code


def _math(facts: Facts, memo: Memo) -> float:
    return _scores(facts, memo).math


def _prompt_tokens(facts: Facts, _memo: Memo) -> int:
    return estimate_prompt([turn.text for turn in facts.turns])


def _script(facts: Facts, _memo: Memo) -> str:
    return script_of(facts.last_user_text())


CONTENT_SIGNALS = (
    Signal("code", "score", "how far the last user turn asks for code or shows it", _code, reads_text=True),
    Signal("math", "score", "how far the last user turn asks for maths", _math, reads_text=True),
    Signal(
        "prompt_tokens", "count", "tokens of the whole prompt, estimated", _prompt_tokens, reads_text=True
    ),
    Signal("script", "text", "the script that most of the last user turn is in", _script, True, SCRIPTS),
)
