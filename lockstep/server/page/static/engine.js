import { element, percent } from "/page/api.js";

const SAMPLES = 120; // two minutes at one a second
const history = [];
const SVG = "http://www.w3.org/2000/svg";

export function show(stats) {
  history.push({
    rate: stats.tokens_per_second,
    running: stats.running,
    waiting: stats.waiting,
    used: stats.engine.pages_used,
    cached: stats.engine.pages_cached,
    total: stats.engine.pages_total,
  });
  if (history.length > SAMPLES) history.shift();
  if (document.getElementById("engine").hidden) return;
  tiles(stats);
  chart("chart-rate", [["rate", "a"]]);
  chart("chart-batch", [["running", "a"], ["waiting", "b"]]);
  chart("chart-pages", [["used", "a"], ["cached", "b"]], history.at(-1).total);
  facts(stats.info);
}

function tiles(stats) {
  const { engine } = stats;
  const entries = [
    ["running", stats.running],
    ["waiting", stats.waiting],
    ["tokens a second", stats.tokens_per_second.toFixed(0)],
    ["prompt tokens from cache", percent(stats.cache_hit_rate)],
    ["pages in use", `${engine.pages_used} of ${engine.pages_total}`],
    ["pages cached", engine.pages_cached],
    ...(engine.pages_tail ? [["of these, branches' own", engine.pages_tail]] : []),
    ["steps", engine.steps.toLocaleString("en")],
    ["tokens generated", engine.generated_tokens.toLocaleString("en")],
    ["preemptions", engine.preemptions],
    ["finished, cancelled, failed", `${engine.finished}, ${engine.cancelled}, ${engine.failed}`],
    ["restarts", stats.restarts],
  ];
  document.getElementById("tiles").replaceChildren(
    ...entries.map(([name, value]) => element("div", { className: "tile" }, element("strong", {}, String(value)), element("span", {}, name))),
  );
}

function chart(id, lines, most = 0) {
  const svg = document.getElementById(id);
  const [width, height, left] = [320, 110, 44];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const top = Math.max(1, most, ...lines.flatMap(([name]) => history.map((entry) => entry[name])));
  const x = (index) => left + ((index + SAMPLES - history.length) / (SAMPLES - 1)) * (width - left - 4);
  const y = (value) => 8 + (1 - value / top) * (height - 24);
  const parts = [];
  for (const mark of [0, top / 2, top]) {
    parts.push(shape("line", { x1: left, x2: width - 4, y1: y(mark), y2: y(mark), class: "grid" }));
    const label = shape("text", { x: left - 6, y: y(mark) + 3, class: "axis" });
    label.textContent = mark >= 10000 ? `${Math.round(mark / 1000)}k` : String(Math.round(mark * 10) / 10);
    parts.push(label);
  }
  for (const [name, style] of lines) {
    const points = history.map((entry, index) => `${x(index).toFixed(1)},${y(entry[name]).toFixed(1)}`);
    parts.push(shape("polyline", { points: points.join(" "), class: `line ${style}` }));
  }
  svg.replaceChildren(...parts);
}

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function facts(info) {
  const rows = Object.entries(info).map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name.replaceAll("_", " ")), element("td", {}, format(name, value))));
  document.getElementById("facts").replaceChildren(...rows);
}

function format(name, value) {
  if (name.endsWith("bytes")) return `${(value / 1e9).toFixed(2)} GB`;
  if (name.endsWith("seconds")) return `${value.toFixed(1)} s`;
  return typeof value === "number" ? value.toLocaleString("en") : String(value);
}
