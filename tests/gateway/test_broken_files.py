"""Files with mistakes: the file, the place and what to do, at the start as in a reload."""

import json
import re
from pathlib import Path

import pytest

from gateway.config import parse
from gateway.snapshots import read_snapshot
from policies.document import ProblemsError
from tests.support.serving import PLAIN, deployment, make

NOBODY = {"fast": "http://127.0.0.1:9", "exact": "http://127.0.0.1:9"}
PLANS = PLAIN + "plans: {default: {requests: 10/min}, trial: {requests: 1/min}}\n"


@pytest.mark.parametrize("setting", ["policy", "keys"])
@pytest.mark.parametrize("broken", ["missing", "folder", "latin"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, setting: str, broken: str) -> None:
    file = tmp_path / "other.yaml"
    if broken == "folder":
        file.mkdir()
    if broken == "latin":
        file.write_bytes(b"# first\n# caf\xe9\n")
    text = json.dumps(deployment(NOBODY, **{setting: "other.yaml"}))
    with pytest.raises(ProblemsError) as caught:
        read_snapshot(parse(text, tmp_path / "dualgauge.yaml", {}))
    place = ":2:6:" if broken == "latin" else ":1:1:"
    assert str(caught.value).startswith(f"{file}{place} error: ")


@pytest.mark.parametrize(
    ("plan", "said"), [("trail", "did you mean `trial`?"), ("gold", "known: default, trial")]
)
def test_a_key_with_a_plan_that_is_not_there_is_refused(tmp_path: Path, plan: str, said: str) -> None:
    with pytest.raises(ProblemsError, match=rf"keys.yaml:1:\d+: error: .*{re.escape(said)}"):
        make(tmp_path, NOBODY, policy=PLANS, keys=f"keys: [{{name: a, key: ka, plan: {plan}}}]")


def test_a_key_without_a_plan_needs_none(tmp_path: Path) -> None:
    assert make(tmp_path, NOBODY, keys="keys: [{name: a, key: ka}]").snapshot.policy.plans == {}


def test_a_key_for_a_model_that_is_not_here_is_warned_of(tmp_path: Path) -> None:
    keys = "keys: [{name: a, key: ka, models: [smolm2, smollm2, 'smollm2:fast']}]"
    warnings = make(tmp_path, NOBODY, keys=keys).snapshot.keyring.warnings
    assert [warning.message for warning in warnings] == ["unknown model `smolm2`; did you mean `smollm2`?"]
