// All runs of the folder: search, state, last values, and two of them to compare.

import { el, fill, visible, announce } from "./dom.js";
import { number, grouped, ago, duration } from "./format.js";
import { runs as read, runPage } from "./api.js";

const EVERY = 3000;
const COLUMNS = [
  { id: "name", title: "Run", of: (r) => r.name, left: true },
  { id: "state", title: "State", of: (r) => r.state, left: true },
  { id: "step", title: "Steps", of: (r) => r.step },
  { id: "reward", title: "Reward", of: (r) => r.values.reward },
  { id: "loss", title: "Loss", of: (r) => r.values.loss },
  { id: "kl", title: "KL, nats", of: (r) => r.values.kl },
  { id: "grad_norm", title: "Gradient norm", of: (r) => r.values.grad_norm },
  { id: "snr", title: "SNR", of: (r) => r.values.snr },
  { id: "spikes", title: "Spikes", of: (r) => r.spikes },
  { id: "incidents", title: "Incidents", of: (r) => r.incidents },
  { id: "updated", title: "Last step", of: (r) => r.updated },
];
const MEANS = { live: "steps are coming in", finished: "it said that it has ended", died: "no step for long, and no end", unreadable: "its store cannot be read" };

export async function showRuns(main) {
  const list = new RunList(main);
  await list.refresh();
  main.setAttribute("aria-busy", "false");
  setInterval(() => document.hidden || list.refresh().catch((error) => list.say(error.message)), EVERY);
}

class RunList {
  constructor(main) {
    this.chosen = [];
    this.sort = { id: "started", down: true };
    this.rows = new Map();
    this.search = el("input", { type: "search", id: "search", placeholder: "part of a name, or a state", autocomplete: "off", oninput: () => this.#filter() });
    this.compare = el("a", { class: "button", role: "link", "aria-disabled": "true" }, "Compare");
    this.head = el("tr", {}, el("th", { scope: "col" }, el("span", { class: "unseen" }, "compare")), COLUMNS.map((column) => this.#heading(column)));
    this.body = el("tbody");
    this.note = el("p", { class: "soft", role: "status" });
    this.table = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Runs" }, el("table", { class: "runs" }, el("thead", {}, this.head), this.body));
    this.tools = el("div", { class: "bar" }, el("label", { for: "search" }, "Search "), this.search, this.compare);
    this.empty = el("div");
    fill(main, el("h1", {}, "Runs"), this.empty, this.tools, this.table, this.note);
  }

  say(text) {
    this.note.textContent = text;
  }

  async refresh() {
    const { runs, folder, single } = await read();
    this.runs = runs;
    this.tools.hidden = this.table.hidden = runs.length === 0;
    fill(this.empty, runs.length ? null : nothing(folder));
    for (const run of runs) this.#row(run);
    const names = new Set(runs.map((run) => run.name));
    for (const name of [...this.rows.keys()]) if (!names.has(name)) this.rows.delete(name);
    this.#order();
    this.#filter();
    if (single) this.say(`The folder of one run: ${folder}`);
  }

  #heading(column) {
    const button = el("button", { type: "button", onclick: () => this.#sortBy(column.id) }, column.title);
    return el("th", { scope: "col", class: column.left ? "left" : null, "data-id": column.id }, button);
  }

  #row(run) {
    let row = this.rows.get(run.name);
    const text = JSON.stringify([run, ago(run.updated)]);
    if (row?.text === text) return;
    const checked = this.chosen.includes(run.name);
    const box = el("input", { type: "checkbox", "aria-label": `compare ${visible(run.name)}`, checked, onchange: (event) => this.#choose(run.name, event.target) });
    const cells = [
      el("td", {}, box),
      el("th", { scope: "row", class: "left" }, el("a", { href: runPage(run.name) }, el("bdi", {}, visible(run.name)))),
      el("td", { class: "left" }, badge(run.state, run.problem)),
      el("td", {}, grouped(run.step)),
      ...["reward", "loss", "kl", "grad_norm", "snr"].map((key) => el("td", { title: run.values[key] ?? "not measured lately" }, number(run.values[key]))),
      el("td", { class: run.spikes ? "loud" : null }, grouped(run.spikes)),
      el("td", { class: run.incidents ? "loud" : null }, grouped(run.incidents)),
      el("td", { title: run.started ? `runs for ${duration(run.updated - run.started)}` : "" }, ago(run.updated)),
    ];
    if (row) fill(row.element, cells);
    else row = { element: el("tr", {}, cells) };
    this.rows.set(run.name, { ...row, run, text });
  }

  #sortBy(id) {
    this.sort = { id, down: this.sort.id === id ? !this.sort.down : !["name", "state"].includes(id) };
    for (const heading of this.head.querySelectorAll("th[data-id]")) {
      if (heading.dataset.id === id) heading.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    }
    this.#order();
  }

  #order() {
    const of = COLUMNS.find((column) => column.id === this.sort.id)?.of ?? ((run) => run.started);
    const missing = (v) => v === null || v === undefined || typeof v !== "number";
    const compare = (a, b) => {
      const [x, y] = [of(a.run), of(b.run)];
      if (typeof x === "string" && typeof y === "string" && ["name", "state"].includes(this.sort.id)) return x.localeCompare(y, "en", { numeric: true });
      return missing(x) || missing(y) ? (missing(x) - missing(y)) * (this.sort.down ? -1 : 1) : x - y;
    };
    const ordered = [...this.rows.values()].sort((a, b) => (this.sort.down ? -1 : 1) * compare(a, b)).map((row) => row.element);
    if (ordered.some((element, i) => this.body.children[i] !== element) || this.body.children.length !== ordered.length) fill(this.body, ordered);
  }

  #filter() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const { element, run } of this.rows.values()) {
      const text = `${run.name} ${run.state}`.toLowerCase();
      element.hidden = !words.every((word) => text.includes(word));
      shown += element.hidden ? 0 : 1;
    }
    if (this.runs.length) this.say(words.length ? `${shown} of ${this.runs.length} runs` : `${this.runs.length} ${this.runs.length === 1 ? "run" : "runs"}`);
  }

  #choose(name, box) {
    this.chosen = this.chosen.filter((other) => other !== name);
    if (box.checked) this.chosen.push(name);
    if (this.chosen.length > 2) {
      const first = this.chosen.shift();
      this.rows.get(first)?.element.querySelector("input").click();
    }
    const ready = this.chosen.length === 2;
    this.compare.setAttribute("aria-disabled", String(!ready));
    if (ready) {
      this.compare.href = `/compare?${new URLSearchParams({ a: this.chosen[0], b: this.chosen[1] })}`;
      announce(`Compare ${this.chosen.map(visible).join(" with ")}`);
    } else this.compare.removeAttribute("href");
  }
}

export function badge(state, problem) {
  return el("span", { class: `badge ${state}`, title: problem ?? MEANS[state] ?? "" }, state);
}

/** An empty store says what to do next. */
function nothing(folder) {
  return el("div", { class: "empty" },
    el("h2", {}, "No runs here yet"),
    el("p", {}, "This page shows the runs in ", el("code", {}, visible(folder)), ". A run appears with its first step."),
    el("p", {}, "Watch a trainer, with one line:"),
    el("pre", {}, 'from seismograd import watch\n\ntrainer = GRPOTrainer(...)\nwatch(trainer, runs="runs")\ntrainer.train()'),
    el("p", {}, "Or see it at work in a minute, without a model or data of your own:"),
    el("pre", {}, "seismograd demo --tiny"),
    el("p", { class: "soft" }, "Your runs lie elsewhere? seismograd serve FOLDER"));
}
