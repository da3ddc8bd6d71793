"""Signals that are measured from the text of a conversation."""

from __future__ import annotations

from policies.facts import Facts
from policies.signals.classifier import Scores, scores
from policies.signals.script import SCRIPTS, script_of
from policies.signals.signal import Memo, Signal
from policies.signals.tokens import estimate_tokens

SHORT = 240
CARRIED = 0.75
_SCORES = ".scores"


def _scores(facts: Facts, memo: Memo) -> Scores:
    """The last user turn decides; a short one that follows up on code or maths takes most of their score."""
    if _SCORES in memo:
        return memo[_SCORES]  # type: ignore[no-any-return]
    turns = facts.turns
    last = next((i for i in range(len(turns) - 1, -1, -1) if turns[i].role == "user"), None)
    found = Scores(0.0, 0.0) if last is None else scores(turns[last].text)
    memo[_SCORES] = found
    return found


def _code(facts: Facts, memo: Memo) -> float:
    return _scores(facts, memo).code


def _math(facts: Facts, memo: Memo) -> float:
    return _scores(facts, memo).math


def _prompt_tokens(facts: Facts, _memo: Memo) -> int:
    return sum(estimate_tokens(turn.text) for turn in facts.turns)


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
