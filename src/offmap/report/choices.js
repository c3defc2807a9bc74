// What the reader can choose: scorer, threshold, clip, colours.

function draw() {
  document.querySelectorAll("[data-scorer]").forEach((part) => { part.hidden = Number(part.dataset.scorer) !== state.scorer; });
  const parts = {
    scores: drawScores, roc: drawRoc, risk: drawRisk, reliability: drawReliability, clips: drawClips, history: drawHistory,
  };
  for (const [part, make] of Object.entries(parts)) if (byId(`plot-${part}`)) make();
  move(state.step);
}

function choose(scorer) {
  state.scorer = scorer;
  state.step = study().start;
  state.clip = 0;
  draw();
}

byId("threshold").addEventListener("input", (event) => move(Number(event.target.value)));
byId("back").addEventListener("click", (event) => move(Number(event.target.dataset.step)));
if (byId("clip")) byId("clip").addEventListener("input", (event) => clipTo(Number(event.target.value)));
if (byId("scorer")) byId("scorer").addEventListener("change", (event) => choose(Number(event.target.value)));

const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
function showTheme() {
  byId("theme").setAttribute("aria-pressed", String(isDark()));
}
byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
});
dark.addEventListener("change", showTheme);
showTheme();

let width = document.documentElement.clientWidth, waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (width === document.documentElement.clientWidth) return;
    width = document.documentElement.clientWidth;
    draw();
  }, 80);
});
choose(data.start);
document.documentElement.dataset.ready = "yes";
