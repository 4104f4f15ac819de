// Numbers and times for people.

/** To four digits: 0.1234, 38.2, 1.2e-7. What is not finite is named, what is missing a dash. */
export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value === "nan" ? "NaN" : value;
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(digits - 2).replace(/\.?0+e/, "e").replace("e+", "e");
  const text = value.toPrecision(digits);
  return text.includes("e") ? String(Math.round(value)) : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** A share of 1 in percent. */
export function percent(value) {
  return typeof value === "number" && Number.isFinite(value) ? `${number(100 * value, 3)}%` : number(value);
}

export function grouped(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US").replaceAll(",", "\u202f");
}

/** 45 s, 12 min, 3 h 20 min. */
export function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function ago(time, now = Date.now() / 1000) {
  return time ? `${duration(now - time)} ago` : "–";
}

export function clock(time) {
  return new Date(1000 * time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}
