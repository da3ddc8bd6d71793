"""Decisions become lines of a log, and are made again from them; what a line lacks is told, never guessed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from policies.compile import compile_policy
from policies.decision import pinned
from policies.document import ProblemsError
from policies.facts import Conversation, Facts, Turn
from policies.logged import (
    DecisionLine,
    Fields,
    FieldsLine,
    Line,
    NotRecordedError,
    Reader,
    Usage,
    decode,
    line_of,
)
from policies.policy import Policy
from policies.replay import MAX_NAMES, Load, Membership, Replay, Way
from policies.signals import SIGNALS, Memo
from tests.policies.test_random_policies import REQUESTS, facts, policies

SECRET = "correct horse battery staple"


def policy(rules: str, classes: str = "{}") -> Policy:
    return compile_policy(
        f"version: 1\nclasses: {classes}\nrules:\n{rules}\n  - {{name: rest, send: fast}}", "p.yaml"
    )


def lines(
    live: Policy, *requests: Facts, measure_all: bool = True, also: tuple[Policy, ...] = ()
) -> list[Line]:
    """What a log has of these requests, read back from its text."""
    fields = Fields([live, *also])
    written = [fields.line]
    for number, request in enumerate(requests):
        memo: Memo = {}
        decision = live.decide(request, memo)
        line = line_of(
            request, memo, decision, fields, id_=f"req_{number}", time=1.0, measure_all=measure_all
        )
        written.append(msgspec.json.encode(line))
    return [decode(one) for one in written]


def request(text: str = "hello", **more: Any) -> Facts:
    conversation = Conversation((Turn("user", text),))
    return Facts(
        **{"dialect": "openai.chat", "model": "m", "headers": {}, "read": lambda: conversation, **more}
    )


def replayed(candidate: Policy, log: list[Line]) -> Replay:
    replay = Replay(candidate)
    for line in log:
        replay.feed(line)
    return replay


def moves(replay: Replay) -> dict[tuple[str, str], int]:
    """By rule now and then."""
    return {(way.rule, way.new_rule): load.requests for way, load in replay.ways.items()}


PLAIN = """\
version: 1
classes: {{a: {first}, b: {second}}}
rules:
  - {{name: r0, when: a, send: exact}}
  - {{name: r1, when: {{not: b}}, send: exact}}
  - {{name: rest, send: fast}}
"""
TESTS = (
    "{signal: code, at_least: 0.5}",
    "{header: {x-a: [high, 3]}}",
    "{header: x-a}",
    "{metadata: {critical: true}}",
    "{tenant_tag: x}",
    "{signal: temperature, above: 1}",
    "{signal: tool_results}",
    "{signal: sample, below: 50%}",
    "{matches: {user: def}}",
    "{time: {from: '08:00', to: '18:00'}}",
)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Policies that compile: random ones, plain ones for those that do not."""
    text = json.dumps(draw(policies()))
    try:
        compile_policy(text, "p.yaml")
    except ProblemsError:
        first, second = draw(st.sampled_from(TESTS)), draw(st.sampled_from(TESTS))
        return PLAIN.format(first=first, second=second)
    return text


REQUESTS_AT = REQUESTS.map(lambda one: {**one, "time": one["time"] or 1_790_000_000})


@settings(max_examples=150, deadline=None)
@given(texts(), st.lists(REQUESTS_AT, min_size=1, max_size=3))
def test_every_decision_is_made_again_from_its_line(text: str, requests: list[dict[str, Any]]) -> None:
    live = compile_policy(text, "p.yaml")
    reader = Reader(live)
    first, *rest = lines(live, *map(facts, requests))
    assert isinstance(first, FieldsLine)
    reader.fields(first)
    for one, line in zip(requests, rest, strict=True):
        assert isinstance(line, DecisionLine)
        decision = live.decide(facts(one))
        assert (line.tier, line.rule, line.reasons) == (decision.tier, decision.rule, decision.reasons)
        rule = live.rule_for(*reader.facts(line))
        assert (rule.send, rule.name) == (decision.tier, decision.rule)


@settings(max_examples=150, deadline=None)
@given(texts(), texts(), st.lists(REQUESTS_AT, min_size=1, max_size=3), st.booleans())
def test_another_policy_decides_a_line_as_the_request_or_says_what_is_lacking(
    text: str, other: str, requests: list[dict[str, Any]], measure_all: bool
) -> None:
    live, candidate = compile_policy(text, "p.yaml"), compile_policy(other, "c.yaml")
    reader = Reader(candidate)
    first, *rest = lines(live, *map(facts, requests), measure_all=measure_all)
    assert isinstance(first, FieldsLine)
    reader.fields(first)
    for one, line in zip(requests, rest, strict=True):
        assert isinstance(line, DecisionLine)
        try:
            rule = candidate.rule_for(*reader.facts(line))
        except NotRecordedError as error:
            event(f"lacking {error}")
            continue
        event("decided")
        assert rule.name == candidate.decide(facts(one)).rule


def test_a_line_has_no_text_and_only_values_that_are_compared() -> None:
    live = policy("""\
  - name: a
    when: {any: [{header: {x-a: [one, Two]}}, {header: x-there}, {metadata: {k: [v, 3, true]}},
      {matches: {user: staple}}]}
    send: exact""")
    asked = request(
        f"Write code. {SECRET}",
        headers={"x-a": " TWO ", "x-there": SECRET, "authorization": SECRET},
        metadata={"k": SECRET, SECRET: "v", "other": SECRET},
    )
    _, line = lines(live, asked)
    assert isinstance(line, DecisionLine)
    assert line.headers == {"x-a": "two", "x-there": True}
    assert line.metadata == {"k": True}
    assert SECRET not in msgspec.json.encode(line).decode()


@pytest.mark.parametrize(
    ("metadata", "logged"),
    [({}, None), ({"k": 3}, "3"), ({"k": True}, "true"), ({"k": None}, True), ({"k": [3]}, True)],
)
def test_metadata_of_any_type(metadata: dict[str, object], logged: object) -> None:
    live = policy("  - {name: a, when: {metadata: {k: [3, true]}}, send: exact}")
    _, line = lines(live, request(metadata=metadata))
    assert isinstance(line, DecisionLine)
    assert line.metadata == {"k": logged}


def test_what_moves_is_counted_by_rule_and_class() -> None:
    live = policy("  - {name: streamed, when: {signal: stream}, send: exact}")
    new = policy(
        "  - {name: tools, when: agent, send: exact}\n  - {name: long, when: {not: agent}, send: fast}",
        "{agent: {signal: has_tools}}",
    )
    log = lines(
        live,
        request(stream=True),
        request(stream=True, has_tools=True),
        request(has_tools=True),
        request(),
        request(),
    )
    for number, line in enumerate(log[1:]):
        assert isinstance(line, DecisionLine)
        line.usage = Usage(100, number)
    replay = replayed(new, log)
    assert replay.ways == {
        Way("streamed", "exact", "long", "fast"): Load(1, 100),
        Way("streamed", "exact", "tools", "exact"): Load(1, 101),
        Way("rest", "fast", "tools", "exact"): Load(1, 102),
        Way("rest", "fast", "long", "fast"): Load(2, 207),
    }
    assert replay.classes == {
        Membership("agent", "exact", "exact"): Load(1, 101),
        Membership("agent", "fast", "exact"): Load(1, 102),
    }
    assert replay.moved == Load(2, 202)
    assert replay.compared == Load(5, 510)
    assert replay.moved_share == 0.4
    assert replay.policies == {live.hash: 5}


def test_the_estimated_prompt_stands_for_tokens_that_no_engine_counted() -> None:
    live = policy("  - {name: a, when: {signal: stream}, send: exact}")
    replay = replayed(live, lines(live, request("word " * 1000)))
    assert 800 < replay.compared.tokens < 1300


def test_pinned_requests_never_move() -> None:
    live = policy("  - {name: a, when: {signal: stream}, send: exact}")
    fields, memo = Fields([live]), Memo()
    line = line_of(
        request(stream=True), memo, pinned("fast", "h"), fields, id_="r", time=1.0, measure_all=True
    )
    assert not line.signals
    replay = replayed(live, [decode(msgspec.json.encode(line))])
    assert replay.pinned == Load(1, 0)
    assert not replay.ways
    assert replay.moved_share == 0


def test_a_signal_that_the_log_lacks_is_told_and_counts_as_moved() -> None:
    live = policy("  - {name: a, when: {signal: stream}, send: exact}")
    new = policy("  - {name: a, when: {signal: code, at_least: 0.5}, send: exact}")
    replay = replayed(new, lines(live, request(), request(stream=True), measure_all=False))
    assert replay.lacking == {"code": 2}
    assert replay.undecided.requests == 2
    assert replay.moved_share == 1


@pytest.mark.parametrize(
    "signal", sorted(SIGNALS.keys() - {"stream", "model", "dialect", "tenant", "sample_tenant"})
)
def test_any_signal_that_is_lacking_is_told_by_its_name(signal: str) -> None:
    value = {"text": "x", "flag": "true"}.get(SIGNALS[signal].kind, "0.5" if signal == "code" else "1")
    if SIGNALS[signal].values:
        value = SIGNALS[signal].values[0]
    live = policy("  - {name: a, when: {signal: stream}, send: exact}")
    new = policy(f"  - {{name: a, when: {{signal: {signal}, equals: {value}}}, send: exact}}")
    assert replayed(new, lines(live, request(), measure_all=False)).lacking == {signal: 1}
    assert not replayed(new, lines(live, request())).lacking


def test_a_signal_that_deciding_does_not_reach_may_be_lacking() -> None:
    live = policy("  - {name: a, when: {signal: stream}, send: exact}")
    new = policy(
        "  - {name: a, when: {signal: stream}, send: exact}\n"
        "  - {name: b, when: {signal: temperature, above: 1}, send: exact}"
    )
    replay = replayed(new, lines(live, request(stream=True), request(), measure_all=False))
    assert moves(replay) == {("a", "a"): 1}
    assert replay.lacking == {"temperature": 1}


def test_a_pattern_that_was_not_asked_for_is_lacking() -> None:
    live = policy("  - {name: a, when: {matches: {user: secret}}, send: exact}")
    new = policy("  - {name: a, when: {matches: {user: public}}, send: exact}")
    assert moves(replayed(live, lines(live, request("secret"), request()))) == {
        ("a", "a"): 1,
        ("rest", "rest"): 1,
    }
    assert replayed(new, lines(live, request())).lacking == {"matches user: public": 1}
    assert moves(replayed(new, lines(live, request(), also=(new,)))) == {("rest", "rest"): 1}


def test_a_class_that_cannot_be_told_is_counted_apart() -> None:
    live = policy("  - {name: a, when: {signal: stream}, send: exact}")
    new = policy(
        "  - {name: a, when: {signal: stream}, send: exact}\n  - {name: b, when: hot, send: exact}",
        "{hot: {signal: temperature, above: 1}}",
    )
    replay = replayed(new, lines(live, request(stream=True), measure_all=False))
    assert replay.compared.requests == 1
    assert replay.unknown == {"hot": 1}


@pytest.mark.parametrize(
    ("new", "value", "outcome"),
    [
        ("{header: {x-a: 1}}", "1", "a"),
        ("{header: {x-a: 1}}", "7", "rest"),
        ("{header: {x-a: [1, 2]}}", "2", "a"),
        ("{header: {x-a: 7}}", "1", "rest"),
        ("{header: {x-a: 7}}", None, "rest"),
        ("{header: {x-a: 7}}", "7", "header x-a: other values"),
        ("{header: x-a}", "7", "a"),
        ("{header: x-a}", None, "rest"),
        ("{header: {x-b: 1}}", "1", "header x-b"),
        ("{header: x-b}", "1", "header x-b"),
        ("{metadata: {x-a: 1}}", "1", "metadata x-a"),
    ],
)
def test_values_of_headers(new: str, value: str | None, outcome: str) -> None:
    """The log was written under a policy that compares `x-a` with 1 and 2."""
    live = policy("  - {name: a, when: {header: {x-a: [1, 2]}}, send: exact}")
    candidate = policy(f"  - {{name: a, when: {new}, send: exact}}")
    headers = {} if value is None else {"x-a": value}
    replay = replayed(candidate, lines(live, request(headers=headers)))
    decided = [way.new_rule for way in replay.ways] + list(replay.lacking)
    assert decided == [outcome]


def test_without_its_fields_line_other_values_are_lacking() -> None:
    live = policy("  - {name: a, when: {header: {x-a: [1, 2]}}, send: exact}")
    _, *log = lines(live, request(headers={"x-a": "1"}), request(headers={"x-a": "7"}))
    replay = replayed(live, log)
    assert moves(replay) == {("a", "a"): 1}
    assert replay.lacking == {"header x-a: other values": 1}


def test_memory_stays_flat_whatever_a_log_holds() -> None:
    live = policy("  - {name: a, when: {signal: stream}, send: exact}")
    _, line = lines(live, request())
    assert isinstance(line, DecisionLine)
    replay = Replay(live)
    for number in range(MAX_NAMES + 500):
        line.rule, line.policy = f"r{number}", f"p{number}"
        replay.feed(line)
        replay.feed(FieldsLine(f"f{number}", {}, {}))
    assert len(replay.ways) == MAX_NAMES + 1
    assert len(replay.policies) == MAX_NAMES + 1
    assert replay.compared.requests == MAX_NAMES + 500


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[1]", b"null", b'{"kind":"other"}', b'{"kind":"decision"}', b"\xff", b'{"kind":'],
)
def test_what_is_no_line_is_refused(text: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        decode(text)
