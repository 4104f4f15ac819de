// One chart: title with help, canvas, legend with the values under the cursor, PNG and CSV.

import uPlot from "/static/uplot/uPlot.esm.js";
import { el, fill, visible, colour, helpOn } from "./dom.js";
import { number, percent } from "./format.js";
import { KEYS } from "./view.js";
import { csv, png, download } from "./export.js";

const HEIGHT = 210;
export const PALETTE = ["c1", "c2", "c3", "c4", "c5", "c6", "c7"];
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];

/**
 * @typedef {{label: string, colour?: string, dash?: number[], min: (number|null)[], max: (number|null)[],
 *   nonfinite?: {count: number, steps: [number, string][]}, quiet?: boolean, fill?: string}} Line
 */

export class Chart {
  /**
   * @param spec id, title, unit (of the axis), help (texts), percent, log, reference ({value, label}), xLabel, xFormat.
   * @param view shared range.
   * @param sync key of charts whose cursors move together.
   */
  constructor(spec, view, sync) {
    this.spec = spec;
    this.view = view;
    this.sync = sync;
    this.log = spec.log ?? false;
    this.marks = [];
    this.lines = [];
    this.x = [];
    this.hidden = new Set();
    this.plot = el("div", {
      class: "plot", tabindex: 0, role: "group",
      "aria-label": `Chart ${spec.title}. Arrow keys move, plus and minus zoom, 0 shows the whole run, shift and arrow keys read values.`,
    });
    this.legend = el("ul", { class: "legend" });
    this.element = el("figure", { class: "chart", id: `chart-${spec.id}` }, this.#caption(), this.plot, this.legend);
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    this.plot.addEventListener("pointerdown", (event) => this.#grab(event), true);
    new ResizeObserver(() => this.#resize()).observe(this.plot);
    view.addEventListener("zoom", () => this.rescale());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#rebuild());
  }

  /**
   * @param x start of each bucket, (N,).
   * @param width of a bucket; 0 where each point is one value.
   * @param lines drawn in this order.
   */
  show(x, width, lines) {
    const shape = (some) => some.map((line) => `${line.label}|${line.colour}`).join("\n");
    const same = this.u && shape(lines) === shape(this.lines);
    [this.x, this.width, this.lines] = [x, width, lines];
    this.element.hidden = lines.every((line) => !line.max.some((v) => v !== null) && !line.nonfinite?.count);
    if (this.element.hidden) return;
    if (same) this.u.setData(this.#data(), true);
    else this.#rebuild();
    this.#values(null);
  }

  /** @param marks {step, kind} of events. */
  mark(marks) {
    this.marks = marks;
    this.u?.redraw(false);
  }

  rescale() {
    if (!this.u) return;
    const [min, max] = this.view.range;
    this.u.setScale("x", { min, max });
  }

  // A bucket is drawn as two points, its smallest and its largest value.
  #data() {
    if (!(this.width > 1)) return [this.x, ...this.lines.map((line) => line.max)];
    const twice = (low, high) => low.flatMap((value, i) => [value, high[i]]);
    return [twice(this.x, this.x.map((x) => x + this.width / 2)), ...this.lines.map((line) => twice(line.min, line.max))];
  }

  #caption() {
    const { title, help = [], id } = this.spec;
    this.scaleButton = el("button", { type: "button", class: "small", "aria-pressed": this.log, onclick: () => this.#toggleLog() }, "log");
    const menu = el("span", { class: "tools" },
      this.spec.stacked ? null : this.scaleButton,
      el("button", { type: "button", class: "small", title: `${title} as a picture`, onclick: () => download(`${id}.png`, png(this)) }, "PNG"),
      el("button", { type: "button", class: "small", title: `${title} as a table`, onclick: () => download(`${id}.csv`, csv(this)) }, "CSV"));
    return el("figcaption", {}, el("h3", {}, title), help.length ? helpOn(title, help) : null, menu);
  }

  #rebuild() {
    if (!this.lines.length) return;
    this.u?.destroy();
    fill(this.plot);
    const soft = colour("soft");
    const axis = { stroke: soft, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif" };
    const show = this.#shown(3);
    this.u = new uPlot({
      width: Math.max(this.plot.clientWidth, 120), height: HEIGHT,
      legend: { show: false },
      padding: [12, 22, 0, 0],
      cursor: {
        sync: { key: this.sync, setSeries: false },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7, width: 2 },
        bind: { dblclick: () => () => { this.view.zoom(null, null); return null; } },
      },
      scales: { x: { time: false, range: () => this.view.range }, y: this.#yScale() },
      axes: [
        { ...axis, label: this.spec.xLabel ?? "step", labelSize: 16, size: 26, incrs: this.spec.xSteps, values: (_, splits) => splits.map((v) => (this.spec.xFormat ?? this.#step)(v)) },
        { ...axis, label: this.#unit(), labelSize: 20, size: (_, values) => 14 + 7 * Math.max(3, ...(values ?? []).map((v) => (v ?? "").length)), values: (_, splits) => splits.map((v) => (v === null ? null : show(v))) },
      ],
      series: [{}, ...this.lines.map((line, i) => this.#series(line, i))],
      bands: this.#bands(),
      hooks: {
        setSelect: [(u) => this.#selected(u)],
        setCursor: [(u) => this.#values(u.cursor.idx)],
        draw: [(u) => this.#reference(u), (u) => this.#drawMarks(u)],
      },
    }, this.#data(), this.plot);
    this.#legend();
  }

  /** Between what was usual and the threshold. */
  #bands() {
    const quiet = this.lines.flatMap((line, i) => (line.quiet ? [i + 1] : []));
    return quiet.length === 2 ? [{ series: quiet, fill: colour("band") }] : [];
  }

  #step(v) {
    return Number.isInteger(v) ? String(v) : "";
  }

  #shown(digits) {
    if (this.spec.words) return (v) => this.spec.words[v] ?? "";
    return this.spec.percent ? percent : (v) => number(v, digits);
  }

  #unit() {
    if (this.spec.percent) return this.spec.unit ? `% of ${this.spec.unit}` : "%";
    return this.spec.unit;
  }

  #yScale() {
    if (this.spec.range) return { range: (u, low, high) => this.spec.range(low, high, this) };
    if (this.log) return { distr: 3, log: 10 };
    return { range: (_, low, high) => (low === null ? [0, 1] : low === high ? [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2] : uPlot.rangeNum(low, high, 0.1, true)) };
  }

  #series(line, i) {
    const stroke = colour(line.colour ?? PALETTE[i % PALETTE.length]);
    return {
      label: line.label, stroke, width: line.quiet ? 1 : 1.6, dash: line.dash ?? (line.quiet ? DASHES[1] : DASHES[0]),
      alpha: line.alpha ?? 1,
      paths: this.spec.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      fill: line.fill ? colour(line.fill) : undefined, spanGaps: true, show: !this.hidden.has(line.label),
      points: { show: !line.quiet && !this.spec.stacked && line.max.filter((v) => v !== null).length < 60, size: 4, fill: stroke },
    };
  }

  // -- legend ------------------------------------------------------------------------------------------------------

  #legend() {
    this.figures = this.lines.map(() => el("output", { class: "value" }));
    fill(this.legend, this.lines.map((line, i) => {
      const swatch = el("span", { class: `swatch${line.quiet ? " thin" : ""}`, "aria-hidden": true });
      swatch.style.setProperty("--swatch", colour(line.colour ?? PALETTE[i % PALETTE.length]));
      const button = el("button", {
        type: "button", "aria-pressed": !this.hidden.has(line.label), title: "show or hide",
        onclick: () => this.#toggle(i, button),
      }, swatch, visible(line.label));
      return el("li", {}, button, this.figures[i]);
    }));
  }

  #toggle(i, button) {
    const { label } = this.lines[i];
    if (!this.hidden.delete(label)) this.hidden.add(label);
    this.u.setSeries(i + 1, { show: !this.hidden.has(label) });
    button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
  }

  /** Values at a place of the cursor, else the last ones. */
  #values(index) {
    if (!this.figures) return;
    const at = index === null || index === undefined ? null : this.width > 1 ? Math.floor(index / 2) : index;
    const show = this.#shown(4);
    this.lines.forEach((line, i) => {
      const place = at ?? line.max.findLastIndex((v) => v !== null);
      const shown = line.shown ?? line;
      const [low, high] = [shown.min[place] ?? null, shown.max[place] ?? null];
      this.figures[i].textContent = low === high ? show(high) : `${show(low)} to ${show(high)}`;
      this.figures[i].title = high === null ? "" : low === high ? String(high) : `${low} to ${high}`;
      this.figures[i].dataset.step = this.x[place] ?? "";
    });
  }

  // -- zoom and pan ------------------------------------------------------------------------------------------------

  #selected(u) {
    if (u.select.width < 4) return;
    const from = u.posToVal(u.select.left, "x");
    const to = u.posToVal(u.select.left + u.select.width, "x");
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.view.zoom(from, to);
  }

  /** Dragging with shift moves instead of selecting. */
  #grab(event) {
    if (!event.shiftKey || event.button !== 0 || !this.u) return;
    event.preventDefault();
    event.stopPropagation();
    let last = event.clientX;
    const width = this.u.over.clientWidth;
    const move = (e) => {
      if (Math.abs(e.clientX - last) < 4) return;
      this.view.pan((last - e.clientX) / width);
      last = e.clientX;
    };
    const release = () => removeEventListener("pointermove", move);
    addEventListener("pointermove", move);
    addEventListener("pointerup", release, { once: true });
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.plot) return;
    if (event.shiftKey && event.key.startsWith("Arrow")) this.#walk(event.key === "ArrowLeft" ? -1 : 1);
    else if (KEYS[event.key]) KEYS[event.key](this.view);
    else return;
    event.preventDefault();
  }

  /** The cursor to the next point, for those who read without a mouse. */
  #walk(by) {
    const points = this.u.data[0];
    const stride = this.width > 1 ? 2 : 1;
    const at = Math.min(Math.max((this.u.cursor.idx ?? points.length) + by * stride, 0), points.length - 1);
    this.u.setCursor({ left: this.u.valToPos(points[at], "x"), top: 10 });
  }

  #toggleLog() {
    this.log = !this.log;
    this.scaleButton.setAttribute("aria-pressed", String(this.log));
    this.#rebuild();
  }

  #resize() {
    const width = this.plot.clientWidth;
    if (this.u && width > 0 && width !== this.u.width) this.u.setSize({ width, height: HEIGHT });
  }

  // -- what is drawn over and under the lines ----------------------------------------------------------------------

  #reference(u) {
    const { reference } = this.spec;
    if (!reference) return;
    const y = u.valToPos(reference.value, "y", true);
    const { left, top, width, height } = u.bbox;
    if (!(y >= top && y <= top + height)) return;
    const { ctx } = u;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("soft");
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(left, y);
    ctx.lineTo(left + width, y);
    ctx.stroke();
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "bottom";
    ctx.lineWidth = 4 * devicePixelRatio;
    ctx.strokeStyle = colour("paper");
    ctx.setLineDash([]);
    const at = [left + width - 2 * devicePixelRatio, y - 2 * devicePixelRatio];
    ctx.strokeText(reference.label, ...at);
    ctx.fillText(reference.label, ...at);
    ctx.restore();
  }

  #drawMarks(u) {
    const { ctx } = u;
    const { left, top, width, height } = u.bbox;
    const one = devicePixelRatio;
    ctx.save();
    ctx.setLineDash([]);
    const drawn = new Set(); // thousands of marks may fall on a few hundred places
    for (const { step, kind } of this.marks) {
      const x = u.valToPos(step, "x", true);
      const place = `${kind} ${Math.round(x / one)}`;
      if (x < left - 1 || x > left + width + 1 || drawn.has(place)) continue;
      drawn.add(place);
      ctx.strokeStyle = ctx.fillStyle = colour(`mark-${kind}`);
      ctx.globalAlpha = 0.55;
      ctx.lineWidth = one;
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      drawSign(ctx, kind, x, top, 4.5 * one);
    }
    ctx.fillStyle = colour("mark-nonfinite");
    ctx.font = `bold ${12 * one}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    for (const line of this.lines) {
      for (const [step, value] of line.nonfinite?.steps ?? []) {
        const x = u.valToPos(step, "x", true);
        if (x >= left && x <= left + width) ctx.fillText(value === "nan" ? "NaN" : value, x, top + 8 * one);
      }
    }
    ctx.restore();
  }
}

/** Kinds differ by shape too: a spike points down, an incident is a diamond, a control a circle. */
function drawSign(ctx, kind, x, y, r) {
  ctx.beginPath();
  if (kind === "spike") {
    ctx.moveTo(x - r, y - r);
    ctx.lineTo(x + r, y - r);
    ctx.lineTo(x, y + r);
  } else if (kind === "incident") {
    ctx.moveTo(x, y - r);
    ctx.lineTo(x + r, y);
    ctx.lineTo(x, y + r);
    ctx.lineTo(x - r, y);
  } else ctx.arc(x, y, 0.8 * r, 0, 7);
  ctx.fill();
}
