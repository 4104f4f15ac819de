// A run, from top to bottom as a story.

import { el, fill, visible, announce } from "./dom.js";
import { number, grouped, ago, clock } from "./format.js";
import * as api from "./api.js";
import { badge } from "./runs.js";
import { Chart } from "./charts.js";
import { Frame } from "./frame.js";
import { Heatmap } from "./heatmap.js";
import { EventList } from "./events.js";
import { Live } from "./live.js";
import { View, remember, remembered } from "./view.js";
import { SECTIONS, CHARTS, selections, lines } from "./panels.js";
import { controls } from "./zoombar.js";
import { Others } from "./others.js";

const HEAT_POINTS = 300;
const SETTLED = 150; // milliseconds without a further zoom, before finer values are asked for

export async function showRun(main, name) {
  document.title = `${visible(name)} · seismograd`;
  fill(document.getElementById("crumbs"), el("a", { href: "/" }, "Runs"), " / ", el("span", {}, el("bdi", {}, visible(name))));
  const page = new RunPage(main, name);
  await page.open();
}

class RunPage {
  constructor(main, name) {
    this.main = main;
    this.name = name;
    this.view = new View();
    this.group = remembered("group") ?? "all";
    this.view.addEventListener("zoom", () => this.#zoomed());
  }

  async open() {
    const range = { from: this.view.from, to: this.view.to };
    // All are asked for at once; the headline does not wait for the values, nor these for the band.
    const values = Promise.all([api.series(this.name, selections(), range), api.events(this.name)]);
    values.catch(() => {}); // told below, unless the run itself cannot be read
    const [about, catalogue] = await Promise.all([api.run(this.name), api.metrics()]);
    this.#build(catalogue);
    this.view.extent = [about.first_step ?? 0, Math.max(about.last_step ?? 1, (about.first_step ?? 0) + 1)];
    this.#about(about);
    performance.mark("headline-shown");
    const [answer, events] = await values;
    this.frame = new Frame(answer);
    this.eventList.add(events.events);
    this.draw();
    performance.mark("charts-drawn");
    [this.baseline] = await Promise.all([api.baseline(this.name, range), this.#heat()]);
    this.draw();
    performance.mark("complete");
    // Rows may have come between the answers: the stream begins where the oldest of them ended.
    const [, event] = about.cursor.split("-");
    this.main.setAttribute("aria-busy", "false");
    this.#listen(`${Math.min(answer.row, this.heatFrame.row)}-${event}`);
  }

  #build(catalogue) {
    const help = (spec) => spec.help.map((metric) => catalogue[metric]).filter(Boolean).flatMap((m) => [m.help, `Definition: ${m.source}`]);
    this.charts = new Map(CHARTS.map((spec) => [spec.id, new Chart({ ...spec, help: help(spec), range: spec.stacked ? spec.range ?? stackRange : undefined }, this.view, "run")]));
    this.heatmap = new Heatmap(this.view, help({ help: ["grad_norm"] }), (group) => this.#chooseGroup(group));
    this.eventList = new EventList(this.name, (step) => this.#look(step));
    this.others = new Others(this.name, this.view);
    this.head = el("div", { class: "head" });
    this.findings = el("ul", { class: "findings" });
    this.connection = el("span", { class: "connection", role: "status" });
    const bar = controls(this.view);
    const sections = SECTIONS.map((section) =>
      el("section", { id: section.id, "aria-labelledby": `${section.id}-title` }, el("h2", { id: `${section.id}-title` }, section.title),
        el("div", { class: "charts" }, section.charts.map((spec) => this.charts.get(spec.id).element)),
        section.id === "gradients" ? this.heatmap.element : null));
    const cost = sections.pop();
    this.settings = el("pre");
    fill(this.main, this.head, this.findings, bar, ...sections, this.eventList.element, this.others.element, cost,
      el("section", {}, el("h2", {}, "Settings"), el("details", {}, el("summary", {}, "in force"), this.settings)));
  }

  #about(about) {
    this.summary = about.summary;
    this.settings.textContent = JSON.stringify(about.config, null, 2);
    const groups = [...new Set(about.series.filter((s) => s.metric === "grad_norm").map((s) => s.labels.group))].sort((a, b) => (b === "all") - (a === "all") || a.localeCompare(b));
    if (groups.length && !groups.includes(this.group)) this.group = groups[0];
    this.heatmap.groups(groups, this.group);
    this.others.know(about.series);
    this.headline = about.headline;
    this.#state(about.summary);
    fill(this.findings, about.findings.slice(0, 12).map((finding) =>
      el("li", { class: finding.severity },
        el("p", {}, el("strong", {}, visible(finding.text))),
        el("p", {}, visible(finding.advice)),
        el("p", { class: "links" },
          el("button", { type: "button", class: "link", onclick: () => this.#look(finding.step) }, `Look at step ${finding.step}`),
          finding.incident ? el("a", { href: api.incidentPage(this.name, finding.incident) }, "Open the incident") : null))));
  }

  #state(summary) {
    this.summary = summary;
    const facts = [
      ["steps", grouped(summary.step)], ["reward", number(summary.values.reward)], ["loss", number(summary.values.loss)],
      ["KL, nats", number(summary.values.kl)], ["spikes", grouped(summary.spikes)], ["incidents", grouped(summary.incidents)],
      ["started", summary.started ? clock(summary.started) : "–"], ["last step", ago(summary.updated)],
    ];
    fill(this.head, el("h1", {}, el("bdi", {}, visible(this.name)), " ", badge(summary.state, summary.problem), " ", this.connection),
      el("p", { class: "headline" }, visible(capital(this.headline))),
      el("dl", { class: "facts" }, facts.map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value)))));
  }

  draw() {
    const { frame, view } = this;
    if (view.whole) view.extent = [frame.from, Math.max(frame.to, frame.from + 1)];
    const marks = this.eventList.marks;
    for (const [id, chart] of this.charts) {
      chart.marks = marks;
      chart.show(frame.step, frame.width, lines(chart.spec, frame, this.baseline));
    }
    if (this.heatFrame) this.heatmap.show(this.heatFrame, this.group);
  }

  async #heat() {
    const range = { from: this.view.from, to: this.view.to, points: HEAT_POINTS };
    this.heatFrame = new Frame(await api.series(this.name, [["grad_norm", null, this.group]], range), HEAT_POINTS);
    this.heatmap.show(this.heatFrame, this.group);
  }

  async #chooseGroup(group) {
    this.group = group;
    remember("group", group === "all" ? null : group);
    await this.#heat().catch((error) => this.#failed(error));
    this.#listen(this.live?.cursor);
  }

  #look(step) {
    const [first, last] = this.view.extent;
    const half = Math.max(10, Math.round((last - first) / 40));
    this.view.zoom(step - half, step + half);
    announce(`Steps ${this.view.range.join(" to ")}`);
    this.charts.get("grad-norm").element.scrollIntoView({ block: "center" });
  }

  #zoomed() {
    this.main.setAttribute("aria-busy", "true");
    clearTimeout(this.settling);
    this.settling = setTimeout(() => this.reread(), SETTLED);
  }

  /** The values of what is looked at, at its own resolution. */
  async reread() {
    const range = { from: this.view.from, to: this.view.to };
    const asked = (this.asked = Symbol());
    try {
      const [answer, baseline] = await Promise.all([api.series(this.name, selections(), range), api.baseline(this.name, range)]);
      if (asked !== this.asked) return;
      this.frame = new Frame(answer);
      this.baseline = baseline;
      await this.#heat();
      this.draw();
    } catch (error) {
      this.#failed(error);
    }
    if (asked === this.asked) this.main.setAttribute("aria-busy", "false");
  }

  /** What is there stays; the stream, where there is one, goes on when the server is back. */
  #failed(error) {
    this.connection.textContent = `not read: ${error.message}`;
  }

  // -- live --------------------------------------------------------------------------------------------------------

  #listen(cursor) {
    this.live?.close();
    if (!cursor || this.summary.state === "finished") return;
    const select = [...selections(), ["grad_norm", null, this.group]];
    this.live = new Live(this.name, select, cursor, {
      rows: (rows) => this.#rows(rows),
      events: (events) => this.#events(events),
      state: (summary) => {
        this.#state(summary);
        this.others.refresh();
      },
      reset: () => this.reread(),
      gone: ({ error }) => (this.connection.textContent = error),
      connection: (there) => (this.connection.textContent = there ? "" : "connection lost, trying again"),
    });
  }

  #rows(rows) {
    if (!this.frame.step.length) {
      this.reread();
      return;
    }
    const to = this.view.to;
    const many = rows.row > this.frame.row && this.frame.add(rows, to);
    const manyHeat = rows.row > this.heatFrame.row && this.heatFrame.add({ ...rows, series: rows.series.filter((s) => s.metric === "grad_norm") }, to);
    this.view.extent[1] = Math.max(this.view.extent[1], ...rows.step);
    if (many || manyHeat) {
      this.reread();
      return;
    }
    this.drawing ??= requestAnimationFrame(async () => {
      this.drawing = null;
      this.draw();
      this.#band();
    });
  }

  /** The band is a history: it is asked for, at most once a second. */
  #band() {
    this.banding ??= setTimeout(async () => {
      this.banding = null;
      const baseline = await api.baseline(this.name, { from: this.view.from, to: this.view.to }).catch(() => null);
      if (baseline && baseline.width === this.frame.width) {
        this.baseline = baseline;
        this.draw();
      }
    }, 1000);
  }

  async #events(events) {
    this.eventList.add(events);
    this.draw();
    const ended = events.some((event) => event.kind === "run_end");
    if (ended) this.live.close();
    try {
      if (ended || events.some((event) => event.kind === "spike" || event.kind === "incident")) this.#about(await api.run(this.name));
      if (ended) await this.reread();
    } catch (error) {
      this.#failed(error);
    }
  }
}

/** Of the cells: what is clipped fills three quarters of the height, the rest is open. */
function stackRange(_, __, chart) {
  const clipped = chart.lines.filter((line) => line.label !== "open");
  const peak = Math.max(0.001, ...clipped.flatMap((line) => line.max.filter((v) => v !== null)));
  return [0, Math.min(1, peak * 1.35)];
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
