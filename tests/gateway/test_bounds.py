"""Shapes that hurt engines: a 400 that names the field, and the engine is never asked."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Bounds
from gateway.dialects import CHAT, COMPLETIONS, EMBEDDINGS, ENDPOINTS, MESSAGES, RESPONSES, TOKENS
from gateway.dialects.base import Dialect
from gateway.dialects.body import Body
from gateway.errors import InvalidRequest
from tests.support import shapes
from tests.support.client import ask
from tests.support.engine import FakeEngine, engines
from tests.support.serving import serving

BASE: dict[Dialect, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    EMBEDDINGS: {"input": "Hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
    TOKENS: {"prompt": "Hi"},
}
EVERY = tuple(BASE)
GENERATING = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


def parse(dialect: Dialect, fields: dict[str, Any], bounds: Bounds | None = None) -> None:
    raw = json.dumps({"model": "smollm2", **BASE[dialect], **fields}).encode()
    bounds = bounds or Bounds()
    dialect.parse(Body(raw, bounds.nodes), bounds)


def refused(dialect: Dialect, fields: dict[str, Any], bounds: Bounds | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(dialect, fields, bounds)
    return caught.value


def schema(inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": inner}}


def tool(parameters: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}]


def nested(levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


FIGURES = [
    ("n", 1_000_000_000),
    ("n", 5),
    ("best_of", 5),
    ("best_of", 1e9),
    ("best_of", "1000000000"),
    ("best_of", True),
    ("stop", ["x"] * 17),
    ("stop", [1]),
    ("stop", "a\0b"),
    ("stop_sequences", ["x"] * 17),
    ("bad_words", ["x"] * 129),
    ("bad_words", [[1]]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1 << 40]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", list(range(129))),
    ("stop_token_ids", 7),
    ("allowed_token_ids", [-5]),
    ("logprob_token_ids", [-5]),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"999999999999": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"٣": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "5"}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("logit_bias", [1]),
    ("logprobs", 21),
    ("top_logprobs", 21),
    ("top_logprobs", 1000.0),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", "1000"),
    ("prompt_logprobs", -1),
    ("repetition_detection", {"max_pattern_size": 10**6}),
    ("repetition_detection", 3),
    ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", "x"),
    ("prompt_embeds", "gASVAAAA"),
    ("prompt_embeds", ["gASVAAAA"]),
    ("image_embeds", "gASVAAAA"),
    ("logits_processors", ["os.system"]),
    ("mcp_servers", [{"type": "url", "url": "http://127.0.0.1"}]),
]


@pytest.mark.parametrize(("field", "value"), FIGURES, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("dialect", EVERY, ids=lambda dialect: dialect.name)
def test_figures_are_bounded_in_every_dialect(dialect: Dialect, field: str, value: object) -> None:
    error = refused(dialect, {field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 4},
        {"stop": ["x"] * 16},
        {"stop": "x"},
        {"stop": []},
        {"bad_words": ["x"] * 128},
        {"stop_token_ids": [0, 151_645]},
        {"logit_bias": {"50256": -100, "0": 0.5}},
        {"logprobs": True, "top_logprobs": 20},
        {"response_format": {"type": "json_object"}},
        {"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}},
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"tools": []},
        {"padding": nested(63)},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_what_is_within_bounds_passes(fields: dict[str, Any]) -> None:
    parse(CHAT, fields)


@pytest.mark.parametrize(
    ("dialect", "field", "value"),
    [
        (CHAT, "top_p", "high"),
        (CHAT, "top_k", 1.5),
        (CHAT, "min_p", []),
        (COMPLETIONS, "presence_penalty", {}),
        (COMPLETIONS, "min_tokens", "9"),
        (RESPONSES, "frequency_penalty", "x"),
        (RESPONSES, "repetition_penalty", True),
        (MESSAGES, "top_k", "x"),
    ],
)
def test_sampling_fields_are_numbers(dialect: Dialect, field: str, value: object) -> None:
    assert refused(dialect, {field: value}).param == field


@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty"])
def test_a_number_that_is_none_for_a_computer_is_refused(field: str) -> None:
    raw = b'{"model":"smollm2","messages":[],"%b":1e400}' % field.encode()
    with pytest.raises(InvalidRequest) as caught:
        CHAT.parse(Body(raw), Bounds())
    assert caught.value.param == field


def test_also_further_in() -> None:
    for field, value in (("messages", b'[{"role":"user","y":1e400}]'), ("metadata", b'{"a":{"b":1e999}}')):
        with pytest.raises(InvalidRequest) as caught:
            CHAT.parse(Body(b'{"model":"m","prompt":"x","%b":%b}' % (field.encode(), value)), Bounds())
        assert caught.value.param == field


@pytest.mark.parametrize(
    "value",
    [b"NaN", b"Infinity", b"-Infinity", b'"\\ud800"', b'"\\udc00x"', b'"\\ud800\\u0041"', b'"a\0b"', b"01"],
)
def test_what_is_no_json_is_refused_also_where_it_is_not_read(value: bytes) -> None:
    for raw in (b'{"model":"smollm2","messages":[],"x":%b}', b'{"model":"smollm2","messages":[],"x":[%b]}'):
        with pytest.raises(InvalidRequest):
            Body(raw % value)


# prompts


@pytest.mark.parametrize(
    "prompt",
    [
        ["x"] * 9,
        [[1, 2]] * 9,
        [1, -2],
        [[1], [-2]],
        [1, "x"],
        [1, True],
        [1.5],
        [[1], {"prompt_embeds": "gASV"}],
        {"prompt_embeds": "gASV"},
        [[[1]]],
        7,
    ],
    ids=lambda prompt: str(prompt)[:30],
)
def test_prompts_are_texts_or_token_ids(prompt: object) -> None:
    assert refused(COMPLETIONS, {"prompt": prompt}).param == "prompt"
    if prompt not in (["x"] * 9, [[1, 2]] * 9):
        assert refused(EMBEDDINGS, {"input": prompt}).param == "input"
        assert refused(TOKENS, {"tokens": prompt}).param == "tokens"


@pytest.mark.parametrize("prompt", ["x" * 5000, ["x"] * 8, [1] * 5000, [[1, 2], [3]], ["x", [1]], []])
def test_prompts_within_bounds_pass(prompt: object) -> None:
    parse(COMPLETIONS, {"prompt": prompt})


def test_many_texts_may_be_embedded_at_once() -> None:
    parse(EMBEDDINGS, {"input": ["x"] * 2048})
    assert refused(EMBEDDINGS, {"input": ["x"] * 2049}).param == "input"


# depth and nodes


@pytest.mark.parametrize("dialect", EVERY, ids=lambda dialect: dialect.name)
def test_nesting_is_bounded(dialect: Dialect) -> None:
    parse(dialect, {"deep": nested(63), "text": {}, "flat": [[]] * 500})
    error = refused(dialect, {"other": [1], "deep": nested(64)})
    assert error.param == "deep"
    assert "bounds.depth" in error.message


@pytest.mark.parametrize("levels", [100, 3000, 100_000])
def test_what_is_said_to_the_model_may_nest_no_more(levels: int) -> None:
    value = b"[" * levels + b"]" * levels
    for dialect, field in (
        (CHAT, "messages"),
        (RESPONSES, "input"),
        (MESSAGES, "system"),
        (EMBEDDINGS, "messages"),
        (TOKENS, "messages"),
    ):
        base = json.dumps({"model": "m", **{k: v for k, v in BASE[dialect].items() if k != field}})
        with pytest.raises(InvalidRequest) as caught:
            dialect.parse(Body(base[:-1].encode() + b', "%b": %b}' % (field.encode(), value)), Bounds())
        assert (caught.value.param, "bounds.depth" in caught.value.message) == (field, True)


@pytest.mark.parametrize("levels", [70, 400, 900])
def test_nor_may_contents_inside_contents(levels: int) -> None:
    inner: Any = "x"
    for _ in range(levels):
        inner = {"content": inner}
    for dialect, field in (
        (CHAT, "messages"),
        (RESPONSES, "input"),
        (MESSAGES, "messages"),
        (MESSAGES, "system"),
    ):
        assert refused(dialect, {field: [inner]}).param == field


def test_a_part_in_a_list_of_lists_is_found() -> None:
    content = [[[{"image_url": "http://10.0.0.1/"}]]]
    assert refused(CHAT, {"messages": [{"role": "user", "content": content}]}).param == "messages"


def test_brackets_in_texts_do_not_nest() -> None:
    for text in ("[" * 500, '["' * 500, "\\[" * 500, '\\"[{' * 500, ',"' * 500):
        parse(CHAT, {"messages": [{"role": "user", "content": text}], "x": {text: text}})


def test_values_are_counted() -> None:
    bounds = Bounds(nodes=1000)
    parse(CHAT, {"many": list(range(900)), "text": '"x",' * 5000}, bounds)
    for many in (list(range(1001)), [[]] * 1001, {str(i): "," for i in range(1001)}, ["a,b"] * 1001):
        error = refused(CHAT, {"x": "[", "many": many}, bounds)
        assert (error.param, "bounds.nodes" in error.message) == ("many", True)


# addresses


BAD_ADDRESSES = [
    "http://169.254.169.254/latest/meta-data",
    "https://example.com/a.png",
    "file:///etc/passwd",
    "ftp://example.com/x",
    "//example.com/x",
    "data://example.com/x",
    " data:image/png;base64,AAAA",
    "",
    7,
    ["data:image/png;base64,AAAA"],
    {"detail": "low"},
    {"url": "http://localhost:8081/"},
    {"url": 7},
]


@pytest.mark.parametrize("address", BAD_ADDRESSES, ids=str)
def test_an_engine_fetches_nothing(address: Any) -> None:
    for kind in ("image_url", "audio_url", "video_url", "file_url", "anything_url"):
        for part in (
            {"type": kind, kind: address},
            {kind: address},
            {"type": "text", "text": "x", kind: address},
        ):
            content = [{"type": "text", "text": "x"}, part]
            for dialect in (CHAT, TOKENS, EMBEDDINGS, MESSAGES):
                error = refused(dialect, {"messages": [{"role": "user", "content": content}]})
                assert error.param == "messages"
                assert error.message.startswith(f"messages[0].content[1].{kind}")
    item = {"role": "user", "content": [{"type": "input_image", "image_url": address}]}
    assert refused(RESPONSES, {"input": [item]}).param == "input"
    output = {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": address}}
    assert refused(RESPONSES, {"input": [output]}).param == "input"


def test_nor_an_address_inside_a_file_or_sound() -> None:
    for part in (
        {"type": "file", "file": {"file_url": "http://x.y"}},
        {"type": "input_audio", "input_audio": {"audio_url": {"url": "http://x.y"}}},
    ):
        assert refused(CHAT, {"messages": [{"role": "user", "content": [part]}]}).param == "messages"
        assert refused(RESPONSES, {"input": [{"role": "user", "content": [part]}]}).param == "input"


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/x"}},
        {"type": "document", "source": {"type": "url", "url": "https://example.com/x"}},
        {
            "type": "tool_result",
            "content": [{"type": "image", "source": {"type": "url", "url": "http://x.y"}}],
        },
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "x", "image_url": "http://x.y"}]},
        },
    ],
    ids=str,
)
def test_nor_from_anthropics_blocks(block: Any) -> None:
    assert refused(MESSAGES, {"messages": [{"role": "user", "content": [block]}]}).param == "messages"
    assert refused(MESSAGES, {"system": [block]}).param == "system"


@pytest.mark.parametrize("kind", ["image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"])
def test_nothing_is_unpickled(kind: str) -> None:
    for part in (
        {"type": kind, kind: "gASV"},
        {"type": kind, "data": "gASV"},
        {kind: {"x": "gASV"}, "uuid": "1"},
    ):
        for dialect in (CHAT, TOKENS, EMBEDDINGS, MESSAGES):
            assert refused(dialect, {"messages": [{"role": "user", "content": [part]}]}).param == "messages"
        assert refused(RESPONSES, {"input": [{"role": "user", "content": [part]}]}).param == "input"


def test_bytes_of_media_pass() -> None:
    image = "data:image/png;base64,iVBORw0KGgo="
    parts = [
        {"type": "text", "text": "see http://example.com/x.png"},
        {"type": "image_url", "image_url": {"url": image, "detail": "low"}},
        {"type": "image_url", "image_url": image},
        {"type": "image_url", "image_url": None, "uuid": "seen-before"},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "tool_use", "id": "t", "name": "fetch", "input": {"image_url": "http://example.com/"}},
    ]
    for dialect in (CHAT, TOKENS, EMBEDDINGS, MESSAGES):
        parse(dialect, {"messages": [{"role": "user", "content": parts}, {"role": "user", "content": "x"}]})
    parse(RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": image}]}]})


ALLOWED = Bounds(fetch=("images.example.com", "*.example.org"))


@pytest.mark.parametrize(
    ("address", "passes"),
    [
        ("https://images.example.com/a.png?x=1", True),
        ("HTTPS://IMAGES.example.com:443/a.png", True),
        ("https://a.b.example.org/", True),
        ("https://example.org/", False),
        ("https://notexample.org/", False),
        ("https://images.example.com.evil.net/", False),
        ("https://images.example.com@evil.net/", False),
        ("https://user:pass@images.example.com/", False),
        ("https://evil.net#@images.example.com/", False),
        ("https://evil.net\\@images.example.com/", False),
        ("https://images.example.com:8080/", False),
        ("https://images.example.com:99999/", False),
        ("https://images.example.com./", False),
        ("https://images%2eexample.com/", False),
        ("https://images.example.com\t/", False),
        ("ftp://images.example.com/", False),
        ("https:images.example.com/", False),
        ("https:///images.example.com/", False),
    ],
)
def test_an_operator_may_name_hosts(address: str, passes: bool) -> None:
    fields = {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}]
    }
    if passes:
        parse(CHAT, fields, ALLOWED)
    else:
        assert "bounds.fetch" in refused(CHAT, fields, ALLOWED).message


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "127.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "localhost",
        "①②⑦.0.0.1",
        "1.2.3.0x4",
    ],
)
def test_any_host_is_still_no_address_of_a_machine(host: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": f"http://{host}/"}}]
    fields = {"messages": [{"role": "user", "content": content}]}
    refused(CHAT, fields, Bounds(fetch=("*",)))


# schemas, patterns, grammars

CYCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
LOOP = {"$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
LIST = {
    "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}},
    "$ref": "#/$defs/n",
}
BAD_EVERYWHERE = [
    CYCLE,
    LOOP,
    {"$ref": "#"},
    {"$ref": "http://10.0.0.1/schema.json"},
    {"$ref": "file:///etc/passwd"},
    {"properties": {"x": {"$ref": "other.json#/x"}}},
    {"$defs": {"unused": {"$ref": "http://10.0.0.1/"}}},
    {"type": "object", "properties": {"x": {"type": "something"}}},
    {"type": ["string", "function"]},
    {"type": 7},
    {"type": []},
    {"type": None},
    {"items": [{"type": "something"}]},
    {"anyOf": [{"items": {"type": "any"}}]},
    {"type": "string", "pattern": "["},
    {"type": "string", "pattern": 7},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "pattern": "((a{100}){100}){100}"},
    {"patternProperties": {"(": {"type": "string"}}},
    {"propertyNames": {"pattern": "*"}},
    {"additionalProperties": {"not": {"if": {"pattern": "(?P<"}}}},
    {"properties": [1]},
    {"properties": {"x": "string"}},
    {"anyOf": {"x": 1}},
    {"type": "array", "minItems": 10**9},
    {"type": "string", "minLength": 10**9},
    "object",
    [1],
]


@pytest.mark.parametrize("bad", BAD_EVERYWHERE, ids=lambda bad: str(bad)[:50])
def test_a_schema_that_no_grammar_can_be_made_of(bad: Any) -> None:
    for fields in (
        {"response_format": schema(bad)},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": bad}}},
        {"guided_json": bad},
        {"guided_json": json.dumps(bad)},
        {"structured_outputs": {"json": bad}},
        {"structured_outputs": {"json": json.dumps(bad)}},
        {
            "structured_outputs": {
                "structural_tag": json.dumps({"structures": [{"begin": "<", "schema": bad}]})
            }
        },
        {"response_format": {"type": "structural_tag", "structures": [{"begin": "<", "schema": bad}]}},
        {"response_format": {"type": "structural_tag", "format": {"elements": [{"json_schema": bad}]}}},
        {"tools": tool(bad)},
        {"tools": tool(bad), "tool_choice": "auto"},
        {"functions": [{"name": "f", "parameters": bad}]},
    ):
        (name, _), *_ = fields.items()
        for dialect in (CHAT, COMPLETIONS, TOKENS):
            error = refused(dialect, fields)
            assert error.param == name
            assert error.message.startswith(name)
    text = {"format": {"type": "json_schema", "name": "x", "schema": bad}}
    assert refused(RESPONSES, {"text": text}).param == "text"
    assert (
        refused(RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": bad}]}).param == "tools"
    )
    assert refused(MESSAGES, {"tools": [{"name": "f", "input_schema": bad}]}).param == "tools"
    output = {"format": {"type": "json_schema", "schema": bad}}
    assert refused(MESSAGES, {"output_config": output}).param == "output_config"


GOOD = [
    {},
    True,
    None,
    {"type": "object", "properties": {"type": {"type": "string"}, "pattern": {"type": ["string", "null"]}}},
    {"type": "object", "properties": {"$ref": {"type": "string"}}, "additionalProperties": False},
    {
        "enum": ["something", {"type": "something"}],
        "default": {"type": "x"},
        "examples": [{"$ref": "http://x"}],
    },
    {"$defs": {"a": {"type": "string"}, "b/c~": {"$ref": "#/$defs/a"}}, "items": {"$ref": "#/$defs/b~1c~0"}},
    {"type": "string", "pattern": r"^[a-z0-9]+(?:-[a-z0-9]+)*$"},
    {
        "type": "string",
        "pattern": r"^(?!\.)(?!.*\.\.)([\w'+\-\.]*)[\w+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    },
    {"type": "string", "pattern": r"^\p{L}[\p{L}\d_]{0,63}$"},
    {"type": "string", "pattern": r"^[\w-.]+@([\w-]+\.)+[a-z+-\d]{2,4}\d-\d$"},
    {"type": "string", "pattern": r"(?<year>\d{4})-\k<year>\/\u{1F600}"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 10**9, "prefixItems": []},
    {"allOf": [{"if": {"required": ["x"]}, "then": {"minimum": 1}}], "not": {"type": "null"}},
]


@pytest.mark.parametrize("good", GOOD, ids=lambda good: str(good)[:50])
def test_schemas_in_use_pass(good: Any) -> None:
    parse(CHAT, {"response_format": schema(good)})
    parse(CHAT, {"tools": tool(good, strict=True), "tool_choice": "required"})
    parse(MESSAGES, {"tools": [{"name": "f", "input_schema": good}]})
    parse(RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": good}]})


def test_a_recursive_schema_is_refused_where_it_becomes_a_grammar() -> None:
    parse(CHAT, {"tools": tool(LIST)})
    parse(CHAT, {"tools": tool({"properties": {"x": {"$ref": "#/$defs/not_there"}}}), "tool_choice": "auto"})
    for fields in (
        {"response_format": schema(LIST)},
        {"tools": tool(LIST), "tool_choice": "required"},
        {"tools": tool(LIST), "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": tool(LIST, strict=True)},
        {"tools": tool({"$ref": "#/$defs/not_there"}, strict=True)},
    ):
        refused(CHAT, fields)
    assert "bounds.recursion" in refused(CHAT, {"response_format": schema(LIST)}).message
    parse(CHAT, {"response_format": schema(LIST)}, Bounds(recursion=True))
    refused(CHAT, {"response_format": schema(CYCLE)}, Bounds(recursion=True))


def test_what_passed_once_is_checked_again_where_it_counts_for_more() -> None:
    tools = tool(LIST)
    for _ in range(2):
        parse(CHAT, {"tools": tools})
        refused(CHAT, {"tools": tools, "tool_choice": "required"})


BAD_PATTERNS = [
    "[",
    "(",
    "a{2,1}",
    "*a",
    r"\q",
    "(a+)+",
    "(a*)*b",
    "((a+))*",
    "(?:a|b+)*",
    "(?:(a+)?)*",
    "(a+){2,}",
    "a{100000}",
    "(a{1000}){1000}",
    "a{1,99999999999999999999}",
    "(" * 70 + "a" + ")" * 70,
    "x" * 10_001,
    "a\0",
]


@pytest.mark.parametrize("pattern", BAD_PATTERNS, ids=lambda pattern: pattern[:30])
def test_patterns_that_do_not_compile_or_explode(pattern: str) -> None:
    for fields in ({"guided_regex": pattern}, {"structured_outputs": {"regex": pattern}}):
        (name, _), *_ = fields.items()
        assert refused(CHAT, fields).param == name


@pytest.mark.parametrize(
    "pattern",
    [
        "a+b+",
        "(a+b)+",
        "[(+*]{3}",
        r"\(\+\)+",
        "(?:ab){1,40}",
        "a{10000}",
        "(?i)x",
        "(a|b)*c?",
        "[]a]+",
        "",
        "a{,3}",
    ],
)
def test_patterns_in_use_pass(pattern: str) -> None:
    parse(CHAT, {"guided_regex": pattern})


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= " + "(" * 65 + '"a"' + ")" * 65,
        'root ::= root "a" | "a"',
        'root ::= x "a"\nx ::= (root | "b")',
        "root ::= \0",
        7,
        {"x": 1},
    ],
    ids=lambda grammar: str(grammar)[:30],
)
def test_grammars_that_nest_or_recurse_without_end(grammar: Any) -> None:
    assert refused(CHAT, {"guided_grammar": grammar}).param == "guided_grammar"
    assert refused(CHAT, {"structured_outputs": {"grammar": grammar}}).param == "structured_outputs"


@pytest.mark.parametrize(
    "made",
    [
        {"type": "grammar", "syntax": "lark", "definition": "start: " + "(" * 70},
        {"type": "grammar", "syntax": "regex", "definition": "(a+)+"},
    ],
)
def test_grammars_of_custom_tools_are_checked(made: dict[str, Any]) -> None:
    flat = [{"type": "custom", "name": "f", "format": made}]
    assert refused(RESPONSES, {"tools": flat}).param == "tools"
    wrapped = [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": made}}}]
    assert refused(CHAT, {"tools": wrapped}).param == "tools"


def test_a_grammar_in_use_passes() -> None:
    parse(CHAT, {"guided_grammar": 'start: sum\nsum: sum "+" NUMBER | NUMBER\nNUMBER: /[0-9]+/'})
    grammar = 'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= "(" expr ")" | [0-9]+ | "((((" '
    parse(CHAT, {"guided_grammar": grammar})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": schema({"description": "x" * (64 << 10)})}, "response_format"),
        ({"guided_json": {"description": "x" * (64 << 10)}}, "guided_json"),
        ({"guided_grammar": "x" * (65 << 10)}, "guided_grammar"),
        ({"guided_choice": ["x" * 70] * 1000}, "guided_choice"),
        ({"tools": tool({"description": "x" * (64 << 10)})}, "tools"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_large_schemas_are_refused(fields: dict[str, Any], name: str) -> None:
    error = refused(CHAT, fields)
    assert (error.param, "bounds.schema" in error.message) == (name, True)


def test_patterns_are_bounded_in_all() -> None:
    one = {"type": "string", "pattern": "x" * 900}
    many = {"properties": {str(i): one for i in range(12)}}
    assert "bounds.pattern" in refused(CHAT, {"response_format": schema(many)}).message
    parse(CHAT, {"response_format": schema({"properties": {str(i): one for i in range(11)}})})


def test_all_tools_are_bounded_together() -> None:
    error = refused(CHAT, {"tools": tool({"description": "x" * (60 << 10)}) * 5})
    assert (error.param, "bounds.tools" in error.message) == ("tools", True)


@pytest.mark.parametrize(
    "bad", ["text", {"type": "mcp", "server_label": "x"}, {"server_url": "http://10.0.0.1"}]
)
def test_no_server_of_a_client_is_called(bad: object) -> None:
    for dialect in GENERATING:
        assert refused(dialect, {"tools": [bad]}).param == "tools"


def test_hostile_schemas_and_patterns_are_looked_at_once() -> None:
    """Each of these took seconds to minutes where a part was read again for every way that leads to it."""
    name = "definition"
    spelt = ["".join(f"%{ord(c):02X}" if i >> k & 1 else c for k, c in enumerate(name)) for i in range(700)]
    refs = [{"$ref": f"#/{one}"} for one in spelt]
    parse(CHAT, {"guided_json": {name: {"allOf": [{}] * 5000}, "allOf": refs}})
    deep: dict[str, Any] = {}
    for _ in range(55):
        deep = {"items": deep}
    refs = [{"$ref": f"#/deep{'/items' * level}"} for level in range(50)]
    parse(CHAT, {"guided_json": {"deep": deep, "allOf": refs * 5}})
    for text in ('"' * 60_000, "[" * 60_000, "a" * 60_000, "|" * 60_000, '"\\' * 30_000, "a::=" * 15_000):
        with contextlib.suppress(InvalidRequest):
            parse(CHAT, {"guided_grammar": text})
    for pattern in ("[" * 9999, "\\p{" * 2400, "{" * 9999, "a?" * 4999, "(?P<" * 60):
        with contextlib.suppress(InvalidRequest):
            parse(CHAT, {"guided_regex": pattern})


def test_many_tools_may_be_larger_than_one_schema() -> None:
    parse(CHAT, {"tools": tool({"description": "x" * (60 << 10)}) * 4})


def test_a_chain_of_references_is_followed_without_recursion() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)}
    parse(CHAT, {"guided_json": {"$defs": {**chain, "d1500": {"type": "null"}}, "$ref": "#/$defs/d0"}})


@pytest.mark.parametrize(
    ("dialect", "field"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (COMPLETIONS, "max_tokens"),
        (RESPONSES, "max_output_tokens"),
        (MESSAGES, "max_tokens"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
@pytest.mark.parametrize("tokens", [1 << 31, 10**30, 10**400], ids=["33 bits", "large", "no double"])
def test_the_output_is_bounded_by_what_engines_count_in(dialect: Dialect, field: str, tokens: int) -> None:
    parse(dialect, {field: (1 << 31) - 1})
    error = refused(dialect, {field: tokens})
    assert (error.param, error.message) == (field, f"{field} must be at most 2147483647")


# on the wire

ON_THE_WIRE = [
    ({"n": 1_000_000_000}, "n"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"tools": tool({"type": "something"})}, "tools"),
    ({"response_format": schema(CYCLE)}, "response_format"),
    ({"deep": nested(70)}, "deep"),
    ({"prompt_embeds": "gASV"}, "prompt_embeds"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
]


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=shapes.IDS)
async def test_the_engine_is_never_asked(tmp_path: Path, shape: shapes.Shape) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        for fields, param in ON_THE_WIRE:
            answer = await ask(served.port, shape.path, shape.ask(**fields))
            assert param in shapes.check_error(answer, 400, shape=shape, param=param)
        assert engine.generations == 0


async def test_bounds_are_the_deployments(tmp_path: Path) -> None:
    engine = FakeEngine()
    bounds = {"depth": 8, "n": 1}
    async with engines(engine), serving(tmp_path, {"fast": engine}, bounds=bounds) as served:
        for fields, param in (({"n": 2}, "n"), ({"x": nested(8)}, "x")):
            answer = await ask(served.port, shapes.CHAT.path, shapes.CHAT.ask(**fields))
            shapes.check_error(answer, 400, param=param)
        assert engine.generations == 0


def test_every_body_is_checked() -> None:
    """No dialect has a way of its own around the checks."""
    assert {endpoint.dialect for endpoint in ENDPOINTS.values()} == set(EVERY)
    assert all("parse" not in vars(kind) for dialect in EVERY for kind in type(dialect).__mro__[:-3])
