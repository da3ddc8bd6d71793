// A pasted request and its decision. What is pasted goes to the gateway for this and is kept nowhere.

import * as api from "./api.js";
import { by, h } from "./dom.js";
import { tierClass } from "./tiers.js";
import { explanation, verdict } from "./why.js";

let state = { tiers: {}, model: "" };
let tenantsRead = false;

const EXAMPLES = {
  "A question": [{ messages: [{ role: "user", content: "What is a dual-gauge railway?" }] }, ""],
  "A critical request": [{ messages: [{ role: "user", content: "Read back the dose in this prescription." }] }, "x-criticality: high"],
  Code: [{ messages: [{ role: "user", content: "Fix this:\n```python\ndef mean(xs):\n    return sum(xs) / len(x)\n```" }] }, ""],
  "Anthropic, with tools": [{
    system: "You are a travel agent.",
    max_tokens: 256,
    tools: [{ name: "trains", description: "Trains between two stations", input_schema: { type: "object", properties: { from: { type: "string" }, to: { type: "string" } } } }],
    messages: [{ role: "user", content: "The first train from Gdansk to Vienna, please." }],
  }, "anthropic-version: 2023-06-01"],
};

function headers(text) {
  const found = {};
  for (const line of text.split("\n").filter((one) => one.trim())) {
    const [name, ...rest] = line.split(":");
    if (rest.length === 0) throw new Error(`headers: write \`${line.trim()}\` as \`name: value\``);
    found[name.trim()] = rest.join(":").trim();
  }
  return found;
}

function now(told) {
  if (told.now.engine === null) return h("p", { class: "error" }, `Now: ${told.now.error}`);
  const because = told.now.because ? `, ${told.now.because}` : "";
  return h("p", {}, "Now: ", h("strong", {}, told.now.engine), ` of tier ${told.now.tier} takes it${because}.`);
}

function candidate(told) {
  if (!told.candidate) return null;
  const { tier, rule } = told.candidate;
  const same = tier === told.tier && rule === told.rule;
  return h("p", {}, same ? "The candidate decides the same." : `The candidate sends it to ${tier}, by the rule ${rule}.`);
}

async function explain(event) {
  event.preventDefault();
  by("explain-error").textContent = "";
  try {
    const told = await api.explain({
      body: by("explain-body").value,
      headers: headers(by("explain-headers").value),
      dialect: by("explain-dialect").value || null,
      tenant: by("explain-tenant").value || null,
    });
    by("explained").replaceChildren(
      verdict(told, tierClass(state.tiers, told.tier)),
      told.problem ? h("p", { class: "error" }, `As it is, ${told.problem}.`) : now(told),
      candidate(told) ?? "",
      explanation(told),
    );
  } catch (error) {
    by("explain-error").textContent = error.message || "Sign in again.";
  }
}

export async function show(latest) {
  state = latest;
  if (tenantsRead) return;
  tenantsRead = true;
  const told = await api.tenants();
  const names = told.tenants.map((one) => one.name).filter((name) => name !== "anonymous");
  by("explain-tenant").append(...names.map((name) => h("option", { value: name }, name)));
}

export function start() {
  const form = by("explain-form");
  form.addEventListener("submit", explain);
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  const examples = by("explain-example");
  examples.append(h("option", { value: "" }, "–"), ...Object.keys(EXAMPLES).map((name) => h("option", {}, name)));
  examples.addEventListener("change", () => {
    if (!examples.value) return;
    const [body, lines] = EXAMPLES[examples.value];
    by("explain-body").value = JSON.stringify({ model: state.model, ...body }, null, 2);
    by("explain-headers").value = lines;
    by("explain-dialect").value = "";
    form.requestSubmit();
  });
}
