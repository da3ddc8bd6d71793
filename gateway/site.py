"""What the admin port shows and does, whether one process serves or several.

`gateway.process.Process` is one process, `gateway.crew.crew.Crew` several: it asks each, and puts their
answers together.
"""

from __future__ import annotations

from typing import Protocol


class SiteError(Exception):
    """What was asked cannot be told or done: the status to answer with, and why."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Site(Protocol):
    """Answers are values that msgspec encodes, or bytes that are JSON already. All raise SiteError."""

    async def ready(self) -> tuple[int, bytes]:
        """Status and body of `/readyz`."""

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """All metrics, and their content type, in the format that a scraper accepts."""

    async def status(self) -> object:
        """Engines, tiers, policy, and what needs a person."""

    async def reload(self) -> object:
        """Read policy and keys again."""

    async def restart(self) -> object:
        """Have new processes take the places of those that run, which end once their streams have."""

    async def hold(self, engine: str, reason: str) -> object:
        """Give an engine no new requests; an empty reason ends that. Says how many are under way."""

    async def demand(self) -> object:
        """Of each tier, what waits for it and what runs."""

    async def live(self, cursor: str) -> bytes:
        """What has changed for a console that has what `cursor` names."""

    async def decision(self, request_id: str) -> object:
        """Why a request was decided as it was."""

    async def policy(self) -> object:
        """The policy in force and what its file holds now."""

    async def tenants(self) -> object:
        """Tenants beside their plans."""

    async def explain(self, pasted: bytes) -> object:
        """How a request would be decided."""
