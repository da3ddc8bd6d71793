"""Policy files that are refused, and some that are not, each with what is said about it.

The lines `# expect LINE:COLUMN: SEVERITY: MESSAGE` at the end of a file are all that may be said.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.compile import compile_policy
from policies.document import ProblemsError

HERE = Path(__file__).parent
MARK = "# expect "


def expected(text: str) -> list[str]:
    return [line.removeprefix(MARK) for line in text.splitlines() if line.startswith(MARK)]


@pytest.mark.parametrize("path", sorted((HERE / "invalid").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_refused_policy_says_where_and_why(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    with pytest.raises(ProblemsError) as caught:
        compile_policy(text, path.name)
    said = [str(diagnostic).removeprefix(f"{path.name}:") for diagnostic in caught.value.diagnostics]
    assert said == expected(text)


@pytest.mark.parametrize("path", sorted((HERE / "valid").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_policy_that_is_taken_says_its_warnings(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    policy = compile_policy(text, path.name)
    assert [str(warning).removeprefix(f"{path.name}:") for warning in policy.warnings] == expected(text)
