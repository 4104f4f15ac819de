// The live stream of a run: server-sent events, taken up where they broke off.

import { liveUrl } from "./api.js";

const AGAIN = 1000;
const KINDS = ["rows", "events", "state", "reset", "gone"];

export class Live {
  /**
   * @param handlers by event: rows, events, state, reset, gone; and `connection` with whether there is one.
   */
  constructor(name, select, cursor, handlers) {
    Object.assign(this, { name, select, cursor, handlers });
    // A browser keeps few connections to one server: pages that nobody looks at give theirs back, and catch up later.
    this.turned = () => (document.hidden ? this.#pause() : this.#open());
    document.addEventListener("visibilitychange", this.turned);
    this.#open();
  }

  close() {
    this.closed = true;
    document.removeEventListener("visibilitychange", this.turned);
    this.#pause();
  }

  #pause() {
    clearTimeout(this.timer);
    this.source?.close();
  }

  #open() {
    this.#pause();
    const source = new EventSource(liveUrl(this.name, this.select, this.cursor));
    this.source = source;
    source.onopen = () => this.handlers.connection?.(true);
    for (const kind of KINDS) {
      source.addEventListener(kind, (event) => {
        if (event.lastEventId) this.cursor = event.lastEventId;
        this.handlers[kind]?.(JSON.parse(event.data));
        if (kind === "gone") this.close();
      });
    }
    source.onerror = () => {
      if (this.closed || source !== this.source) return;
      this.handlers.connection?.(false);
      // The browser tries again by itself after a broken connection, but not after a refusal.
      if (source.readyState === EventSource.CLOSED) {
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.closed || this.#open(), AGAIN);
      }
    };
  }
}
