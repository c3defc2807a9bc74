// The clip slider: the same fit with its weights held ever closer to the model's.

const mapColours = data.map.map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
let clipFrame = null;

// One byte per point, row 0 at the bottom, as the address of a small image.
function encodeImage(bytes, side) {
  const sheet = document.createElement("canvas");
  sheet.width = sheet.height = side;
  const pen = sheet.getContext("2d"), pixels = pen.createImageData(side, side), levels = atob(bytes);
  for (let i = 0; i < side * side; i += 1) {
    const share = (levels.charCodeAt(i) / 255) * (mapColours.length - 1);
    const low = Math.min(Math.floor(share), mapColours.length - 2);
    const [from, to] = [mapColours[low], mapColours[low + 1]];
    const place = 4 * ((side - 1 - Math.floor(i / side)) * side + (i % side));
    for (let c = 0; c < 3; c += 1) pixels.data[place + c] = from[c] + (share - low) * (to[c] - from[c]);
    pixels.data[place + 3] = 255;
  }
  pen.putImageData(pixels, 0, 0);
  return sheet.toDataURL();
}

function drawClips() {
  const { clips } = study();
  if (!byId("plot-clips") || !missing("clips", clips)) return;
  const panel = byId("plot-clips"), flat = clips.kind === "map", [low, high] = [clips.low, clips.high];
  panel.closest("section").classList.toggle("narrow", flat);
  const width = Math.max(220, panel.clientWidth);
  const tall = (width - 58) * Math.min(1, (high[1] - low[1]) / (high[0] - low[0])) + 62;
  const height = flat ? Math.min(640, Math.max(280, tall)) : 320;
  clipFrame = axes(panel, {
    height, alt: "",
    x: { low: low[0], high: high[0], title: flat ? "first input" : "input" },
    y: flat
      ? { low: low[1], high: high[1], title: "second input" }
      : { low: clips.ends[0], high: clips.ends[1], title: clips.kind === "band" ? "target" : clips.unit },
  });
  const { X, Y, box, inside } = clipFrame;
  if (flat) {
    const size = { width: box.right - box.left, height: box.bottom - box.top };
    clipFrame.image = shape(inside, "image", { x: box.left, y: box.top, ...size, preserveAspectRatio: "none" });
  } else {
    clipFrame.area = shape(inside, "path", { style: "fill: var(--band)" });
    clipFrame.middle = line(inside, [], [], clipFrame, "var(--series4)");
  }
  const test = clips.points.test, edge = "stroke: #10203a; stroke-width: .7";
  test.x.forEach((x, i) => {
    const second = flat && test.y && test.y[i] > 0 && clips.unit === "predictive entropy";
    const spot = { cx: X(x[0]), cy: flat ? Y(x[1]) : clips.kind === "band" ? Y(test.y[i]) : box.bottom - 5 };
    const square = { x: spot.cx - 2.7, y: spot.cy - 2.7, width: 5.4, height: 5.4 };
    if (second) shape(inside, "rect", { ...square, style: `fill: #ffc24d; ${edge}` });
    else if (flat) shape(inside, "circle", { ...spot, r: 2.9, style: `fill: #fff; ${edge}` });
    else shape(inside, "circle", { ...spot, r: 2.4, style: "fill: var(--id)" });
  });
  drawOodRows(clips, flat);
  clipLegend(panel, clips, flat);
  const slider = byId("clip");
  slider.max = clips.clips.length - 1;
  const sets = Object.keys(clips.points);
  const rows = clips.clips.map((clip, i) => [
    clip + (i === clips.own ? " (the guard's)" : ""), ...sets.map((s) => number(clips.medians[i][s])),
  ]);
  fill(byId("table-clips"), ["clip", ...sets], rows, `Median ${clips.unit}`);
  clipTo(Math.min(state.clip, clips.clips.length - 1));
}

// OOD rows along a line are short strokes above it, one height for every set.
function drawOodRows(clips, flat) {
  const { X, box, inside } = clipFrame;
  if (flat) return;
  Object.entries(clips.points).filter(([name]) => name !== "test").forEach(([, points], place) => {
    const y = box.top + 5 + 9 * place, style = `stroke: ${colour(place + 1)}`;
    points.x.forEach((x) => shape(inside, "line", { x1: X(x[0]), x2: X(x[0]), y1: y, y2: y + 6, style }));
  });
}

function clipLegend(panel, clips, flat) {
  const sets = Object.keys(clips.points).filter((name) => name !== "test");
  const marked = sets.map((name, place) => [`where ${name} lies`, colour(place + 1), ""]);
  if (clips.kind === "band") {
    const band = [["mean ± 2 standard deviations", "var(--band)", "area"], ["mean", "var(--series4)", ""]];
    legend(panel, [...band, ["test rows", "var(--id)", "dot"], ...marked]);
  } else if (clips.kind === "area") {
    legend(panel, [[clips.unit, "var(--band)", "area"], ["test rows", "var(--id)", "dot"], ...marked]);
  }
  if (!flat) return;
  const key = node(panel, "p", { class: "scale" });
  node(key, "span", {}, `${clips.unit}: ${number(clips.ends[0])}`);
  node(key, "i", { style: `background: linear-gradient(90deg, ${data.map.join(", ")})` });
  node(key, "span", {}, number(clips.ends[1]));
  const other = data.classes.length === 2 ? data.classes[1] : "other classes";
  const classes = [[`test rows of ${data.classes[0] || "class 0"}`, "#fff", "dot"], [`test rows of ${other}`, "#ffc24d", "square"]];
  legend(panel, clips.unit === "predictive entropy" ? classes : [["test rows", "#fff", "dot"]]);
}

function clipTo(place) {
  const { clips } = study();
  state.clip = place;
  const { X, Y, box } = clipFrame, frame = clips.frames[place];
  const own = place === clips.own ? " (the guard's)" : "";
  const words = Object.entries(clips.medians[place]).map(([name, value]) => `${number(value)} on ${name}`).join(", ");
  const text = `Clip ${clips.clips[place]}${own}: median ${clips.unit} ${words}.`;
  byId("clipped").textContent = text;
  byId("clip").value = place;
  byId("clip").setAttribute("aria-valuetext", clips.clips[place] === "∞" ? "no clip" : `${clips.clips[place]}${own}`);
  clipFrame.svg.setAttribute("aria-label", `Predictions over the inputs. ${text}`);
  if (clips.kind === "map") {
    clipFrame.image.setAttribute("href", encodeImage(frame, clips.side));
    return;
  }
  const values = frame.mean || frame.area, count = values.length - 1;
  const x = values.map((_, i) => X(clips.low[0] + (i / count) * (clips.high[0] - clips.low[0])).toFixed(1));
  const upper = values.map((v, i) => Y(frame.std ? v + 2 * frame.std[i] : v).toFixed(1));
  const lower = values.map((v, i) => (frame.std ? Y(v - 2 * frame.std[i]).toFixed(1) : box.bottom));
  const there = x.map((v, i) => `${v} ${upper[i]}`).join("L"), back = x.map((v, i) => `${v} ${lower[i]}`).reverse().join("L");
  clipFrame.area.setAttribute("d", `M${there}L${back}Z`);
  clipFrame.middle.setAttribute("d", `M${values.map((v, i) => `${x[i]} ${Y(v).toFixed(1)}`).join("L")}`);
}
