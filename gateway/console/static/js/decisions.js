// The stream of decisions: the latest first, each with its "why" when it is opened.

import * as api from "./api.js";
import { by, h, setText } from "./dom.js";
import { count, exactly, seconds, time } from "./format.js";
import { recent } from "./history.js";
import { tierClass } from "./tiers.js";
import { explanation } from "./why.js";

const MOST = 200;
const OUTCOMES = { ok: "good", cancelled: "quiet", client_error: "warn", limited: "warn" };

const rows = new Map();
let paused = false;
let held = [];
let tiers = {};

const WORDS = {
  ok: "ok",
  client_error: "client error",
  limited: "limited",
  unavailable: "unavailable",
  engine_error: "engine error",
  timeout: "timeout",
  cancelled: "cancelled",
  internal_error: "internal error",
};

function outcome(decision) {
  if (!decision.done) return ["running", "live"];
  if (decision.outcome === "ok" && decision.degraded) return ["degraded", "warn"];
  return [WORDS[decision.outcome] ?? decision.outcome, OUTCOMES[decision.outcome] ?? "bad"];
}

function tokens(usage) {
  return usage ? `${count(usage.prompt)} → ${count(usage.completion)}` : "";
}

const fact = (name, value) => (value ? h("div", {}, h("dt", {}, name), h("dd", {}, value)) : null);

class Row {
  constructor(decision) {
    this.why = null;
    this.body = h("div", { class: "opened" });
    this.summary = h("summary", {});
    this.details = h("details", { ontoggle: () => this.toggled() }, this.summary, this.body);
    this.element = h("li", { "data-id": decision.id }, this.details);
    this.show(decision);
  }

  show(decision) {
    this.decision = decision;
    const [word, kind] = outcome(decision);
    const served = decision.tier || decision.decided;
    const cells = [
      h("time", { datetime: new Date(decision.time * 1000).toISOString() }, time(decision.time)),
      h("span", { class: `tag ${tierClass(tiers, served)}` }, served),
      h("span", { class: "rule" }, h("strong", {}, decision.rule), h("span", { class: "hint" }, decision.reasons.join("; "))),
      h("span", { class: "who" }, decision.tenant, h("span", { class: "hint" }, decision.engine)),
      h("span", { class: "numbers" }, seconds(decision.seconds), h("span", { class: "hint" }, tokens(decision.usage))),
      h("span", { class: "pill", "data-kind": kind }, word),
    ];
    this.summary.replaceChildren(...cells);
    this.text = [decision.id, decision.rule, decision.tenant, decision.engine, decision.model, served, decision.dialect, word, ...decision.reasons].join(" ").toLowerCase();
    if (this.details.open) this.fill();
  }

  toggled() {
    if (this.details.open) this.fill();
  }

  async fill() {
    const one = this.decision;
    const moved = one.tier && one.tier !== one.decided ? `${one.decided}, answered by ${one.tier}: ${one.because}` : one.decided;
    const usage = one.usage;
    const facts = h("dl", { class: "facts" },
      fact("Tier", moved),
      fact("Engine", one.engine && `${one.engine} (${one.precision})`),
      fact("Status", one.status && `${one.status}${one.error ? `, ${one.error}` : ""}`),
      fact("First token", one.first_token !== null && one.stream ? seconds(one.first_token) : ""),
      fact("Queued", one.queued ? seconds(one.queued) : ""),
      fact("Attempts", one.attempts > 1 ? String(one.attempts) : ""),
      fact("Tokens", usage && `${exactly(usage.prompt)} prompt (${exactly(usage.cached)} cached), ${exactly(usage.completion)} completion`),
      fact("Changed", one.edits),
      fact("Asked for", `${one.model}, ${one.dialect}${one.stream ? ", streamed" : ""}`),
      fact("Request", one.id));
    this.body.replaceChildren(facts, this.why ?? h("p", { class: "hint" }, "…"));
    if (this.why) return;
    try {
      this.why = explanation(await api.why(one.id));
      this.body.replaceChildren(facts, this.why);
    } catch (error) {
      this.body.replaceChildren(facts, h("p", { class: "error" }, error.message || "Sign in again to see why."));
    }
  }
}

function put(decision) {
  const row = rows.get(decision.id);
  if (row) row.show(decision);
  else rows.set(decision.id, new Row(decision));
}

function arrange() {
  const ordered = [...rows.values()].sort((a, b) => b.decision.time - a.decision.time);
  for (const row of ordered.splice(MOST)) {
    rows.delete(row.decision.id);
    row.element.remove();
  }
  // Rows that are in their place are not moved: an opened one keeps its focus.
  const list = by("decisions");
  ordered.forEach((row, index) => {
    if (list.children[index] !== row.element) list.insertBefore(row.element, list.children[index] ?? null);
  });
  filter();
}

function filter() {
  const words = by("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows.values()) {
    row.element.hidden = !words.every((word) => row.text.includes(word));
    shown += row.element.hidden ? 0 : 1;
  }
  by("no-decisions").hidden = rows.size > 0;
  by("decisions").hidden = shown === 0;
}

export function show(state, decisions) {
  tiers = state.tiers;
  const rates = Object.keys(tiers).map((tier) => recent(`tier/${tier}/requests`) ?? 0);
  const all = rates.reduce((sum, one) => sum + one, 0);
  const some = all > 20 ? `, 20 of them shown` : "";
  setText(by("rate"), paused ? `paused, ${held.length} new` : `${all < 10 ? all.toFixed(1) : count(Math.round(all))}/s${some}`);
  if (paused) {
    held = [...held, ...decisions].slice(-MOST);
    return;
  }
  if (decisions.length === 0) return;
  decisions.forEach(put);
  arrange();
}

export function start() {
  by("filter").addEventListener("input", filter);
  by("pause").addEventListener("click", (event) => {
    paused = !paused;
    event.target.setAttribute("aria-pressed", String(paused));
    if (!paused) {
      held.forEach(put);
      held = [];
      arrange();
    }
  });
}

// Whatever was shown is another process's.
export function clear() {
  for (const row of rows.values()) row.element.remove();
  rows.clear();
  held = [];
}
