from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import canary
from engines.spec import EngineSpec

GOOD = {"France": " Paris. It is", "Thursday,": " Friday, Saturday", "8,": " 9, 10"}


def judged(answers: dict[str, str | None], *, right: bool = True) -> str | None:
    async def ask(prompt: str, tokens: int) -> str | None:
        return next(text for end, text in answers.items() if end in prompt)

    return asyncio.run(canary.problem(ask, answers=right))


def test_right_answers_pass() -> None:
    assert judged(GOOD) is None


def test_one_wrong_answer_passes_since_ties_flip() -> None:
    assert judged({**GOOD, "8,": " 10, 12"}) is None


def test_mostly_wrong_answers_do_not() -> None:
    found = judged({"France": " a nice city", "Thursday,": " and so on", "8,": " 9"})
    assert found is not None
    assert "'The capital of France is' it said ' a nice city'" in found


def test_of_an_unknown_model_no_right_answers_are_expected() -> None:
    assert judged({"France": " une ville", "Thursday,": " and so on", "8,": " ten"}, right=False) is None


def test_an_engine_that_completes_no_texts_is_not_judged() -> None:
    assert judged(dict.fromkeys(GOOD)) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "nothing"),
        (" \n\t", "nothing"),
        ("!!!!!!!!!!!!!!!!", "the same over and over"),
        (" the the the the the the", "the same over and over"),
        ("ababababababababab", "the same over and over"),
        ("\x00\x01\x02 ab", "characters that are none"),
        ("a\ufffd\ufffd\ufffd", "characters that are none"),
        ("Paris Привет 東京 and", "a mixture of scripts"),
        ("elseif Ωmega ที่ 한국", "a mixture of scripts"),
    ],
)
def test_garbage_is_told_by_its_looks(text: str, why: str) -> None:
    assert canary.garbage(text) == why
    assert why in (judged({**GOOD, "France": text}, right=False) or "")


@pytest.mark.parametrize(
    "text",
    [
        " Paris, and Paris is the capital of France",
        " 9, 10, 11, 12, 13, 14, 15",
        " \u6771\u4eac (Tokyo)",
        " 9",
        " ... and so on\n\n",
        " Paris \ufffd",  # the half of a character that was cut off
    ],
)
def test_what_a_working_model_may_write_is_none(text: str) -> None:
    assert canary.garbage(text) is None


@given(st.text(min_size=1, max_size=4).filter(str.strip), st.integers(20, 60))
def test_a_short_piece_over_and_over_is_always_seen(piece: str, times: int) -> None:
    assert canary.garbage(piece * times) is not None


@pytest.mark.parametrize(
    ("model", "known"),
    [("demo/smollm2-135m-awq", True), ("Qwen/Qwen3-8B-AWQ", True), ("/models/mine", False), (None, False)],
)
def test_models_of_the_table_are_known(model: str | None, known: bool) -> None:
    spec = EngineSpec("e", "fast", "vllm", "http://127.0.0.1:1", "m", "awq", model=model)
    assert canary.known(spec) is known
