"""What is known of one request before a decision: plain values, no I/O.

The gateway's dialects fill these in; signals and the policy read them and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class Turn(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One message of a conversation; `developer` counts as system, `function` as tool. In JSON it is one of
    OpenAI's messages."""

    role: Role
    text: str = msgspec.field(name="content")


class Conversation(msgspec.Struct, frozen=True, gc=False):
    """The readable part of a request, the same shape for every dialect.

    `turns` keeps the order of the request, system turns included. A completion's prompt is one user turn.
    `more` is what else the prompt holds, as JSON: definitions of tools and calls of them. `token_ids` counts
    those of a prompt that comes as ids, which have no text.
    """

    turns: tuple[Turn, ...]
    tool_results: int = 0
    images: int = 0
    more: tuple[str, ...] = ()
    token_ids: int = 0


class Facts:
    """One request as policies see it.

    `headers` maps lower-case names to values; `metadata` is the body's own, and may hold anything.
    `read` is called once at most, and only where a rule asks for the conversation. `time` is when the request
    came, in Unix seconds; without it no window of time holds. `tokens` is the length of the prompt, where the
    model's own tokenizer counted it.
    """

    __slots__ = (
        "_conversation",
        "_read",
        "dialect",
        "has_tools",
        "headers",
        "metadata",
        "model",
        "output_tokens",
        "stream",
        "structured",
        "tags",
        "temperature",
        "tenant",
        "time",
        "tokens",
    )

    def __init__(
        self,
        *,
        dialect: str,
        model: str,
        read: Callable[[], Conversation],
        headers: Mapping[str, str],
        metadata: Mapping[str, object] | None = None,
        tenant: str = "anonymous",
        tags: frozenset[str] = frozenset(),
        stream: bool = False,
        has_tools: bool = False,
        structured: bool = False,
        output_tokens: int | None = None,
        temperature: float | None = None,
        time: float | None = None,
        tokens: int | None = None,
    ) -> None:
        self.dialect = dialect
        self.model = model
        self.headers = headers
        self.metadata = metadata or {}
        self.tenant = tenant
        self.tags = tags
        self.stream = stream
        self.has_tools = has_tools
        self.structured = structured
        self.output_tokens = output_tokens
        self.temperature = temperature
        self.time = time
        self.tokens = tokens
        self._read = read
        self._conversation: Conversation | None = None

    @property
    def conversation(self) -> Conversation:
        if self._conversation is None:
            self._conversation = self._read()
        return self._conversation

    @property
    def turns(self) -> Sequence[Turn]:
        return self.conversation.turns

    def last_user_text(self) -> str:
        for turn in reversed(self.conversation.turns):
            if turn.role == "user":
                return turn.text
        return ""

    def system_text(self) -> str:
        """The system prompt; of several, all, a line each."""
        return "\n".join(turn.text for turn in self.conversation.turns if turn.role == "system")
