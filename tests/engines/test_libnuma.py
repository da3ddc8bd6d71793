from __future__ import annotations

from collections.abc import Sequence

import pytest

from engines import libnuma
from engines.libnuma import INSTALL, UPDATE
from engines.making import MakingError


class System:
    """A system without the library, and what is run on it. `works` are the commands that succeed, in turn."""

    def __init__(self, *works: bool, brings: bool = True) -> None:
        self.ran: list[Sequence[str]] = []
        self.works = list(works)
        self.brings = brings
        self.there = False

    def present(self) -> bool:
        return self.there

    def run(self, command: Sequence[str]) -> bool:
        self.ran.append(command)
        works = self.works.pop(0)
        self.there = works and command is INSTALL and self.brings
        return works

    def ensure(self, *, allowed: bool = True) -> None:
        libnuma.ensure(present=self.present, allowed=lambda: allowed, run=self.run)


def test_nothing_is_run_where_the_library_is_there() -> None:
    system = System()
    system.there = True
    system.ensure()
    assert system.ran == []


def test_root_installs_it() -> None:
    system = System(True)
    system.ensure()
    assert system.ran == [INSTALL]


def test_lists_of_packages_are_updated_where_that_is_needed() -> None:
    system = System(False, True, True)
    system.ensure()
    assert system.ran == [INSTALL, UPDATE, INSTALL]


@pytest.mark.parametrize(
    ("system", "allowed"),
    [
        (System(), False),
        (System(False, False), True),
        (System(False, True, False), True),
        (System(True, brings=False), True),
    ],
    ids=["not root", "no network", "no package", "not what it should be"],
)
def test_what_cannot_be_installed_is_said_with_what_to_do(system: System, allowed: bool) -> None:
    with pytest.raises(MakingError, match="apt-get install libnuma1"):
        system.ensure(allowed=allowed)


def test_a_library_that_no_system_has_is_not_loadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libnuma, "LIBRARY", "libno-such-thing.so.1")
    assert not libnuma.loadable()


def test_commands_that_fail_or_are_not_there_do_not_succeed() -> None:
    assert libnuma.run(["true"])
    assert not libnuma.run(["false"])
    assert not libnuma.run(["no-such-program-anywhere"])
