from __future__ import annotations

import contextlib
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.document import MAX_DEPTH, ProblemsError, convert, load, nearest


def problems(text: str) -> list[str]:
    with pytest.raises(ProblemsError) as caught:
        load(text, "f.yaml")
    return [str(d) for d in caught.value.diagnostics]


def test_scalars_follow_yaml_1_2() -> None:
    value = load("[yes, on, no, 12:30, 1_000, 010, 0x10, 1e3, .5, 2027-01-01, ~, true, '1', \"\"]", "f").value
    assert value == [
        "yes",
        "on",
        "no",
        "12:30",
        "1_000",
        10,
        16,
        1000.0,
        0.5,
        "2027-01-01",
        None,
        True,
        "1",
        "",
    ]


def test_positions_of_values_and_keys() -> None:
    document = load("a: 1\nb:\n  - x: deep\n    y: [1,  2]\n", "f")
    assert document.position(("b", 0, "y", 1)) == (4, 13)
    assert document.position(("b", 0, "y"), key=True) == (4, 5)
    assert document.position(("b", 0, "missing")) == (3, 5)
    assert document.position(()) == (1, 1)


def test_an_alias_stands_where_its_anchor_does() -> None:
    document = load("a: &x {k: v}\nb: *x\n", "f")
    assert document.value["b"] == {"k": "v"}
    assert document.position(("b", "k")) == (1, 11)


def test_escapes_of_a_surrogate_pair_are_one_character() -> None:
    assert load(r'{"\ud83d\ude00": "\ud83d\ude00"}', "f").value == {"\U0001f600": "\U0001f600"}


def test_tabs_that_indent_come_with_what_to_do() -> None:
    (said,) = problems("a:\n\tb: 1")
    assert said.endswith("that cannot start any token: indent with blanks")


def test_an_empty_text_is_none() -> None:
    assert load("", "f").value is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", ["f.yaml:2:1: error: duplicate key `a`: it is already given on line 1"]),
        (
            "a: [1,\n",
            ["f.yaml:2:1: error: not valid YAML: while parsing a flow node, expected the node content, "],
        ),
        (
            "a: !!python/object:os.system x",
            ["f.yaml:1:4: error: tags are not read: remove `!!python/object:os.system`"],
        ),
        ("a: !!int 1", ["f.yaml:1:4: error: tags are not read: remove `!!int`"]),
        (
            "a:\n\tb: 1",
            [r"f.yaml:2:1: error: not valid YAML: while scanning for the next token, found character '\t' "],
        ),
        (
            'a: "\\ud83d"',
            ["f.yaml:1:4: error: half a surrogate pair is no character: write the character itself"],
        ),
        (
            '"\\ude00": 1',
            ["f.yaml:1:1: error: half a surrogate pair is no character: write the character itself"],
        ),
        ('a: "b\\0"', ["f.yaml:1:4: error: a text cannot have the character `\\0`: remove it"]),
        ("a: .nan", ["f.yaml:1:4: error: `.nan` is not a finite number; quote it if it is meant as text"]),
        ("a: 1e999", ["f.yaml:1:4: error: the number is too large"]),
        ("a: 1\n---\nb: 2\n", ["f.yaml:2:1: error: a second document: only one is read"]),
        ("a: *b", ["f.yaml:1:4: error: alias `*b` is not defined before"]),
        ("a: &b [*b]", ["f.yaml:1:8: error: alias `*b` contains itself"]),
        ("? [1]\n: 2\n", ["f.yaml:1:3: error: a key must be a plain name"]),
        ("a: b\0c", ["f.yaml:1:5: error: character '\\x00' is not allowed in YAML"]),
        ("<<: {a: 1}", ["f.yaml:1:1: error: merge keys (`<<`) are not read: write the keys out"]),
        ("{a: 1, a: 2, b: .inf}", ["f.yaml:1:8: error: duplicate", "f.yaml:1:17: error: `.inf` is not"]),
    ],
)
def test_what_is_refused(text: str, expected: list[str]) -> None:
    found = problems(text)
    assert len(found) == len(expected)
    assert all(f.startswith(e) for f, e in zip(found, expected, strict=True)), found


def test_aliases_cannot_blow_up() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "aliases expand to more than" in problems("\n".join(lines))[0]


def test_depth_is_bounded() -> None:
    assert f"nested deeper than {MAX_DEPTH} levels" in problems("[" * 5000)[0]
    chain = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, MAX_DEPTH + 2)]
    assert "aliases nest deeper" in problems("\n".join(chain))[0]


def test_size_is_bounded() -> None:
    assert "the file is too large" in problems("#" * 2_000_000)[0]
    assert "more than 20000 values" in problems("[" + "a," * 30_000 + "]")[0]


@settings(deadline=None)
@given(
    st.text(alphabet=st.sampled_from("ab:-[]{}&*!|>'\"#%@,?~01.eE\\xuU \n\t"), max_size=60)
    | st.text(max_size=40)
)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(ProblemsError):
        assert load(text, "f").position() >= (1, 1)


def test_expand_rewrites_scalars_before_their_type() -> None:
    def expand(text: str) -> str:
        if text == "${NONE}":
            raise ValueError("NONE is not set")
        return text.replace("${PORT}", "8080")

    assert load("a: ${PORT}\nb: 'x${PORT}'", "f", expand=expand).value == {"a": 8080, "b": "x8080"}
    with pytest.raises(ProblemsError, match=r"^f:2:4: error: NONE is not set$"):
        load("a: 1\nb: ${NONE}", "f", expand=expand)


class Part(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    kind: Literal["vllm", "external"] = "vllm"


class Whole(msgspec.Struct, forbid_unknown_fields=True, rename={"class_": "class"}):
    parts: list[Part]
    by_name: dict[str, Part] = {}
    class_: int | None = None


def test_convert_gives_the_struct() -> None:
    document = load("parts: [{name: a, share: 1}]\nby_name: {x: {name: b}}\nclass: 3", "f")
    assert convert(document, Whole) == Whole([Part("a", 1.0)], {"x": Part("b")}, 3)
    assert convert(document, Part, path=("parts", 0)) == Part("a", 1.0)


def test_convert_reports_every_problem_where_it_stands() -> None:
    text = """\
parts:
  - {nam: a}
  - {name: 1, share: 2}
  - name: x
    kind: extrenal
by_name:
  x: {name: b, share: '0.5'}
clas: 1
"""
    with pytest.raises(ProblemsError) as caught:
        convert(load(text, "f"), Whole)
    assert [str(d) for d in caught.value.diagnostics] == [
        "f:2:5: error: the key `name` is missing",
        "f:2:6: error: unknown key `nam`; did you mean `name`?",
        "f:3:12: error: expected `str`, got `int`",
        "f:3:22: error: expected `float` <= 1.0",
        "f:5:11: error: unknown value `extrenal`; did you mean `external`?",
        "f:7:23: error: expected `float | null`, got `str`",
        "f:8:1: error: unknown key `clas`; did you mean `class`?",
    ]


def test_convert_of_a_wrong_top() -> None:
    with pytest.raises(ProblemsError, match=r"^f:1:1: error: expected `object`, got `array`$"):
        convert(load("[1]", "f"), Whole)


def test_nearest() -> None:
    assert nearest("prompt_token", ["prompt_tokens", "turns"]) == "prompt_tokens"
    assert nearest("Fast", ["fast", "exact"]) == "fast"
    assert nearest("zzz", ["fast", "exact"]) is None
