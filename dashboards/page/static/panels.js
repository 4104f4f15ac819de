// What a run's page shows, from top to bottom, and which series each chart takes.

import { keyOf } from "./api.js";
import { PALETTE } from "./charts.js";

const trainer = (name) => ["trainer_metric", name];
const CELLS = ["phantom", "hidden", "legitimate", "open"];
const cellsOf = (ratio) => CELLS.map((cell) => ["clip_fraction", cell, ratio]);

/**
 * id, title; `takes`: selections of series; `label` of a series (its labels); `help`: metrics whose help is shown.
 */
export const SECTIONS = [
  {
    id: "learning",
    title: "Is it learning?",
    charts: [
      { id: "reward", title: "Reward", takes: [trainer("reward")], unit: "reward", help: ["trainer_metric"] },
      { id: "loss", title: "Loss", takes: [trainer("loss")], unit: "loss", help: ["trainer_metric"] },
      { id: "kl", title: "KL to the rollout policy", takes: [["kl", "k3"], trainer("kl")], unit: "nats", log: true, help: ["kl"], label: (s) => (s.metric === "kl" ? "k3" : "as the trainer logs it") },
      { id: "entropy", title: "Entropy", takes: [trainer("entropy")], unit: "nats", help: ["trainer_metric"] },
    ],
  },
  {
    id: "precision",
    title: "Do training and rollout agree?",
    charts: [
      { id: "alpha-beta", title: "Policy change against precision gap", takes: [["alpha_abs_mean"], ["beta_abs_mean"], ["alpha_floor"]], unit: "nats", help: ["alpha_abs_mean", "beta_abs_mean", "alpha_floor"], label: (s) => ({ alpha_abs_mean: "|alpha|, the policy", beta_abs_mean: "|beta|, precision", alpha_floor: "|alpha| at the same weights" })[s.metric] },
      { id: "snr", title: "Signal-to-noise ratio", takes: [["snr"]], unit: "|alpha| / |beta|", help: ["snr"], reference: { value: 1, label: "1: as much noise as signal" } },
      { id: "cells", title: "What the clip does to tokens", takes: cellsOf("ppo"), unit: "tokens", percent: true, stacked: true, cells: true, help: ["clip_fraction"] },
      { id: "cells-importance", title: "What the importance bound does to tokens", takes: cellsOf("importance"), unit: "tokens", percent: true, stacked: true, cells: true, help: ["clip_fraction"] },
      { id: "log-ratio", title: "Log-ratio of a token", takes: ["max", "mean", "min"].map((stat) => ["log_ratio", stat]), unit: "nats", help: ["log_ratio"] },
      { id: "sequence-log-ratio", title: "Log-ratio of a sequence", takes: ["max", "mean", "min"].map((stat) => ["sequence_log_ratio", stat]), unit: "nats", help: ["sequence_log_ratio"] },
      { id: "effective", title: "Effective sample size", takes: [["effective_sample_size_ratio", null]], unit: "of the samples", percent: true, help: ["effective_sample_size_ratio"] },
      { id: "weights", title: "Weights that the engine sees changed", takes: [["weights_changed_ratio", "all"], ["weights_changed_since_sync_ratio", "all"]], unit: "trained weights", percent: true, help: ["weights_changed_ratio", "weights_changed_since_sync_ratio"], label: (s) => (s.metric === "weights_changed_ratio" ? "in the step" : "since the last sync") },
      { id: "taken", title: "Gradient taken away", takes: [["gradient_taken_fraction", null]], unit: "tokens", percent: true, help: ["gradient_taken_fraction"] },
    ],
  },
  {
    id: "gradients",
    title: "Are the gradients healthy?",
    charts: [
      { id: "grad-norm", title: "Gradient norm", takes: [["grad_norm", "all", "all"]], unit: "L2 norm", log: true, baseline: true, help: ["grad_norm"], label: () => "gradient norm" },
      { id: "loss-weight", title: "Largest weight of a token", takes: [["loss_weight", "abs_max"]], unit: "|dL/dlogp|", log: true, help: ["loss_weight"], label: () => "largest |dL/dlogp|" },
      { id: "heterogeneity", title: "Heterogeneity of layers", takes: [["heterogeneity"]], unit: "times its usual", log: true, help: ["heterogeneity", "layer_proportion"], label: () => "largest proportion over its usual" },
      { id: "cosine", title: "Cosine with the clean gradient", takes: [["gradient_cosine"], ["gradient_cosine_floor"]], unit: "cosine", help: ["gradient_cosine", "gradient_cosine_floor"], label: (s) => (s.metric === "gradient_cosine" ? "of the step's gradient" : "floor: two halves of the step") },
      { id: "controls", title: "State of the controls", takes: [["control_state", null]], unit: "", help: ["control_state"], range: () => [-0.2, 3.3], stacked: true, stepped: true, words: ["off", "observing", "armed", "on"] },
    ],
  },
  {
    id: "cost",
    title: "What does watching cost?",
    charts: [
      { id: "overhead", title: "Own share of the step time", takes: [["overhead_ratio"]], unit: "step time", percent: true, help: ["overhead_ratio"], label: () => "since the start" },
      { id: "hook", title: "Own time by part", takes: [["hook_seconds", null]], unit: "seconds", help: ["hook_seconds"], most: 6 },
      { id: "spacing", title: "Spacing of the probes", takes: [["probe_spacing_steps", null]], unit: "steps", log: true, help: ["probe_spacing_steps"] },
      { id: "step-seconds", title: "Step time", takes: [["step_seconds"]], unit: "seconds", help: ["step_seconds"], label: () => "a step" },
    ],
  },
];

export const CHARTS = SECTIONS.flatMap((section) => section.charts);
const OWN = CHARTS.flatMap((chart) => chart.takes).filter(([metric]) => metric === "trainer_metric").map(([, name]) => name);

/** A small chart for each further thing that the trainer logs. @param series of the run. */
export function others(series) {
  const names = series.filter((s) => s.metric === "trainer_metric" && !OWN.includes(s.labels.name)).map((s) => s.labels.name);
  return names.sort().map((name, i) => ({ id: `trainer-${i}`, title: name, takes: [trainer(name)], unit: "", help: [] }));
}

export const selections = () => CHARTS.flatMap((chart) => chart.takes);

const accepts = (selection, column) =>
  selection[0] === column.metric && Object.values(column.labels).every((value, i) => selection.length === 1 || selection[i + 1] === null || selection[i + 1] === value);

/** The lines of a chart, from a frame. */
export function lines(spec, frame, baseline) {
  const columns = [...frame.columns.values()];
  let found = spec.takes.flatMap((selection) => columns.filter((column) => accepts(selection, column)));
  if (spec.cells) return cells(found);
  if (spec.most) found = largest(found, spec.most);
  const several = found.length > 1;
  const made = found.map((column, i) => ({
    key: keyOf(column.metric, column.labels),
    label: spec.label?.(column) ?? (Object.values(column.labels).join(" ") || spec.title),
    colour: PALETTE[i % PALETTE.length],
    dash: several && i >= PALETTE.length ? [6, 3] : undefined,
    ...column,
  }));
  if (spec.baseline && baseline) made.push(...banded(frame, baseline));
  return made;
}

/** What was usual, and the threshold, on the frame's buckets. */
function banded(frame, baseline) {
  const at = new Map(baseline.step.map((step, i) => [step, i]));
  const on = (values) => frame.step.map((step) => (at.has(step) ? values[at.get(step)] : null));
  const line = (label, values) => ({ label, colour: "soft", quiet: true, min: values, max: values });
  return [line("threshold", on(baseline.threshold)), line("usual", on(baseline.level))];
}

/** The four cells one on top of the other. Of a bucket the largest share of each, so that none is hidden. */
function cells(found) {
  const of = (cell) => found.find((column) => column.labels.cell === cell);
  const open = of("open");
  let below = [];
  const stacked = [];
  for (const cell of CELLS.slice(0, 3)) {
    const column = of(cell);
    if (!column) continue;
    const top = column.max.map((value, n) => (value === null ? null : value + (below[n] ?? 0)));
    below = top;
    stacked.push({ label: cell, colour: `cell-${cell}`, fill: `cell-${cell}`, min: top, max: top, shown: column, nonfinite: column.nonfinite });
  }
  if (!stacked.length) return [];
  if (open) {
    const top = below.map((value) => (value === null ? null : 1));
    stacked.push({ label: "open", colour: "cell-open", fill: "cell-open", min: top, max: top, shown: open, nonfinite: open.nonfinite });
  }
  return stacked.reverse();
}

function largest(found, most) {
  const mean = (column) => {
    const values = column.max.filter((v) => v !== null);
    return values.reduce((sum, v) => sum + v, 0) / Math.max(values.length, 1);
  };
  return found.map((column) => [mean(column), column]).sort((a, b) => b[0] - a[0]).slice(0, most).map(([, column]) => column);
}
