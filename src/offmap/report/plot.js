"use strict";
// Small drawing tools: axes, lines, steps, legends and tables. All words go in as text, never as markup.

const SVG = (() => {
  const box = document.createElement("div");
  box.innerHTML = "<svg></svg>";
  return box.firstChild.namespaceURI;
})();

function put(parent, element, attributes, text) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
const shape = (parent, tag, attributes, text) => put(parent, document.createElementNS(SVG, tag), attributes, text);
const node = (parent, tag, attributes, text) => put(parent, document.createElement(tag), attributes, text);
const byId = (id) => document.getElementById(id);

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e5)
    ? value.toExponential(digits - 1).replace(/\.?0*e\+?/, "e")
    : String(Number(value.toPrecision(size >= 1000 ? Math.max(5, digits) : digits)));
  return text.replace(/-/g, "−");
}
// Numbers in as many digits as tell them apart.
function apart(values) {
  const few = [3, 4, 5, 6, 8, 10].find((digits) => new Set(values.map((v) => number(v, digits))).size === values.length) || 12;
  return (value) => number(value, few);
}
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;

// Cuts words that are wider than their room.
function fit(element, room) {
  const words = element.textContent;
  for (let most = words.length - 1; most > 0 && element.getComputedTextLength() > room; most -= 1) {
    element.textContent = `${words.slice(0, most)}…`;
  }
}

// The in-distribution set is blue, OOD ones follow in colours that colour-blind readers can tell apart; dashes differ as well.
const COLOURS = ["var(--id)", "var(--ood)", "var(--series5)", "var(--series2)", "var(--series1)", "var(--series7)"];
const DASHES = ["", "", "7 3", "2 3", "9 3 2 3", "5 2 1 2 1 2"];
const colour = (place) => COLOURS[place === 0 ? 0 : 1 + ((place - 1) % (COLOURS.length - 1))];
// when the colours begin anew, the dashes are one further: 25 sets can be told apart
const dashes = (place) => DASHES[place === 0 ? 0 : 1 + ((place - 1 + Math.floor((place - 1) / 5)) % (DASHES.length - 1))];

function canvas(panel, height, alt) {
  panel.replaceChildren();
  const width = Math.max(220, panel.clientWidth);
  const svg = shape(panel, "svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": alt });
  return { svg, width, height };
}

// About `count` multiples of 1, 2 or 5 times a power of ten between two numbers.
function roundNumbers(low, high, count = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count, ten = 10 ** Math.floor(Math.log10(rough));
  const far = (m) => Math.abs(Math.log((m * ten) / rough));
  const step = ten * [1, 2, 5, 10].reduce((best, m) => (far(m) < far(best) ? m : best));
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// Marks [share of the axis, value] of values that rise evenly along an axis, be it linear or not, far enough apart to be read.
function marksAlong(values, kind) {
  const finite = values.filter((v) => v !== null), low = finite[0], high = finite[finite.length - 1];
  const decades = [];
  if (kind === "log") for (let k = Math.ceil(Math.log10(low)); k <= Math.log10(high); k += 1) decades.push(Number(`1e${k}`));
  const every = Array.from({ length: 33 }, (_, i) => Number(finite[Math.round((i * (finite.length - 1)) / 32)].toPrecision(1)));
  const few = decades.filter((_, i) => i % Math.ceil(decades.length / 6) === 0);
  const chosen = [];
  for (const value of kind === "linear" ? roundNumbers(low, high) : decades.length > 2 ? few : every) {
    if (value < low || value > high) continue;
    const after = Math.max(1, values.findIndex((v) => v === null || v >= value)), [a, b] = [values[after - 1], values[after]];
    const share = (after - 1 + (b > a ? (value - a) / (b - a) : 0)) / (values.length - 1);
    if (!chosen.length || share - chosen[chosen.length - 1][0] >= 0.11) chosen.push([share, value]);
  }
  return chosen;
}

// The range of numbers with a little room.
function spread(values) {
  const numbers = values.filter((v) => v !== null);
  const low = numbers.length ? Math.min(...numbers) : 0, high = numbers.length ? Math.max(...numbers) : 1;
  const room = 0.06 * (high - low) || 0.5;
  return [low - room, high + room];
}

// Axes from `low` to `high` with ticks at round numbers; the title of y stands above it, where it can be read.
function axes(panel, { height, x, y, alt, left = 46 }) {
  x.ticks = x.ticks || roundNumbers(x.low, x.high, x.count);
  y.ticks = y.ticks || roundNumbers(y.low, y.high, y.count);
  const { svg, width } = canvas(panel, height, alt);
  const box = { left, right: width - 12, top: 26, bottom: height - 36 };
  const X = (v) => box.left + ((v - x.low) / (x.high - x.low)) * (box.right - box.left);
  const Y = (v) => box.bottom - ((v - y.low) / (y.high - y.low)) * (box.bottom - box.top);
  const grid = shape(svg, "g", { class: "grid" });
  for (const value of x.ticks) {
    shape(grid, "line", { x1: X(value), x2: X(value), y1: box.top, y2: box.bottom });
    shape(svg, "text", { x: X(value), y: box.bottom + 15, class: "tick middle" }, (x.label || apart(x.ticks))(value));
  }
  for (const value of y.ticks) {
    shape(grid, "line", { x1: box.left, x2: box.right, y1: Y(value), y2: Y(value) });
    shape(svg, "text", { x: box.left - 6, y: Y(value) + 4, class: "tick end" }, (y.label || apart(y.ticks))(value));
  }
  shape(svg, "text", { x: box.right, y: height - 4, class: "title end" }, x.title);
  shape(svg, "text", { x: 2, y: 13, class: "title" }, y.title);
  const id = `${panel.id}-box`;
  const clip = shape(shape(svg, "defs"), "clipPath", { id });
  shape(clip, "rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top });
  const inside = shape(svg, "g", { "clip-path": `url(#${id})` });
  return { svg, inside, X, Y, box };
}

function line(parent, xs, ys, { X, Y }, look = "", dash = "", wide = 2) {
  let path = "";
  let open = false;
  xs.forEach((x, i) => {
    if (ys[i] === null) { open = false; return; }
    path += `${open ? "L" : "M"}${X(x).toFixed(1)} ${Y(ys[i]).toFixed(1)}`;
    open = true;
  });
  return shape(parent, "path", {
    d: path, fill: "none", style: `stroke: ${look}`, "stroke-width": wide, "stroke-dasharray": dash || null,
    "stroke-linejoin": "round",
  });
}

function dots({ svg, X, Y }, xs, ys, look) {
  xs.forEach((x, i) => { if (ys[i] !== null) shape(svg, "circle", { cx: X(x), cy: Y(ys[i]), r: 3.5, style: `fill: ${look}` }); });
}
function ring(parent, look) {
  return shape(parent, "circle", { r: 5.5, style: `fill: var(--paper); stroke: ${look}`, "stroke-width": 2.5 });
}
function at(mark, x, y) {
  mark.setAttribute("cx", x);
  mark.setAttribute("cy", y);
}

// [words, colour, dashes | "dot" | "area" | "square"]
function legend(panel, entries) {
  const list = node(panel, "ul", { class: "key" });
  for (const [words, look, kind] of entries) {
    const item = node(list, "li");
    const svg = shape(item, "svg", { width: 26, height: 12, "aria-hidden": "true" });
    const edge = `fill: ${look}; stroke: var(--ink); stroke-width: .6`;
    if (kind === "dot") shape(svg, "circle", { cx: 13, cy: 6, r: 4, style: edge });
    else if (kind === "square") shape(svg, "rect", { x: 9, y: 2, width: 8, height: 8, style: edge });
    else if (kind === "area") shape(svg, "rect", { width: 26, height: 12, rx: 2, style: `fill: ${look}` });
    else line(svg, [0, 26], [6, 6], { X: (v) => v, Y: (v) => v }, look, kind, 2.5);
    item.append(words);
  }
}

// A table with a head; the first cell of a row is its heading. Returns its body's rows.
function fill(table, head, rows, caption) {
  table.replaceChildren();
  if (caption) node(table, "caption", {}, caption);
  const top = node(node(table, "thead"), "tr");
  head.forEach((word) => node(top, "th", { scope: "col" }, word));
  const body = node(table, "tbody");
  return rows.map((row) => {
    const entry = node(body, "tr");
    return row.map((cell, i) => (i ? node(entry, "td", {}, cell) : node(entry, "th", { scope: "row" }, cell)));
  });
}
