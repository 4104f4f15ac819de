// Gradient norms as a picture: layers by steps, colour by the logarithm of each bucket's largest norm.

import { el, fill, visible, colour, helpOn } from "./dom.js";
import { number } from "./format.js";
import { KEYS } from "./view.js";

// Cividis (Nuñez et al. 2018, doi:10.1371/journal.pone.0199239): even in lightness, the same to the colour-blind.
const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
const ROW = 18;
const LEFT = 76;
const BOTTOM = 30;
const DECADES = 5; // norms further below the largest share the darkest colour, so that one tiny norm does not flatten the rest

/** Depth as data flow: the embedding, numbered layers, the final norm, the head. */
export function byDepth(a, b) {
  const place = (layer) => ({ embedding: 0, norm: 2, head: 3, other: 4 })[layer] ?? 1;
  return place(a) - place(b) || a.localeCompare(b, "en", { numeric: true });
}

export class Heatmap {
  /** @param onGroup called with the module group that was chosen. */
  constructor(view, help, onGroup) {
    this.view = view;
    this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "Gradient norms, layers by steps. Arrow keys read values." });
    this.tip = el("output", { class: "tip", hidden: true });
    this.select = el("select", { id: "heat-group", onchange: () => onGroup(this.select.value) });
    this.scale = el("div", { class: "scale", "aria-hidden": true });
    this.ends = [el("span"), el("span")];
    this.box = el("div", { class: "heat" }, this.canvas, this.tip);
    this.element = el("figure", { class: "chart wide", id: "chart-heatmap", hidden: true },
      el("figcaption", {}, el("h3", {}, "Gradient norm by layer"),
        helpOn("the picture", help),
        el("span", { class: "tools" }, el("label", { for: "heat-group" }, "module group "), this.select)),
      this.box, el("div", { class: "key" }, this.ends[0], this.scale, this.ends[1], el("span", { class: "soft" }, "largest norm of each bucket, logarithmic")));
    fill(this.scale, CIVIDIS.map((c) => {
      const step = el("i");
      step.style.background = c;
      return step;
    }));
    this.canvas.addEventListener("pointermove", (event) => this.#hover(event));
    this.canvas.addEventListener("pointerleave", () => this.#point(null));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
    view.addEventListener("zoom", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  groups(names, chosen) {
    fill(this.select, names.map((name) => el("option", { value: name, selected: name === chosen }, visible(name))));
  }

  /** @param frame with the series grad_norm of one group, by layer. */
  show(frame, group) {
    const columns = [...frame.columns.values()].filter((c) => c.metric === "grad_norm" && c.labels.layer !== "all" && c.labels.group === group);
    columns.sort((a, b) => byDepth(a.labels.layer, b.labels.layer));
    this.frame = frame;
    this.rows = columns;
    this.element.hidden = columns.length === 0;
    this.draw();
    if (this.at) this.#point(this.rows[this.at.row] && this.at.i < frame.step.length ? this.at : null);
  }

  draw() {
    if (!this.rows?.length || !this.box.clientWidth) return;
    const one = devicePixelRatio;
    const width = this.box.clientWidth;
    this.rowHeight = Math.max(6, Math.min(ROW, 560 / this.rows.length));
    const height = this.rows.length * this.rowHeight + BOTTOM;
    this.canvas.width = Math.round(width * one);
    this.canvas.height = Math.round(height * one);
    this.canvas.style.height = `${height}px`;
    const ctx = this.canvas.getContext("2d");
    ctx.scale(one, one);
    const [low, high] = this.#ends();
    this.ends[0].textContent = number(10 ** low, 2);
    this.ends[1].textContent = number(10 ** high, 2);
    const plain = colour("panel");
    ctx.fillStyle = plain;
    ctx.fillRect(LEFT, 0, width - LEFT, height - BOTTOM);
    const { step, width: wide } = this.frame;
    for (let i = 0; i < step.length; i += 1) {
      const [x0, x1] = this.#span(i, wide);
      if (x1 < LEFT || x0 > width) continue;
      for (let j = 0; j < this.rows.length; j += 1) {
        const value = this.rows[j].max[i];
        if (value === null || value === undefined) continue;
        const share = value > 0 && high > low ? (Math.log10(value) - low) / (high - low) : value > 0 ? 1 : 0;
        ctx.fillStyle = CIVIDIS[Math.min(Math.max(Math.floor(share * CIVIDIS.length), 0), CIVIDIS.length - 1)];
        const left = Math.max(x0, LEFT);
        ctx.fillRect(left, j * this.rowHeight, Math.max(x1 - left, 0.6), this.rowHeight - (this.rowHeight > 10 ? 1 : 0));
      }
    }
    this.#nonfinite(ctx);
    this.#axes(ctx, width, height);
  }

  #ends() {
    const logs = this.rows.flatMap((row) => row.max.filter((v) => v > 0)).map(Math.log10);
    if (!logs.length) return [0, 0];
    const high = logs.reduce((a, b) => Math.max(a, b));
    return [Math.max(logs.reduce((a, b) => Math.min(a, b)), high - DECADES), high];
  }

  #x(step) {
    const [from, to] = this.view.range;
    return LEFT + ((step - from) / (to - from + this.frame.width)) * (this.box.clientWidth - LEFT);
  }

  // A probe that ran on few steps leaves gaps: a bucket reaches as far as its own width.
  #span(i, wide) {
    return [this.#x(this.frame.step[i]), this.#x(this.frame.step[i] + wide)];
  }

  #nonfinite(ctx) {
    ctx.fillStyle = colour("mark-nonfinite");
    this.rows.forEach((row, j) => {
      for (const [step] of row.nonfinite.steps) {
        const x = this.#x(step);
        if (x >= LEFT) ctx.fillRect(x, j * this.rowHeight, Math.max(this.#x(step + this.frame.width) - x, 2), this.rowHeight - 1);
      }
    });
  }

  #axes(ctx, width, height) {
    ctx.fillStyle = colour("soft");
    ctx.font = "12px system-ui, sans-serif";
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const every = Math.ceil(13 / this.rowHeight);
    this.rows.forEach((row, j) => {
      if (j % every === 0) ctx.fillText(visible(row.labels.layer).slice(0, 12), LEFT - 8, (j + 0.5) * this.rowHeight);
    });
    ctx.textAlign = "center";
    const [from, to] = this.view.range;
    const rough = (to - from) / Math.max(2, Math.floor((width - LEFT) / 110));
    const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
    const by = [1, 2, 5, 10].map((f) => f * power).find((f) => f >= rough) ?? power;
    for (let step = Math.ceil(from / by) * by; step <= to; step += by) {
      const half = ctx.measureText(String(step)).width / 2;
      ctx.fillText(String(step), Math.min(this.#x(step + this.frame.width / 2), width - half), height - BOTTOM + 10);
    }
    ctx.fillText("step", LEFT + (width - LEFT) / 2, height - 6);
  }

  // -- values ------------------------------------------------------------------------------------------------------

  #hover(event) {
    if (!this.frame) return;
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const row = Math.floor(y / this.rowHeight);
    const [from, to] = this.view.range;
    const step = from + ((x - LEFT) / (box.width - LEFT)) * (to - from + this.frame.width);
    const i = this.frame.step.findLastIndex((s) => s <= step);
    this.#point(x >= LEFT && i >= 0 && this.rows[row] ? { i, row } : null);
  }

  #point(at) {
    this.at = at;
    this.tip.hidden = at === null;
    if (at === null) return;
    const { step, width } = this.frame;
    const row = this.rows[at.row];
    const steps = width > 1 ? `steps ${step[at.i]} to ${Math.floor(step[at.i] / width) * width + width - 1}` : `step ${step[at.i]}`;
    const [low, high] = [row.min[at.i], row.max[at.i]];
    const odd = row.nonfinite.steps.filter(([s]) => Math.floor(s / width) === Math.floor(step[at.i] / width)).map(([, v]) => number(v));
    const value = [low === high ? number(high) : `${number(low)} to ${number(high)}`, ...odd].join(", ");
    this.tip.textContent = `layer ${visible(row.labels.layer)}, ${steps}: ${value}`;
    this.tip.dataset.value = high ?? "";
    const x = Math.min(Math.max(this.#x(step[at.i]), LEFT), this.box.clientWidth - this.tip.offsetWidth - 4);
    this.tip.style.left = `${x}px`;
    this.tip.style.top = `${(at.row + 1) * this.rowHeight + 4}px`;
  }

  #key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const move = moves[event.key];
    if (move && this.rows?.length) {
      const { i, row } = this.at ?? { i: this.frame.step.length - 1, row: 0 };
      const bound = (v, n) => Math.min(Math.max(v, 0), n - 1);
      this.#point({ i: bound(i + move[0], this.frame.step.length), row: bound(row + move[1], this.rows.length) });
    } else if (KEYS[event.key]) KEYS[event.key](this.view);
    else return;
    event.preventDefault();
  }
}
