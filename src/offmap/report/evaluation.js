// The page at work. `state` is what the reader chose; `draw` shows a scorer, `move` a threshold, `clipTo` a frame.

const data = JSON.parse(byId("data").textContent);
const state = { scorer: data.start, step: 0, clip: 0 };
const study = () => data.scorers[state.scorer];
const steps = () => study().thresholds.length - 1;
const UNIT = [0, 0.25, 0.5, 0.75, 1];
const percents = (value) => String(100 * value);
let marks = { rows: [], roc: [], risk: null };

function drawScores() {
  const { sets, thresholds, axis, start, own } = study();
  const panel = byId("plot-scores"), row = 68, side = 12, foot = 38;
  const height = sets.length * row + foot;
  const { svg, width } = canvas(panel, height, `Histograms of the scores of ${sets.map((s) => s.name).join(", ")}.`);
  const X = (share) => side + share * (width - 2 * side);
  const right = shape(shape(shape(svg, "defs"), "clipPath", { id: "flagged-side" }), "rect", { y: 0, height, width });
  const paths = shape(svg, "g");
  marks.line = shape(svg, "line", { y1: 4, y2: height - foot, class: "threshold" });
  marks.rows = sets.map((set, place) => {
    const base = place * row + row - 4, most = Math.max(...set.bins, 1e-9), room = row - 28;
    let path = `M${X(0)} ${base}`;
    set.bins.forEach((share, i) => {
      const y = (base - (share / most) * room).toFixed(1);
      path += `L${X(i / set.bins.length).toFixed(1)} ${y}L${X((i + 1) / set.bins.length).toFixed(1)} ${y}`;
    });
    path += `L${X(1)} ${base}Z`;
    shape(paths, "path", { d: path, style: `fill: ${colour(place)}`, opacity: 0.28 });
    shape(paths, "path", { d: path, style: `fill: ${colour(place)}`, "clip-path": "url(#flagged-side)" });
    shape(svg, "path", { d: `M${X(0)} ${base}H${X(1)}`, class: "base" });
    const words = place ? set.name : `${set.name} (in-distribution)`;
    fit(shape(svg, "text", { x: side, y: place * row + 17, class: "name" }, words), width - 2 * side - 115);
    return shape(svg, "text", { x: width - side, y: place * row + 17, class: "name end" });
  });
  const ticks = marksAlong(thresholds, axis), word = apart(ticks.map(([, value]) => value));
  for (const [share, value] of ticks) {
    const edge = share < 0.06 ? "" : share > 0.94 ? " end" : " middle";
    shape(svg, "line", { x1: X(share), x2: X(share), y1: height - foot - 4, y2: height - foot + 2, class: "base" });
    shape(svg, "text", { x: X(share), y: height - foot + 16, class: `tick${edge}` }, word(value));
  }
  shape(svg, "text", { x: width - side, y: height - 3, class: "title end" }, "score, more OOD to the right");
  marks.right = right;
  marks.X = X;
  byId("back").textContent = "Reset";
  byId("back").dataset.step = start;
  byId("threshold").max = steps();
  const drag = (event) => {
    const spot = svg.getBoundingClientRect();
    const share = (((event.clientX - spot.left) / spot.width) * width - side) / (width - 2 * side);
    move(Math.round(steps() * Math.min(1, Math.max(0, share))));
  };
  svg.addEventListener("pointerdown", (event) => { svg.setPointerCapture(event.pointerId); drag(event); });
  svg.addEventListener("pointermove", (event) => { if (event.buttons) drag(event); });
  marks.cells = fill(byId("flagged"), ["data set", "flagged", "rows"], sets.map((s) => [s.name, "", ""]));
  const quantiles = ["5 %", "25 %", "median", "75 %", "95 %"];
  const rows = sets.map((s) => [s.name, String(s.rows), ...s.quantiles.map((v) => number(v))]);
  fill(byId("table-scores"), ["data set", "rows", ...quantiles], rows, "Quantiles of the scores");
}

function move(step) {
  const { sets, thresholds, start, own, roc, risk } = study();
  state.step = step;
  const threshold = number(thresholds[step], 4), x = marks.X(step / steps());
  const kind = step !== start ? "" : own ? " (the guard's)" : " (95\u00a0% of in-distribution rows pass)";
  marks.right.setAttribute("x", x);
  marks.line.setAttribute("x1", x);
  marks.line.setAttribute("x2", x);
  const shares = sets.map((set) => set.over[step] / set.rows);
  sets.forEach((set, place) => {
    marks.rows[place].textContent = `${percent(shares[place])} flagged`;
    marks.cells[place][1].textContent = percent(shares[place]);
    marks.cells[place][2].textContent = `${set.over[step]} of ${set.rows}`;
  });
  const caught = sets.slice(1).map((set, i) => `${percent(shares[i + 1])} of ${set.name}`).join(", ");
  const alarms = `false alarms on ${percent(shares[0])} of in-distribution rows`;
  byId("rates").textContent = `Threshold ${threshold}${kind}: ${alarms}; caught ${caught}.`;
  const slider = byId("threshold");
  slider.value = step;
  slider.setAttribute("aria-valuetext", `${threshold}${kind}`);
  if (marks.roc.length) roc.forEach((_, i) => at(marks.roc[i].ring, marks.roc[i].X(shares[0]), marks.roc[i].Y(shares[i + 1])));
  if (marks.risk) {
    const value = risk.at[step];
    marks.risk.ring.toggleAttribute("hidden", value === null);
    marks.risk.ring.style.display = value === null ? "none" : "";
    if (value !== null) at(marks.risk.ring, marks.risk.X(risk.answered[step]), marks.risk.Y(Math.min(value, risk.top)));
    marks.risk.words.textContent = value === null
      ? "At this threshold the model abstains on every row."
      : `At this threshold ${percent(risk.answered[step])} of the rows are answered, with ${risk.label} ${riskWords(risk)(value)}.`;
  }
}

function drawRoc() {
  const { roc, sets } = study(), panel = byId("plot-roc");
  const words = roc.map((r) => `${r.name} ${number(100 * r.auroc, 4)}`).join(", ");
  const frame = axes(panel, {
    height: 300, alt: `ROC curves; area under them in percent: ${words}.`,
    x: { low: 0, high: 1, ticks: UNIT, label: percents, title: "in-distribution rows flagged, %" },
    y: { low: 0, high: 1, ticks: UNIT, label: percents, title: "OOD rows caught, %" },
  });
  line(frame.svg, [0, 1], [0, 1], frame, "var(--line)", "", 1);
  roc.forEach((curve, i) => line(frame.svg, curve.x, curve.y, frame, colour(i + 1), dashes(i + 1)));
  marks.roc = roc.map((_, i) => ({ ...frame, ring: ring(frame.svg, colour(i + 1)) }));
  legend(panel, roc.map((r, i) => [`${r.name}, AUROC ${percent(r.auroc)}`, colour(i + 1), dashes(i + 1)]));
  const near = (xs, ys, value) => xs[ys.findIndex((y) => y >= value)];
  const levels = [0.5, 0.8, 0.9, 0.95, 0.99];
  const rows = roc.map((r) => [r.name, percent(r.auroc), ...levels.map((v) => percent(near(r.x, r.y, v) ?? 1))]);
  fill(byId("table-roc"), ["OOD set", "AUROC", ...levels.map(percents).map((v) => `${v} % caught`)], rows,
    `False alarms among ${sets[0].rows} in-distribution rows, by the share of OOD rows caught`);
}

const riskWords = (risk) => (risk.share ? percent : number);

function drawRisk() {
  const { risk } = study(), panel = byId("plot-risk");
  marks.risk = null;
  if (!missing("risk", risk)) return;
  const last = risk.y[risk.y.length - 1], words = riskWords(risk);
  const frame = axes(panel, {
    height: 300, alt: `${risk.label} of the rows that are answered, over their share; ${words(last)} when all are.`,
    x: { low: 0, high: 1, ticks: UNIT, label: percents, title: "rows answered, %" },
    y: {
      low: 0, high: 1.04 * risk.top, count: 4, title: risk.share ? `${risk.label}, %` : risk.label,
      label: risk.share ? (v) => number(100 * v) : null,
    },
  });
  line(frame.svg, risk.x, risk.y, frame, "var(--id)");
  marks.risk = { ...frame, ring: ring(frame.svg, "var(--id)"), words: node(panel, "p", { class: "note" }) };
  const levels = [1, 0.95, 0.9, 0.8, 0.7, 0.5, 0.25];
  const near = (share) => risk.y[risk.x.findIndex((x) => x >= share - 1e-9)];
  fill(byId("table-risk"), ["rows answered", risk.label], levels.map((v) => [percent(v), words(near(v))]));
}

function drawReliability() {
  const { reliability, kind } = study(), panel = byId("plot-reliability");
  if (!missing("reliability", reliability.own)) return;
  const names = kind === "regression" ? ["level of the interval", "targets inside"] : ["confidence", "correct"];
  const pairs = reliability.own.map((r) => `${number(100 * r[0])}: ${number(100 * r[1])}`).join("; ");
  const frame = axes(panel, {
    height: 300, alt: `Reliability: ${names[1]} over ${names[0]}, in percent, ${pairs}.`,
    x: { low: 0, high: 1, ticks: UNIT, label: percents, title: `${names[0]}, %` },
    y: { low: 0, high: 1, ticks: UNIT, label: percents, title: `${names[1]}, %` },
  });
  line(frame.svg, [0, 1], [0, 1], frame, "var(--soft)", "1 4", 1.5);
  const looks = { wide: ["var(--series0)", "6 3"], own: ["var(--id)", ""] };
  const classes = kind !== "regression";
  for (const [key, [look, dash]] of Object.entries(looks)) {
    const curve = reliability[key], most = Math.max(...curve.map((r) => r[2]));
    if (!classes) line(frame.svg, curve.map((r) => r[0]), curve.map((r) => r[1]), frame, look, dash);
    for (const [x, y, rows] of curve) {
      const spot = { cx: frame.X(x), cy: frame.Y(y), r: classes ? 3 + 5 * Math.sqrt(rows / most) : 2.5 };
      // a stem from the diagonal: how far off; no line between bins, of which some hold a row or two
      if (classes && key === "own") line(frame.svg, [x, x], [x, y], frame, look, "", 1.5);
      if (key === "own") shape(frame.svg, "circle", { ...spot, style: `fill: ${look}` });
      else if (classes) shape(frame.svg, "circle", { ...spot, style: `fill: none; stroke: ${look}; stroke-width: 1.5` });
    }
  }
  const size = classes ? "; larger dots hold more rows" : "", dot = classes ? "dot" : "";
  legend(panel, [
    [`predictions${size}`, "var(--id)", dot],
    ["unclipped draws", classes ? "none" : "var(--series0)", dot || "6 3"], ["as stated", "var(--soft)", "1 4"],
  ]);
  const rows = reliability.own.map((r) => [percent(r[0]), percent(r[1]), String(r[2])]);
  fill(byId("table-reliability"), [names[0], names[1], "rows"], rows);
}

function drawHistory() {
  const { history } = study(), panel = byId("plot-history");
  if (!missing("history", history)) return;
  panel.replaceChildren();
  const { step, max_risk: bounds, kept, members } = history, last = Math.max(1, step[step.length - 1]);
  const pair = node(panel, "div", { class: "pair" });
  const titles = { risk: "validation risk", entropy: "entropy, (1/d) Σ log φ²" };
  // both first: one alone would be as wide as the page
  const boxes = Object.keys(titles).map((key) => node(pair, "div", { id: `history-${key}` }));
  for (const [place, [key, title]] of Object.entries(titles).entries()) {
    const box = boxes[place], ends = history.ends[key] || spread(history[key].flat());
    const final = history[key][0][step.length - 1];
    const frame = axes(box, {
      height: 240, left: 58,
      alt: `${title} over ${step.length} checks, ${number(final)} at the last, kept at step ${kept.join(", ")}.`,
      x: { low: 0, high: last, count: 3, title: "step" },
      y: { low: ends[0], high: ends[1], count: 4, title },
    });
    history[key].forEach((values, m) => {
      line(frame.inside, step, values, frame, colour(m), dashes(m), 1.8);
      if (step.length < 3) dots(frame, step, values, colour(m));
      line(frame.inside, [kept[m], kept[m]], ends, frame, colour(m), "1 3", 1.2);
      const bound = [bounds[m], bounds[m]];
      if (key === "risk" && bounds.length) line(frame.inside, [0, last], bound, frame, colour(m), "6 4", 1.2);
    });
  }
  const some = history.risk.length;
  if (members > some) node(panel, "p", { class: "note" }, `The first ${some} of ${members} members.`);
  const few = step.map((s, i) => i).filter((i) => i % Math.ceil(step.length / 12) === 0 || i === step.length - 1);
  const columns = [(i) => history.risk[0][i], () => bounds[0], (i) => history.entropy[0][i]];
  const rows = few.map((i) => [String(step[i]), ...columns.map((value) => number(value(i), 4))]);
  fill(byId("table-history"), ["step", "risk", "τ", "entropy"], rows, "The first member");
}

// Shows a section's figure, or the word on why there is none; tells which.
function missing(part, found) {
  const there = Boolean(found) && typeof found !== "string";
  const words = byId(`missing-${part}`), section = words.closest("section");
  words.hidden = there;
  words.textContent = there ? "" : typeof found === "string" ? found : data.missing[part];
  section.querySelectorAll(".plot, .slide, output, details").forEach((item) => { item.hidden = !there; });
  return there;
}
