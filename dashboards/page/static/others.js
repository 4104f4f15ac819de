// What else the trainer logs: a chart a name, read only once somebody opens the section.

import { el, fill, visible } from "./dom.js";
import * as api from "./api.js";
import { Chart } from "./charts.js";
import { Frame } from "./frame.js";
import { others, lines } from "./panels.js";

const AT_ONCE = 40; // selections in one request

export class Others {
  constructor(run, view) {
    Object.assign(this, { run, view, specs: [] });
    this.holder = el("div", { class: "charts" });
    this.count = el("span");
    this.details = el("details", { ontoggle: () => this.refresh() }, el("summary", {}, this.count), this.holder);
    this.element = el("section", { id: "others", hidden: true }, el("h2", {}, "What else the trainer logs"), this.details);
    view.addEventListener("zoom", () => this.refresh());
  }

  /** @param series all of the run's. */
  know(series) {
    const specs = others(series);
    this.element.hidden = specs.length === 0;
    if (specs.length === this.specs.length) return;
    this.specs = specs;
    this.count.textContent = `${specs.length} more`;
    this.charts = specs.map((spec) => new Chart({ ...spec, title: visible(spec.title) }, this.view, "run"));
    fill(this.holder, this.charts.map((chart) => chart.element));
    this.refresh();
  }

  /** Reads the values of what is looked at, where the section is open. */
  async refresh() {
    if (!this.details.open) return;
    const asked = (this.asked = Symbol());
    for (let first = 0; first < this.specs.length; first += AT_ONCE) {
      const some = this.specs.slice(first, first + AT_ONCE);
      const range = { from: this.view.from, to: this.view.to };
      const answer = await api.series(this.run, some.flatMap((spec) => spec.takes), range).catch(() => null);
      if (asked !== this.asked || answer === null) return; // the page itself says what cannot be read
      const frame = new Frame(answer);
      some.forEach((spec, i) => this.charts[first + i].show(frame.step, frame.width, lines(spec, frame)));
    }
  }
}
