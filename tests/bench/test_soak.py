import pytest

from bench.soak import fault_of, faults

EVENT = b'data: {"choices":[{"delta":{"content":"@0000000000000000001"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'
END = b"data: [DONE]\n\n"
GOOD = {
    "minutes": 30,
    "errors": 0,
    "leases": [0, 0],
    "in flight": 0,
    "engines' streams": 0,
    "descriptors": [20, 22],
    "threads": [4, 4],
    "MiB an hour": 0.9,
}


def test_a_whole_stream_is_right() -> None:
    assert fault_of(True, True, 2, 200, True, EVENT * 2 + USAGE + END) is None


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (EVENT * 2 + USAGE, "no end"),
        (EVENT + USAGE + END, "1 of 2 tokens"),
        (EVENT * 2 + END, "no usage"),
    ],
)
def test_what_is_wrong_with_a_stream_is_told(body: bytes, told: str) -> None:
    assert told in str(fault_of(True, True, 2, 200, True, body))


def test_usage_that_nobody_asked_for_is_wrong() -> None:
    assert fault_of(True, False, 1, 200, True, EVENT + USAGE + END) == "usage was not asked"


def test_a_reply_that_was_cut_is_wrong() -> None:
    assert "cut" in str(fault_of(False, False, 1, 200, False, b"{}"))


def test_another_status_is_wrong() -> None:
    assert "502" in str(fault_of(False, False, 1, 502, True, b"{}"))


def test_a_good_soak_has_no_faults() -> None:
    assert faults(GOOD) == []


@pytest.mark.parametrize(
    ("figure", "value", "told"),
    [
        ("errors", 2, "2 errors that were not injected"),
        ("leases", [0, 1], "leases or requests were left"),
        ("engines' streams", 1, "leases or requests were left"),
        ("descriptors", [20, 23], "descriptors grew"),
        ("threads", [4, 5], "threads grew"),
        ("MiB an hour", 1.0, "memory grew"),
    ],
)
def test_what_must_not_be_is_told(figure: str, value: object, told: str) -> None:
    assert faults({**GOOD, figure: value}) == [told]


def test_a_short_soak_says_nothing_of_memory() -> None:
    assert faults({**GOOD, "minutes": 5, "MiB an hour": 50}) == []
