"""Prompts are counted with the model's own tokenizer where that may change a decision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from click.testing import CliRunner

from engines.spec import EngineSpec
from engines.tokenizer_file import find
from gateway.cli.explain import explain_command
from gateway.config import parse
from gateway.tokenizer import MOST_WAITING, Counter, Tokenizer, TokenizerError, tokenizer_of
from policies.compile import compile_policy
from policies.document import ProblemsError
from policies.facts import Conversation, Turn
from policies.signals.prompt import estimate
from tests.support.client import ask
from tests.support.engine import FakeEngine, engines, reply
from tests.support.serving import deployment, serving
from tests.support.shapes import CHAT, IDS, SHAPES, Shape

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }} <|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def checkpoint(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A folder with a tokenizer that makes one token of each word, and a chat template."""
    folder.mkdir(exist_ok=True)
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(folder / "tokenizer.json"))
    config = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def talk(*turns: tuple[str, str], **more: Any) -> Conversation:
    return Conversation(tuple(Turn(role, text) for role, text in turns), **more)  # type: ignore[arg-type]


def policy(bound: int) -> str:
    when = f"{{signal: prompt_tokens, at_least: {bound}}}"
    return f"version: 1\nrules: [{{name: long, when: {when}, send: exact}}, {{name: rest, send: fast}}]"


def test_the_marks_of_the_template_are_counted(tmp_path: Path) -> None:
    tokenizer = Tokenizer(checkpoint(tmp_path / "m") / "tokenizer.json")
    # <|im_start|>user one two <|im_end|> <|im_start|> assistant
    assert tokenizer.count(talk(("user", "one two")), "openai.chat") == 6
    grown = talk(("system", "be brief"), ("user", "one"), ("assistant", "two three"), ("user", "four"))
    assert tokenizer.count(grown, "openai.chat") == 6 + 4 * 2 + 2
    assert tokenizer.count(talk(("user", "one two")), "openai.completions") == 2
    assert tokenizer.count(talk(token_ids=7), "openai.completions") == 7


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{% broken"])
def test_without_a_template_marks_are_estimated(tmp_path: Path, template: str | None) -> None:
    tokenizer = Tokenizer(checkpoint(tmp_path / "m", template) / "tokenizer.json")
    assert tokenizer.count(talk(("user", "one two")), "openai.chat") == 6


def test_a_template_cannot_reach_out(tmp_path: Path) -> None:
    evil = "{{ cycler.__init__.__globals__.os.system('touch " + str(tmp_path / "pwned") + "') }}"
    tokenizer = Tokenizer(checkpoint(tmp_path / "m", evil) / "tokenizer.json")
    assert tokenizer.count(talk(("user", "one")), "openai.chat") == 5
    assert not (tmp_path / "pwned").exists()


def test_what_is_no_tokenizer_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is no tokenizer"):
        Tokenizer(tmp_path / "tokenizer.json").load()


async def test_only_prompts_near_a_bound_are_counted(tmp_path: Path) -> None:
    counter = Counter(Tokenizer(checkpoint(tmp_path / "m") / "tokenizer.json"))
    policies = (compile_policy(policy(1000), "p"),)
    try:
        for words, counted in ((200, None), (900, 904), (1500, 1504), (3000, None)):
            conversation = talk(("user", "word " * words))
            assert await counter.count(conversation, "openai.chat", policies) == counted
    finally:
        counter.close()


async def test_a_broken_tokenizer_leaves_estimates_and_a_reason(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    counter = Counter(Tokenizer(tmp_path / "tokenizer.json"))
    policies = (compile_policy(policy(1000), "p"),)
    try:
        for _ in range(2):
            assert await counter.count(talk(("user", "word " * 1000)), "openai.chat", policies) is None
        assert "is no tokenizer" in counter.source
    finally:
        counter.close()


async def test_too_many_waiting_are_decided_by_their_estimate(tmp_path: Path) -> None:
    counter = Counter(Tokenizer(checkpoint(tmp_path / "m") / "tokenizer.json"))
    counter._waiting = MOST_WAITING
    policies = (compile_policy(policy(1000), "p"),)
    try:
        assert await counter.count(talk(("user", "word " * 1000)), "openai.chat", policies) is None
    finally:
        counter.close()


ODD = "x" * 8 + " "
"""A word of three tokens, as they are estimated, and of one in the tokenizer of these tests."""


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_count_decides_where_the_estimate_would_err(tmp_path: Path, shape: Shape) -> None:
    text = ODD * 700
    body: dict[str, Any] = {"completions": {"prompt": text}, "responses": {"input": text}}.get(
        shape.name, {"messages": [{"role": "user", "content": text}]}
    )
    assert estimate(talk(("user", text))) >= 1000
    fast, exact = FakeEngine(reply(shape.reply)), FakeEngine(reply(shape.reply))
    folder = str(checkpoint(tmp_path / "m"))
    async with engines(fast, exact):
        for tokenizer, rule in (("none", "long"), (folder, "rest")):
            async with serving(
                tmp_path, {"fast": fast, "exact": exact}, policy=policy(1000), tokenizer=tokenizer
            ) as served:
                answer = await ask(served.port, shape.path, shape.ask(**body))
                assert answer.headers["x-dualgauge-rule"] == rule


async def test_short_prompts_and_pinned_ones_read_no_tokenizer(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    folder = str(checkpoint(tmp_path / "m"))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine, "exact": engine}, policy=policy(1000), tokenizer=folder) as served,
    ):
        await ask(served.port, CHAT.path, CHAT.ask())
        long = [{"role": "user", "content": "word " * 1000}]
        await ask(served.port, CHAT.path, CHAT.ask(model="smollm2:fast", messages=long))
        assert served.gateway.counter is not None
        assert not served.gateway.counter._tokenizer.loaded


def spec(model: str | None) -> EngineSpec:
    return EngineSpec("e", "fast", "vllm", "http://127.0.0.1:1", "m", "awq", model)


def test_where_a_tokenizer_is_looked_for(tmp_path: Path) -> None:
    beside = checkpoint(tmp_path / "m")
    home, hub = tmp_path / "home", tmp_path / "hub"
    (home / "models").mkdir(parents=True)
    demo = checkpoint(home / "models" / "smollm2-135m-awq")
    cached = hub / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc123\n")
    (cached / "snapshots").mkdir()
    snapshot = checkpoint(cached / "snapshots" / "abc123")
    env = {"DUALGAUGE_HOME": str(home), "HF_HUB_CACHE": str(hub), "HOME": str(tmp_path)}
    for model, folder in (
        (str(beside), beside),
        ("demo/smollm2-135m-awq", demo),
        ("org/name", snapshot),
    ):
        assert find([spec(None), spec(model)], env) == folder / "tokenizer.json"
    assert find([spec("org/other"), spec(None), spec(str(tmp_path))], env) is None


def config(tmp_path: Path, **settings: Any) -> Any:
    text = json.dumps(deployment({"fast": "http://127.0.0.1:1"}, **settings))
    return parse(text, tmp_path / "dualgauge.yaml", {})


def test_how_prompts_are_measured_is_told_in_words(tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "m") / "tokenizer.json"
    assert tokenizer_of(config(tmp_path, tokenizer="m"))[1] == f"counted by {file}"
    assert tokenizer_of(config(tmp_path, tokenizer="none")) == (None, "estimated: `tokenizer: none`")
    nowhere = "estimated: no tokenizer.json beside an engine's `model`"
    assert tokenizer_of(config(tmp_path)) == (None, nowhere)


def test_a_tokenizer_that_is_not_there_is_an_error_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError, match=r"1:\d+: error: there is no .*tokenizer.json"):
        config(tmp_path, tokenizer="./nowhere/tokenizer.json")


def test_explain_counts_and_says_so(tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "m") / "tokenizer.json"
    run = CliRunner().invoke
    command = ["--text", "one two", "--policy", "default"]
    counted = run(explain_command, [*command, "--tokenizer", str(file), "--json"])
    found = json.loads(counted.stdout)
    assert found["signals"]["prompt_tokens"] == 6
    assert found["prompt_tokens"] == f"counted by {file}"
    assert f"(counted by {file})" in run(explain_command, [*command, "--tokenizer", str(file)]).stdout
    assert "(estimated)" in run(explain_command, command).stdout
