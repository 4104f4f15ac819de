// The bar that moves all charts of a page together.

import { el } from "./dom.js";
import { grouped } from "./format.js";

export function controls(view) {
  const shown = el("output", { class: "range", "aria-live": "polite" });
  const button = (text, label, action) => el("button", { type: "button", title: label, "aria-label": label, onclick: action }, text);
  const tell = () => {
    const [low, high] = view.range;
    shown.textContent = view.whole ? "all steps" : `steps ${grouped(Math.round(low))} to ${grouped(Math.round(high))}`;
  };
  view.addEventListener("zoom", tell);
  tell();
  return el("div", { class: "zoombar", role: "toolbar", "aria-label": "Steps shown, in all charts" },
    button("◀", "earlier", () => view.pan(-0.5)),
    button("▶", "later", () => view.pan(0.5)),
    button("+", "closer", () => view.scale(0.5)),
    button("−", "wider", () => view.scale(2)),
    button("All", "the whole run", () => view.zoom(null, null)),
    shown,
    button("Copy link", "a link to this view", (event) => copyLink(event.currentTarget)),
    el("span", { class: "soft hint" }, "Drag across a chart to zoom, with shift to move; double-click shows all."));
}

async function copyLink(button) {
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The link is in the address bar";
  }
  setTimeout(() => (button.textContent = "Copy link"), 2000);
}
