// The policy in force, what is wrong with its file, and the candidate beside it.

import * as api from "./api.js";
import { by, h, pill, say } from "./dom.js";
import { busy, contract, count, exactly, percent, span } from "./format.js";
import { tierClass } from "./tiers.js";

let shown = "";
let reloaded = "";

function problemList(problems, label) {
  if (problems.length === 0) return null;
  return h("ul", { class: "problems", "aria-label": label }, problems.map((one) =>
    h("li", { "data-kind": one.severity === "error" ? "bad" : "warn" },
      h("code", {}, `${one.file}:${one.line}:${one.column}`), " ", h("strong", {}, one.severity), ` ${one.message}`)));
}

function ruleTable(told, state) {
  const counts = new Map(state.rules.map((rule) => [rule.name, rule.requests]));
  const head = ["", "Rule", "Sends to", "When", "If busy", "If unavailable", "Decided"];
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rules" },
    h("table", { class: "rules-table" },
      h("thead", {}, h("tr", {}, head.map((name, index) => h("th", { scope: "col" }, index ? name : h("span", { class: "unseen" }, "Order"))))),
      h("tbody", {}, told.rules.map((rule, index) =>
        h("tr", {},
          h("td", { class: "hint" }, String(index + 1)),
          h("th", { scope: "row" }, rule.name),
          h("td", {}, h("span", { class: `tag ${tierClass(state.tiers, rule.send)}` }, rule.send)),
          h("td", {}, rule.when ?? h("span", { class: "hint" }, "always")),
          h("td", {}, rule.if_busy ? busy(rule.if_busy) : h("span", { class: "hint" }, "–")),
          h("td", {}, contract(rule.if_unavailable)),
          h("td", { class: "number" }, count(counts.get(rule.name) ?? 0)))))));
}

function sourceLines(told) {
  const marked = new Map();
  for (const one of told.diagnostics) if (one.file === told.file) marked.set(one.line, one);
  return h("div", { class: "source", tabindex: "0", role: "region", "aria-label": "Text of the policy file" },
    h("ol", {}, told.text.replace(/\n$/, "").split("\n").map((line, index) => {
      const problem = marked.get(index + 1);
      return h("li", { "data-kind": problem ? (problem.severity === "error" ? "bad" : "warn") : null },
        h("code", {}, line || " "), problem ? h("span", { class: "said" }, problem.message) : null);
    })));
}

function shadowCard(told, state) {
  const shadow = state.policy.shadow;
  if (!shadow) return null;
  const head = ["In force", "Candidate", "Requests"];
  const side = (rule, tier) => [h("span", { class: `tag ${tierClass(state.tiers, tier)}` }, tier), ` ${rule}`];
  const moved = shadow.decided ? ` (${percent(shadow.moved / shadow.decided)})` : "";
  return h("section", { class: "card", "aria-labelledby": "shadow-title" },
    h("div", { class: "head" }, h("h2", { id: "shadow-title" }, "Shadow"),
      h("span", { class: "hint" }, shadow.file), h("span", { class: "spring" }),
      pill(shadow.rollout ? `decides ${percent(shadow.rollout)} of conversations` : "does not act", shadow.rollout ? "warn" : "quiet")),
    h("p", {}, `Of ${exactly(shadow.decided)} requests the candidate sends ${exactly(shadow.moved)}${moved} to another tier.`),
    shadow.failed ? h("p", { class: "error" }, `It failed to decide ${exactly(shadow.failed)}: the gateway's log tells why.`) : null,
    told.candidate ? problemList(told.candidate.diagnostics, "Problems of the candidate") : null,
    shadow.differences.length === 0
      ? h("p", { class: "hint" }, "No difference so far.")
      : h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Differences" },
          h("table", {},
            h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
            h("tbody", {}, shadow.differences.slice(0, 50).map((one) =>
              h("tr", {}, h("td", {}, side(one.rule, one.tier)), h("td", {}, side(one.candidate_rule, one.candidate_tier)),
                h("td", { class: "number" }, exactly(one.requests))))))));
}

function fileState(told) {
  if (told.on_disk === "") return pill("the file has mistakes", "bad");
  return told.on_disk === told.hash ? pill("as on disk", "good") : pill("the file has changed", "warn");
}

async function reload(event) {
  const button = event.currentTarget;
  button.disabled = true;
  try {
    const done = await api.reload();
    reloaded = `The policy ${done.policy} is in force.`;
  } catch (error) {
    reloaded = error.message;
  }
  button.disabled = false;
  shown = "";
  say(reloaded);
  document.dispatchEvent(new Event("changed"));
}

function plan(name, limits) {
  const said = limits.map((one) => `${count(one.amount)} ${one.kind}${one.seconds ? ` / ${span(one.seconds)}` : ""}`);
  return h("div", {}, h("dt", {}, name), h("dd", {}, said.join(", ") || "no limits"));
}

export async function show(state) {
  const shadow = state.policy.shadow;
  const key = JSON.stringify([state.policy.hash, state.policy.reload_error, state.policy.shadow_error, state.rules.map((rule) => rule.requests), shadow]);
  if (key === shown) return;
  shown = key;
  const told = await api.policy();
  const place = by("policy");
  // What the reader has scrolled or focused stays so.
  const source = place.querySelector(".source");
  const scrolled = source ? source.scrollTop : 0;
  const focused = document.activeElement?.getAttribute("aria-label");
  place.replaceChildren(
    h("section", { class: "card", "aria-labelledby": "force-title" },
      h("div", { class: "head" }, h("h2", { id: "force-title" }, "In force"), h("code", {}, told.hash), h("span", { class: "hint path" }, told.file),
        h("span", { class: "spring" }), fileState(told), h("button", { type: "button", onclick: reload, "aria-label": "Reload policy and keys" }, "Reload")),
      reloaded ? h("p", { class: "hint" }, reloaded) : null,
      problemList(told.diagnostics, "Problems of the policy") ?? h("p", { class: "hint" }, "No problems."),
      ruleTable(told, state)),
    shadowCard(told, state) ?? "",
    h("div", { class: "columns even" },
      h("section", { class: "card", "aria-labelledby": "classes-title" },
        h("div", { class: "head" }, h("h2", { id: "classes-title" }, "Classes")),
        h("dl", { class: "facts wide" }, Object.entries(told.classes).map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))))),
      h("section", { class: "card", "aria-labelledby": "plans-title" },
        h("div", { class: "head" }, h("h2", { id: "plans-title" }, "Plans")),
        h("dl", { class: "facts wide" }, Object.entries(told.plans).map(([name, limits]) => plan(name, limits))))),
    h("section", { class: "card", "aria-labelledby": "source-title" },
      h("div", { class: "head" }, h("h2", { id: "source-title" }, "File")), sourceLines(told)),
  );
  place.querySelector(".source").scrollTop = scrolled;
  if (focused) place.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
}
