"""Whether two engines can stand in for each other: what of their models and flags must be the same.

A conversation may move between the engines of a deployment at any request, so whatever turns messages into
tokens and tokens into replies must agree; only the precision may differ. Read from the folders that the
engines will open, before any is started. What a file leaves out counts as its neutral value (null, false, an
empty list): tools that quantise write the same file with more or fewer such keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engines import changes, checkpoint, flags, templates
from engines.allowed import ASPECTS, NOTHING, Allowance, Aspect, Difference
from engines.spec import EngineSpec

SHOWN = 3
"""Differences of one aspect that are shown; of the others, how many there are."""
WIDTH = 60
_VOCABULARIES = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt")
_SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SPECIAL = ("bos_token", "eos_token", "unk_token")
_ADDED = ("add_bos_token", "add_eos_token", "add_prefix_space")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
_NOT_TOKENS = ("truncation", "padding", "version")
_TOOLS = (
    "--tool-call-parser",
    "--enable-auto-tool-choice",
    "--tool-parser-plugin",
    "--reasoning-parser",
    "--chat-template-content-format",
    "--default-chat-template-kwargs",
)

Traits = Mapping[Aspect, Mapping[str, Any] | None]
"""What an engine is by aspect: a name that says where it stands -> its value, any JSON. None: nobody
knows before it runs."""


class ParityError(Exception):
    """A file that cannot be read, or engines that differ; the message says in what, and what to do."""


def check(
    specs: Sequence[EngineSpec], folders: Mapping[str, Path], allowed: Allowance = NOTHING
) -> tuple[Difference, ...]:
    """Compare every engine with the first. Returns the differences that are allowed.

    Raises ParityError for the others, and for files that cannot be read.
    """
    here = [spec for spec in specs if spec.name in folders and folders[spec.name].is_dir()]
    if len(here) < 2:
        return ()
    first = traits(here[0], folders[here[0].name])
    found = [
        difference
        for spec in here[1:]
        for difference in differences(here[0].name, first, spec.name, traits(spec, folders[spec.name]))
    ]
    refused = [difference for difference in found if not allowed.covers(difference)]
    if refused:
        raise ParityError(explain(refused))
    return tuple(found)


def explain(refused: Sequence[Difference]) -> str:
    names = ", ".join(dict.fromkeys(difference.aspect for difference in refused))
    digests = ", ".join(dict.fromkeys(difference.digest for difference in refused))
    shown = "\n".join(f"  {line}" for difference in refused for line in str(difference).splitlines())
    template = (
        " A chat template that both engines are given (`args: [--chat-template, FILE]`) is one."
        if any(difference.aspect == "chat_template" for difference in refused)
        else ""
    )
    return (
        f"these engines cannot stand in for each other:\n{shown}\n"
        f"Take checkpoints of one model with the same files and flags.{template} To accept this difference "
        f"and no other, write into the configuration: parity: {{accept: [{digests}]}}; to allow whatever "
        f"differs there, now and later: parity: {{allow: [{names}]}}"
    )


def differences(one: str, left: Traits, other: str, right: Traits) -> Iterator[Difference]:
    """The aspects in which they differ, in the order of `ASPECTS`."""
    for aspect in ASPECTS:
        here, there = left.get(aspect), right.get(aspect)
        places = [] if here is None or there is None else list(_differing(here, there, ""))
        if places:
            lines = [line for place in places[:SHOWN] for line in place.shown()]
            more = [f"and {len(places) - SHOWN:,} more"] if len(places) > SHOWN else []
            yield Difference(aspect, one, other, (*lines, *more), _digest(aspect, places))


class _Place(NamedTuple):
    """Where two JSON values differ, and in what."""

    at: str
    left: Any
    right: Any

    def shown(self) -> list[str]:
        left, right = self.left, self.right
        if isinstance(left, list) and isinstance(right, list) and max(len(left), len(right)) > SHOWN:
            same = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
            where = "" if same is None else f", unlike from entry {same:,}"
            return [f"{self.at}: {len(left):,} entries | {len(right):,} entries{where}"]
        if isinstance(left, str) and isinstance(right, str) and max(len(left), len(right)) > WIDTH:
            only = " only white space differs" if left.split() == right.split() else ""
            return [f"{self.at}:{only}", *(f"  {line}" for line in changes.lines(left, right))]
        return [f"{self.at}: {_short(left)} | {_short(right)}"]


def _digest(aspect: Aspect, places: Sequence[_Place]) -> str:
    sides = ({place.at: place.left for place in places}, {place.at: place.right for place in places})
    text = json.dumps([aspect, *sorted(json.dumps(side, sort_keys=True) for side in sides)])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def traits(spec: EngineSpec, folder: Path) -> Traits:
    """What an engine will be. Raises ParityError."""
    args = spec.args
    config = _object(folder / "config.json")
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    source = folder
    named = flags.option(args, "--tokenizer")
    if named is not None and Path(named).is_absolute():
        source = Path(named)
    tokens = _object(source / "tokenizer_config.json")
    generation = {} if _plain(args) else _object(folder / "generation_config.json")
    overrides = _overrides(spec)
    # A tokenizer of the hub is opened by the engine alone: its name is all there is to compare.
    known = named is None or source != folder
    return {
        "model": {f"config.json: {key}": text.get(key) for key in _SHAPE},
        "tokenizer": _tokenizer(source) if known else {"--tokenizer": named},
        "chat_template": {"template": _templates(args, source)} if known else None,
        "special_tokens": _special(source, tokens) if known else None,
        "eos": {"eos_token_id": _ids(config, text, generation)},
        "max_length": _length(args, text),
        "tool_parser": {name: _flag(args, name) for name in _TOOLS},
        "sampling": {key: {**generation, **overrides}.get(key) for key in _SAMPLING},
    }


def _plain(args: Sequence[str]) -> bool:
    """Whether vLLM's own defaults are asked for, instead of generation_config.json's."""
    return flags.option(args, "--generation-config") == "vllm"


def _overrides(spec: EngineSpec) -> dict[str, Any]:
    given = flags.option(spec.args, "--override-generation-config")
    try:
        found = json.loads(given or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ParityError(f"engine `{spec.name}`: --override-generation-config must be a JSON object")
    return found


def _tokenizer(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    if path.is_file():
        found = _object(path)
        model = dict(found.get("model") or {})
        # The library has written merges both ways: "a b", and since 0.20 ["a", "b"].
        model["merges"] = [" ".join(m) if isinstance(m, list) else m for m in model.get("merges") or []]
        whole = {**{k: v for k, v in found.items() if k not in _NOT_TOKENS}, "model": model}
        return {"tokenizer.json": whole}
    return {
        name: hashlib.sha256(_bytes(folder / name)).hexdigest()
        for name in _VOCABULARIES
        if (folder / name).is_file()
    }


def _templates(args: Sequence[str], folder: Path) -> dict[str, str]:
    """The chat templates by name; one that is given takes the place of all. One newline at its end says
    nothing."""
    given = flags.option(args, "--chat-template")
    try:
        if given is None:
            found = templates.of_folder(folder)
        else:
            path = Path(given)
            found = {templates.DEFAULT: path.read_text("utf-8") if path.is_file() else given}
    except (OSError, UnicodeDecodeError) as error:
        raise ParityError(f"{given} cannot be read: {error}") from None
    except templates.TemplateError as error:
        raise ParityError(str(error)) from None
    return {name: text.removesuffix("\n") for name, text in found.items()}


def _special(folder: Path, tokens: Mapping[str, Any]) -> dict[str, Any]:
    fallback = _object(folder / "special_tokens_map.json")
    found = {name: _content(tokens.get(name, fallback.get(name))) for name in _SPECIAL}
    return {**found, **{name: tokens.get(name) for name in _ADDED}}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _ids(*configs: Mapping[str, Any]) -> list[int]:
    """Token ids that end a reply: the engine ends it at any of them."""
    found: set[int] = set()
    for config in configs:
        ids = config.get("eos_token_id")
        found |= {each for each in (ids if isinstance(ids, list) else [ids]) if isinstance(each, int)}
    return sorted(found)


def _length(args: Sequence[str], text: Mapping[str, Any]) -> dict[str, Any] | None:
    """Tokens of the longest request; None where the engine chooses by the memory that it finds."""
    if flags.has_option(args, "--max-model-len"):
        given = flags.number(args, "--max-model-len")
        return None if given is None else {"tokens": given}
    return {"tokens": text.get("max_position_embeddings")}


def _flag(args: Sequence[str], name: str) -> Any:
    if name == "--enable-auto-tool-choice":
        return flags.has_option(args, name)
    return flags.option(args, name)


def _object(path: Path) -> dict[str, Any]:
    """A JSON file of a model folder; empty where there is none. Raises ParityError."""
    if not path.is_file():
        return {}
    try:
        return checkpoint.json_object(path)
    except checkpoint.CheckpointError as error:
        raise ParityError(str(error)) from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ParityError(f"{path} cannot be read: {error.strerror}") from None


def _differing(left: Any, right: Any, at: str) -> Iterator[_Place]:
    if left == right or (_neutral(left) and _neutral(right)):
        return
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in dict.fromkeys((*left, *right)):
            yield from _differing(left.get(key), right.get(key), f"{at}.{key}" if at else str(key))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _differing(one, other, f"{at}[{index}]")
    else:
        yield _Place(at, left, right)


def _neutral(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str | list | Mapping) and not value)


def _short(value: Any) -> str:
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}…"
