"""The tap alone: a stream cut anywhere passes unchanged, an injected usage chunk is read and taken out."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.relay.sse import HOLD_LIMIT, Tap, Usage, boundary
from tests.support.engine import split
from tests.support.shapes import CHAT, COMPLETIONS, IDS, SHAPES, Shape, events

ODD = "\u2028 \u2029 \u0085 \x0b\x0c 日本語 😀👩‍🚀".encode()
CHUNK = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


def tap(shape: Shape = CHAT, *, strip: bool = False) -> Tap:
    dialect = shape.dialect
    return Tap(dialect.stream_usage, marker=dialect.marker, strip=strip)


def passed(parts: list[bytes], one: Tap) -> bytes:
    return b"".join([one.feed(part) for part in parts]) + one.finish()


def crlf(stream: bytes) -> bytes:
    return stream.replace(b"\n", b"\r\n")


@pytest.mark.parametrize("ends", ["lf", "crlf", "cr"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_c01_a_recorded_stream_cut_at_every_offset_passes_unchanged(shape: Shape, ends: str) -> None:
    stream = shape.stream.replace(b"\n", {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}[ends])
    for offset in range(1, len(stream)):
        one = tap(shape)
        assert passed([stream[:offset], stream[offset:]], one) == stream
        assert one.usage == shape.stream_usage


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_a_recorded_stream_byte_by_byte_passes_unchanged(shape: Shape) -> None:
    one = tap(shape)
    assert passed([bytes([byte]) for byte in shape.stream], one) == shape.stream
    assert one.usage == shape.stream_usage


@pytest.mark.parametrize("shape", [CHAT, COMPLETIONS], ids=["chat", "completions"])
def test_the_recordings_hold_what_splits_lines_elsewhere(shape: Shape) -> None:
    text = shape.stream.decode()
    assert all(odd in text for odd in ("\u2028", "\u2029", "\u0085", "日本語", "😀"))


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
@pytest.mark.parametrize("shape", [CHAT, COMPLETIONS], ids=["chat", "completions"])
def test_an_injected_usage_chunk_is_taken_out_at_every_cut(shape: Shape, ends: bytes) -> None:
    stream = shape.stream.replace(b"\n", ends)
    chunk = next(e for e in events(shape.stream) if b'"choices":[]' in e).replace(b"\n", ends)
    expected = stream.replace(chunk, b"")
    assert len(expected) < len(stream)
    for offset in range(1, len(stream)):
        one = tap(shape, strip=True)
        assert passed(split(stream, offset), one) == expected
        assert one.usage == shape.stream_usage


def test_only_whole_events_are_passed_on() -> None:
    one = tap()
    assert one.feed(CHUNK[:-1]) == b""
    assert one.feed(CHUNK[-1:] + CHUNK[:5]) == CHUNK
    assert one.feed(CHUNK[5:] + CHUNK + CHUNK[:20]) == CHUNK * 2
    assert not one.torn


def test_comments_and_null_usage_pass_unchanged() -> None:
    stream = b": keep-alive\n\n" + CHUNK.replace(b"}\n\n", b',"usage":null}\n\n') + b": ping\n\n" + DONE
    one = tap(strip=True)
    assert passed([stream], one) == stream
    assert one.usage is None


def test_usage_beside_choices_is_read_and_kept() -> None:
    """vLLM's `continuous_usage_stats`, and other engines' last chunk."""
    beside = CHUNK.replace(b"}\n\n", b',"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n')
    one = tap(strip=True)
    assert passed([beside + DONE], one) == beside + DONE
    assert one.usage == Usage(5, 2)


def test_an_empty_choices_chunk_without_usage_is_kept() -> None:
    stream = b'data: {"id":"","choices":[],"prompt_filter_results":[]}\n\n' + DONE
    assert passed([stream], tap(strip=True)) == stream


def test_text_that_speaks_of_usage_is_kept() -> None:
    stream = CHUNK % rb"{\"usage\":{\"prompt_tokens\":9},\"choices\":[]}" + DONE
    one = tap(strip=True)
    assert passed([stream], one) == stream
    assert one.usage is None


def test_usage_that_is_not_json_is_kept() -> None:
    stream = b'data: {"choices":[],"usage": oh no\n\n' + DONE
    assert passed([stream], tap(strip=True)) == stream


def test_usage_of_wrong_types_is_kept_and_not_counted() -> None:
    stream = b'data: {"choices":[{}],"usage":{"prompt_tokens":"9","completion_tokens":-3}}\n\n'
    one = tap()
    assert passed([stream], one) == stream
    assert one.usage == Usage(0, 0)


def test_a_stream_without_a_last_blank_line_is_whole() -> None:
    stream = CHUNK + b"data: [DONE]"
    one = tap()
    assert one.feed(stream) == CHUNK
    assert one.finish() == b"data: [DONE]"


def test_an_injected_usage_chunk_without_a_blank_line_is_taken_out() -> None:
    one = tap(strip=True)
    assert passed([CHUNK, USAGE.rstrip()], one) == CHUNK
    assert one.usage == Usage(7, 3)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_tokens_are_counted_where_no_usage_comes(shape: Shape) -> None:
    for offset in range(1, len(shape.stream), 7):
        one = tap(shape)
        whole = one.feed(shape.stream[:offset]) + one.feed(shape.stream[offset:])
        deltas = whole.count(b'"content":"') + whole.count(b'"text":"') if shape is COMPLETIONS else None
        marked = whole.count(shape.dialect.marker)
        assert one.tokens == marked
        assert deltas is None or marked >= deltas


@pytest.mark.parametrize("size", [HOLD_LIMIT - 100, HOLD_LIMIT, HOLD_LIMIT + 1, 3 * HOLD_LIMIT])
@pytest.mark.parametrize("step", [1 << 16, 1 << 20])
def test_an_event_larger_than_the_hold_limit_passes_in_parts(size: int, step: int) -> None:
    stream = CHUNK + CHUNK % (b"x" * size) + CHUNK + DONE
    one = tap()
    parts = [stream[at : at + step] for at in range(0, len(stream), step)]
    held = 0
    out = b""
    for part in parts:
        out += one.feed(part)
        held = max(held, sum(map(len, parts[: parts.index(part) + 1])) - len(out))
    assert out + one.finish() == stream
    assert held <= HOLD_LIMIT + step
    assert not one.torn


def test_a_torn_event_is_known_as_torn_until_its_end() -> None:
    one = tap()
    start = b'data: {"x":"' + b"y" * (HOLD_LIMIT + 1)
    assert one.feed(CHUNK + start) == CHUNK + start
    assert one.torn
    assert one.feed(b"more") == b""
    assert one.torn
    assert one.feed(b'"}\n\n') == b'more"}\n\n'
    assert not one.torn


@pytest.mark.parametrize(
    ("data", "end"),
    [
        (b"", 0),
        (b"data: a", 0),
        (b"data: a\n", 0),
        (b"data: a\n\n", 9),
        (b"data: a\n\nb", 9),
        (b"data: a\r\n\r\n", 11),
        (b"data: a\r\n\r", 0),
        (b"data: a\r\r", 9),
        (b"\n\n", 2),
        (b"\r\r", 2),
        (b"\n\r\n", 3),
        ("data: a\u2028\u2028\u0085\u0085".encode(), 0),
        (b"a\n\nb\r\n\r\nc\n", 8),
    ],
)
def test_boundary(data: bytes, end: int) -> None:
    assert boundary(data) == end


PIECES = st.sampled_from(
    [
        CHUNK % ODD,
        CHUNK % b"a",
        USAGE,
        b": c\n\n",
        DONE,
        b"event: x\ndata: {}\n\n",
        b"\n\n",
        b"data:\n\n",
    ]
)


@given(st.lists(PIECES, max_size=12), st.lists(st.integers(0, 3000)), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
@example([b"data:\n\n", b"\n\n", USAGE], [11], True, True)
def test_any_stream_in_any_parts(pieces: list[bytes], cuts: list[int], strip: bool, dos: bool) -> None:
    whole = b"".join(pieces)
    expected = b"".join(p for p in pieces if p != USAGE) if strip else whole
    if dos:
        whole, expected = crlf(whole), crlf(expected)
    offsets = sorted({cut for cut in cuts if cut < len(whole)})
    one = tap(strip=strip)
    assert passed(split(whole, *offsets), one) == expected
    assert (one.usage is not None) == (USAGE in pieces)
