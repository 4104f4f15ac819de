// The server's JSON (docs/api.md).

const API = "/api/v1";

/** @throws {Error} with the server's own sentence. */
async function get(path, parameters = []) {
  const query = new URLSearchParams(parameters).toString();
  const answer = await fetch(API + path + (query ? `?${query}` : ""), { headers: { Accept: "application/json" } });
  let data = {};
  try {
    data = await answer.json();
  } catch {
    // told by the status below
  }
  if (!answer.ok) throw new Error(data.error ?? `The server answered ${answer.status}.`);
  return data;
}

const of = (run) => `/runs/${encodeURIComponent(run)}`;

export const runs = () => get("/runs");
export const run = (name) => get(of(name));
export const events = (name) => get(`${of(name)}/events`);

/** @param select list of [metric, ...label values or null]; a lone name is all its series. */
export function series(name, select, range) {
  return get(`${of(name)}/series`, [...selecting(select), ...ranged(range)]);
}

export const baseline = (name, range) => get(`${of(name)}/baseline`, ranged(range));

export function liveUrl(name, select, cursor) {
  return `${API}${of(name)}/live?${new URLSearchParams([...selecting(select), ["cursor", cursor]])}`;
}

let catalogue;

/** Metrics by name; asked for once. */
export function metrics() {
  catalogue ??= get("/metrics").then((data) => Object.fromEntries(data.metrics.map((metric) => [metric.name, metric])));
  return catalogue;
}

export const runPage = (name) => of(name);
export const incidentPage = (name, incident) => `${of(name)}/incidents/${encodeURIComponent(incident)}.html`;

/** A series' identity as one text. */
export const keyOf = (metric, labels) => JSON.stringify([metric, ...Object.values(labels)]);

const selecting = (select) => select.map((parts) => ["select", JSON.stringify(parts)]);

function ranged({ from = null, to = null, points = 600 } = {}) {
  const parameters = [["points", points]];
  if (from !== null) parameters.push(["from", from]);
  if (to !== null) parameters.push(["to", to]);
  return parameters;
}
