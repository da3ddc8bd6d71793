// Light, dark, or as the system has it; kept in this browser.

import { by } from "./dom.js";

const KEY = "dualgauge.theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };

let chosen = "auto";

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function show() {
  const root = document.documentElement;
  if (chosen === "auto") root.removeAttribute("data-theme");
  else root.setAttribute("data-theme", chosen);
  const button = by("theme");
  button.textContent = SIGNS[chosen];
  button.setAttribute("aria-label", `Theme: ${chosen}. Switch to ${NEXT[chosen]}`);
  button.title = `Theme: ${chosen}`;
  document.dispatchEvent(new Event("theme"));
}

export function start() {
  const kept = stored();
  if (kept in NEXT) chosen = kept;
  show();
  by("theme").addEventListener("click", () => {
    chosen = NEXT[chosen];
    try {
      localStorage.setItem(KEY, chosen);
    } catch {
      // Without storage the choice lasts as long as the page.
    }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
}
