"""Shapes of a request that would hurt an engine, refused before one is asked.

Figures are the deployment's `bounds`; why each matters is in vLLM's advisories (a schema or pattern that
takes the grammar compiler down, `n` of a billion, embeddings that are unpickled).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.config import Bounds
from gateway.dialects.body import ANY, Body
from gateway.dialects.media import check_messages
from gateway.dialects.scan import opening, too_deep, tree_too_deep
from gateway.dialects.schemas import Checked, Checker
from gateway.errors import InvalidRequest

Check = Callable[[str, Any, Bounds], None]

MAX_TOKEN_ID = (1 << 24) - 1
"""No vocabulary is so large; engines index their logits with a client's ids."""
MAX_REPETITION = 1024
BIAS = 100
KWARG_LENGTH = 64
_CHECKED = Checked()


def _at_most(name: str, what: str, value: int, most: int, setting: str) -> None:
    if value > most:
        raise InvalidRequest(f"{what} must be at most {most} (bounds.{setting})", param=name)


def _whole(name: str, value: Any) -> int:
    # Engines read 1e9 and "1000000000" as the integer too: what is no integer must not pass by the bound.
    if type(value) is not int or value < 0:
        raise InvalidRequest(f"{name} must be an integer, and not negative", param=name)
    return value


def _answers(name: str, value: Any, bounds: Bounds) -> None:
    _at_most(name, name, _whole(name, value), bounds.n, "n")


def _texts(name: str, value: Any, most: int, setting: str) -> None:
    texts = value if isinstance(value, list) else [value]
    if set(map(type, texts)) - {str}:
        raise InvalidRequest(f"{name} must be a string or a list of strings", param=name)
    _at_most(name, f"the length of {name}", len(texts), most, setting)
    if any("\0" in text for text in texts):
        raise InvalidRequest(f"{name} holds a NUL character", param=name)


def _stops(name: str, value: Any, bounds: Bounds) -> None:
    _texts(name, value, bounds.stop, "stop")


def _bad_words(name: str, value: Any, bounds: Bounds) -> None:
    _texts(name, value, bounds.bad_words, "bad_words")


def _ids(name: str, value: Any) -> None:
    """Token ids: integers that are not negative."""
    if set(map(type, value)) - {int} or (value and not 0 <= min(value) <= max(value) <= MAX_TOKEN_ID):
        raise InvalidRequest(f"{name} must hold token ids, 0 to {MAX_TOKEN_ID}", param=name)


def _token_ids(name: str, value: Any, bounds: Bounds) -> None:
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be a list of token ids", param=name)
    _at_most(name, f"the length of {name}", len(value), bounds.token_ids, "token_ids")
    _ids(name, value)


def _logit_bias(name: str, value: Any, bounds: Bounds) -> None:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object of token ids and numbers", param=name)
    _at_most(name, f"the size of {name}", len(value), bounds.logit_bias, "logit_bias")
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 8 and int(token) <= MAX_TOKEN_ID):
            raise InvalidRequest(f"{name}: `{token[:32]}` is no token id, 0 to {MAX_TOKEN_ID}", param=name)
        if type(bias) not in (int, float) or not -BIAS <= bias <= BIAS:
            raise InvalidRequest(f"{name}.{token} must be a number from -{BIAS} to {BIAS}", param=name)


def _logprobs(name: str, value: Any, bounds: Bounds) -> None:
    if not isinstance(value, bool):
        _at_most(name, name, _whole(name, value), bounds.logprobs, "logprobs")


def _repetition(name: str, value: Any, _bounds: Bounds) -> None:
    # A scan of this length for every token.
    figures: list[Any] = list(value.values()) if isinstance(value, dict) else [None]
    if set(map(type, figures)) - {int} or not all(0 <= figure <= MAX_REPETITION for figure in figures):
        raise InvalidRequest(f"{name} must be an object of integers, 0 to {MAX_REPETITION}", param=name)


def _constraint(name: str, body: Body, bounds: Bounds) -> None:
    size = body.size(name)
    if size > bounds.schema:
        raise InvalidRequest(f"{name} is {size} bytes, at most {bounds.schema} (bounds.schema)", param=name)
    _once(name, "", body, bounds, CONSTRAINTS[name])


CONSTRAINTS: Mapping[str, Callable[[Checker, Any], None]] = {
    "response_format": Checker.constraints,
    "structured_outputs": Checker.constraints,
    "text": Checker.constraints,
    "output_config": Checker.constraints,
    "output_format": Checker.constraints,
    "guided_json": lambda checker, value: checker.schema(checker.json(value, ()), ()),
    "json_schema": lambda checker, value: checker.schema(checker.json(value, ()), ()),
    "guided_regex": lambda checker, value: checker.pattern(value, ()),
    "guided_whitespace_pattern": lambda checker, value: checker.pattern(value, ()),
    "guided_grammar": lambda checker, value: checker.grammar(value, ()),
    "grammar": lambda checker, value: checker.grammar(value, ()),
    "guided_choice": Checker.constraints,
}


def _tools(name: str, body: Body, bounds: Bounds) -> None:
    size = body.size(name)
    if size > bounds.tools:
        raise InvalidRequest(f"{name} is {size} bytes, at most {bounds.tools} (bounds.tools)", param=name)
    choice = body.get("tool_choice", ANY)
    kind = choice.get("type") if isinstance(choice, dict) else choice
    forced = kind not in (None, "auto", "none")
    _once(name, str(forced), body, bounds, lambda checker, value: checker.tools(value, forced=forced))


def _once(name: str, how: str, body: Body, bounds: Bounds, constrain: Callable[[Checker, Any], None]) -> None:
    def check() -> None:
        value = body.get(name, ANY)
        if tree_too_deep(value, bounds.depth - 1):
            raise _too_deep(name, bounds)
        constrain(Checker(name, bounds), value)

    key = f"{name} {how} {bounds.schema} {bounds.pattern} {bounds.depth} {bounds.nodes} {bounds.recursion} "
    _CHECKED.once(key, body.value(name), check)


def _kwargs(name: str, value: Any, _bounds: Bounds) -> None:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", param=name)
    for key, given in value.items():
        if key not in TEMPLATE_KWARGS:
            field, allowed = f"{name}.{key[:64]}", ", ".join(sorted(TEMPLATE_KWARGS))
            raise InvalidRequest(f"{field} is not accepted; allowed: {allowed}", param=field)
        if isinstance(given, dict | list) or (isinstance(given, str) and len(given) > KWARG_LENGTH):
            raise InvalidRequest(f"{name}.{key} must be true, false or a word", param=f"{name}.{key}")


def _template(name: str, _value: Any, _bounds: Bounds) -> None:
    raise InvalidRequest(f"{name} is not accepted: the model's own is used", param=name)


def _refused(name: str, _value: Any, _bounds: Bounds) -> None:
    raise InvalidRequest(f"{name} is not accepted: send text", param=name)


TEMPLATE_KWARGS = frozenset({"enable_thinking", "thinking", "reasoning_effort"})

FIGURES: Mapping[str, Check] = {
    "n": _answers,
    "best_of": _answers,
    "stop": _stops,
    "stop_sequences": _stops,
    "bad_words": _bad_words,
    "stop_token_ids": _token_ids,
    "allowed_token_ids": _token_ids,
    "logprob_token_ids": _token_ids,
    "logit_bias": _logit_bias,
    "logprobs": _logprobs,
    "top_logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "n_probs": _logprobs,
    "repetition_detection": _repetition,
    "chat_template": _template,
    "chat_template_kwargs": _kwargs,
    **dict.fromkeys(
        (
            "prompt_embeds",
            "image_embeds",
            "audio_embeds",
            "video_embeds",
            "input_embeds",
            "inputs_embeds",
            "image_data",
            "audio_data",
            "video_data",
            "multi_modal_data",
            "logits_processors",
            "custom_logit_processor",
            "lora_path",
            "mcp_servers",
        ),
        _refused,
    ),
}


TOOLS = ("tools", "functions")
CHECKED = FIGURES.keys() | CONSTRAINTS.keys() | set(TOOLS)


def check(body: Body, bounds: Bounds, said: frozenset[str]) -> None:
    """What a body's bytes and its fields tell, but for the fields `said`, which a dialect checks when it has
    decoded them. Raises InvalidRequest naming the field."""
    for name in () if CHECKED.isdisjoint(body.names) else body.names & CHECKED:
        if name in FIGURES:
            FIGURES[name](name, body.get(name, ANY), bounds)
        elif name in TOOLS:
            _tools(name, body, bounds)
        else:
            _constraint(name, body, bounds)
    if opening(body.raw) > bounds.depth:
        for name in body.names - CHECKED - said:
            if too_deep(body.value(name), bounds.depth - 1):
                raise _too_deep(name, bounds)


def _too_deep(name: str, bounds: Bounds) -> InvalidRequest:
    return InvalidRequest(f"{name} is nested deeper than {bounds.depth} levels (bounds.depth)", param=name)


def check_said(name: str, messages: object, bounds: Bounds) -> None:
    """Messages, items of the Responses API, blocks: no address of a medium, no tensor, not too deep."""
    try:
        odd = check_messages(name, messages, bounds.fetch)
    except RecursionError:
        raise _too_deep(name, bounds) from None
    if odd and tree_too_deep(odd, bounds.depth - 1):
        raise _too_deep(name, bounds)


def check_prompts(name: str, value: object, most: int, setting: str) -> None:
    """A text, a list of texts, of token ids, or of such lists."""
    if isinstance(value, str):
        return
    kinds = set(map(type, value)) if isinstance(value, list) else {object}
    if kinds == {int}:
        _ids(name, value)
        return
    if kinds - {str, list}:
        raise InvalidRequest(f"{name} must be a string, token ids, or a list of such", param=name)
    assert isinstance(value, list)
    _at_most(name, f"the length of {name}", len(value), most, setting)
    for one in value:
        if isinstance(one, list):
            _ids(name, one)
