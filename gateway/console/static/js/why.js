// Why a request was decided as it was: what `dualgauge explain` prints.

import { h } from "./dom.js";
import { busy, contract, signal } from "./format.js";

const MARKS = {
  decides: ["✓", "decides"],
  holds: ["+", "holds too, decided before"],
  not: ["–", "does not hold"],
};

function fact(name, value) {
  return value === null || value === undefined ? null : h("div", {}, h("dt", {}, name), h("dd", {}, value));
}

function ruleLine(rule) {
  const kind = rule.held && rule.reached ? "decides" : rule.held ? "holds" : "not";
  const [mark, meaning] = MARKS[kind];
  return h(
    "li",
    { "data-kind": kind },
    h("span", { class: "mark", "aria-hidden": "true" }, mark),
    h("div", {},
      h("p", {}, h("strong", {}, rule.name), h("span", { class: "unseen" }, ` ${meaning}, sends to `), h("span", { class: "hint" }, ` → ${rule.send}`)),
      rule.reasons.map((reason) => h("p", { class: "hint" }, reason))),
  );
}

function signalTable(told) {
  const used = new Set(told.used ?? Object.keys(told.signals));
  const names = Object.keys(told.signals).sort((a, b) => Number(used.has(b)) - Number(used.has(a)));
  return h(
    "dl",
    { class: "signals" },
    names.map((name) =>
      h("div", { class: used.has(name) ? "" : "unread", title: used.has(name) ? null : "no rule reads it" },
        h("dt", {}, name), h("dd", {}, signal(told.signals[name])))),
  );
}

export function explanation(told) {
  const edits = Object.entries(told.edits ?? {}).map(([name, value]) => `${name} ${value}`).join(", ");
  return h(
    "div",
    { class: "why" },
    h("ul", { class: "reasons" }, told.reasons.map((reason) => h("li", {}, reason))),
    h("dl", { class: "facts" },
      fact("If unavailable", contract(told.if_unavailable)),
      fact("If busy", told.if_busy ? busy(told.if_busy) : null),
      fact("Changes", edits || null),
      fact("Priority", told.priority ? String(told.priority) : null),
      fact("Traced", told.trace ? "always" : null),
      fact("Prompt tokens", told.prompt_tokens),
      fact("Policy", told.policy.hash)),
    h("h3", {}, "Signals"),
    Object.keys(told.signals).length ? signalTable(told) : h("p", { class: "hint" }, "None was needed."),
    h("h3", {}, "Rules"),
    told.rules
      ? h("ol", { class: "rules" }, told.rules.map(ruleLine))
      : h("p", { class: "hint" }, "No console was open when this was decided: the rules that did not decide, and other signals, were not looked at."),
  );
}

export function verdict(told, colours) {
  return h("p", { class: "verdict" }, h("span", { class: `tag ${colours}` }, told.tier), " by the rule ", h("strong", {}, told.rule));
}

