"""The clients that the documents show, run as they stand there."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.engines_real.pair import Pair

DOCUMENT = Path(__file__).parents[2] / "docs" / "getting-started.md"
BASE = "http://127.0.0.1:8080"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text("utf-8"), re.MULTILINE | re.DOTALL)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Items? .* `ReadOnly` qualifier:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_(computed_)?fields':DeprecationWarning"),
]


@pytest.mark.parametrize("code", EXAMPLES, ids=[code.split()[1] for code in EXAMPLES])
def test_an_example(code: str, pair: Pair) -> None:
    assert BASE in code
    with redirect_stdout(io.StringIO()) as said:
        exec(code.replace(BASE, pair.base), {})
    assert said.getvalue().strip()
