# ruff: noqa: RUF001
from __future__ import annotations

import pytest

from policies.compile import compile_policy
from policies.facts import Conversation, Facts, Turn
from policies.shipped import shipped
from policies.signals import SIGNALS, content
from policies.signals.classifier import read_model, scores, shipped_model
from policies.signals.features import HEAD, NAMES, TAIL, VERSION, measure
from policies.signals.lexicon import build, terms
from policies.signals.script import SCRIPTS, script_of
from policies.signals.seen import Seen
from policies.signals.tokens import FEATURES, WEIGHTS, estimate_prompt, estimate_tokens, features


def conversation(*turns: tuple[str, str]) -> Facts:
    read = Conversation(tuple(Turn(role, text) for role, text in turns))  # type: ignore[arg-type]
    return Facts(dialect="openai.chat", model="m", headers={}, read=lambda: read)


def code(*turns: tuple[str, str]) -> float:
    value = SIGNALS["code"].read(conversation(*turns), {})
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Hello, world", "latin"),
        ("Ünïcödé façade", "latin"),
        ("Cảm ơn bạn rất nhiều", "latin"),
        ("Привет, как дела?", "cyrillic"),
        ("Γειά σου Κόσμε", "greek"),
        ("שלום עולם", "hebrew"),
        ("مرحبا بالعالم", "arabic"),
        ("नमस्ते दुनिया", "devanagari"),
        ("สวัสดีชาวโลก", "thai"),
        ("你好，世界", "han"),
        ("東京の天気はどうですか", "japanese"),
        ("カタカナ", "japanese"),
        ("안녕하세요 세계", "hangul"),
        ("გამარჯობა", "georgian"),
        ("Напиши код на Python", "cyrillic"),
        ("12345 + 67!", "none"),
        ("", "none"),
        ("🎉🎉", "none"),
        ("Hello " * 500 + "мир", "latin"),
    ],
)
def test_script(text: str, script: str) -> None:
    assert script_of(text) == script
    assert script in SCRIPTS


def test_tokens_of_an_empty_prompt() -> None:
    assert estimate_tokens("") == 0
    assert estimate_prompt([]) == 0


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # counted with o200k_base and DeepSeek's tokenizer; the mean of the two
        (
            "The quick brown fox jumps over the lazy dog, and nobody in the village seems to mind it at all.",
            22,
        ),
        (
            "def total(cart):\n    return sum(item.price * item.count for item in cart if item.count > 0)\n",
            23,
        ),
        ("请帮我写一封给老师的信，告诉他我明天不能去学校，因为我生病了。", 22),
    ],
)
def test_tokens_are_near(text: str, tokens: int) -> None:
    assert abs(estimate_tokens(text) / tokens - 1) <= 0.15


def test_the_quick_sum_is_that_of_the_features() -> None:
    for text in (
        "It's 12,345 o'clock.\n",
        "Füße für 20 €",
        "Привет 42",
        "你好，こんにちは 안녕 🎉",
        "\tif x:\r\n  y()",
    ):
        slow = sum(weight * count for weight, count in zip(WEIGHTS, features(text), strict=True))
        assert len(features(text)) == len(FEATURES)
        assert estimate_tokens(text) == round(slow)


def test_long_prompts_are_sampled_without_a_jump() -> None:
    text = "All work and no play makes a dull afternoon. " * 3000
    whole = sum(estimate_tokens(text[at : at + 5000]) for at in range(0, len(text), 5000))
    assert abs(estimate_tokens(text) / whole - 1) < 0.05
    assert abs(estimate_prompt([text] * 30) / (30 * whole) - 1) < 0.1


def test_only_the_last_user_turn_and_what_it_follows_count() -> None:
    asked = ("user", "Write a function in Python that reverses a string.")
    answered = ("assistant", "```python\ndef rev(s):\n    return s[::-1]\n```")
    assert code(asked) >= 0.5
    assert code(asked, answered, ("user", "make it faster")) >= 0.5
    assert code(asked, answered, ("user", "thanks, that is all for today")) < 0.5
    assert code(asked, answered, ("user", "now write my wife a birthday poem")) < 0.5
    assert code(asked, answered, ("user", "ok"), ("assistant", "Anything else?"), ("user", "yes")) < 0.5
    assert code(("system", asked[1]), ("user", "hello there")) < 0.5


def test_no_user_turn_is_no_code() -> None:
    assert code(("system", "Write code."), ("assistant", "def f(): pass")) == 0.0
    assert code() == 0.0


def test_only_head_and_tail_of_a_long_text_are_read() -> None:
    filler = "It was a quiet evening by the sea. " * 400
    asked = "\n\nWrite a bash script that renames these files."
    assert scores(filler + asked).code > scores(filler).code
    hidden = filler[:HEAD] + asked + filler[: TAIL * 3]
    assert scores(hidden) == scores(filler[:HEAD] + "." * len(asked) + filler[: TAIL * 3])


def test_what_was_not_read_is_reported() -> None:
    policy = compile_policy(*shipped("default"))
    text = "It was a quiet evening by the sea. " * 100
    asked = conversation(("user", text))
    assert policy.decide(asked).signals["unread"] == len(text) - HEAD - TAIL
    assert policy.explain(asked).signals["unread"] == len(text) - HEAD - TAIL
    chinese = "今天天气很好，我们去海边散步吧。" * 100
    assert SIGNALS["unread"].read(conversation(("user", chinese)), {}) == len(chinese) - HEAD // 3 - TAIL // 3
    assert "unread" not in policy.decide(conversation(("user", "Hello there"), ("user", "hi"))).signals


def test_code_and_maths_are_one_look_and_earlier_turns_are_seen_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []
    inner = content._measure
    monkeypatch.setattr(content, "_SEEN", Seen(lambda text: looked.append(text) or inner(text)))
    turns = [("user", "Write a loop in C."), ("assistant", "for (;;) {}"), ("user", "shorter?")]
    for end in (1, 3):
        facts, memo = conversation(*turns[:end]), dict[str, object]()
        assert all(SIGNALS[name].read(facts, memo) is not None for name in ("code", "math", "code"))
    assert sorted(looked) == sorted(text for _, text in turns)


def test_features_have_names_and_no_nothing() -> None:
    found = measure("Write a SQL query: SELECT a FROM b WHERE c = 3; -- how many rows?")
    assert all(found.values.values())
    assert {"language", "sql", "asks_first", "how_many", "semicolon"} <= {NAMES[at] for at in found.values}
    assert {b"sql", b"rows"} <= found.words


@pytest.mark.parametrize("text", ["", " ", "\n\n", "\0", "\ud800", "🎉" * 3000, "a" * 100_000, "```" * 5000])
def test_any_text_has_a_score(text: str) -> None:
    found = scores(text)
    assert 0 <= found.code <= 1
    assert 0 <= found.math <= 1


def test_weights_of_other_features_are_refused() -> None:
    with pytest.raises(ValueError, match="fit anew"):
        read_model('{"features": 0, "weights": {}, "words": {}}')
    with pytest.raises(ValueError, match="fit anew"):
        read_model(
            f'{{"features": {VERSION}, "weights": {{"bias": [0, 0], "snakes": [1, 0]}}, "words": {{}}}}'
        )
    assert len(shipped_model().code.features) == len(NAMES)


def test_seen_texts_are_bounded() -> None:
    measured: list[str] = []
    seen = Seen(lambda text: measured.append(text) or scores(text), most=2)
    for text in ("one", "two", "two", "three", "one"):
        assert seen(text) == scores(text)
    assert measured == ["one", "two", "three", "one"]


def test_a_lexicon_is_built_from_lines() -> None:
    text = "# note\n[code]\nen: loop for_loop c++\nru: код_ функци\nzh: 函数\n[other]\nen: loop\n"
    lexicon = build(terms(text))
    assert lexicon.subjects == ("code", "other")

    def count(text: str) -> list[int]:
        return lexicon.count(text)[0]

    assert count("a Loop, a for-loop in C++!") == [3, 1]
    assert count("looping") == [0, 0]
    assert count("Функцию и код.") == [2, 0]
    assert count("кодекс") == [0, 0]
    assert count("写一个函数吧") == [1, 0]
    assert count("用c++写") == [1, 0]
