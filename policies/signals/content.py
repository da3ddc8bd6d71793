"""Signals that are measured from the text of a conversation."""

from __future__ import annotations

from policies.facts import Facts
from policies.signals.classifier import code_score, math_score
from policies.signals.script import SCRIPTS, script_of
from policies.signals.signal import Memo, Signal
from policies.signals.tokens import estimate_tokens


def _code(facts: Facts, _memo: Memo) -> float:
    return code_score(facts.last_user_text())


def _math(facts: Facts, _memo: Memo) -> float:
    return math_score(facts.last_user_text())


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
