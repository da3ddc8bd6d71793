"""How many tokens a text has, without its tokenizer."""

from __future__ import annotations


def estimate_tokens(text: str) -> int:
    """Tokens of a text, estimated from its length in bytes."""
    return len(text.encode("utf-8", "surrogatepass")) // 4
