"""Counting prompts with the model's own tokenizer, where its file is at hand.

A token costs some 1.5 us there: of a 2 kB prompt, more than all else that the gateway does with a request. So
it counts only where that may change a decision: where the estimate lies near a bound that a rule compares
`prompt_tokens` with. Longer prompts are counted in a thread of their own, beside which others run; turns that
were counted before are known by their hash. Fails open: what cannot be counted stays an estimate.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engines import tokenizer_file
from gateway.config import Config
from policies.facts import Conversation
from policies.policy import Policy
from policies.signals.prompt import estimate
from policies.signals.seen import Seen
from policies.signals.tokens import OVERHEAD

logger = logging.getLogger("dualgauge.gateway")

AT_ONCE = 400
"""Tokens that are counted without the thread, which costs as much as 50 of them."""

MOST_WAITING = 8
"""Prompts that may wait for the thread; one more is decided by its estimate."""

INSTALL = "pip install 'dualgauge[tokenizer]'"
_SOME = "a"


class TokenizerError(Exception):
    """A tokenizer file that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Tokens that a chat template adds: once, for each turn by its role, and where tools are offered."""

    once: int
    turn: Mapping[str, int]
    tools: int

    def of(self, conversation: Conversation) -> int:
        each = sum(self.turn[turn.role] for turn in conversation.turns)
        return self.once + each + (self.tools if conversation.more else 0)


class Tokenizer:
    """A tokenizer.json, read when the first prompt is counted."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._model: Any = None
        self._marks: Marks | None = None
        self._bare = 0
        self._seen: Seen[int] = Seen(self._length)

    @property
    def loaded(self) -> bool:
        return self._model is not None

    def load(self) -> None:
        """Read the file. Raises TokenizerError."""
        if self._model is not None:
            return
        try:
            import tokenizers

            model = tokenizers.Tokenizer.from_file(str(self.file))
        except ImportError:
            raise TokenizerError(f"{self.file} cannot be read: {INSTALL}") from None
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise TokenizerError(f"{self.file} is no tokenizer: {error}") from None
        model.no_truncation()
        model.no_padding()
        self._model = model
        self._bare = len(model.encode("").ids)
        self._marks = _marks(self.file.parent, self._length)

    def count(self, conversation: Conversation, dialect: str) -> int:
        """Tokens of a prompt as the engine sees it. Raises TokenizerError."""
        self.load()
        texts = [turn.text for turn in conversation.turns]
        text = sum(self._seen(one) for one in (*texts, *conversation.more) if one)
        if dialect in ("openai.completions", "openai.embeddings"):
            return text + conversation.token_ids + self._bare * len(texts)
        marks = self._marks
        return text + (OVERHEAD * len(texts) if marks is None else marks.of(conversation))

    def _length(self, text: str) -> int:
        # Not `encode`, which holds the interpreter's lock.
        return len(self._model.encode_batch_fast([text], add_special_tokens=False)[0])


def _marks(folder: Path, length: Any) -> Marks | None:
    """What the model's chat template adds, by rendering small conversations; None where it has none."""
    render = _template(folder)
    if render is None:
        return None
    user = {"role": "user", "content": _SOME}
    one = length(_SOME)

    def size(*messages: Mapping[str, Any], **more: Any) -> int:
        return int(length(render(messages=list(messages), add_generation_prompt=True, **more)))

    try:
        alone = size(user)
        answered = size(user, {"role": "assistant", "content": _SOME})
        again = size(user, {"role": "assistant", "content": _SOME}, user)
    except Exception:  # noqa: BLE001 - a template is a program of somebody else's
        return None
    turn = {
        "assistant": answered - alone - one,
        "user": again - answered - one,
        "tool": again - answered - one,
    }
    tool = {"type": "function", "function": {"name": _SOME, "parameters": {}}}
    turn["system"] = _attempt(
        lambda: size({"role": "system", "content": _SOME}, user) - alone - one, OVERHEAD
    )
    tools = _attempt(lambda: size(user, tools=[tool]) - alone - length(json.dumps(tool)), 0)
    return Marks(alone - one - turn["user"], turn, max(0, tools))


def _attempt(measure: Any, otherwise: int) -> int:
    try:
        return int(measure())
    except Exception:  # noqa: BLE001 - templates refuse roles that their model does not know
        return otherwise


def _template(folder: Path) -> Any:
    """The chat template of a checkpoint, in jinja's sandbox with what transformers gives to templates."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
        beside = folder / "chat_template.jinja"
        text = beside.read_text(encoding="utf-8") if beside.is_file() else config.get("chat_template")
        if isinstance(text, list):
            text = next(one["template"] for one in text if one.get("name") == "default")
        if not isinstance(text, str):
            return None
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.filters["tojson"] = lambda value, **_more: json.dumps(value, ensure_ascii=False)
        env.globals["raise_exception"] = _refuse
        env.globals["strftime_now"] = lambda _format: "26 Jul 2024"
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {name: _token(config.get(name)) for name in names}
        return partial(env.from_string(text).render, **tokens)
    except Exception:  # noqa: BLE001 - without a template, marks are estimated
        return None


def _refuse(message: str) -> None:
    raise ValueError(message)


def _token(value: object) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def near(policies: Sequence[Policy], bytes_: int) -> bool:
    """Whether a body of so many bytes, at least one a token, may hold a prompt near a bound of a policy."""
    for policy in policies:  # noqa: SIM110 - asked of every request: a generator would cost as much again
        if policy.least_near <= bytes_:
            return True
    return False


class Counter:
    """Counts prompts where that may change a decision. `source` says with which file, or why not at all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.source = f"counted by {tokenizer.file}"
        self._tokenizer = tokenizer
        self._waiting = 0
        self._broken = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    async def count(self, conversation: Conversation, dialect: str, policies: Sequence[Policy]) -> int | None:
        """The tokens of a prompt, None where an estimate is as good, or all that there is time for."""
        if self._broken:
            return None
        tokens = estimate(conversation)
        if not any(policy.is_near(tokens) for policy in policies):
            return None
        try:
            if tokens <= AT_ONCE and self._tokenizer.loaded:
                return self._tokenizer.count(conversation, dialect)
            if self._waiting >= MOST_WAITING:
                return None
            self._waiting += 1
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._thread, self._tokenizer.count, conversation, dialect)
            finally:
                self._waiting -= 1
        except TokenizerError as error:
            self._broken = True
            self.source = f"estimated: {error}"
            logger.warning("prompts are estimated, not counted: %s", error)
            return None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def tokenizer_of(config: Config) -> tuple[Tokenizer | None, str]:
    """The tokenizer of a deployment, and how prompts are measured, in words."""
    if config.tokenizer == "none":
        return None, "estimated: `tokenizer: none`"
    file = tokenizer_file.find(config.engines) if config.tokenizer == "auto" else Path(config.tokenizer)
    if file is None:
        return None, f"estimated: no {tokenizer_file.NAME} beside an engine's `model`"
    if importlib.util.find_spec("tokenizers") is None:
        return None, f"estimated: {file} cannot be read, {INSTALL}"
    return Tokenizer(file), f"counted by {file}"
