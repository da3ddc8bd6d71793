"""What the documents say holds: commands, options, configurations, links."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml

from gateway import config
from gateway.cli import cli
from gateway.identity import Known, parse_keys
from policies.compile import TIERS, compile_policy

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`(dualgauge [^`\n]+)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
FILE = re.compile(r"# (policy|keys|dualgauge)\.yaml\n")
ENGINE = {"name": "e", "tier": "fast", "kind": "external", "url": "http://127.0.0.1:1", "precision": "awq"}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(path.read_text("utf-8")) if language in languages]


def commands(path: Path) -> Iterator[str]:
    """Every call of `dualgauge` in a document's shell blocks and code spans."""
    for block in blocks(path, "", "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            yield from (
                call.strip() for call in re.split(r"&&|\|\|?|;", line) if re.search(r"\bdualgauge \w", call)
            )
    prose = FENCE.sub("", path.read_text("utf-8"))
    yield from SPAN.findall(prose)


def words(call: str) -> list[str]:
    """What stands behind `dualgauge`, up to a redirection or a comment."""
    behind = call[re.search(r"\bdualgauge (?=\w)", call).end() :]  # type: ignore[union-attr]
    found = shlex.split(behind, comments=True)
    stops = [index for index, word in enumerate(found) if re.match(r"[0-9]?[<>]", word)]
    return found[: stops[0]] if stops else found


def complaint(call: str) -> str | None:
    """What is wrong with a call, None where its commands and options are there."""
    command: click.Command = cli
    names = words(call)
    context = click.Context(cli)
    while isinstance(command, click.Group) and names and re.fullmatch(r"[a-z]+", names[0]):
        inner = command.get_command(context, names[0])
        if inner is None:
            return f"there is no `{names[0]}` in `{command.name}`"
        command, names = inner, names[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [
        word for word in names if word.startswith("-") and word != "-" and word.partition("=")[0] not in known
    ]
    return f"`{command.name}` has no {', '.join(unknown)}" if unknown else None


CALLS = sorted({(named(path), call) for path in DOCUMENTS for call in commands(path)})


@pytest.mark.parametrize(("document", "call"), CALLS)
def test_a_command_exists(document: str, call: str) -> None:
    assert complaint(call) is None, f"{document}: {call}: {complaint(call)}"


def test_commands_are_found_and_checked() -> None:
    assert ("README.md", "dualgauge up") in CALLS
    assert complaint("dualgauge up --no-such-option") is not None
    assert complaint("dualgauge no such command") is not None
    assert complaint("pip install . && dualgauge up") is None


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_every_command_is_in_a_document(name: str) -> None:
    assert any(words(call)[:1] == [name] for _, call in CALLS), f"no document shows `dualgauge {name}`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    lost = [
        link for link in LINK.findall(document.read_text("utf-8")) if not (document.parent / link).exists()
    ]
    assert not lost


KNOWN = Known(tiers=TIERS, plans=("default", "trial"), models=("smollm2",))
FILES = [(named(path), block) for path in DOCUMENTS for block in blocks(path, "yaml") if FILE.match(block)]


@pytest.mark.parametrize(("document", "text"), FILES)
def test_a_configuration_is_accepted(document: str, text: str) -> None:
    kind = FILE.match(text)
    assert kind is not None
    if kind[1] == "policy":
        assert compile_policy(text, document, tiers=TIERS).warnings == ()
    elif kind[1] == "keys":
        assert parse_keys(text, document, KNOWN, loopback=True).tenants
    else:
        # Some show only the keys in question: what they leave out is added.
        whole = {"model": "smollm2", "engines": [ENGINE], **yaml.safe_load(text)}
        assert config.parse(yaml.safe_dump(whole), ROOT / "dualgauge.yaml", {}).engines


def ci_reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_readme", ROOT / ".ci" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ci_runs_the_commands_of_the_readme() -> None:
    """CI takes them from README.md by heading and place, and runs each."""
    read = ci_reader().commands
    readme, script = (ROOT / "README.md").read_text("utf-8"), (ROOT / ".ci" / "run").read_text("utf-8")
    start = read(readme, "Install and run")
    assert start[0] == "pip install . && dualgauge up"
    assert "-m venv" in start[1]
    assert start[2].startswith("curl ")
    assert 'up_command="${start[0]}" curl_command="${start[2]}"' in script
    assert read(readme, "Test") == ["pip install -e '.[dev]' && pytest"]
    for run in ('exec bash -c "$up_command"', 'bash -c "$curl_command"', 'bash -c "$test_command"'):
        assert run in script


def test_ci_says_where_the_readme_lost_a_command() -> None:
    with pytest.raises(LookupError, match="## Test"):
        ci_reader().commands("# Dualgauge\n\n## Test\n\nNothing.\n", "Test")
