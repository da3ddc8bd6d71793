// Elements without markup in strings: what comes from outside is text, always.

export const by = (id) => document.getElementById(id);

// h("p", {class: "hint"}, "text", node, [more], null)
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// Without a change nothing is touched: selections and screen readers stay undisturbed.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export function pill(text, kind) {
  return h("span", { class: "pill", "data-kind": kind }, text);
}

// A bar that is `share` (0..1) full; above `warn` and `bad` it changes its colour.
export class Bar {
  constructor(label, { warn = Infinity, bad = Infinity, colours = "" } = {}) {
    this.bounds = { warn, bad };
    this.fill = h("span");
    this.element = h("div", { class: `meter ${colours}`, role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, this.fill);
    this.show(0);
  }

  show(share) {
    const full = Math.min(1, Math.max(0, share));
    this.fill.style.width = `${full * 100}%`;
    setAttribute(this.element, "aria-valuenow", Math.round(full * 100));
    setAttribute(this.element, "data-kind", full >= this.bounds.bad ? "bad" : full >= this.bounds.warn ? "warn" : "good");
    return this;
  }
}

export function say(text) {
  by("announcer").textContent = text;
}
