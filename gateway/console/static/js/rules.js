// How often each rule has decided.

import { Bar, by, h, setText } from "./dom.js";
import { count, percent } from "./format.js";
import { tierClass } from "./tiers.js";

let shape = "";
let lines = [];

class Line {
  constructor(rule, tiers) {
    this.number = h("span", { class: "number" });
    this.note = h("span", { class: "hint" });
    this.share = new Bar(`Share of ${rule.name}`, { colours: rule.send ? tierClass(tiers, rule.send) : "" });
    const name = rule.in_policy ? rule.name : h("s", { title: "not in the policy any more" }, rule.name);
    this.element = h("li", {},
      h("div", { class: "line" }, h("span", {}, name, rule.send ? h("span", { class: "hint" }, ` → ${rule.send}`) : null), this.number),
      this.share.element, this.note);
  }

  show(rule, all) {
    const share = all ? rule.requests / all : 0;
    setText(this.number, count(rule.requests));
    this.share.show(share);
    setText(this.note, rule.requests ? `${percent(share)}${rule.degraded ? `, ${count(rule.degraded)} degraded` : ""}` : "never yet");
  }
}

export function show(state) {
  const now = JSON.stringify(state.rules.map((rule) => [rule.name, rule.send, rule.in_policy]));
  if (now !== shape) {
    shape = now;
    lines = state.rules.map((rule) => new Line(rule, state.tiers));
    by("hits").replaceChildren(...lines.map((line) => line.element));
  }
  const all = state.rules.reduce((sum, rule) => sum + rule.requests, 0);
  state.rules.forEach((rule, index) => lines[index].show(rule, all));
}
