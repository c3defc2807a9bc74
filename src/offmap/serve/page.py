"""Pages that load nothing: the rolling share of off-map inputs, live, with the line above which is alarm; and the API."""

from __future__ import annotations

import html
import json
from typing import Any

STYLE = """<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
pre { background: #f4f4f4; padding: 1rem; overflow: auto } td { padding: 0 1rem 0 0; vertical-align: top }
</style>"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>offmap live</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
svg { width: 100%; height: 16rem; border: 1px solid #ccc; background: #fafafa }
#state { font-size: 1.4rem; font-weight: 600 } .alarm { color: #b00020 } .calm { color: #1b6e3c }
</style></head><body>
<h1>Off the map?</h1>
<p id="state" role="status" class="calm">Waiting for rows …</p>
<svg viewBox="0 0 300 100" preserveAspectRatio="none" role="img" aria-label="Rolling share of off-map inputs over time">
<line id="alert" x1="0" x2="300" stroke="#b00020" stroke-dasharray="4 3" vector-effect="non-scaling-stroke"/>
<polyline id="share" fill="none" stroke="#1f4e9c" stroke-width="2" vector-effect="non-scaling-stroke"/></svg>
<p id="told"></p>
<p><label>Token, if the server asks for one: <input id="token" type="password" autocomplete="off"></label></p>
<script>
const id = name => document.getElementById(name), percent = share => (100 * share).toFixed(1) + " %";
async function look() {
  try {
    const token = id("token").value, headers = token ? {Authorization: "Bearer " + token} : {};
    const answer = await fetch("live", {headers});
    if (answer.status === 401) throw new Error("The server asks for a token.");
    if (!answer.ok) throw new Error("The server answers " + answer.status);
    draw(await answer.json());
  } catch (error) { id("state").textContent = error.message; id("state").className = "alarm"; }
  setTimeout(look, 1000);
}
function draw(told) {
  const top = Math.max(2 * told.alert, 0.05, ...told.line.map(p => p[1])), y = share => 100 - 100 * Math.min(share / top, 1);
  const first = told.line.length ? told.line[0][0] : 0, last = told.line.length ? told.line[told.line.length - 1][0] : 1;
  const x = t => 300 * (t - first) / Math.max(last - first, 1);
  id("share").setAttribute("points", told.line.map(p => x(p[0]) + "," + y(p[1])).join(" "));
  id("alert").setAttribute("y1", y(told.alert)); id("alert").setAttribute("y2", y(told.alert));
  id("state").className = told.alarm ? "alarm" : "calm";
  id("state").textContent = !told.window ? "Waiting for rows …" : (told.alarm ? "ALERT: " : "") + percent(told.share)
    + " of the latest " + told.window + " inputs are off the map";
  id("told").textContent = told.flagged + " of " + told.rows + " rows since the start; alert above " + percent(told.alert);
}
look();
</script></body></html>
"""
"""Asks `/live` once a second."""


def documentation(schema: dict[str, Any]) -> str:
    """The OpenAPI schema as a page to read; it loads nothing."""
    told = [f"<h1>{html.escape(schema['info']['title'])} {html.escape(schema['info']['version'])}</h1>"]
    told.append("<p>The same for machines: <a href='openapi.json'>openapi.json</a>. Live: <a href='.'>page</a>.</p>")
    for path, methods in schema["paths"].items():
        for method, each in methods.items():
            told.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(each.get('description', ''))}</p>")
            for kind, content in each.get("requestBody", {}).get("content", {}).items():
                shown = html.escape(json.dumps(content["schema"], indent=1))
                told.append(f"<p>Body, {html.escape(kind)}:</p><pre>{shown}</pre>")
            rows = [f"<tr><td>{code}</td><td>{html.escape(a['description'])}</td></tr>" for code, a in each["responses"].items()]
            told.append(f"<table>{''.join(rows)}</table>")
    head = f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>offmap API</title>{STYLE}</head>"
    return f"{head}<body>{''.join(told)}</body></html>"
