from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import parity
from engines.allowed import ASPECTS, NOTHING, Allowance
from engines.parity import ParityError
from engines.spec import EngineSpec

CONFIG = {"model_type": "llama", "hidden_size": 8, "max_position_embeddings": 4096, "eos_token_id": 2}
TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
TOKENIZER_CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [{"id": 0, "content": "<s>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 1, "b": 2, "ab": 3}, "merges": ["a b"]},
}
GENERATION = {"eos_token_id": [2, 3], "temperature": 0.6}


ALL = Allowance(frozenset(ASPECTS))


def spec(name: str, *args: str) -> EngineSpec:
    return EngineSpec(name, name, "vllm", "http://127.0.0.1:1", "m", "awq", model="m", args=args)


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir()
    whole: dict[str, Any] = {
        "config": CONFIG,
        "tokenizer_config": TOKENIZER_CONFIG,
        "tokenizer": TOKENIZER,
        "generation_config": GENERATION,
        **files,
    }
    for name, content in whole.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """The aspects in which an engine with other files or flags differs from the usual one."""

    def compared(*args: str, **files: Any) -> tuple[str, ...]:
        folders = {"fast": write(tmp_path / "fast"), "exact": write(tmp_path / "exact", **files)}
        engines = [spec("fast"), spec("exact", *args)]
        found = parity.check(engines, folders, ALL)
        if found:
            with pytest.raises(ParityError):
                parity.check(engines, folders)
        return tuple(difference.aspect for difference in found)

    return compared


def test_copies_of_one_model_agree(compare: Callable[..., tuple[str, ...]]) -> None:
    assert compare() == ()


@pytest.mark.parametrize(
    ("files", "aspect"),
    [
        ({"config": {**CONFIG, "hidden_size": 16}}, "model"),
        ({"tokenizer": {**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": {"a": 1}}}}, "tokenizer"),  # type: ignore[dict-item]
        ({"tokenizer": {**TOKENIZER, "normalizer": {"type": "NFC"}}}, "tokenizer"),
        ({"tokenizer": None}, "tokenizer"),
        ({"tokenizer_config": {**TOKENIZER_CONFIG, "chat_template": TEMPLATE + "x"}}, "chat_template"),
        ({"chat_template": {"chat_template": "{{ messages }}"}}, "chat_template"),
        ({"tokenizer_config": {**TOKENIZER_CONFIG, "bos_token": "<b>"}}, "special_tokens"),
        ({"tokenizer_config": {**TOKENIZER_CONFIG, "add_bos_token": True}}, "special_tokens"),
        ({"generation_config": {**GENERATION, "eos_token_id": [2, 4]}}, "eos"),
        ({"config": {**CONFIG, "max_position_embeddings": 8192}}, "max_length"),
        ({"generation_config": {**GENERATION, "temperature": 1.0}}, "sampling"),
        ({"generation_config": {**GENERATION, "top_k": 0}}, "sampling"),
    ],
)
def test_what_differs_in_a_folder_is_named(
    compare: Callable[..., tuple[str, ...]], files: Any, aspect: str
) -> None:
    assert compare(**files) == (aspect,)


@pytest.mark.parametrize(
    ("args", "aspects"),
    [
        (("--max-model-len", "2048"), ("max_length",)),
        (("--max-model-len=4096",), ()),
        (("--max-model-len", "auto"), ()),
        (("--tool-call-parser", "hermes"), ("tool_parser",)),
        (("--enable_auto_tool_choice",), ("tool_parser",)),
        (("--reasoning-parser=qwen3",), ("tool_parser",)),
        (("--chat-template", "{{ messages }}"), ("chat_template",)),
        (("--chat-template", TEMPLATE), ()),
        (("--generation-config", "vllm"), ("eos", "sampling")),
        (("--override-generation-config", '{"temperature": 0.1}'), ("sampling",)),
        (("--tokenizer", "some/other"), ("tokenizer",)),
    ],
)
def test_what_differs_in_flags_is_named(
    compare: Callable[..., tuple[str, ...]], args: tuple[str, ...], aspects: tuple[str, ...]
) -> None:
    assert compare(*args) == aspects


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer": {**TOKENIZER, "model": {**TOKENIZER["model"], "merges": [["a", "b"]]}}},  # type: ignore[dict-item]
        {"tokenizer": {**TOKENIZER, "truncation": {"max_length": 5}, "normalizer": None}},
        {"config": {**CONFIG, "eos_token_id": [2]}},
        {"tokenizer_config": {**TOKENIZER_CONFIG, "eos_token": "</s>", "pad_token": "<pad>"}},
        {"tokenizer_config": {**TOKENIZER_CONFIG, "chat_template": TEMPLATE + "\n"}},
    ],
)
def test_another_way_to_write_the_same_is_no_difference(
    compare: Callable[..., tuple[str, ...]], files: Any
) -> None:
    assert compare(**files) == ()


def test_a_refusal_shows_where_and_how_to_allow_it(tmp_path: Path) -> None:
    changed = {**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": {"a": 1, "b": 7, "ab": 3}}}  # type: ignore[dict-item]
    longer = {**TOKENIZER_CONFIG, "chat_template": TEMPLATE.replace("<|end|>", "<|eot|>")}
    folders = {
        "fast": write(tmp_path / "fast"),
        "exact": write(tmp_path / "exact", tokenizer=changed, tokenizer_config=longer),
    }
    with pytest.raises(ParityError) as caught:
        parity.check([spec("fast"), spec("exact")], folders, Allowance(frozenset({"sampling"})))
    message = str(caught.value)
    assert "tokenizer: fast and exact differ\n      tokenizer.json.model.vocab.b: 2 | 7" in message
    assert (
        """template.default:
        - "<|end|>{% endfor %}"
        + "<|eot|>{% endfor %}\""""
        in message
    )
    assert "parity: {allow: [tokenizer, chat_template]}" in message


@pytest.fixture
def accepted(tmp_path: Path) -> Callable[[str, Allowance], tuple[str, ...]]:
    """The differences that are allowed between the usual template and another. Raises ParityError."""
    usual = write(tmp_path / "fast")

    def checked(template: str, allowed: Allowance) -> tuple[str, ...]:
        exact = tmp_path / "exact"
        if not exact.exists():
            write(exact)
        config = {**TOKENIZER_CONFIG, "chat_template": template}
        (exact / "tokenizer_config.json").write_text(json.dumps(config))
        folders = {"fast": usual, "exact": exact}
        return tuple(d.digest for d in parity.check([spec("fast"), spec("exact")], folders, allowed))

    return checked


SPACED = TEMPLATE.replace("<|end|>", "<|end|> ")


def digest_in(message: str) -> str:
    return re.search(r"accept: \[(sha256:[0-9a-f]{64})\]", message)[1]  # type: ignore[index]


def test_white_space_that_differs_is_seen(accepted: Callable[[str, Allowance], tuple[str, ...]]) -> None:
    with pytest.raises(ParityError) as caught:
        accepted(SPACED.replace("<|end|> ", "<|end|>\r\n"), NOTHING)
    assert '+ "<|end|>\\r\\n"' in str(caught.value)
    with pytest.raises(ParityError, match="only white space differs"):
        accepted(TEMPLATE.replace("{{ message.role }}", "{{  message.role }}"), NOTHING)


def test_a_difference_that_was_accepted_passes_and_is_told(
    accepted: Callable[[str, Allowance], tuple[str, ...]],
) -> None:
    with pytest.raises(ParityError) as caught:
        accepted(SPACED, NOTHING)
    pinned = digest_in(str(caught.value))
    assert accepted(SPACED, Allowance(accepted=frozenset({pinned}))) == (pinned,)


def test_what_was_accepted_covers_nothing_else(
    accepted: Callable[[str, Allowance], tuple[str, ...]],
) -> None:
    with pytest.raises(ParityError) as caught:
        accepted(SPACED, NOTHING)
    pinned = Allowance(accepted=frozenset({digest_in(str(caught.value))}))
    with pytest.raises(ParityError) as caught:
        accepted(SPACED + " ", pinned)
    assert digest_in(str(caught.value)) not in pinned.accepted


def test_what_was_accepted_holds_whichever_engine_is_named_first() -> None:
    def digest(left: str, right: str) -> str:
        (found,) = parity.differences(
            "l", {"chat_template": {"t": left}}, "r", {"chat_template": {"t": right}}
        )
        return found.digest

    assert digest("a", "b") == digest("b", "a")
    assert len({digest("a", "b"), digest("a", "c"), digest("b", "c")}) == 3


def test_templates_beside_the_default_are_compared(tmp_path: Path) -> None:
    folders = {"fast": write(tmp_path / "fast"), "exact": write(tmp_path / "exact")}
    beside = folders["exact"] / "additional_chat_templates"
    beside.mkdir()
    (beside / "tool_use.jinja").write_text("{{ tools }}")
    with pytest.raises(ParityError, match=r"template\.tool_use: none"):
        parity.check([spec("fast"), spec("exact")], folders)


def test_a_long_list_of_differences_is_cut(tmp_path: Path) -> None:
    many = {str(at): at for at in range(50)}
    other = {**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": many}}  # type: ignore[dict-item]
    folders = {"fast": write(tmp_path / "fast"), "exact": write(tmp_path / "exact", tokenizer=other)}
    (found,) = parity.check([spec("fast"), spec("exact")], folders, ALL)
    assert len(found.details) == parity.SHOWN + 1
    assert found.details[-1] == "and 50 more"


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    folders = {"fast": write(tmp_path / "fast"), "exact": write(tmp_path / "exact")}
    (folders["exact"] / "tokenizer.json").write_text("{")
    with pytest.raises(ParityError, match=r"exact/tokenizer\.json is not JSON"):
        parity.check([spec("fast"), spec("exact")], folders)


def test_a_tokenizer_named_by_a_folder_is_read_there(tmp_path: Path) -> None:
    elsewhere = write(tmp_path / "tokens")
    folders = {"fast": write(tmp_path / "fast"), "exact": write(tmp_path / "exact", tokenizer=None)}
    assert parity.check([spec("fast"), spec("exact", "--tokenizer", str(elsewhere))], folders) == ()


def test_one_engine_has_nobody_to_differ_from(tmp_path: Path) -> None:
    assert parity.check([spec("fast")], {"fast": write(tmp_path / "fast")}) == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
)


@given(JSON, JSON)
def test_a_difference_is_found_from_either_side(left: Any, right: Any) -> None:
    def found(one: Any, other: Any) -> int:
        return sum(len(d.details) for d in parity.differences("l", {"model": one}, "r", {"model": other}))

    one, other = {"k": left}, {"k": right}
    assert found(one, other) == found(other, one)
    assert found(one, one) == 0
