"""A body is changed by whole top-level fields; everything else reaches the engine as it came."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.body import OBJECT, WHOLE, Body, Field, Fields
from gateway.errors import InvalidRequest


def test_an_unchanged_body_is_the_clients_bytes() -> None:
    raw = b' { "a" : 1.0 , "b":"\\u00e9\\/" ,"c":[ ] }\n'
    assert Body(raw).encode() is raw


@pytest.mark.parametrize(
    "value",
    [
        b"123456789012345678901234567890",
        b"-0",
        b"0.10000000000000000555",
        b"1E400",
        b"1e-07",
        b'"\\u2028\\ud83d\\ude00"',
        '"日本語 😀 \u2028\u0085"'.encode(),
        b"[1, 2,  3]",
        b'{"b": 1, "a": {"null": null}}',
        b"true",
    ],
    ids=str,
)
def test_values_beside_a_change_keep_their_bytes(value: bytes) -> None:
    body = Body(b'{"model":"a","x":%b}' % value)
    body.set("model", "b")
    assert body.encode() == b'{"model":"b","x":%b}' % value


def test_nulls_are_left_out_at_the_top_only() -> None:
    body = Body(b'{"a": null, "b": {"c": null}, "d": [null], "e": "null"}')
    assert body.encode() == b'{"b":{"c": null},"d":[null],"e":"null"}'
    assert "a" not in body
    assert body.dropped == []


@pytest.mark.parametrize(
    "raw",
    [
        b'{"n": 1000000000, "x": 1, "n": 2}',
        b'{"n":1,"x":1,"n":1}',
        b'{"n": 1, "n": null}',
        b'{"n":null,"n":1}',
        b'{"\\u006e":1000000000,"n":2}',
        # As long as the fields that count would be with Python's blanks.
        b'{"n":1,"n":1,"abcdef":2,"b":3,"c":4}',
        b'{\n  "n": 1,\n  "n": 2\n}',
        '{"é": 1, "n":2, "n":3}'.encode(),
    ],
    ids=str,
)
def test_a_field_that_is_given_twice_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Body(raw)
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b"{ }",
        b'{"n":1,"x":{"n":2,"m":{"n":3}}}',
        b'{"n": 1, "x": [{"n": 2}, {"n": 3}]}',
        b'{\n  "n": 1,\n  "x": "\\"n\\": 1, "\n}',
        b'{"n" :123456789012345678901234567890,"x": 1E400}',
        '{"é": "n", "n":2}'.encode(),
    ],
    ids=str,
)
def test_names_may_come_again_further_in(raw: bytes) -> None:
    assert Body(raw).encode() is raw


def test_names_are_read_through_escapes() -> None:
    assert Body(b'{"chat\\u005ftemplate": 1}').get("chat_template", WHOLE) == 1


def test_dropped_fields_are_named() -> None:
    body = Body(b'{"a": 1, "b": 2}')
    body.drop("a")
    body.drop("nope")
    assert body.encode() == b'{"b":2}'
    assert body.dropped == ["a"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"1",
        b"[]",
        b"{",
        b"{'a': 1}",
        b'{"a": 1} {"b": 2}',
        b'{"a": 1,}',
        b'{"a": NaN}',
        b'{"a": "\xff"}',
        b'{"\xc3\x28": 1}',
        b'{"a": "\x01"}',
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": ' + b"[" * 200_000,
        '{"a": 1}'.encode("utf-16"),
    ],
    ids=lambda raw: str(raw[:20]),
)
def test_what_is_not_one_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Body(raw)


def test_deep_nesting_is_refused_where_it_is_read_and_never_fatal() -> None:
    raw = b'{"a": %b%b, "n": 1}' % (b"[" * 5000, b"]" * 5000)
    try:
        body = Body(raw)
    except InvalidRequest:
        return
    with pytest.raises(InvalidRequest, match="a must be"):
        body.get("a", Field(list[Any], "a list"))
    assert body.encode() == raw


@pytest.mark.parametrize(
    ("field", "value"),
    [(WHOLE, b"1.5"), (WHOLE, b'"1"'), (WHOLE, b"true"), (OBJECT, b"[]"), (Field(bool, "x"), b"1")],
    ids=str,
)
def test_a_field_of_another_type_is_named(field: Field[Any], value: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Body(b'{"a": %b}' % value).get("a", field)
    assert caught.value.param == "a"
    assert caught.value.message == f"a must be {field.expected}"


class Shape(msgspec.Struct):
    n: int | None = None
    options: dict[str, Any] | None = None
    items: list[Any] | None = None
    anything: Any = None


def test_fields_are_read_in_one_go_and_others_skipped() -> None:
    read = Fields(Shape).read(b'{"n": 3, "unknown": {"deep": [1]}, "anything": [1, {"a": null}]}')
    assert (read.n, read.options, read.anything) == (3, None, [1, {"a": None}])


@pytest.mark.parametrize(
    ("raw", "param", "message"),
    [
        (b'{"n": "3"}', "n", "n must be an integer"),
        (b'{"options": 1}', "options", "options must be an object"),
        (b'{"items": {}}', "items", "items must be a list"),
    ],
)
def test_fields_of_another_type_are_named(raw: bytes, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Fields(Shape).read(raw)
    assert (caught.value.param, caught.value.message) == (param, message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=6), st.booleans())
def test_any_object_keeps_its_meaning(fields: dict[str, Any], ascii_only: bool) -> None:
    raw = json.dumps(fields, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return
    body = Body(raw)
    body.set("model", "b")
    expected = {name: value for name, value in fields.items() if value is not None}
    assert json.loads(body.encode()) == {**expected, "model": "b"}
