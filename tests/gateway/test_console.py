"""What the console's page asks the admin port, and who may ask."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest

from gateway.app import change_engines
from gateway.cli.status import describe, status
from gateway.config import parse
from gateway.console.access import COOKIE, SESSION_SECONDS, Access, is_loopback
from gateway.console.live import AT_ONCE, FRESH_SECONDS
from gateway.console.page import STATIC
from gateway.process import Process
from gateway.telemetry.recent import EACH_LOOK
from tests.support.client import Reply, ask, get, until
from tests.support.engine import FakeEngine, engines, hang, reply, stream
from tests.support.serving import Served, deployment, serving
from tests.support.shapes import ANTHROPIC, CHAT, check_openai, events

TOKEN = "s3cret"
BEARER = {"authorization": f"Bearer {TOKEN}"}
DOWN = {"fast": "http://127.0.0.1:9", "exact": "http://127.0.0.1:9"}
GUARDED = ["/admin/live", "/admin/decisions/req_1", "/admin/policy", "/admin/tenants", "/admin/explain"]
SECRET = "the-words-of-a-prompt"
POLICY = """
version: 1
classes:
  critical: {header: {x-criticality: high}}
  told: {matches: {user: words}}
rules:
  - {name: critical, when: critical, send: exact, if_unavailable: fail}
  - {name: told, when: told, send: exact, if_unavailable: degrade}
  - {name: everything else, send: fast, if_unavailable: fail}
plans:
  default: {requests: [600/min, 10k/day], tokens: 200k/min, concurrent: 32}
  trial: {requests: 20/min, exact_tokens: 2k/min}
"""
KEYS = """
organisations: [{name: acme, plan: default}]
keys:
  - {name: shop, key: sk-shop}
  - {name: ci, key: sk-ci, plan: trial, tags: [critical], organisation: acme}
  - {name: gone, key: sk-gone, tiers: [fast], disabled: true}
"""


async def explain(served: Served, body: object, **more: Any) -> Reply:
    return await ask(served.admin, "/admin/explain", {"body": body, **more})


async def live(served: Served, cursor: str = "") -> Any:
    answer = await get(served.admin, f"/admin/live?cursor={cursor}")
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"
    return answer.json


async def changed(served: Served, cursor: str) -> Any:
    """The next answer that is made anew."""
    await asyncio.sleep(FRESH_SECONDS + 0.05)
    return await live(served, cursor)


# who may ask


@pytest.mark.parametrize("path", GUARDED)
async def test_a_token_is_asked(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, DOWN, wait=False, admin_token=TOKEN) as served:
        method = "POST" if path.endswith("explain") else "GET"
        answer = await ask(served.admin, path, method=method)
        assert answer.status == 401
        check_openai(answer.json["error"])
        assert (await ask(served.admin, path, method=method, headers=BEARER)).status != 401


async def test_the_page_needs_no_token_and_holds_no_data(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False, admin_token=TOKEN) as served:
        answer = await get(served.admin, "/")
        assert (answer.status, answer.headers["location"]) == (307, "console/")
        page = await get(served.admin, "/console/")
        assert page.status == 200
        assert TOKEN.encode() not in page.body
        assert b"smollm2" not in page.body


async def sign_in(port: int, token: str, **headers: str) -> Reply:
    return await ask(port, "/admin/login", {"token": token}, headers=headers)


def cookie_of(answer: Reply) -> dict[str, str]:
    morsel = SimpleCookie(answer.headers["set-cookie"])[COOKIE]
    return {"cookie": f"{COOKIE}={morsel.value}"}


async def test_a_login_gives_a_session(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False, admin_token=TOKEN) as served:
        assert (await get(served.admin, "/admin/session")).json == {"asked": True, "signed_in": False}
        answer = await sign_in(served.admin, TOKEN)
        assert answer.status == 204
        morsel = SimpleCookie(answer.headers["set-cookie"])[COOKIE]
        assert (morsel["httponly"], morsel["samesite"], morsel["secure"]) == (True, "strict", "")
        assert int(morsel["max-age"]) == SESSION_SECONDS
        assert TOKEN not in morsel.value
        session = cookie_of(answer)
        assert (await get(served.admin, "/admin/status", session)).status == 200
        assert (await get(served.admin, "/admin/session", session)).json["signed_in"] is True
        assert (await ask(served.admin, "/admin/reload", headers=session)).status == 200
        assert "max-age=0" in (
            (await ask(served.admin, "/admin/logout", headers=session)).headers["set-cookie"].lower()
        )


async def test_behind_tls_the_cookie_is_secure(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False, admin_token=TOKEN) as served:
        answer = await sign_in(served.admin, TOKEN, **{"x-forwarded-proto": "https"})
        assert SimpleCookie(answer.headers["set-cookie"])[COOKIE]["secure"]


@pytest.mark.parametrize("body", [{"token": "wrong"}, {"token": ""}, {}, b"{", {"token": 1}, b"x" * 10_000])
async def test_a_login_that_is_wrong_gives_nothing(tmp_path: Path, body: object) -> None:
    async with serving(tmp_path, DOWN, wait=False, admin_token=TOKEN) as served:
        answer = await ask(served.admin, "/admin/login", body)
        assert answer.status == (
            401 if isinstance(body, dict) and isinstance(body.get("token"), str) else 400
        )
        check_openai(answer.json["error"])
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [{"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"origin": "https://evil.example"}],
)
async def test_another_site_can_change_nothing(tmp_path: Path, headers: Mapping[str, str]) -> None:
    async with serving(tmp_path, DOWN, wait=False, admin_token=TOKEN) as served:
        session = cookie_of(await sign_in(served.admin, TOKEN))
        assert (await ask(served.admin, "/admin/reload", headers={**session, **headers})).status == 403
        assert (await sign_in(served.admin, TOKEN, **headers)).status == 403
    async with serving(tmp_path, DOWN, wait=False) as served:
        assert (await ask(served.admin, "/admin/reload", headers=headers)).status == 403
        assert (await get(served.admin, "/admin/status", headers)).status == 403


async def test_the_own_page_may(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False) as served:
        host = f"127.0.0.1:{served.admin}"
        for own in ({"sec-fetch-site": "same-origin"}, {"origin": f"http://{host}"}):
            assert (await ask(served.admin, "/admin/reload", headers={"host": host, **own})).status == 200


async def test_without_a_token_a_name_that_leads_here_is_no_way_in(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False) as served:
        for path in ("/admin/status", "/admin/live", "/metrics"):
            answer = await get(served.admin, path, {"host": "rebound.example:8081"})
            assert answer.status == 403
            assert "admin_token" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("localhost:8081", True),
        ("127.0.0.1:8081", True),
        ("[::1]:8081", True),
        ("gateway.localhost", True),
        ("", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
        ("[::1", False),
        ("[v1.x]", False),
    ],
)
def test_loopback_names(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_session_ends() -> None:
    now = [1000.0]
    access = Access(TOKEN, lambda: now[0])
    session = {COOKIE: access.session()}
    assert access.signed_in(session)
    now[0] += SESSION_SECONDS - 1
    assert access.signed_in(session)
    now[0] += 1
    assert not access.signed_in(session)


@pytest.mark.parametrize(
    "forged", ["", ".", "x", "9999999999", "9999999999.", "9" * 5000 + ".a", "-1.a", "²."]
)
def test_a_forged_session_is_none(forged: str) -> None:
    assert not Access(TOKEN, lambda: 0.0).signed_in({COOKIE: forged})


def test_a_session_is_of_one_token_and_one_end() -> None:
    session = Access(TOKEN, lambda: 0.0).session()
    end, _, mac = session.partition(".")
    assert not Access("another", lambda: 0.0).signed_in({COOKIE: session})
    assert not Access(None, lambda: 0.0).is_token("")
    assert not Access(TOKEN, lambda: 0.0).signed_in({COOKIE: f"{int(end) + 1}.{mac}"})


# the page


async def test_the_page_may_load_and_run_its_own_files_only(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False) as served:
        answer = await get(served.admin, "/console/")
        policy = dict(
            part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


async def test_every_file_that_is_named_is_served(tmp_path: Path) -> None:
    names = re.findall(r'(?:src|href)="([^"#]+)"', (STATIC / "index.html").read_text("utf-8"))
    modules = sorted((STATIC / "js").glob("*.js"))
    for module in modules:
        for name in re.findall(r'from "([^"]+)"', module.read_text("utf-8")):
            found = (module.parent / name).resolve()
            names.append(str(found.relative_to(STATIC)))
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    async with serving(tmp_path, DOWN, wait=False) as served:
        for name in set(names):
            answer = await get(served.admin, f"/console/{name}")
            assert answer.status == 200, name
            assert answer.headers["content-type"].startswith(kinds[Path(name).suffix])
    assert len(set(names)) > len(modules)


@pytest.mark.parametrize(
    "file", sorted(STATIC.glob("**/*.html")) + sorted(STATIC.glob("js/*.js")), ids=lambda f: f.name
)
def test_nothing_is_inline_and_nothing_comes_from_elsewhere(file: Path) -> None:
    text = file.read_text("utf-8")
    for forbidden in ("innerHTML", "style=", "<style", "javascript:", "eval(", "http://", "https://"):
        assert forbidden not in text
    assert not re.search(r"<script(?![^>]*src=)|<\w+[^>]* on\w+=", text)


@pytest.mark.parametrize("path", ["/console/nope.js", "/console/../admin.py", "/console/%2e%2e/page.py"])
async def test_other_files_are_not_there(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, DOWN, wait=False) as served:
        assert (await get(served.admin, path)).status == 404


# what is live


async def test_a_decision_is_shown_from_its_start_to_its_end(tmp_path: Path) -> None:
    fast = FakeEngine(hang)
    async with engines(fast), serving(tmp_path, {"fast": fast}, policy=POLICY) as served:
        before = await live(served)
        assert before["decisions"] == []
        body = CHAT.ask(messages=[{"role": "user", "content": "Hello"}])
        asking = asyncio.create_task(ask(served.port, CHAT.path, body))
        await until(lambda: fast.generations == 1)
        after = await changed(served, before["cursor"])
        (row,) = after["decisions"]
        assert (row["decided"], row["rule"], row["engine"]) == ("fast", "everything else", "fast-0")
        assert (row["done"], row["outcome"], row["seconds"], row["explained"]) == (False, "", None, True)
        asking.cancel()
        await until(lambda: served.clean)
        last = await changed(served, after["cursor"])
        (row,) = last["decisions"]
        assert (row["done"], row["outcome"]) == (True, "cancelled")
        assert (await changed(served, last["cursor"]))["decisions"] == []


async def test_a_decision_made_while_nobody_looked_is_shown_with_its_reasons(tmp_path: Path) -> None:
    async with engines(fast := FakeEngine(reply(CHAT.reply))), serving(tmp_path, {"fast": fast}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        (row,) = (await live(served))["decisions"]
        assert row["id"] == answer.headers["x-request-id"]
        assert (row["status"], row["usage"]["completion"]) == (200, CHAT.reply_usage.completion)
        assert row["explained"] is False
        why = (await get(served.admin, f"/admin/decisions/{row['id']}")).json
        assert why["rules"] is None
        assert why["reasons"] == ["no rule before it held"]


async def test_why_is_what_explain_says(tmp_path: Path) -> None:
    exact = FakeEngine(reply(CHAT.reply))
    body = CHAT.ask(messages=[{"role": "user", "content": f"{SECRET} words"}])
    async with engines(exact), serving(tmp_path, {"exact": exact}, policy=POLICY) as served:
        await live(served)
        answer = await ask(served.port, CHAT.path, body)
        why = (await get(served.admin, f"/admin/decisions/{answer.headers['x-request-id']}")).json
        told = (await explain(served, body)).json
        for name in ("tier", "rule", "reasons", "rules", "if_unavailable", "policy", "used"):
            assert why[name] == told[name]
        assert [(rule["name"], rule["held"], rule["reached"]) for rule in why["rules"]] == [
            ("critical", False, True),
            ("told", True, True),
            ("everything else", True, False),
        ]
        assert why["signals"].keys() == told["signals"].keys()


async def test_no_word_of_a_prompt_is_shown(tmp_path: Path) -> None:
    fast = FakeEngine(reply(CHAT.reply))
    async with engines(fast), serving(tmp_path, {"fast": fast, "exact": fast}, policy=POLICY) as served:
        first = await live(served)
        for shape in (CHAT, ANTHROPIC):
            body = shape.ask(
                messages=[{"role": "user", "content": f"{SECRET} words"}], metadata={"a": SECRET}
            )
            answer = await ask(served.port, shape.path, body, headers={"x-team": SECRET})
            shown = await get(served.admin, f"/admin/decisions/{answer.headers['x-request-id']}")
            assert shown.status == 200
            assert SECRET.encode() not in shown.body
        assert SECRET not in json.dumps(await changed(served, first["cursor"]))


async def test_a_decision_that_is_not_kept_is_not_found(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False) as served:
        assert (await get(served.admin, "/admin/decisions/req_0")).status == 404


async def test_all_consoles_share_an_answer_a_second(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False) as served:
        now = [10.0]
        served.gateway.clock = lambda: now[0]
        one = Process(served.gateway)
        first = json.loads(await one.live(""))
        served.gateway.draining = True
        assert json.loads(await one.live(""))["state"]["draining"] is False
        now[0] += 1
        assert json.loads(await one.live(first["cursor"]))["state"]["draining"] is True


async def test_many_consoles_are_told_to_ask_more_rarely(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False) as served:
        now = [10.0]
        served.gateway.clock = lambda: now[0]
        one = Process(served.gateway)
        consoles, due, every = 5 * AT_ONCE, [0.0] * (5 * AT_ONCE), 1.0
        for _ in range(400):
            now[0] += 0.1
            for index in range(consoles):
                if now[0] >= due[index]:
                    every = json.loads(await one.live(""))["every"]
                    due[index] = now[0] + every
        assert 3.5 <= every <= 7


async def test_a_burst_is_explained_in_part_only(tmp_path: Path) -> None:
    async with engines(fast := FakeEngine(reply(CHAT.reply))), serving(tmp_path, {"fast": fast}) as served:
        before = await live(served)
        for _ in range(EACH_LOOK + 5):
            await ask(served.port, CHAT.path, CHAT.ask())
        after = await changed(served, before["cursor"])
        assert len(after["decisions"]) == EACH_LOOK
        (rule,) = (rule for rule in after["state"]["rules"] if rule["name"] == "everything else")
        assert rule["requests"] == EACH_LOOK + 5


@pytest.mark.parametrize("cursor", ["", "x", "..", "a.b.c", "0.0.0", "%00", "-1.-1.-1", "9" * 3000])
async def test_a_cursor_that_says_nothing_gets_everything(tmp_path: Path, cursor: str) -> None:
    async with engines(fast := FakeEngine(reply(CHAT.reply))), serving(tmp_path, {"fast": fast}) as served:
        await ask(served.port, CHAT.path, CHAT.ask())
        answer = await live(served, cursor)
        assert len(answer["decisions"]) == 1
        assert answer["columns"][0] == "tier/fast/requests"


async def test_a_cursor_from_before_an_engine_came_gets_the_columns_anew(tmp_path: Path) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        before = await live(served)
        (spec,) = served.gateway.config.engines
        change_engines(served.gateway, [spec, replace(spec, name="fast-9")])
        assert "engine/fast-9/running" in (await live(served, before["cursor"]))["columns"]


async def test_rules_keep_their_counts_over_a_reload(tmp_path: Path) -> None:
    async with engines(fast := FakeEngine(reply(CHAT.reply))), serving(tmp_path, {"fast": fast}) as served:
        for model in ("smollm2", "smollm2:fast"):
            await ask(served.port, CHAT.path, CHAT.ask(model=model))
        (tmp_path / "policy.yaml").write_text("version: 1\nrules: [{name: all, send: fast}]")
        assert (await ask(served.admin, "/admin/reload")).status == 200
        shown = {rule["name"]: rule for rule in (await live(served))["state"]["rules"]}
        assert (shown["all"]["requests"], shown["all"]["in_policy"]) == (0, True)
        assert (shown["pinned"]["requests"], shown["pinned"]["in_policy"]) == (1, True)
        assert (shown["everything else"]["requests"], shown["everything else"]["in_policy"]) == (1, False)


async def test_a_candidate_that_acts_explains_its_own_decisions(tmp_path: Path) -> None:
    (tmp_path / "candidate.yaml").write_text("version: 1\nrules: [{name: new, send: fast}]")
    policy = "version: 1\nshadow: candidate.yaml\nrollout: 100%\nrules: [{name: old, send: fast}]"
    async with (
        engines(fast := FakeEngine(reply(CHAT.reply))),
        serving(tmp_path, {"fast": fast}, policy=policy) as served,
    ):
        await live(served)
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        why = (await get(served.admin, f"/admin/decisions/{answer.headers['x-request-id']}")).json
        assert (why["rule"], [rule["name"] for rule in why["rules"]]) == ("new", ["new"])
        told = (await explain(served, CHAT.ask())).json
        assert (told["rule"], told["candidate"]) == ("old", {"tier": "fast", "rule": "new"})


# explaining what is pasted


async def test_a_pasted_request_is_explained_and_asks_no_engine(tmp_path: Path) -> None:
    fast, exact = FakeEngine(), FakeEngine()
    async with (
        engines(fast, exact),
        serving(tmp_path, {"fast": fast, "exact": exact}, policy=POLICY) as served,
    ):
        told = (await explain(served, CHAT.ask(), headers={"X-Criticality": " high "})).json
        assert (told["tier"], told["rule"], told["problem"]) == ("exact", "critical", None)
        assert told["now"] == {"engine": "exact-0", "tier": "exact", "because": ""}
        served.mark("exact-0", "down")
        told = (await explain(served, json.dumps(CHAT.ask()), headers={"x-criticality": "high"})).json
        assert told["now"]["engine"] is None
        assert "exact" in told["now"]["error"]
        assert fast.generations == exact.generations == 0
        assert (await live(served))["decisions"] == []


@pytest.mark.parametrize(
    ("body", "headers", "dialect"),
    [
        ({"messages": []}, {}, "openai.chat"),
        ({"messages": [], "max_tokens": 4}, {"anthropic-version": "2023-06-01"}, "anthropic.messages"),
        ({"messages": [], "max_tokens": 4, "system": "Be kind."}, {}, "anthropic.messages"),
        ({"prompt": "Hi"}, {}, "openai.completions"),
        ({"input": "Hi"}, {}, "openai.responses"),
    ],
)
async def test_the_dialect_is_told_by_the_body(
    tmp_path: Path, body: dict[str, Any], headers: dict[str, str], dialect: str
) -> None:
    if "messages" in body:
        body = {**body, "messages": [{"role": "user", "content": "Hi"}]}
    async with serving(tmp_path, DOWN, wait=False, policy=POLICY) as served:
        told = (await explain(served, {"model": "smollm2", **body}, headers=headers)).json
        assert told["dialect"] == dialect


async def test_a_caller_brings_its_tags_and_tiers(tmp_path: Path) -> None:
    policy = """
version: 1
rules:
  - {name: tagged, when: {tenant_tag: critical}, send: exact}
  - {name: rest, send: fast}
plans: {default: {requests: 5/min}, trial: {requests: 5/min}}
"""
    async with serving(tmp_path, DOWN, wait=False, policy=policy, keys=KEYS) as served:
        assert (await explain(served, CHAT.ask(), tenant="ci")).json["rule"] == "tagged"
        assert (await explain(served, CHAT.ask(), tenant="shop")).json["rule"] == "rest"
        pinned = (await explain(served, CHAT.ask(model="smollm2:exact"), tenant="gone")).json
        assert "403" in pinned["problem"]
        unknown = (await explain(served, CHAT.ask(model="gpt"))).json
        assert "404" in unknown["problem"]


@pytest.mark.parametrize(
    ("sent", "part"),
    [
        (b"{", "send"),
        ({}, "body"),
        ({"body": "no JSON"}, "not a JSON object"),
        ({"body": {"messages": 1}}, "messages"),
        ({"body": {"messages": []}, "dialect": "nope"}, "no API shape"),
        ({"body": {"messages": []}, "tenant": "nobody"}, "there is no key"),
        ({"body": {}, "more": 1}, "more"),
        (b'{"body": ' + b"[" * 100_000, "send"),
    ],
)
async def test_what_cannot_be_explained_is_told(tmp_path: Path, sent: object, part: str) -> None:
    async with serving(tmp_path, DOWN, wait=False, policy=POLICY) as served:
        answer = await ask(served.admin, "/admin/explain", sent)
        assert answer.status == 400
        check_openai(answer.json["error"])
        assert part in answer.json["error"]["message"]


async def test_a_body_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False, bounds={"body": "4KiB"}) as served:
        assert (await explain(served, "x" * 5000)).status == 413


# policy and tenants


async def test_the_policy_is_shown_as_it_is_in_force(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False, policy=POLICY, keys=KEYS) as served:
        told = (await get(served.admin, "/admin/policy")).json
        assert told["text"] == POLICY
        assert told["hash"] == told["on_disk"] == served.gateway.snapshot.policy.hash
        assert told["diagnostics"] == []
        assert [rule["when"] for rule in told["rules"]] == ["critical", "told", None]
        assert told["classes"]["critical"] == "header x-criticality is high"
        assert [limit["field"] for limit in told["plans"]["default"]] == [
            "requests",
            "requests.1",
            "tokens",
            "concurrent",
        ]


async def test_a_mistake_on_disk_is_shown_where_it_stands(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False, policy=POLICY, keys=KEYS) as served:
        (tmp_path / "policy.yaml").write_text(POLICY.replace("send: fast", "send: fats"))
        told = (await get(served.admin, "/admin/policy")).json
        assert told["on_disk"] == ""
        (problem,) = told["diagnostics"]
        assert (problem["severity"], problem["line"]) == ("error", 9)
        assert "did you mean `fast`" in problem["message"]
        (tmp_path / "policy.yaml").unlink()
        told = (await get(served.admin, "/admin/policy")).json
        assert "No such file" in told["diagnostics"][0]["message"]


async def test_a_shipped_policy_is_shown_too(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False, policy=None) as served:
        told = (await get(served.admin, "/admin/policy")).json
        assert told["on_disk"] == told["hash"]
        assert "critical stays exact" in told["text"]


async def test_tenants_stand_against_their_plans(tmp_path: Path) -> None:
    fast = FakeEngine(stream(*events(CHAT.stream)))
    async with engines(fast), serving(tmp_path, {"fast": fast}, policy=POLICY, keys=KEYS) as served:
        for _ in range(3):
            await ask(served.port, CHAT.path, CHAT.ask(stream=True), headers={"x-api-key": "sk-ci"})
        told = (await get(served.admin, "/admin/tenants")).json
        assert [one["name"] for one in told["tenants"]] == ["ci", "gone", "shop"]
        ci, gone, shop = told["tenants"]
        assert (ci["plan"], ci["organisation"], ci["tags"], ci["valid"]) == (
            "trial",
            "acme",
            ["critical"],
            True,
        )
        assert (gone["tiers"], gone["valid"]) == (["fast"], False)
        usage = CHAT.stream_usage
        assert (ci["requests"], ci["tokens"]) == (3, 3 * (usage.prompt + usage.completion))
        requests, exact = ci["limits"]
        assert (requests["kind"], requests["amount"], requests["seconds"]) == ("requests", 20, 60)
        assert requests["used"] == pytest.approx(3, abs=0.5)
        assert (exact["kind"], exact["used"]) == ("exact tokens", 0)
        assert {limit["used"] for limit in shop["limits"]} == {0}
        (acme,) = told["organisations"]
        assert acme["limits"][0]["used"] == pytest.approx(3, abs=0.6)
        assert told["more"] == 0


async def test_status_names_the_console(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False) as served:
        config = parse(
            json.dumps(deployment(DOWN, admin="0.0.0.0:8081", admin_token=TOKEN)), tmp_path / "d", {}
        )
        answer = (await get(served.admin, "/admin/status")).json
        body = status(config, None, answer)
        assert body["console"] == "http://127.0.0.1:8081/console/"
        assert f"console: {body['console']}" in describe(body, "")
        assert not any(line.startswith("console") for line in describe(status(config, None, None), "gone"))


async def test_an_engine_that_is_held_back_says_why(tmp_path: Path) -> None:
    async with engines(fast := FakeEngine()), serving(tmp_path, {"fast": fast}) as served:
        served.engine("fast-0").held = "it drains"
        (shown,) = (await live(served))["state"]["engines"]
        assert (shown["state"], shown["held"]) == ("ready", "it drains")
