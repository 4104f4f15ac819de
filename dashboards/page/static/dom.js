// Elements without HTML in text: whatever a run, a token or a label is called, it stays text.

/** An element. `on...` attributes are listeners, true and false set or leave out; children are elements or texts. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-") && typeof value === "boolean") made.setAttribute(name, String(value));
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Puts these children in place of the old ones. */
export function fill(parent, ...children) {
  parent.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return parent;
}

/** What cannot be seen in untrusted text is spelled out: control characters, marks that turn the reading direction. */
export function visible(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Zl}\p{Zp}\u2800\u3164\uffa0\u115f\u1160]/gu, (c) =>
    c === "\n" ? "↵" : c === "\t" ? "→" : `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** The `?` beside a title: one is open at a time, Escape closes it. */
export function helpOn(title, texts) {
  const about = el("details", { class: "help", name: "help" },
    el("summary", { "aria-label": `What ${title} means` }, "?"),
    el("div", { class: "bubble" }, texts.map((text) => el("p", {}, text))));
  about.addEventListener("keydown", (event) => {
    if (event.key === "Escape") about.open = false;
  });
  return about;
}

/** A CSS variable's value now, in light or dark. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Says something to those who do not see it change. */
export function announce(text) {
  let region = document.getElementById("announcer");
  if (!region) {
    region = el("div", { id: "announcer", class: "unseen", role: "status", "aria-live": "polite" });
    document.body.append(region);
  }
  region.textContent = text;
}
