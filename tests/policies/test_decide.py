from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from policies.compile import compile_policy
from policies.decision import Busy, Contract, Edits
from policies.facts import Conversation, Facts, Turn
from policies.policy import Policy
from policies.units import Rate


def policy(rules: str, classes: str = "{}", more: str = "") -> Policy:
    return compile_policy(f"version: 1\nclasses: {classes}\nrules:\n{rules}\n{more}", "p.yaml")


def when(condition: str, **request: Any) -> bool:
    """Whether a condition holds for a request."""
    rules = f"  - {{name: it, when: {condition}, send: exact}}\n  - {{name: rest, send: fast}}"
    return policy(rules).decide(facts(**request)).rule == "it"


def facts(
    text: str = "hello",
    *,
    turns: tuple[Turn, ...] | None = None,
    headers: Mapping[str, str] | None = None,
    tool_results: int = 0,
    images: int = 0,
    **more: Any,
) -> Facts:
    conversation = Conversation(turns or (Turn("user", text),), tool_results, images)
    more = {"dialect": "openai.chat", "model": "m", **more}
    return Facts(headers=headers or {}, read=lambda: conversation, **more)


def unread(**more: Any) -> Facts:
    """A request whose text must not be looked at."""

    def read() -> Conversation:
        raise AssertionError("the conversation was read")

    return Facts(dialect="openai.chat", model="m", headers={}, read=read, **more)


@pytest.mark.parametrize(
    ("condition", "request_", "held"),
    [
        ("{header: {x-criticality: [high, critical]}}", {"headers": {"x-criticality": "High "}}, True),
        ("{header: {X-Criticality: high}}", {"headers": {"x-criticality": "high"}}, True),
        ("{header: {x-criticality: high}}", {"headers": {"x-criticality": "highest"}}, False),
        ("{header: {x-a: 1, x-b: 2}}", {"headers": {"x-a": "1"}}, False),
        ("{header: {x-a: 1, x-b: 2}}", {"headers": {"x-a": "1", "x-b": "2"}}, True),
        ("{header: X-Debug}", {"headers": {"x-debug": ""}}, True),
        ("{header: x-debug}", {}, False),
        ('{metadata: {critical: "true"}}', {"metadata": {"critical": "true"}}, True),
        ('{metadata: {critical: "true"}}', {"metadata": {"critical": True}}, True),
        ("{metadata: {critical: true}}", {"metadata": {"critical": "True"}}, True),
        ("{metadata: {critical: true}}", {"metadata": {"critical": ["true"]}}, False),
        ("{metadata: {critical: true}}", {}, False),
        ("{metadata: {level: 3}}", {"metadata": {"level": 3}}, True),
        ("{metadata: level}", {"metadata": {"level": None}}, True),
        ("{tenant_tag: critical}", {"tags": frozenset({"critical", "x"})}, True),
        ("{tenant_tag: [a, b]}", {"tags": frozenset({"c"})}, False),
        ("{tenant: [ci, cd]}", {"tenant": "cd"}, True),
        ("{model: m}", {}, True),
        ("{model: M}", {}, False),
        ("{dialect: anthropic.messages}", {"dialect": "anthropic.messages"}, True),
        ("{signal: has_tools}", {"has_tools": True}, True),
        ("{signal: has_tools, equals: false}", {"has_tools": True}, False),
        ("{signal: structured}", {"structured": True}, True),
        ("{signal: stream}", {}, False),
        ("{signal: images}", {"images": 1}, True),
        ("{signal: tool_results, at_least: 2}", {"tool_results": 2}, True),
        ("{signal: tool_results, above: 2}", {"tool_results": 2}, False),
        ("{signal: tool_results, in: [2, 4]}", {"tool_results": 4}, True),
        ("{signal: output_tokens, at_most: 2k}", {"output_tokens": 2000}, True),
        ("{signal: output_tokens, at_most: 2k}", {}, False),
        ("{not: {signal: output_tokens, above: 2k}}", {}, True),
        ("{signal: temperature, below: 0.5}", {"temperature": 0.0}, True),
        ("{signal: temperature, below: 0.5}", {}, False),
        ("{signal: output_tokens, at_least: 10, below: 20}", {"output_tokens": 20}, False),
        ("{signal: turns, equals: 2}", {"turns": (Turn("user", "a"), Turn("user", "b"))}, True),
        ("{signal: script, equals: cyrillic}", {"text": "Привет, мир"}, True),
        ("{signal: script, in: [han, japanese]}", {"text": "こんにちは世界"}, True),
        ("{signal: prompt_tokens, at_least: 1k}", {"text": "word " * 2000}, True),
        ("{all: [{signal: stream}, {signal: has_tools}]}", {"stream": True}, False),
        ("{any: [{signal: stream}, {signal: has_tools}]}", {"stream": True}, True),
        ("{not: {any: [{signal: stream}, {signal: has_tools}]}}", {}, True),
    ],
)
def test_conditions(condition: str, request_: dict[str, Any], held: bool) -> None:
    assert when(condition, **request_) is held


def test_the_first_rule_that_holds_decides() -> None:
    rules = """\
  - {name: one, when: {signal: stream}, send: exact}
  - {name: two, when: {signal: has_tools}, send: fast}
  - {name: rest, send: fast}"""
    assert policy(rules).decide(facts(stream=True, has_tools=True)).rule == "one"
    assert policy(rules).decide(facts(has_tools=True)).rule == "two"
    assert policy(rules).decide(facts()).rule == "rest"


def test_a_decision_carries_all_of_its_rule() -> None:
    rules = """\
  - name: code
    when: {signal: stream}
    send: exact
    if_busy: {use: fast, waiting: 2, kv: 0.5, wait: 5s}
    if_unavailable: {wait: 20s, then: degrade}
    priority: -3
    trace: always
    cap: {max_tokens: 512}
    set: {temperature: 0}
  - {name: rest, send: fast, if_busy: exact, if_unavailable: {use: exact}}"""
    compiled = policy(rules)
    code = compiled.decide(facts(stream=True))
    assert (code.tier, code.rule, code.policy_hash) == ("exact", "code", compiled.hash)
    assert code.contract == Contract("wait", wait=20.0, then="degrade")
    assert code.if_busy == Busy("fast", 2, 0.5, 5.0)
    assert (code.priority, code.trace, code.edits) == (-3, True, Edits(512, 0.0))
    rest = compiled.decide(facts())
    assert rest.contract == Contract("use", use="exact")
    assert rest.if_busy == Busy("exact", 8, 0.95)
    assert (rest.priority, rest.trace, rest.edits) == (0, False, Edits())


def test_a_contract_left_out_is_fail() -> None:
    assert policy("  - {name: rest, send: fast}").decide(facts()).contract == Contract("fail")


def test_signals_that_no_rule_uses_are_not_computed() -> None:
    compiled = policy("  - {name: a, when: {signal: stream}, send: exact}\n  - {name: rest, send: fast}")
    assert compiled.signals == {"stream"}
    assert not compiled.needs_conversation
    assert compiled.decide(unread(stream=False)).signals == {"stream": False}


def test_text_is_not_read_where_an_earlier_rule_decides() -> None:
    rules = """\
  - {name: first, when: {signal: has_tools}, send: exact}
  - {name: code, when: {signal: code, at_least: 0.5}, send: exact}
  - {name: rest, send: fast}"""
    compiled = policy(rules)
    assert compiled.needs_conversation
    assert compiled.decide(unread(has_tools=True)).rule == "first"


def test_the_conversation_is_read_once() -> None:
    reads = []

    def read() -> Conversation:
        reads.append(1)
        return Conversation((Turn("user", "hello"),))

    rules = """\
  - {name: code, when: {signal: code, at_least: 0.5}, send: exact}
  - {name: long, when: {signal: prompt_tokens, at_least: 9k}, send: exact}
  - {name: script, when: {signal: script, equals: han}, send: exact}
  - {name: rest, send: fast}"""
    policy(rules).decide(Facts(dialect="openai.chat", model="m", headers={}, read=read))
    assert reads == [1]


def test_reasons_say_what_settled_it() -> None:
    classes = "{agent: {all: [{signal: has_tools}, {signal: tool_results, at_least: 2}]}}"
    rules = """\
  - {name: loud, when: {any: [agent, {header: {x-a: [b, c]}}]}, send: exact}
  - {name: quiet, when: {not: {signal: stream}}, send: exact}
  - {name: rest, send: fast}"""
    compiled = policy(rules, classes)
    agent = compiled.decide(facts(has_tools=True, tool_results=3))
    assert agent.reasons == ("agent: has_tools is true, tool_results 3 >= 2",)
    assert compiled.decide(facts(headers={"x-a": "c"})).reasons == ("header x-a is one of b, c",)
    assert compiled.decide(facts()).reasons == ("stream is false",)
    assert compiled.decide(facts(stream=True)).reasons == ("no rule before it held",)


def test_reasons_quote_the_policy_and_not_the_client() -> None:
    decision = policy(
        "  - {name: a, when: {header: x-secret}, send: exact}\n  - {name: rest, send: fast}"
    ).decide(facts(headers={"x-secret": "hunter2"}))
    assert decision.reasons == ("header x-secret is given",)


def test_an_explanation_looks_at_every_rule_and_signal() -> None:
    rules = """\
  - {name: hot, when: {signal: temperature, above: 1}, send: exact}
  - {name: streamed, when: {signal: stream}, send: exact}
  - {name: tools, when: {signal: has_tools}, send: exact}
  - {name: rest, send: fast}"""
    explanation = policy(rules).explain(facts(stream=True, has_tools=True))
    seen = [(rule.name, rule.held, rule.reached, rule.reasons) for rule in explanation.rules]
    assert seen == [
        ("hot", False, True, ("temperature is not given, asked: temperature > 1",)),
        ("streamed", True, True, ("stream is true",)),
        ("tools", True, False, ("has_tools is true",)),
        ("rest", True, False, ("it has no `when`",)),
    ]
    assert explanation.decision.rule == "streamed"
    assert explanation.signals["temperature"] is None
    assert explanation.signals["turns"] == 1
    assert explanation.used == {"temperature", "stream", "has_tools"}


def test_an_explanation_of_what_does_not_hold() -> None:
    rules = """\
  - {name: a, when: {all: [{signal: stream}, {tenant: [ci, cd]}]}, send: exact}
  - {name: b, when: {signal: model, equals: other}, send: exact}
  - {name: c, when: {signal: script, in: [han, thai]}, send: exact}
  - {name: rest, send: fast}"""
    explanation = policy(rules).explain(facts())
    assert [rule.reasons for rule in explanation.rules] == [
        ("stream is false",),
        ("model is m, not other",),
        ("script is latin, not one of han, thai",),
        ("no rule before it held",),
    ]


def test_decisions_are_alike_whose_signals_are() -> None:
    compiled = policy("  - {name: rest, when: {signal: stream}, send: fast}\n  - {name: z, send: fast}")
    one = compiled.decide(facts(), {".shared": 1})
    assert one == compiled.decide(facts())
    assert hash(one) == hash(compiled.decide(facts()))
    assert one != compiled.decide(facts(stream=True))


def test_decisions_and_policies_cannot_be_changed() -> None:
    compiled = policy("  - {name: rest, when: {signal: stream}, send: fast}\n  - {name: z, send: fast}")
    decision = compiled.decide(facts())
    with pytest.raises(AttributeError):
        decision.tier = "exact"  # type: ignore[misc]
    with pytest.raises(TypeError):
        decision.signals["stream"] = True  # type: ignore[index]
    with pytest.raises(AttributeError):
        compiled.hash = "x"  # type: ignore[misc]


def test_the_hash_names_the_content() -> None:
    one = policy("  - {name: rest, send: fast}")
    assert one.hash == policy("  - {name: rest, send: fast}").hash
    assert one.hash != policy("  - {name: rest, send: exact}").hash
    assert len(one.hash) == 12


def test_other_tiers() -> None:
    text = "version: 1\nrules:\n  - {name: all, send: mid, if_unavailable: degrade, if_busy: low}"
    compiled = compile_policy(text, "p", tiers=("low", "mid", "high"))
    assert compiled.decide(facts()).tier == "mid"
    assert compiled.tiers == {"mid", "low"}


def test_plans() -> None:
    more = """\
plans:
  a: {requests: 600/min, tokens: [5M/day, 200k/min], exact_tokens: 2k/min, concurrent: 32}
  b: {output: 64, weights: {exact: 4, fast: 0.5}, cached: 10%}
  c:
    concurrent: 2
    wait: 20s
    models:
      m: {requests: 5/min, fast_tokens: 1k/min}"""
    plans = policy("  - {name: rest, send: fast}", more=more).plans
    a, b, c = (plans[name] for name in "abc")
    assert a.requests == (Rate(600, 60.0),)
    assert a.tokens == (Rate(200_000, 60.0), Rate(5_000_000, 86400.0))
    assert a.tier_tokens == {"exact": (Rate(2000, 60.0),)}
    assert (a.concurrent, a.output, a.wait, a.weights, a.cached) == (32, 1024, 0, {}, 1)
    assert (b.requests, b.concurrent, b.output) == ((), None, 64)
    assert (b.weights, b.cached) == ({"exact": 4, "fast": 0.5}, 0.1)
    assert (c.concurrent, c.wait) == (2, 20)
    model = c.models["m"]
    assert (model.name, model.requests) == ("c, m", (Rate(5, 60.0),))
    assert (model.tier_tokens, model.at) == ({"fast": (Rate(1000, 60.0),)}, (12, 7))


def test_fields_are_what_a_policy_reads_and_compares() -> None:
    rules = """\
  - {name: a, when: {any: [{header: X-A}, {header: {x-b: [1, High]}}, {metadata: {K: yes}}]}, send: exact}
  - {name: b, when: {header: {x-b: 2}}, send: exact}
  - {name: r, send: fast}"""
    assert policy(rules).fields == {
        ("header", "x-a"): frozenset(),
        ("header", "x-b"): {"1", "2", "high"},
        ("metadata", "K"): {"yes"},
    }


def test_classes_are_those_that_rules_use() -> None:
    classes = "{a: {signal: stream}, b: {not: a}, c: {signal: images}}"
    compiled = policy("  - {name: r, when: {any: [b]}, send: exact}\n  - {name: s, send: fast}", classes)
    assert set(compiled.classes) == {"a", "b"}
    assert compiled.classes["b"].test(facts(stream=False), {})


def test_what_is_known_is_not_measured_again() -> None:
    compiled = policy(
        "  - {name: r, when: {signal: turns, at_least: 9}, send: exact}\n  - {name: s, send: fast}"
    )
    memo = {"turns": 9}
    assert compiled.decide(facts(), memo).rule == "r"
    assert compiled.explain(facts(), memo).signals["turns"] == 9
    assert compiled.decide(facts(), {}).rule == "s"


def test_classes_that_use_each_other_many_times_are_looked_at_once() -> None:
    classes = "{c0: {signal: stream}"
    for level in range(1, 25):
        classes += f", c{level}: {{any: [c{level - 1}, c{level - 1}]}}"
    compiled = policy("  - {name: a, when: c24, send: exact}\n  - {name: rest, send: fast}", classes + "}")
    assert compiled.decide(facts()).rule == "rest"
