// A chart as a picture or a table, made here: nothing is sent anywhere.

import { colour } from "./dom.js";

/** The chart with its title, legend and background, as PNG. */
export function png(chart) {
  const source = chart.u.ctx.canvas;
  const one = devicePixelRatio;
  const head = 44 * one;
  const canvas = document.createElement("canvas");
  canvas.width = source.width;
  canvas.height = source.height + head;
  const ctx = canvas.getContext("2d");
  ctx.fillStyle = colour("paper");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.fillStyle = colour("ink");
  ctx.font = `600 ${15 * one}px system-ui, sans-serif`;
  ctx.fillText(chart.spec.title, 10 * one, 19 * one);
  ctx.font = `${12 * one}px system-ui, sans-serif`;
  let x = 10 * one;
  for (const [i, line] of chart.lines.entries()) {
    ctx.fillStyle = chart.u.series[i + 1].stroke();
    ctx.fillRect(x, 30 * one, 12 * one, 3 * one);
    ctx.fillStyle = colour("soft");
    ctx.fillText(line.label, x + 16 * one, 36 * one);
    x += ctx.measureText(line.label).width + 30 * one;
  }
  ctx.drawImage(source, 0, head);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

/** What the chart shows, a row a bucket: its smallest and largest value where it holds several. */
export function csv(chart) {
  const wide = chart.width > 1;
  const head = [chart.spec.xLabel ?? "step"];
  for (const line of chart.lines) head.push(...(wide ? [`${line.label} min`, `${line.label} max`] : [line.label]));
  const rows = chart.x.map((x, i) => {
    const cells = [x];
    for (const line of chart.lines) {
      const shown = line.shown ?? line;
      cells.push(...(wide ? [shown.min[i], shown.max[i]] : [shown.max[i]]));
    }
    return cells.map((cell) => cell ?? "").join(",");
  });
  return new Blob([`${head.map(quoted).join(",")}\n`, rows.join("\n"), "\n"], { type: "text/csv;charset=utf-8" });
}

/** A table program would run a text that begins like a formula. */
function quoted(text) {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return `"${safe.replaceAll('"', '""')}"`;
}

/** Offers a blob, or the promise of one, under a file name. */
export async function download(name, blob) {
  const url = URL.createObjectURL(await blob);
  const link = document.createElement("a");
  link.href = url;
  link.download = `seismograd-${name}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
