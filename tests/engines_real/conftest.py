from __future__ import annotations

import pytest

from tests.engines_real.pair import Pair, the_pair


@pytest.fixture(scope="session")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return the_pair(request.config, tmp_path_factory)
