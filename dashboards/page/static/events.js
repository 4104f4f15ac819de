// What happened once: spikes, incidents, changes of controls, faults, each with its evidence.

import { el, fill, visible } from "./dom.js";
import { clock, number } from "./format.js";
import { incidentPage } from "./api.js";

const SHOWN = 200;
const NAMES = { spike: "spike", incident: "incident", control: "control", action: "control acts", fault: "fault", degraded: "not measured", gap: "gap", note: "note", run_start: "start", run_end: "end" };
export const MARKED = ["spike", "incident", "control"];

export class EventList {
  /**
   * @param run its name.
   * @param onStep called with a step to look at.
   */
  constructor(run, onStep) {
    this.run = run;
    this.onStep = onStep;
    this.events = [];
    this.kinds = new Set();
    this.filters = el("div", { class: "filters", role: "group", "aria-label": "Kinds of events" });
    this.list = el("ol", { class: "events" });
    this.more = el("p", { class: "soft" });
    this.element = el("section", { id: "events", "aria-labelledby": "events-title" }, el("h2", { id: "events-title" }, "What happened"), this.filters, this.list, this.more);
  }

  add(events) {
    const known = this.events.length ? this.events[this.events.length - 1].number : 0;
    const fresh = events.filter((event) => event.number > known);
    if (!fresh.length && this.drawn) return;
    this.events.push(...fresh);
    this.drawn = true;
    this.draw();
  }

  get marks() {
    const marks = new Map();
    for (const { step, kind } of this.events) if (MARKED.includes(kind) && step >= 0) marks.set(`${kind} ${step}`, { step, kind });
    return [...marks.values()];
  }

  draw() {
    const counts = new Map();
    for (const { kind } of this.events) counts.set(kind, (counts.get(kind) ?? 0) + 1);
    fill(this.filters, [...counts].map(([kind, count]) =>
      el("button", { type: "button", class: "small", "aria-pressed": this.kinds.has(kind), onclick: () => this.#toggle(kind) }, `${NAMES[kind] ?? kind} ${count}`)));
    const shown = this.events.filter((event) => !this.kinds.size || this.kinds.has(event.kind)).toReversed();
    fill(this.list, shown.slice(0, SHOWN).map((event) => this.#item(event)));
    this.more.textContent = shown.length > SHOWN ? `The newest ${SHOWN} of ${shown.length}; the others come by /api/v1/runs/NAME/events.` : shown.length ? "" : "Nothing yet.";
  }

  #toggle(kind) {
    if (!this.kinds.delete(kind)) this.kinds.add(kind);
    this.draw();
  }

  #item(event) {
    const { kind, step, message, time, data } = event;
    const where = step >= 0
      ? el("button", { type: "button", class: "step", title: "look at this step", onclick: () => this.onStep(step) }, `step ${step}`)
      : el("span", { class: "step" }, "–");
    // What stands beside it or below is not said twice.
    const twice = [` (${data.path})`, data.advice && ` ${data.advice}`].filter(Boolean);
    let text = message.replace(new RegExp(`^step ${step}: `), "");
    for (const part of twice) text = text.replace(part, "");
    if (kind === "spike") text = text.replace(/ \(usual [^()]*\)$/, "");
    return el("li", { class: kind }, where, el("span", { class: `sign ${kind}` }, NAMES[kind] ?? visible(kind)),
      el("div", {}, el("p", {}, visible(text)), this.#evidence(kind, data), el("time", { class: "soft", datetime: new Date(1000 * time).toISOString() }, clock(time))));
  }

  #evidence(kind, data) {
    if (kind === "incident") {
      const name = String(data.path ?? "").split(/[/\\]/).at(-1).replace(/\.json$/, "");
      return [
        el("ul", {}, (data.evidence ?? []).map((sentence) => el("li", {}, visible(sentence)))),
        data.advice ? el("p", {}, el("strong", {}, "What to do: "), visible(data.advice)) : null,
        /^step-\d+(-\d+)?$/.test(name) ? el("p", {}, el("a", { href: incidentPage(this.run, name) }, "Open the incident")) : null,
      ];
    }
    if (kind === "spike") return el("p", { class: "soft" }, `${number(data.value)} where ${number(data.baseline)} is usual; fires beyond ${number(data.threshold)}`);
    if (kind === "control") return el("p", { class: "soft" }, `${visible(data.control ?? "")}: ${visible(data.before ?? "")} → ${visible(data.after ?? "")}`);
    const detail = kind === "fault" && data.traceback ? data.traceback : null;
    return detail ? el("details", {}, el("summary", {}, "traceback"), el("pre", {}, String(detail))) : null;
  }
}
