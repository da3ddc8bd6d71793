"""`dualgauge keys`: what it prints, what it writes, and what it leaves alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli import cli, keyfile
from gateway.cli.failures import Failure
from gateway.config import NAME
from gateway.identity import parse_keys
from gateway.keyformat import DIGITS, SHAPE, new_key, well_formed
from policies.document import load
from tests.gateway.test_identity import KNOWN
from tests.support.client import ask
from tests.support.engine import FakeEngine, engines, reply
from tests.support.serving import serving
from tests.support.shapes import CHAT

OLD = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
NOW = 1_800_000_000.0

TEXT = f"""\
# who may ask
keys:
  # the build machines
  - name: ci          # public
    sha256: {OLD}     # of sk-old
    tags: [critical]
    # the last line of ci

  - {{name: b, key: sk-plain, tiers: [fast]}}   # local
  -   disabled: false
      name: "c"
      sha256: '{"ab" * 32}'

# the end
"""


def run(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli, ["keys", *words], input=stdin)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(TEXT)
    return path


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(path: Path, name: str) -> dict[str, Any]:
    return next(key for key in yaml.safe_load(path.read_text())["keys"] if key["name"] == name)


def made(result: Result) -> str:
    assert result.exit_code == 0, result.output
    key = result.stdout.strip()
    assert well_formed(key)
    return key


# the form


def test_a_typo_is_told_from_a_key() -> None:
    key = new_key()
    assert SHAPE.fullmatch(key)
    assert well_formed(key)
    assert key != new_key()
    for position in range(4, len(key)):
        other = DIGITS[(DIGITS.index(key[position]) + 1) % len(DIGITS)]
        assert not well_formed(key[:position] + other + key[position + 1 :])
    for wrong in (
        key[:-1],
        key + "0",
        key.replace("dgk_", "ghp_"),
        key[:8] + key[9] + key[8] + key[10:] + " ",
        "",
    ):
        assert not well_formed(wrong)


def test_the_checksum_of_a_key_never_changes() -> None:
    """Base62 of the CRC-32, six digits of 0-9, A-Z, a-z: scanners hold to it."""
    assert new_key(lambda digits: digits[0]) == "dgk_" + "0" * 30 + "2C8GjS"


# create


def test_a_key_is_shown_once_and_kept_as_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    words = ("--plan", "trial", "--tag", "x", "--tag", "y z", "--tier", "fast", "--model", "smollm2:fast")
    result = run("create", "ci", "--file", str(path), *words, "--expires", "2099-01-01")
    key = made(result)
    assert key not in result.stderr
    assert "shown once" in result.stderr
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    tenant = parse_keys(path.read_text(), "keys.yaml", KNOWN, loopback=True).authenticate(key.encode(), NOW)
    assert (tenant.name, tenant.plan, tenant.tags, tenant.tiers) == ("ci", "trial", {"x", "y z"}, {"fast"})
    assert tenant.models == {"smollm2:fast"}
    assert [p.name for p in tmp_path.iterdir()] == ["keys.yaml"]


def test_what_the_operator_wrote_stays(file: Path) -> None:
    key = made(run("create", "new", "--file", str(file)))
    added = f"\n  - name: new\n    sha256: {sha(key)}"
    assert file.read_text() == TEXT.replace("\n\n# the end", f"{added}\n\n# the end")


def test_json_says_the_same(file: Path) -> None:
    told = json.loads(run("create", "new", "--file", str(file), "--json", "--plan", "trial").stdout)
    assert (told["name"], told["plan"], told["sha256"]) == ("new", "trial", sha(told["key"]))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("create", "ci"), 1, "`ci` is a key in"),
        (("create", "a b"), 2, "use letters, digits, dots, dashes"),
        (("create", "x", "--expires", "soon"), 2, "is not a date"),
        (("create", "x", "--expires", "2001-01-01"), 2, "is over already"),
        (("create", "x", "--organisation", "acme"), 1, "unknown organisation `acme`"),
        (("create",), 2, "Missing argument"),
        (("revoke", "nobody"), 1, "there is no key `nobody` in"),
        (("rotate", "nobody"), 1, "there is: ci, b, c"),
        (("rotate", "ci", "--overlap", "long"), 2, "is not a duration"),
    ],
)
def test_what_cannot_be_done_changes_nothing(
    file: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    result = run(*words, "--file", str(file))
    assert (result.exit_code, message in result.stderr) == (code, True), result.output
    assert file.read_text() == TEXT


def test_names_are_those_of_the_deployment(tmp_path: Path) -> None:
    config = tmp_path / "dualgauge.yaml"
    engine = '{name: e, tier: fast, kind: external, url: "http://127.0.0.1:1", precision: awq}'
    config.write_text(f"model: m\nkeys: apps.yaml\nengines: [{engine}]\n")
    made(run("create", "a", "--config", str(config), "--tier", "fast"))
    assert entry(tmp_path / "apps.yaml", "a")["tiers"] == ["fast"]
    for words, message in (
        (("--tier", "fats"), "did you mean `fast`?"),
        (("--plan", "gold"), "unknown plan"),
    ):
        result = run("create", "b", "--config", str(config), *words)
        assert (result.exit_code, message in result.stderr) == (1, True), result.output
    config.write_text(f"model: m\nengines: [{engine}]\n")
    assert "names no key file" in run("list", "--config", str(config)).stderr
    assert "there is no" in run("list", "--config", str(tmp_path / "nowhere.yaml")).stderr


# revoke, rotate


def test_a_revoked_key_keeps_its_entry(file: Path) -> None:
    for name in ("ci", "b", "c"):
        assert run("revoke", name, "--file", str(file)).exit_code == 0
    assert [entry(file, name)["disabled"] for name in ("ci", "b", "c")] == [True] * 3
    changed = TEXT.replace("tags: [critical]", "tags: [critical]\n    disabled: true")
    changed = changed.replace("tiers: [fast]}", "tiers: [fast], disabled: true}")
    assert file.read_text() == changed.replace("disabled: false", "disabled: true")
    result = run("revoke", "b", "--file", str(file), "--json")
    assert json.loads(result.stdout)["was_revoked"] is True


@pytest.mark.parametrize(("name", "old"), [("ci", OLD), ("b", sha("sk-plain")), ("c", "ab" * 32)])
def test_a_rotated_key_overlaps_with_the_old_one(file: Path, name: str, old: str) -> None:
    before = entry(file, name)
    key = made(run("rotate", name, "--file", str(file), "--overlap", "2h"))
    after = entry(file, name)
    assert (after.pop("sha256"), after.pop("previous")["sha256"]) == (sha(key), old)
    before.pop("key", None)
    before.pop("sha256", None)
    assert after == before
    for comment in re.findall("#.*", TEXT):
        assert comment in file.read_text()


def test_the_old_key_is_the_tenants_until_the_overlap_ends(file: Path) -> None:
    import time

    new = made(run("rotate", "b", "--file", str(file), "--overlap", "1h")).encode()
    ring = parse_keys(file.read_text(), "keys.yaml", KNOWN, loopback=True)
    now = time.time()
    for key in (new, b"sk-plain"):
        assert (ring.authenticate(key, now).name, ring.authenticate(key, now).tiers) == ("b", {"fast"})
    assert ring.authenticate(new, now + 3700).name == "b"
    assert ring.find(b"sk-plain") is not None
    assert ring.find(b"sk-plain").expires < now + 3700  # type: ignore[union-attr]


def test_without_an_overlap_the_old_key_ends_at_once(file: Path) -> None:
    made(run("rotate", "ci", "--file", str(file)))
    made(run("rotate", "ci", "--file", str(file), "--overlap", "0s", "--expires", "90d"))
    assert "previous" not in entry(file, "ci")
    assert "expires" in entry(file, "ci")


def test_what_has_ended_is_not_brought_back(file: Path) -> None:
    run("revoke", "ci", "--file", str(file))
    result = run("rotate", "ci", "--file", str(file))
    assert (result.exit_code, "`ci` is revoked" in result.stderr) == (1, True)


def test_revoking_ends_the_key_before_too(file: Path) -> None:
    run("rotate", "ci", "--file", str(file))
    run("revoke", "ci", "--file", str(file))
    assert "previous" not in entry(file, "ci")


# list, check


def test_keys_are_listed_without_showing_them(file: Path) -> None:
    run("rotate", "ci", "--file", str(file))
    run("revoke", "c", "--file", str(file))
    result = run("list", "--file", str(file))
    assert "sk-plain" not in result.stdout
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["ci", "valid,"], ["b", "valid"], ["c", "revoked"]]
    listed = json.loads(run("list", "--file", str(file), "--json").stdout)
    assert [key["state"] for key in listed] == ["valid", "valid", "revoked"]
    assert listed[0]["previous_until"] is not None
    assert listed[1]["sha256"] == sha("sk-plain")[:12]


def test_a_key_is_known_offline(file: Path) -> None:
    key = made(run("create", "new", "--file", str(file)))
    for stdin, code, words in (
        (key, 0, "new: valid"),
        ("sk-plain\n", 0, "b: valid"),
        (new_key(), 1, "it has the form"),
        (key[:-1] + "!", 1, "has a typo"),
        ("hunter2", 1, "has not the form"),
        ("", 1, "no key of"),
    ):
        result = run("check", "--file", str(file), stdin=stdin)
        assert (result.exit_code, words in result.stdout) == (code, True), result.output
        assert stdin.strip() == "" or stdin.strip() not in result.output
    run("revoke", "new", "--file", str(file))
    told = run("check", "--file", str(file), "--json", stdin=key)
    assert (told.exit_code, json.loads(told.stdout)["state"]) == (1, "revoked")


# the file


def test_a_file_with_a_mistake_is_left_alone(file: Path) -> None:
    file.write_text(TEXT + "  - name: x\n")
    before = file.read_text()
    for words in (("create", "y"), ("revoke", "ci"), ("rotate", "ci")):
        result = run(*words, "--file", str(file))
        assert (result.exit_code, "error" in result.stderr) == (1, True)
        assert file.read_text() == before


def test_a_style_that_cannot_be_edited_is_left_alone() -> None:
    text = "x: &k [{name: a, key: b}]\nkeys: *k\n"
    with pytest.raises(Failure, match="edit it by hand"):
        keyfile.with_key(text, {"name": "c", "sha256": OLD}, "keys.yaml")


def test_a_link_stays_a_link(tmp_path: Path, file: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    made(run("create", "new", "--file", str(link)))
    assert link.is_symlink()
    assert entry(file, "new")["sha256"]


def create(path: str, name: str) -> None:
    assert run("create", name, "--file", path).exit_code == 0


def test_two_who_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.yaml")
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=create, args=(path, f"k{i}")) for i in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert {key["name"] for key in yaml.safe_load(Path(path).read_text())["keys"]} == {
        f"k{i}" for i in range(6)
    }


STYLES = (
    "",
    "# nothing yet\n",
    "keys: []\n",
    "keys: [] # none\n# end",
    "keys:\n",
    "keys: # none\n",
    "{keys: []}",
    "keys: [{name: z, key: x}]\norganisations: [{name: o, plan: p}]\n",
    "keys:\n- name: z\n  key: x\norganisations:\n- {name: o, plan: p}",
    "keys: [\n  {name: z, key: x},\n  {name: y, key: w}\n]\n",
    "organisations: []\nkeys:\n  -\n    name: z\n    key: >-\n      x\n\n\n",
    "organisations: []\n",
    TEXT,
)
NAMES = st.from_regex(NAME, fullmatch=True)
DIGESTS = st.one_of(
    st.binary(min_size=32, max_size=32).map(bytes.hex), st.from_regex("[0-9]{30}e[0-9]{33}", fullmatch=True)
)
TAGS = st.lists(st.text("ab :#,[]{}'\"&*!|>%@`\\-1.é\n", min_size=1), min_size=1, max_size=3)


@given(st.sampled_from(STYLES), NAMES, DIGESTS, TAGS)
def test_any_key_is_read_back_from_any_style(style: str, name: str, digest: str, tags: list[str]) -> None:
    name = f"k-{name}"
    added: dict[str, Any] = {"name": name, "sha256": digest, "tags": tags, "tiers": ["fast"]}
    before = load(style, "f").value or {}
    text = keyfile.with_key(style, added, "f")
    assert load(text, "f").value == {**before, "keys": [*(before.get("keys") or []), added]}
    previous = {"sha256": digest, "until": "2027-01-01T00:00:00+00:00"}
    text = keyfile.with_fields(text, name, {"disabled": True, "previous": previous, "tags": None}, "f")
    text = keyfile.with_fields(text, name, {"sha256": OLD, "previous": None}, "f")
    wanted = {"name": name, "sha256": OLD, "tiers": ["fast"], "disabled": True}
    assert load(text, "f").value == {**before, "keys": [*(before.get("keys") or []), wanted]}


# a gateway that runs


async def test_a_running_gateway_follows(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    keys = "keys: [{name: first, key: sk-first}]\n"
    async with engines(engine), serving(tmp_path, {"fast": engine}, keys=keys) as served:
        path = str(tmp_path / "keys.yaml")

        async def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await ask(served.port, CHAT.path, CHAT.ask(), headers=headers)).status

        async def becomes(key: str, wanted: int) -> None:
            async with asyncio.timeout(5):
                while await status(key) != wanted:
                    await asyncio.sleep(0.05)

        new = made(await asyncio.to_thread(run, "create", "new", "--file", path))
        await becomes(new, 200)
        newer = made(await asyncio.to_thread(run, "rotate", "new", "--file", path))
        await becomes(newer, 200)
        assert await status(new) == 200
        await asyncio.to_thread(run, "revoke", "new", "--file", path)
        await becomes(newer, 401)
        assert await status(new) == 401
        assert await status("sk-first") == 200
