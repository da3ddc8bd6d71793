from typing import Any

from bench.report import brief, render

MACHINE: dict[str, Any] = {
    "date": "2026-01-01",
    "cores": 2,
    "cpu": "A CPU",
    "kernel": "6.1",
    "python": "3.11.2",
    "load before": 0.1,
    "others": 0.04,
}
OF_ALL = ("json_us", "token_us", "burst_us", "rate", "p50", "p99", "rss", "pss")
LOAD: dict[str, Any] = {
    "machine": MACHINE,
    "options": {"rounds": 2, "seconds": 5.0},
    "versions": {"dualgauge": "0.1.0", "peer": "9.9"},
    "rounds": {
        "no gateway": {"p50": [20.0, 22.0], "p99": [40.0, 44.0]},
        "dualgauge": {figure: [30.0, 60.0] for figure in OF_ALL},
        "peer": {figure: [20.0, 40.0] for figure in OF_ALL},
    },
}
SIZE: dict[str, Any] = {"machine": MACHINE, "options": {}, "total": 86.44, "largest": {"uvloop": 13.61}}
SOAK: dict[str, Any] = {
    "machine": MACHINE,
    "minutes": 30,
    "requests": {"streams": 10},
    "happened": {"new keys": 3},
    "errors": 0,
    "MiB an hour": 0.25,
    "standard error": 0.1,
    "PSS": [50, 51],
    "RSS": [60, 61],
    "descriptors": [30, 30],
    "threads": [4, 4],
    "leases": [0, 0],
}


def test_a_contender_is_shown_with_its_version_and_figures() -> None:
    assert "| peer 9.9 | 30.0 (20.0 to 40.0) |" in render({"load peer": LOAD})


def test_ours_is_held_against_each_peer() -> None:
    assert "| CPU a JSON request, to peer | 1.500 |" in render({"load peer": LOAD})


def test_the_machine_is_told() -> None:
    assert "2 cores of A CPU, Linux 6.1, Python 3.11.2; load before 0.1, others took 0.04 cores" in render(
        {"load peer": LOAD}
    )


def test_latency_without_a_gateway_stands_below_the_table() -> None:
    assert "Without a gateway: p50 21 (20 to 22) us" in render({"load peer": LOAD})


def test_parts_stand_under_their_names() -> None:
    text = render({"load peer": LOAD, "size": SIZE})
    assert text.index("## load peer") < text.index("## size")


def test_the_size_is_told_by_part() -> None:
    assert "| all of it | 86.4 |\n| uvloop | 13.6 |" in render({"size": SIZE})


def test_the_brief_has_ratios() -> None:
    assert brief("load", LOAD)["ratio.peer.json_us"] == 1.5


def test_a_soak_tells_its_slope_with_its_error() -> None:
    assert "rose by 0.25 MiB an hour (standard error 0.10)" in render({"soak": SOAK})
