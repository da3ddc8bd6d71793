// Tiers and their engines: state, load, sparklines.

import { Bar, by, h, setAttribute, setText } from "./dom.js";
import { Sparkline } from "./charts.js";
import { percent, rate, seconds } from "./format.js";
import * as history from "./history.js";

const KINDS = { ready: "good", starting: "warn", suspect: "warn", asleep: "warn", held: "warn", down: "bad" };

let shape = "";
let cards = [];

// What holds an engine back from new requests counts for more than its health.
export const stateOf = (engine) => (engine.state === "ready" && engine.held ? "held" : engine.state);
export const tierClass = (tiers, tier) => `tier-${Math.max(0, Object.keys(tiers).indexOf(tier)) % 6}`;

const figure = (label) => {
  const value = h("dd", {}, "–");
  return { value, element: h("div", {}, h("dt", {}, label), value) };
};

class EngineCard {
  constructor(engine, colours) {
    this.name = engine.name;
    this.state = h("span", { class: "pill" });
    this.reason = h("p", { class: "reason" });
    this.figures = { running: figure("running"), waiting: figure("waiting") };
    this.kvValue = h("dd", {}, "–");
    this.kv = new Bar(`KV cache of ${engine.name}`, { warn: 0.8, bad: 0.95 });
    const chart = h("div", { class: "spark small" });
    const caption = h("figcaption", {});
    this.element = h(
      "li",
      { class: "engine" },
      h("div", { class: "engine-head" }, h("h3", {}, engine.name), h("span", { class: "hint" }, `${engine.precision} · ${engine.kind}`), h("span", { class: "spring" }), this.state),
      this.reason,
      h("div", { class: "engine-body" },
        h("dl", { class: "figures small" }, this.figures.running.element, this.figures.waiting.element,
          h("div", {}, h("dt", {}, "KV cache"), this.kvValue, h("dd", {}, this.kv.element))),
        h("figure", {}, chart, caption)),
    );
    this.later = () => {
      const series = [{ label: "running", line: `--${colours}`, fill: `--${colours}-soft` }, { label: "waiting", line: "--warn" }];
      this.chart = new Sparkline(chart, caption, series, rate);
    };
  }

  show(engine) {
    const state = stateOf(engine);
    setText(this.state, state);
    setAttribute(this.state, "data-kind", KINDS[state] ?? "warn");
    setText(this.reason, state === "ready" ? "" : engine.held || engine.reason);
    const known = !["down", "starting"].includes(engine.state);
    setText(this.figures.running.value, known ? String(engine.running) : "–");
    setText(this.figures.waiting.value, known ? String(engine.waiting) : "–");
    setText(this.kvValue, engine.kv_usage === null ? "–" : percent(engine.kv_usage));
    this.kv.show(engine.kv_usage ?? 0);
    this.chart.show(history.times(), history.column(`engine/${this.name}/running`), history.column(`engine/${this.name}/waiting`));
  }
}

class TierCard {
  constructor(tier, state) {
    this.tier = tier;
    const colours = tierClass(state.tiers, tier);
    this.pill = h("span", { class: "pill" });
    this.figures = {
      requests: figure("requests/s"),
      tokens: figure("tokens/s"),
      flight: figure("in flight"),
      first: figure("TTFT p50"),
      slow: figure("TTFT p90"),
    };
    const chart = h("div", { class: "spark" });
    const caption = h("figcaption", {});
    this.engines = state.engines.filter((one) => one.tier === tier).map((one) => new EngineCard(one, colours));
    this.element = h(
      "section",
      { class: `card tier ${colours}`, "aria-labelledby": `tier-${tier}` },
      h("div", { class: "head" }, h("span", { class: "dot", "aria-hidden": "true" }), h("h2", { id: `tier-${tier}` }, tier), h("span", { class: "spring" }), this.pill),
      h("dl", { class: "figures" }, Object.values(this.figures).map((one) => one.element)),
      h("figure", {}, chart, caption),
      h("ul", { class: "engines" }, this.engines.map((one) => one.element)),
    );
    this.later = () => {
      const series = [{ label: "tokens/s", line: `--${colours}`, fill: `--${colours}-soft` }];
      this.chart = new Sparkline(chart, caption, series, rate);
      for (const engine of this.engines) engine.later();
    };
  }

  show(state) {
    const engines = state.engines.filter((one) => one.tier === this.tier);
    const ready = engines.filter((one) => stateOf(one) === "ready").length;
    setText(this.pill, ready === engines.length && ready > 0 ? "ready" : `${ready} of ${engines.length} ready`);
    setAttribute(this.pill, "data-kind", ready === 0 ? "bad" : ready < engines.length ? "warn" : "good");
    const at = (name) => `tier/${this.tier}/${name}`;
    setText(this.figures.requests.value, rate(history.recent(at("requests"))));
    setText(this.figures.tokens.value, rate(history.recent(at("tokens"))));
    setText(this.figures.flight.value, String(engines.reduce((sum, one) => sum + one.in_flight, 0)));
    setText(this.figures.first.value, seconds(history.latest(at("ttft_p50"))));
    setText(this.figures.slow.value, seconds(history.latest(at("ttft_p90"))));
    this.chart.show(history.times(), history.column(at("tokens")));
    engines.forEach((engine, index) => this.engines[index].show(engine));
  }

  end() {
    for (const chart of [this.chart, ...this.engines.map((one) => one.chart)]) chart.end();
  }
}

export function show(state) {
  const now = JSON.stringify(state.engines.map((one) => [one.tier, one.name]));
  if (now !== shape) {
    shape = now;
    for (const card of cards) card.end();
    cards = Object.keys(state.tiers).map((tier) => new TierCard(tier, state));
    by("tiers").replaceChildren(...cards.map((card) => card.element));
    // A chart takes its size from the page, so that it must be in there.
    for (const card of cards) card.later();
  }
  for (const card of cards) card.show(state);
}
