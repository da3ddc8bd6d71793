from __future__ import annotations

from policies.compile import compile_policy
from policies.facts import Conversation, Facts, Turn
from policies.signals import SIGNALS


def facts(*turns: tuple[str, str], tenant: str = "ci") -> Facts:
    read = Conversation(tuple(Turn(role, text) for role, text in turns))  # type: ignore[arg-type]
    return Facts(dialect="openai.chat", model="m", headers={}, read=lambda: read, tenant=tenant)


def place(name: str, request: Facts) -> float:
    value = SIGNALS[name].read(request, {})
    assert isinstance(value, float)
    return value


BEGUN = (("system", "Be brief."), ("user", "Hello"))
GROWN = (*BEGUN, ("assistant", "Hi!"), ("user", "And now?"))


def test_a_conversation_keeps_its_place_while_it_grows() -> None:
    assert place("sample", facts(*BEGUN)) == place("sample", facts(*GROWN))
    assert place("sample", facts(*BEGUN)) != place("sample", facts(("user", "Hello")))
    assert place("sample", facts(*BEGUN)) != place("sample", facts(*BEGUN, tenant="cd"))


def test_a_request_has_its_own_place() -> None:
    assert place("sample_request", facts(*BEGUN)) == place("sample_request", facts(*BEGUN))
    assert place("sample_request", facts(*BEGUN)) != place("sample_request", facts(*GROWN))


def test_a_tenant_has_one_place() -> None:
    assert place("sample_tenant", facts(*BEGUN)) == place("sample_tenant", facts(("user", "else")))
    assert place("sample_tenant", facts(*BEGUN)) != place("sample_tenant", facts(*BEGUN, tenant="cd"))


def test_places_do_not_move_with_the_version() -> None:
    # Changing the hash would deal all conversations anew.
    assert f"{place('sample', facts(*BEGUN)):.6f}" == "0.003724"


def test_a_share_of_the_conversations_is_that_share() -> None:
    rules = "[{name: a, when: {signal: sample, below: 10%}, send: exact}, {name: b, send: fast}]"
    policy = compile_policy(f"version: 1\nrules: {rules}", "p")
    taken = sum(policy.decide(facts(("user", f"question {n}"))).tier == "exact" for n in range(5000))
    assert 400 < taken < 600


def test_a_long_turn_is_told_apart_by_its_ends_and_its_length() -> None:
    long = "a" * 100_000
    assert place("sample", facts(("user", long))) != place("sample", facts(("user", long + "b")))
    assert place("sample", facts(("user", long))) == place("sample", facts(("user", long)))
