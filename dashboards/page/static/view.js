// Which steps are looked at: one range for all charts of a page, kept in the address so that a link shows the same.

export class View extends EventTarget {
  constructor() {
    super();
    const query = new URLSearchParams(location.search);
    this.from = whole(query.get("from"));
    this.to = whole(query.get("to"));
    this.extent = [0, 1];
  }

  /** Whether the whole run is shown, and its end is followed. */
  get whole() {
    return this.from === null && this.to === null;
  }

  /** [first, last] on the axis. */
  get range() {
    const [first, last] = this.extent;
    const low = this.from ?? first;
    const high = this.to ?? last;
    return high > low ? [low, high] : [low - 0.5, low + 0.5];
  }

  zoom(from, to) {
    const [first, last] = this.extent;
    this.from = from === null ? null : Math.max(first, Math.round(from));
    this.to = to === null ? null : Math.min(last, Math.round(to));
    if (this.from !== null && this.to !== null && this.to <= this.from) this.to = this.from + 1;
    if (this.from !== null && this.to !== null && this.from <= first && this.to >= last) this.from = this.to = null;
    remember("from", this.from);
    remember("to", this.to);
    this.dispatchEvent(new Event("zoom"));
  }

  /** Zooms by a factor about the middle, or about a step. */
  scale(factor, about = null) {
    const [low, high] = this.range;
    const middle = about ?? (low + high) / 2;
    this.zoom(middle - (middle - low) * factor, middle + (high - middle) * factor);
  }

  /** Moves by a share of what is shown. */
  pan(share) {
    const [low, high] = this.range;
    const [first, last] = this.extent;
    const wanted = share * (high - low);
    const by = Math.min(Math.max(wanted, first - low), last - high);
    if (!this.whole) this.zoom(low + by, high + by);
  }
}

/** Keeps a setting of the view in the address. */
export function remember(key, value) {
  const url = new URL(location.href);
  if (value === null) url.searchParams.delete(key);
  else url.searchParams.set(key, value);
  history.replaceState(null, "", url);
}

export const remembered = (key) => new URLSearchParams(location.search).get(key);

function whole(text) {
  return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null;
}

/** The buttons and keys that move the view. */
export const KEYS = {
  ArrowLeft: (view) => view.pan(-0.25),
  ArrowRight: (view) => view.pan(0.25),
  "+": (view) => view.scale(0.5),
  "=": (view) => view.scale(0.5),
  "-": (view) => view.scale(2),
  0: (view) => view.zoom(null, null),
  Home: (view) => view.zoom(null, null),
};
