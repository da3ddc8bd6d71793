"""A few short questions with known answers: whether an engine that says 200 also says something sensible.

Engines have answered with gibberish and HTTP 200 after a wake-up (vllm#29341), with broken kernels and with
flipped weights. For models that we know, most answers must be right; of any other only what no working model
writes is refused: nothing, control characters, one piece over and over, a salad of scripts. Greedy, so that
an engine answers alike each time; ties still flip, so no exact text is expected.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engines import catalog
from engines.spec import EngineSpec

TOKENS = 12
ENOUGH = 16
"""Characters from which a text is long enough to be called a repetition."""
PERIOD = 4
SCRIPTS = 3
"""Scripts in one answer to an English question."""


@dataclass(frozen=True, slots=True)
class Question:
    """A text to go on with, and what stands near the beginning of a good continuation."""

    prompt: str
    answer: str


QUESTIONS = (
    Question("The capital of France is", "paris"),
    Question("Monday, Tuesday, Wednesday, Thursday,", "friday"),
    Question("1, 2, 3, 4, 5, 6, 7, 8,", "9"),
)

Ask = Callable[[str, int], Awaitable[str | None]]
"""(prompt, tokens at most) -> the greedy continuation; None where the engine completes no texts."""


def known(spec: EngineSpec) -> bool:
    """Whether the model is one of which right answers are expected."""
    return spec.model in (*catalog.names(), catalog.DEMO_EXACT, catalog.DEMO_AWQ)


async def problem(ask: Ask, *, answers: bool) -> str | None:
    """What is wrong with this engine's replies, None where nothing is. `answers`: most must be right."""
    wrong = []
    for question in QUESTIONS:
        text = await ask(question.prompt, TOKENS)
        if text is None:
            return None
        strange = garbage(text)
        if strange is not None:
            return f"to {question.prompt!r} it said {_shown(text)}: {strange}"
        if question.answer not in text.lower():
            wrong.append(f"to {question.prompt!r} it said {_shown(text)}")
    if answers and len(wrong) > len(QUESTIONS) // 2:
        return "; ".join(wrong)
    return None


def garbage(text: str) -> str | None:
    """Why no working model would have written this; None where one may have."""
    if not text.strip():
        return "nothing"
    strange = [
        c for c in text if c == "\ufffd" or (unicodedata.category(c) in ("Cc", "Cn") and c not in "\n\r\t")
    ]
    # One broken character may be the half of one that was cut off.
    if len(strange) > 1:
        return "characters that are none"
    bare = text.strip()
    for period in range(1, PERIOD + 1):
        if len(bare) >= ENOUGH and all(bare[i] == bare[i - period] for i in range(period, len(bare))):
            return "the same over and over"
    if len({_script(c) for c in text if c.isalpha()}) >= SCRIPTS:
        return "a mixture of scripts"
    return None


def _script(letter: str) -> str:
    return unicodedata.name(letter, "?").partition(" ")[0]


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
