"""Stable shares of the traffic: where a tenant, a conversation or a request falls between 0 and 1.

The place is a hash, so it is the same in every process, after every reload and in a replay. It says nothing
of other samplings (a rollout, a trace), which are seeded otherwise.
"""

from __future__ import annotations

from hashlib import blake2b

from policies.facts import Facts
from policies.signals.signal import Memo, Signal

_SEED = b"dualgauge.sample"
_READ = 2000
"""Characters of a turn that are hashed at either end; its length is hashed too, so the cost is bounded."""


def place(*parts: str) -> float:
    """Where these texts fall, 0 or more and below 1; evenly spread."""
    text = "\0".join(parts).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=6, person=_SEED).digest(), "big") / (1 << 48)


def _of_tenant(facts: Facts, _memo: Memo) -> float:
    return place("tenant", facts.tenant)


def _of_conversation(facts: Facts, _memo: Memo) -> float:
    """By what stays while a conversation grows: its turns up to the first of the user's."""
    begin = []
    for turn in facts.turns:
        begin.append(_ends(turn.text))
        if turn.role == "user":
            break
    return place("conversation", facts.tenant, *begin)


def _of_request(facts: Facts, _memo: Memo) -> float:
    turns = facts.turns
    sizes = ",".join(str(len(turn.text)) for turn in turns)
    return place("request", facts.tenant, sizes, *(_ends(turn.text) for turn in turns[-2:]))


def _ends(text: str) -> str:
    return text if len(text) <= 2 * _READ else f"{len(text)} {text[:_READ]}{text[-_READ:]}"


SAMPLE_SIGNALS = (
    Signal("sample", "share", "where the conversation falls in an even spread", _of_conversation, True),
    Signal("sample_tenant", "share", "where the caller's key falls in an even spread", _of_tenant),
    Signal("sample_request", "share", "where the request falls in an even spread", _of_request, True),
)
