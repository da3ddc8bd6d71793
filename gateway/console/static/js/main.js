// The page: views by the address's hash, one poll for all that is live, and the login.

import * as api from "./api.js";
import * as decisions from "./decisions.js";
import { by, h, say, setAttribute, setText } from "./dom.js";
import * as explain from "./explain.js";
import * as history from "./history.js";
import * as policy from "./policy.js";
import * as rules from "./rules.js";
import * as tenants from "./tenants.js";
import * as theme from "./theme.js";
import * as tiers from "./tiers.js";

const VIEWS = ["live", "policy", "tenants", "explain"];
const RETRY = 2000;

let state = null;
let cursor = "";
let timer = 0;
let asking = false;
let session = null;
const states = new Map();

const view = () => (VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "live");

function showView() {
  const now = view();
  for (const name of VIEWS) by(`view-${name}`).hidden = name !== now;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === now) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  tenants.again();
  refresh();
}

// What only one view shows is asked for while that view is open.
async function refresh() {
  if (state === null) return;
  try {
    if (view() === "policy") await policy.show(state);
    else if (view() === "tenants") await tenants.show();
    else if (view() === "explain") await explain.show(state);
  } catch (error) {
    failed(error);
  }
}

function notice(kind, title, text) {
  return h("div", { class: "notice", "data-kind": kind }, h("strong", {}, title), text ? h("pre", {}, text) : null);
}

let noticed = "";

function showNotices() {
  const found = [];
  if (state.draining) found.push(["warn", "The gateway is shutting down: it takes no new requests.", ""]);
  for (const [tier, reason] of Object.entries(state.tiers)) {
    if (reason !== "ready") found.push(["bad", `No engine of tier ${tier} is ready.`, reason]);
  }
  if (state.policy.reload_error) found.push(["bad", "A changed file has mistakes: the one before stays in force.", state.policy.reload_error]);
  if (state.policy.shadow_error) found.push(["warn", "The candidate is refused.", state.policy.shadow_error]);
  if (state.restart_needed) found.push(["warn", "dualgauge.yaml was changed: it is read at the start only, restart the gateway.", ""]);
  if (!state.store.up) found.push(["bad", "The store of limits does not answer: `limits.on_store_failure` holds.", ""]);
  const now = JSON.stringify(found);
  if (now === noticed) return;
  noticed = now;
  by("notices").replaceChildren(...found.map((one) => notice(...one)));
}

function health(kind, text) {
  setText(by("health"), text);
  setAttribute(by("health"), "data-kind", kind);
}

function announce() {
  const said = [];
  for (const engine of state.engines) {
    const before = states.get(engine.name);
    const now = tiers.stateOf(engine);
    if (before !== undefined && before !== now) said.push(`${engine.name} is ${now}`);
    states.set(engine.name, now);
  }
  if (said.length) say(said.join(", "));
}

function show(answer) {
  if (answer.columns && cursor !== "") decisions.clear();
  cursor = answer.cursor;
  state = answer.state;
  history.add(answer);
  by("login").hidden = true;
  by("views").hidden = false;
  by("sign-out").hidden = !session.signed_in;
  setText(by("model"), state.model);
  const waiting = Object.values(state.tiers).filter((reason) => reason !== "ready").length;
  if (state.draining) health("warn", "draining");
  else if (waiting === 0) health("good", "ready");
  else health("bad", waiting === Object.keys(state.tiers).length ? "not ready" : "partly ready");
  document.title = `${by("health").textContent} · ${state.model} · Dualgauge`;
  announce();
  showNotices();
  tiers.show(state);
  rules.show(state);
  decisions.show(state, answer.decisions);
  refresh();
}

function failed(error) {
  if (error instanceof api.Unauthorized) {
    session = null;
    state = null;
    by("views").hidden = true;
    by("sign-out").hidden = true;
    if (by("login").hidden) {
      by("login").hidden = false;
      by("token").focus();
    }
    health("quiet", "signed out");
    return true;
  }
  health("bad", "no answer");
  document.title = "no answer · Dualgauge";
  return false;
}

async function poll() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  let wait = RETRY;
  try {
    session ??= await api.session();
    if (session.asked && !session.signed_in) throw new api.Unauthorized();
    const answer = await api.live(cursor, AbortSignal.timeout(10000));
    show(answer);
    wait = answer.every * 1000;
  } catch (error) {
    if (failed(error)) wait = null;
  }
  asking = false;
  if (wait !== null) timer = setTimeout(poll, wait);
}

async function signIn(event) {
  event.preventDefault();
  const field = by("token");
  by("login-error").textContent = "";
  try {
    await api.signIn(field.value);
    field.value = "";
    await poll();
    by("main").focus();
  } catch (error) {
    by("login-error").textContent = error.message;
    field.select();
  }
}

async function signOut() {
  await api.signOut().catch(() => null);
  session = null;
  cursor = "";
  decisions.clear();
  poll();
}

theme.start();
decisions.start();
explain.start();
by("login-form").addEventListener("submit", signIn);
by("sign-out").addEventListener("click", signOut);
addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", poll);
document.addEventListener("changed", refresh);
showView();
poll();
