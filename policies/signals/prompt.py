"""How many tokens the whole prompt has: as the model's own tokenizer counted, where the gateway had it count,
else an estimate."""

from __future__ import annotations

from policies.facts import Conversation, Facts
from policies.signals.signal import Memo, Signal
from policies.signals.tokens import estimate_prompt


def estimate(conversation: Conversation) -> int:
    """Tokens of turns, tool definitions and calls by their characters; token ids count as they are."""
    texts = [turn.text for turn in conversation.turns]
    if conversation.more:
        texts += conversation.more
    return estimate_prompt(texts) + conversation.token_ids


def _prompt_tokens(facts: Facts, _memo: Memo) -> int:
    return estimate(facts.conversation) if facts.tokens is None else facts.tokens


PROMPT_SIGNAL = Signal("prompt_tokens", "count", "tokens of the whole prompt", _prompt_tokens, True)
