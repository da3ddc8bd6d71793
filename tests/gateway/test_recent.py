"""What is kept of the latest decisions, and of the figures of the last minutes."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.app import change_engines
from gateway.telemetry.history import ROWS, History, figures, quantile
from gateway.telemetry.recent import EACH_LOOK, IDLE_SECONDS, LATEST, MOST, Recent
from gateway.telemetry.record import Record
from policies.compile import compile_policy
from policies.facts import Conversation, Facts, Turn
from policies.policy import Explanation
from tests.support.client import ask
from tests.support.engine import FakeEngine, engines, reply
from tests.support.serving import serving
from tests.support.shapes import CHAT

POLICY = compile_policy("version: 1\nrules: [{name: all, send: fast}]", "p.yaml")


def record(number: int) -> Record:
    return Record(f"req_{number}", 0.0, 0)


def explanation() -> Explanation:
    def read() -> Conversation:
        return Conversation((Turn("user", "hi"),))

    return POLICY.explain(Facts(dialect="openai.chat", model="m", read=read, headers={}))


def names(recent: Recent, now: float) -> list[str]:
    return [seen.record.request_id for seen in recent.look(now)]


def test_without_a_look_the_latest_are_kept_and_none_is_explained() -> None:
    recent = Recent()
    for number in range(LATEST + 5):
        assert recent.left == 0
        recent.add(record(number))
    assert names(recent, 100.0) == [f"req_{number}" for number in range(5, LATEST + 5)]


def test_a_look_pays_for_the_next_explanations() -> None:
    recent = Recent()
    recent.look(100.0)
    for number in range(EACH_LOOK):
        assert recent.left == EACH_LOOK - number
        recent.explain(record(number), explanation(), POLICY)
    assert recent.left == 0
    assert len(names(recent, 101.0)) == EACH_LOOK
    assert recent.left == EACH_LOOK


def test_between_two_looks_the_explained_ones_stand_for_all() -> None:
    recent = Recent()
    recent.look(100.0)
    recent.explain(record(1), explanation(), POLICY)
    recent.add(record(2))
    assert names(recent, 101.0) == ["req_1"]
    recent.add(record(3))
    assert names(recent, 101.0 + IDLE_SECONDS) == ["req_1", "req_3"]


def test_what_is_shown_is_bounded() -> None:
    recent = Recent()
    for look in range(MOST):
        recent.look(float(look))
        for number in range(2):
            recent.explain(record(2 * look + number), explanation(), POLICY)
    shown = names(recent, 1000.0)
    assert len(shown) == MOST
    assert shown[-1] == f"req_{2 * MOST - 1}"
    assert recent.find("req_0") is None
    seen = recent.find(shown[0])
    assert seen is not None
    assert seen.explanation is not None


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0], 0.5, None),
        ([4, 0, 0], 0.5, 0.5),
        ([0, 4, 0], 0.5, 2.0),
        ([2, 2, 0], 0.9, 2.6),
        ([0, 0, 7], 0.5, 3.0),
    ],
)
def test_a_quantile_lies_on_a_line_through_its_bucket(
    counts: list[int], share: float, expected: float | None
) -> None:
    assert quantile(counts, (1.0, 3.0), share) == expected


async def test_a_row_has_the_figures_of_two_seconds(tmp_path: Path) -> None:
    async with (
        engines(engine := FakeEngine(reply(CHAT.reply))),
        serving(tmp_path, {"fast": engine}) as served,
    ):
        gateway, now = served.gateway, [50.0]
        history = History(("fast", "exact"), ("fast-0",), lambda: now[0], lambda: 1000.0)
        history.take(figures(gateway.fleet, gateway.metrics))
        assert history.since(-1) == []
        for _ in range(3):
            await ask(served.port, CHAT.path, CHAT.ask())
        gateway.ended.tell()
        now[0] += 2
        served.engine("fast-0").waiting = 7
        history.take(figures(gateway.fleet, gateway.metrics))
    (row,) = history.since(-1)
    shown = dict(zip(history.columns, row[1:], strict=True))
    assert row[0] == 1000.0
    assert shown["tier/fast/requests"] == 1.5
    assert shown["tier/fast/tokens"] == 3 * CHAT.reply_usage.completion / 2
    assert shown["tier/fast/ttft_p50"] is None
    assert shown["engine/fast-0/waiting"] == 7
    assert shown["tier/exact/requests"] == 0


async def test_rows_keep_what_they_have_when_engines_come_and_go(tmp_path: Path) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        gateway = served.gateway
        (spec,) = gateway.config.engines
        history = gateway.history
        history.take(figures(gateway.fleet, gateway.metrics))
        served.engine("fast-0").waiting = 7
        history.take(figures(gateway.fleet, gateway.metrics))
        change_engines(gateway, [replace(spec, name="fast-9"), spec])
        history.take(figures(gateway.fleet, gateway.metrics))
    form = {name: index for index, name in enumerate(history.columns, 1)}
    columns = [form[f"engine/fast-{number}/waiting"] for number in (9, 0)]
    assert [[row[column] for column in columns] for row in history.since(-1)[-2:]] == [[None, 7], [0, 7]]


async def test_rows_are_bounded_and_sent_once(tmp_path: Path) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        gateway = served.gateway
        history = History(("fast", "exact"), ("fast-0",), gateway.clock, gateway.wall)
        seen = figures(gateway.fleet, gateway.metrics)
    for _ in range(ROWS + 11):
        history.take(seen)
    assert history.made == ROWS + 10
    assert len(history.since(-1)) == ROWS
    assert len(history.since(history.made - 2)) == 2
    assert list(history.since(history.made)) == []
    assert len(history.since(history.made + 1)) == ROWS
