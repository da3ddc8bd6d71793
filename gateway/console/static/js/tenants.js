// Tenants against their plans.

import * as api from "./api.js";
import { Bar, by, h, pill } from "./dom.js";
import { count, span } from "./format.js";

const EVERY = 3000;
let last = 0;

function limit(one, name) {
  const each = one.seconds ? ` / ${span(one.seconds)}` : "";
  const used = one.used === null ? "not known" : `${count(Math.round(one.used))} of ${count(one.amount)}${each}`;
  return h("div", { class: "limit" },
    h("div", { class: "line" }, h("span", {}, one.kind), h("span", { class: "number" }, used)),
    new Bar(`${one.kind} of ${name}`, { warn: 0.7, bad: 0.9 }).show((one.used ?? 0) / one.amount).element);
}

function tenant(one) {
  const tags = one.tags.map((tag) => h("span", { class: "tag plain" }, tag));
  return h("li", { class: "card" },
    h("div", { class: "head" }, h("h2", {}, one.name), h("span", { class: "hint" }, `plan ${one.plan}`), tags, h("span", { class: "spring" }),
      one.valid ? null : pill("not valid", "bad"), one.tiers ? pill(`only ${one.tiers.join(", ")}`, "quiet") : null),
    h("p", { class: "hint" }, `${count(one.requests)} requests, ${count(one.tokens)} tokens since the start${one.organisation ? `; of ${one.organisation}` : ""}`),
    one.limits.length ? one.limits.map((each) => limit(each, one.name)) : h("p", { class: "hint" }, "No limits."));
}

function organisation(one) {
  return h("li", { class: "card" },
    h("div", { class: "head" }, h("h2", {}, one.name), h("span", { class: "hint" }, `organisation, plan ${one.plan}`)),
    one.limits.map((each) => limit(each, one.name)));
}

export async function show() {
  if (performance.now() - last < EVERY) return;
  last = performance.now();
  const told = await api.tenants();
  by("tenants").replaceChildren(
    h("ul", { class: "grid" }, told.tenants.map(tenant), told.organisations.map(organisation)),
    told.more ? h("p", { class: "hint" }, `and ${told.more} more: \`dualgauge keys list\` has them all`) : "",
  );
}

export function again() {
  last = 0;
}
