// Values on a grid of buckets, as /series gives them, to which new rows are added.
// What is added falls into the bucket that the server would put it into, so that a page that was open shows what a page
// that is opened now shows.

import { keyOf } from "./api.js";

const NAMED_STEPS = 100;

export class Frame {
  /** @param answer of /series. */
  constructor(answer, points = 600) {
    this.points = points;
    this.from = answer.from;
    this.to = answer.to;
    this.width = answer.width;
    this.row = answer.row;
    this.step = answer.step;
    this.time = answer.time;
    this.columns = new Map();
    for (const series of answer.series) {
      const low = series.min ?? series.value;
      this.columns.set(keyOf(series.metric, series.labels), {
        metric: series.metric,
        labels: series.labels,
        min: low,
        max: series.max ?? low.slice(),
        nonfinite: series.nonfinite ?? { count: 0, steps: [] },
      });
    }
  }

  get last() {
    return this.step.length ? this.step[this.step.length - 1] : null;
  }

  /**
   * Adds rows of the live stream.
   * @param rows data of an event `rows`.
   * @param to last step of the window, or null where it follows the run.
   * @returns whether the buckets have become too many: then /series is to be read again.
   */
  add(rows, to = null) {
    rows.step.forEach((step, i) => {
      if (step < this.from || (to !== null && step > to)) return;
      const seen = rows.series.filter((series) => series.value[i] !== null);
      if (!seen.length) return;
      this.to = Math.max(this.to, step);
      const at = this.#bucket(step, rows.time[i]);
      for (const series of seen) this.#put(series, at, step, series.value[i]);
    });
    this.row = Math.max(this.row, rows.row);
    return Math.floor(this.to / this.width) - Math.floor(this.from / this.width) + 1 > this.points;
  }

  #bucket(step, time) {
    const start = Math.max(Math.floor(step / this.width) * this.width, this.from);
    let at = this.step.length;
    while (at > 0 && this.step[at - 1] > start) at -= 1;
    if (at > 0 && this.step[at - 1] === start) {
      this.time[at - 1] = Math.max(this.time[at - 1], time);
      return at - 1;
    }
    this.step.splice(at, 0, start);
    this.time.splice(at, 0, time);
    for (const column of this.columns.values()) {
      column.min.splice(at, 0, null);
      column.max.splice(at, 0, null);
    }
    return at;
  }

  #put(series, at, step, value) {
    const key = keyOf(series.metric, series.labels);
    let column = this.columns.get(key);
    if (!column) {
      const empty = () => new Array(this.step.length).fill(null);
      column = { metric: series.metric, labels: series.labels, min: empty(), max: empty(), nonfinite: { count: 0, steps: [] } };
      this.columns.set(key, column);
    }
    if (typeof value === "string") {
      column.nonfinite.count += 1;
      if (column.nonfinite.steps.length < NAMED_STEPS) column.nonfinite.steps.push([step, value]);
      return;
    }
    column.min[at] = column.min[at] === null ? value : Math.min(column.min[at], value);
    column.max[at] = column.max[at] === null ? value : Math.max(column.max[at], value);
  }
}
