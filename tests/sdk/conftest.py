from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines_real.pair import Pair, free_port, the_pair
from tests.sdk.front import TIERS, Front, serve
from tests.sdk.late import Late


@pytest.fixture(scope="session")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return the_pair(request.config, tmp_path_factory)


@pytest.fixture(scope="session")
def front(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """In front of the two real engines."""
    with serve(tmp_path_factory.mktemp("front"), pair.engines) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """With no engine behind it: what is refused before one is asked."""
    engines = {tier: f"http://127.0.0.1:{free_port()}" for tier in TIERS}
    with serve(tmp_path_factory.mktemp("lone"), engines) as gateway:
        yield gateway


@dataclass(frozen=True)
class Recovering:
    """A gateway whose exact engine is down until `up()`."""

    front: Front
    up: Callable[[], None]


@pytest.fixture
def recovering(pair: Pair, tmp_path: Path) -> Iterator[Recovering]:
    late = Late(pair.engines["exact"])
    try:
        with serve(tmp_path, {"fast": pair.engines["fast"], "exact": late.url}) as gateway:
            yield Recovering(gateway, late.open)
    finally:
        late.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sessions that need the real engines are marked so; what is refused before one is asked needs none."""
    for item in items:
        if isinstance(item, pytest.Function) and "pair" in item.fixturenames:
            item.add_marker("engines")
