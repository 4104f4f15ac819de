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

// Seconds between marks of the axis.
const ROUND = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800, 2592000];

export async function showCompare(main) {
  const names = [remembered("a"), remembered("b")];
  if (names.some((name) => name === null)) throw new Error("Choose two runs in the list, then compare them.");
  document.title = "Compare · seismograd";
  fill(document.getElementById("crumbs"), el("a", { href: "/" }, "Runs"), " / Compare");
  const page = new Compare(names);
  await page.open(main);
}

class Compare {
  constructor(names) {
    this.names = names;
    this.by = remembered("x") === "time" ? "time" : "step";
    this.view = new View();
  }

  async open(main) {
    const select = METRICS.map((metric) => metric.key);
    const [abouts, answers, catalogue] = await Promise.all([
      Promise.all(this.names.map(api.run)), Promise.all(this.names.map((name) => api.series(name, select))), api.metrics(),
    ]);
    this.started = abouts.map((about) => about.summary.started);
    this.frames = answers.map((answer) => new Frame(answer));
    const choice = ["step", "time"].map((by) =>
      el("button", { type: "button", "aria-pressed": by === this.by, "data-by": by, onclick: () => this.#axis(by) }, by === "step" ? "by step" : "by wall time"));
    this.choice = choice;
    this.metrics = METRICS.map((metric) => ({ ...metric, help: [catalogue[metric.key[0]]?.help].filter(Boolean) }));
    this.holder = el("div", { class: "charts" });
    fill(main, el("h1", {}, "Compare"),
      el("ul", { class: "pair" }, abouts.map((about, i) =>
        el("li", { class: i ? "second" : "first" }, el("a", { href: api.runPage(this.names[i]) }, el("bdi", {}, visible(this.names[i]))), " ", badge(about.summary.state), el("p", {}, visible(about.headline))))),
      el("div", { class: "bar", role: "group", "aria-label": "Axis" }, choice), controls(this.view), this.holder);
    this.draw();
  }

  #axis(by) {
    this.by = by;
    remember("x", by === "time" ? by : null);
    for (const button of this.choice) button.setAttribute("aria-pressed", String(button.dataset.by === by));
    this.view.zoom(null, null);
    this.draw();
  }

  draw() {
    const xs = this.frames.map((frame, i) => (this.by === "step" ? frame.step : frame.time.map((t) => t - this.started[i])));
    const all = xs.flat();
    this.view.extent = all.length ? [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))] : [0, 1];
    const time = this.by === "time" ? { xLabel: "time since the start", xFormat: (v) => duration(v), xSteps: ROUND } : {};
    fill(this.holder, this.metrics.map((metric) => {
      const chart = new Chart({ ...metric, ...time }, this.view, "compare");
      const columns = this.frames.map((frame) => frame.columns.get(JSON.stringify(metric.key)));
      // On one axis, each run at its own places.
      const tables = columns.map((c, i) => [xs[i], c?.min ?? xs[i].map(() => null), c?.max ?? xs[i].map(() => null)]);
      const joined = uPlot.join(tables).map((values) => values.map((v) => v ?? null));
      const width = Math.max(...this.frames.map((frame) => frame.width));
      const lines = this.names.map((name, i) => ({
        label: name, colour: i ? "c2" : "c1", alpha: 0.75, dash: i ? [6, 3] : undefined, min: joined[1 + 2 * i], max: joined[2 + 2 * i], nonfinite: { count: 0, steps: [] },
      }));
      chart.show(joined[0], this.by === "step" ? width : width > 1 ? 1.0001 : 0, lines);
      return chart.element;
    }));
  }
}
