"""Signals that are measured from the text of a conversation."""

from __future__ import annotations

from policies.facts import Facts
from policies.signals.classifier import Scores, score, shipped_model
from policies.signals.features import NAMES, excerpt, measure
from policies.signals.prompt import PROMPT_SIGNAL
from policies.signals.script import SCRIPTS, script_of
from policies.signals.seen import Seen
from policies.signals.signal import Memo, Signal

SHORT = 240
"""Characters of a user turn that may be about the turns before it ("faster?", "add a test")."""

CARRIED = 0.75
"""The part of their score that it takes from them."""

UNREAD = "unread"
_SCORES = ".scores"
_OTHER, _CLOSING = NAMES.index("other"), NAMES.index("closing")


def _measure(text: str) -> tuple[Scores, bool]:
    """The scores of an excerpt, and whether it says itself that it is about something else, or the end."""
    features = measure(text)
    return score(features, shipped_model()), _OTHER in features.values or _CLOSING in features.values


_SEEN = Seen(_measure)


def _scores(facts: Facts, memo: Memo) -> Scores:
    """The last user turn decides; a short one also takes part of the score of the two turns before it.

    System prompts do not count: they are about what an application may do, not about what is asked now. What
    was not read of the last user turn is left in `memo` for the decision to report.
    """
    scores: Scores | None = memo.get(_SCORES)
    if scores is None:
        scores = memo[_SCORES] = _conversation_scores(facts, memo)
    return scores


def _conversation_scores(facts: Facts, memo: Memo) -> Scores:
    turns = facts.turns
    last = len(turns) - 1
    while last >= 0 and turns[last].role != "user":
        last -= 1
    if last < 0:
        return Scores(0.0, 0.0)
    text = turns[last].text
    read = excerpt(text)
    if read is not text:
        memo[UNREAD] = _left_out(text, read)
    found, apart = _SEEN(read)
    if last == 0 or len(text) > SHORT or apart:
        return found
    before = [turn.text for turn in turns[:last] if turn.role in ("user", "assistant")][-2:]
    earlier = [_SEEN(excerpt(one))[0] for one in before if one]
    return Scores(
        max((found.code, *(CARRIED * one.code for one in earlier))),
        max((found.math, *(CARRIED * one.math for one in earlier))),
    )


def _left_out(text: str, read: str) -> int:
    """Characters of a text that are not in its excerpt, which has a line break of its own."""
    return 0 if read is text else len(text) - (len(read) - 1)


def _code(facts: Facts, memo: Memo) -> float:
    return _scores(facts, memo).code


def _math(facts: Facts, memo: Memo) -> float:
    return _scores(facts, memo).math


def _unread(facts: Facts, _memo: Memo) -> int:
    text = facts.last_user_text()
    return _left_out(text, excerpt(text))


def _script(facts: Facts, _memo: Memo) -> str:
    return script_of(facts.last_user_text())


CONTENT_SIGNALS = (
    Signal("code", "score", "how far the last user turn asks for code or shows it", _code, reads_text=True),
    Signal("math", "score", "how far the last user turn asks for maths", _math, reads_text=True),
    PROMPT_SIGNAL,
    Signal(
        UNREAD,
        "count",
        "characters in the middle of the last user turn that `code` and `math` did not read",
        _unread,
        reads_text=True,
    ),
    Signal("script", "text", "the script that most of the last user turn is in", _script, True, SCRIPTS),
)
