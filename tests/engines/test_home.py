from __future__ import annotations

from pathlib import Path

import pytest

from engines import home


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HOME": "/h"}, "/h/.local/share/dualgauge"),
        ({"HOME": "/h", "XDG_DATA_HOME": "/x"}, "/x/dualgauge"),
        ({"HOME": "/h", "XDG_DATA_HOME": "relative"}, "/h/.local/share/dualgauge"),
        ({"HOME": "/h", "XDG_DATA_HOME": "/x", "DUALGAUGE_HOME": "/d"}, "/d"),
        ({"HOME": "/h", "DUALGAUGE_HOME": ""}, "/h/.local/share/dualgauge"),
    ],
)
def test_the_data_home_follows_the_environment(env: dict[str, str], expected: str) -> None:
    assert home.data_home(env) == Path(expected)


def test_a_relative_home_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert home.data_home({"DUALGAUGE_HOME": "data"}) == tmp_path / "data"
