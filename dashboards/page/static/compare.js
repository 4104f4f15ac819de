// Two runs on the same axes, by step or by wall time.

import uPlot from "/static/uplot/uPlot.esm.js";
import { el, fill, visible } from "./dom.js";
import { duration } from "./format.js";
import * as api from "./api.js";
import { badge } from "./runs.js";
import { Chart } from "./charts.js";
import { Frame } from "./frame.js";
import { View, remember, remembered } from "./view.js";
import { controls } from "./zoombar.js";

const METRICS = [
  { id: "reward", title: "Reward", key: ["trainer_metric", "reward"], unit: "reward" },
  { id: "loss", title: "Loss", key: ["trainer_metric", "loss"], unit: "loss" },
  { id: "kl", title: "KL to the rollout policy (k3)", key: ["kl", "k3"], unit: "nats", log: true },
  { id: "entropy", title: "Entropy", key: ["trainer_metric", "entropy"], unit: "nats" },
  { id: "grad-norm", title: "Gradient norm", key: ["grad_norm", "all", "all"], unit: "L2 norm", log: true },
  { id: "snr", title: "Signal-to-noise ratio", key: ["snr"], unit: "|alpha| / |beta|" },
  { id: "alpha", title: "Policy change |alpha|", key: ["alpha_abs_mean"], unit: "nats" },
  { id: "beta", title: "Precision gap |beta|", key: ["beta_abs_mean"], unit: "nats" },
  { id: "phantom", title: "Phantom clipping", key: ["clip_fraction", "phantom", "ppo"], unit: "tokens", percent: true },
  { id: "step-seconds", title: "Step time", key: ["step_seconds"], unit: "seconds" },
];
const SELECT = METRICS.map((metric) => metric.key);
const SETTLED = 150; // milliseconds without a further zoom, before finer values are asked for

// Seconds between marks of the axis.
const ROUND = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800, 2592000];

export async function showCompare(main) {
  const names = [remembered("a"), remembered("b")];
  if (names.some((name) => name === null)) throw new Error("Choose two runs in the list, then compare them.");
  document.title = "Compare · seismograd";
  fill(document.getElementById("crumbs"), el("a", { href: "/" }, "Runs"), " / Compare");
  await new Compare(names).open(main);
}

class Compare {
  constructor(names) {
    this.names = names;
    this.by = remembered("x") === "time" ? "time" : "step";
    this.view = new View();
    this.view.addEventListener("zoom", () => {
      this.main?.setAttribute("aria-busy", "true");
      clearTimeout(this.settling);
      this.settling = setTimeout(() => this.#reread(), SETTLED);
    });
  }

  async open(main) {
    this.main = main;
    const [abouts, answers, catalogue] = await Promise.all([
      Promise.all(this.names.map(api.run)), Promise.all(this.names.map((name) => api.series(name, SELECT))), api.metrics(),
    ]);
    this.started = abouts.map((about) => about.summary.started);
    this.wholes = this.frames = answers.map((answer) => new Frame(answer));
    this.metrics = METRICS.map((metric) => ({ ...metric, help: [catalogue[metric.key[0]]?.help].filter(Boolean) }));
    this.choice = ["step", "time"].map((by) =>
      el("button", { type: "button", "aria-pressed": by === this.by, "data-by": by, onclick: () => this.#axis(by) }, by === "step" ? "by step" : "by wall time"));
    this.holder = el("div", { class: "charts" });
    fill(main, el("h1", {}, "Compare"),
      el("ul", { class: "pair" }, abouts.map((about, i) =>
        el("li", { class: i ? "second" : "first" }, el("a", { href: api.runPage(this.names[i]) }, el("bdi", {}, visible(this.names[i]))), " ", badge(about.summary.state), el("p", {}, visible(about.headline))))),
      el("div", { class: "bar", role: "group", "aria-label": "Axis" }, this.choice), controls(this.view), this.holder);
    this.#build();
    if (!this.view.whole) await this.#reread();
    main.setAttribute("aria-busy", "false");
  }

  #axis(by) {
    this.by = by;
    remember("x", by === "time" ? by : null);
    for (const button of this.choice) button.setAttribute("aria-pressed", String(button.dataset.by === by));
    this.frames = this.wholes;
    this.view.from = this.view.to = null;
    this.#build();
    this.view.zoom(null, null);
  }

  #build() {
    const all = this.wholes.flatMap((frame, i) => this.#xs(frame, i));
    this.view.extent = all.length ? [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))] : [0, 1];
    const time = this.by === "time" ? { xLabel: "time since the start", xFormat: (v) => duration(v), xSteps: ROUND } : {};
    this.charts = this.metrics.map((metric) => new Chart({ ...metric, ...time }, this.view, "compare"));
    fill(this.holder, this.charts.map((chart) => chart.element));
    this.#draw();
  }

  #xs(frame, i) {
    return this.by === "step" ? frame.step : frame.time.map((t) => t - this.started[i]);
  }

  /** What is looked at, at its own resolution. */
  async #reread() {
    const asked = (this.asked = Symbol());
    const read = async (name, i) => new Frame(await api.series(name, SELECT, this.#steps(i)));
    // Without an answer what is there stays.
    const frames = this.view.whole ? this.wholes : await Promise.all(this.names.map(read)).catch(() => this.frames);
    if (asked !== this.asked) return;
    this.frames = frames;
    this.#draw();
    this.main.setAttribute("aria-busy", "false");
  }

  /** The steps of a run that lie in the view, and a bucket more on each side. */
  #steps(i) {
    const { from, to } = this.view;
    const whole = this.wholes[i];
    const xs = this.#xs(whole, i);
    const before = from === null ? -1 : xs.findLastIndex((x) => x <= from);
    const after = to === null ? -1 : xs.findIndex((x) => x >= to);
    return { from: before < 0 ? null : whole.step[before], to: after < 0 ? null : whole.step[after] + whole.width - 1 };
  }

  #draw() {
    const xs = this.frames.map((frame, i) => this.#xs(frame, i));
    const width = Math.max(...this.frames.map((frame) => frame.width));
    this.charts.forEach((chart, m) => {
      const columns = this.frames.map((frame) => frame.columns.get(JSON.stringify(this.metrics[m].key)));
      // On one axis, each run at its own places.
      const tables = columns.map((c, i) => [xs[i], c?.min ?? xs[i].map(() => null), c?.max ?? xs[i].map(() => null)]);
      const joined = uPlot.join(tables).map((values) => values.map((v) => v ?? null));
      const lines = this.names.map((name, i) => ({
        label: name, colour: i ? "c2" : "c1", alpha: 0.75, dash: i ? [6, 3] : undefined, min: joined[1 + 2 * i], max: joined[2 + 2 * i], nonfinite: columns[i]?.nonfinite && this.by === "step" ? columns[i].nonfinite : undefined,
      }));
      // By time a bucket has no width of its own: its two values stand at one place.
      chart.show(joined[0], this.by === "step" || width === 1 ? width : 1 + 1e-9, lines);
    });
  }
}
