// Which view the address asks for.

import { el, fill } from "./dom.js";
import { showRuns } from "./runs.js";
import { showRun } from "./run.js";
import { showCompare } from "./compare.js";

const main = document.getElementById("main");

async function show() {
  const parts = location.pathname.split("/").filter(Boolean).map(decodeURIComponent);
  if (parts[0] === "runs" && parts.length === 2) await showRun(main, parts[1]);
  else if (parts[0] === "compare") await showCompare(main);
  else await showRuns(main);
}

show().catch((error) => {
  main.setAttribute("aria-busy", "false");
  fill(main, el("h1", {}, "This cannot be shown"), el("p", { class: "notice" }, error.message), el("p", {}, el("a", { href: "/" }, "All runs")));
});
