"use strict";
// Draws state.json, once a second. All texts go in as text, never as HTML.
const COLORS = ["#2a7de1", "#e07b00", "#12a150", "#c2418f", "#8a63d2", "#d13b3b", "#00a3a3", "#8c6d46"];
const DASHES = ["none", "6 3", "2 3", "10 3 2 3", "12 6", "1 6"];
let state = null, picked = null;  // what was read last, and the run whose curve is put before the others
const color = n => COLORS[n % COLORS.length], dash = n => DASHES[Math.floor(n / COLORS.length) % DASHES.length];
const $ = id => document.getElementById(id);
const percent = value => value === null || value === undefined ? "–" : (100 * value).toFixed(1);

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function table(title, head, rows) {
  const cell = (kind, value, at) => {
    const { text, cls } = typeof value === "object" ? value : { text: value };
    return element(kind, { class: [at ? "number" : "", cls || ""].join(" ").trim() }, text);
  };
  const line = (kind, values) => element("tr", {}, ...values.map((v, n) => cell(kind, v, head[n].number)));
  const body = element("tbody", {}, ...rows.map(row => line("td", row)));
  const whole = element("table", {}, element("thead", {}, line("th", head.map(h => h.text))), body);
  return [element("h2", {}, title), element("div", { class: "scroll" }, whole)];
}

function sample(n) {  // a piece of a run's curve, as the table's key
  const svg = shape("svg", { class: "key", viewBox: "0 0 30 8", "aria-hidden": "true" });
  svg.append(shape("line", { x1: 0, x2: 30, y1: 4, y2: 4, stroke: color(n), "stroke-width": 3,
    "stroke-dasharray": dash(n) }));
  return svg;
}

function plot(curve, runs) {
  const width = 360, height = 190, left = 36, bottom = 22, top = 8, right = 10;
  const values = curve.lines.flatMap(line => line.points.map(point => point[1]));
  let low = Math.floor(10 * Math.min(...values)) / 10, high = Math.ceil(10 * Math.max(...values)) / 10;
  if (high <= low) high = low + 0.1;
  const reached = Math.max(...curve.lines.map(line => line.points.at(-1)[0]));
  const end = Math.min(curve.rounds, Math.max(10, 2 * reached));  // of many rounds, the first few would be a wall
  const x = round => left + (width - left - right) * (end > 1 ? (round - 1) / (end - 1) : 0.5);
  const y = value => top + (height - top - bottom) * (1 - (value - low) / (high - low));
  const last = curve.lines.map(line => `${runs[line.run].name} ${percent(line.points.at(-1)[1])}`);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${curve.label} over the rounds, in percent; last: ${last.join(", ")}` });
  for (const value of [low, (low + high) / 2, high]) {
    svg.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, (100 * value).toFixed(0)));
  }
  svg.append(shape("text", { x: left, y: height - 6 }, "round 1"));
  svg.append(shape("text", { x: width - right, y: height - 6, "text-anchor": "end" }, String(end)));
  for (const line of curve.lines) {
    const points = line.points.map(([round, value]) => `${x(round).toFixed(1)},${y(value).toFixed(1)}`);
    const behind = picked === null || picked === line.run ? "" : " behind";
    svg.append(shape("polyline", { class: "curve" + behind, points: points.join(" "), stroke: color(line.run),
      "stroke-dasharray": dash(line.run) }));
    const [round, value] = line.points.at(-1);
    const dot = shape("circle", { class: behind.trim(), cx: x(round), cy: y(value), r: 3.5, fill: color(line.run) });
    dot.append(shape("title", {}, `${runs[line.run].name}, round ${round}: ${percent(value)} %`));
    svg.append(dot);
  }
  return element("figure", {}, svg, element("figcaption", {}, `${curve.label}, %`));
}

function draw() {
  document.title = `${state.left ? state.left + " left: " : state.state + ": "}${state.title}`;
  $("title").textContent = state.title;
  const left = state.left ? `, ${state.left} left` : "";
  $("status").textContent = `${state.state}: round ${state.done} of ${state.rounds}${left}`;
  $("bar").max = state.rounds;
  $("bar").value = state.done;
  const waited = state.sites.filter(site => site.state === "waited for");
  $("waiting").hidden = waited.length === 0;
  $("waiting").textContent = `Waiting for ${waited.map(site => `${site.name} (${site.about})`).join(", ")}`;
  $("findings").replaceChildren(...state.findings.map(text => element("li", {}, text)));
  $("curves").replaceChildren(...state.curves.map(curve => plot(curve, state.runs)));
  const labels = Object.keys(state.runs[0].last).filter(key => state.runs.some(run => run.last[key] !== null));
  const many = state.runs.length > 1;  // of a single run, the lines above tell name, seed, state and round
  const head = [...(many ? [{ text: "run" }, { text: "seed", number: true }, { text: "state" },
    { text: "round", number: true }] : []), ...labels.map(text => ({ text: `${text}, %`, number: true })),
    { text: "sent", number: true }, { text: "a round", number: true }];
  const rows = state.runs.map(run => [...(many ? [run.name, run.seed,
    { text: run.state, cls: run.state === "failed" ? "bad" : "" }, `${run.round}/${run.rounds}`] : []),
    ...labels.map(key => percent(run.last[key])), run.sent, run.per_round || "–"]);
  $("runs").hidden = !many && !state.done;
  $("runs").replaceChildren(...table(many ? "Runs" : "So far", head, rows));
  if (many) document.querySelectorAll("#runs tbody tr").forEach((row, n) => {
    row.firstChild.prepend(sample(n));
    row.classList.toggle("picked", n === picked);
  });
  const about = [{ text: "site" }, { text: "labeled", number: true }, { text: "unlabeled", number: true },
    { text: "state" }];
  const sites = state.sites.map(site => [site.name, site.labeled ?? "–", site.unlabeled ?? "–",
    { text: site.state + (site.about ? `: ${site.about}` : ""),
      cls: ["waited for", "no reply"].includes(site.state) ? "long bad" : "long" }]);
  $("sites").replaceChildren(...(sites.length ? table("Sites", about, sites) : []));
  $("foot").textContent = `${state.sentence}. Read at ${state.at}.`;
}

async function update() {
  try {
    const answer = await fetch("state.json");
    if (!answer.ok) throw new Error(await answer.text());
    state = await answer.json();
    draw();
    document.body.dataset.drawn = Number(document.body.dataset.drawn || 0) + 1;
  } catch (error) {
    $("status").textContent = error instanceof TypeError
      ? "No connection: the command that serves this page has ended." : error.message;
  }
  setTimeout(update, 1000);
}

// Point at a run in the table, or touch it, to see its curves before the others.
$("runs").addEventListener("pointerover", event => pick(event.target.closest("tbody tr")));
$("runs").addEventListener("pointerleave", event => event.pointerType === "mouse" && pick(null));

function pick(row) {
  const found = row && state.runs.length > 1 ? row.rowIndex - 1 : null;
  if (found === picked) return;
  picked = found;
  draw();
}

update();
