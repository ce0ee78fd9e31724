// Draws the charts of a report with plotly.js: hover shows values, and a click on the legend hides a row.
// What each chart shows stands beside it as JSON. Names are text, never markup.
"use strict";
(() => {
  const CELL = 27, NAME = 18, MOST_NUMBERS = 12, MOST_TICKS = 30, MOST_LINES = 3;
  const RIGHT = "#1b62c4", WRONG = "#e07b00", GREY = "#8a8a8a";
  const CONFIG = { displayModeBar: false, responsive: true };
  const charts = [], hidden = new Set();

  const text = s => String(s).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = s => text(s.length > NAME ? s.slice(0, NAME - 1) + "…" : s);
  function lines(name, _, all) {  // long names in several lines: names that begin alike must be told apart
    const found = [""];
    if (all && all.length > MOST_NUMBERS) return [short(name)];  // so many have no room for more
    for (const word of String(name).split(/(?<=[\s,_-])|(?<=\.)(?=[A-Za-z])/)) {
      if (found.at(-1) && (found.at(-1) + word).trimEnd().length > NAME) found.push("");
      found[found.length - 1] += word;
    }
    if (found.length > MOST_LINES) found.splice(MOST_LINES - 1, found.length, found.slice(MOST_LINES - 1).join(""));
    return found.map(line => short(line.trim()));
  }
  const wrapped = (name, n, all) => lines(name, n, all).join("<br>");
  const row = (height, names) => Math.max(height, 6 + 16 * Math.max(...names.map(lines).map(found => found.length)));
  const number = (v, digits = 1) => v === null ? "–" : v.toLocaleString("en", { maximumFractionDigits: digits,
    minimumFractionDigits: Math.abs(v) >= 1000 ? 0 : digits });
  const faded = (color, share) => color + Math.round(255 * share).toString(16).padStart(2, "0");

  const parts = color => color.slice(1).replace(/^(.)(.)(.)$/, "$1$1$2$2$3$3").match(/../g).map(two => parseInt(two, 16));
  function ink(paper, color, share) {  // black or white, whichever has the larger contrast (WCAG 2) on a share of a colour
    const [r, g, b] = parts(paper).map((c, n) => (c + share * (parts(color)[n] - c)) / 255)
      .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return (.2126 * r + .7152 * g + .0722 * b + .05) ** 2 > .05 * 1.05 ? "#000" : "#fff";
  }

  function theme() {
    const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue(name).trim();
    return { ink: of("--ink"), paper: of("--paper"), line: of("--line"), soft: of("--soft") };
  }

  function ticks(names, most, written = short) {
    const step = Math.ceil(names.length / most), kept = names.map((_, n) => n).filter(n => n % step === 0);
    return { tickmode: "array", tickvals: kept, ticktext: kept.map(n => written(names[n], n, names)) };
  }

  // Each kind of chart: its rows that the legend can hide, and what plotly draws.
  const kinds = {
    lines(chart, shown, colors) {
      const data = [];
      for (const line of chart.lines.filter(shown)) {
        const band = line.x.map((x, n) => [x, line.y[n], line.spread[n]]).filter(point => point[2] != null);
        if (band.length) {
          const back = band.slice().reverse();
          data.push({ type: "scatter", x: [...band, ...back].map(p => p[0]), hoverinfo: "skip", mode: "lines",
            y: [...band.map(p => p[1] + p[2]), ...back.map(p => p[1] - p[2])], fill: "toself",
            line: { width: 0 }, fillcolor: faded(line.color, .15) });
        }
        data.push({ type: "scatter", x: line.x, y: line.y, name: text(line.name), mode: line.x.length > 1 ? "lines" : "markers",
          line: { color: line.color, width: 2, dash: line.dash || "solid" }, marker: { color: line.color, size: 8 },
          text: line.y.map((y, n) => number(y) + (line.spread[n] != null ? " ± " + number(line.spread[n]) : "")),
          hovertemplate: "%{text}" });
      }
      const known = chart.lines.filter(shown).flatMap(line => line.y.flatMap((y, n) =>
        [y - (line.spread[n] || 0), y + (line.spread[n] || 0)]));
      let [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 100];
      if (chart.percent) {
        const more = Math.max(.05 * (high - low), (10 - (high - low)) / 2);
        [low, high] = [Math.max(0, low - more), Math.min(100, high + more)];
      } else low = 0;
      const edge = .04 * (high - low || 1);
      const chosen = chart.chosen === null ? [] : [chart.chosen];
      const numbers = chart.lines.flatMap(line => line.x), few = Math.max(...numbers) - Math.min(...numbers) <= 8;
      const whole = few ? { dtick: 1 } : {};  // of few rounds, plotly would mark halves, too
      return { data, height: 300, layout: { hovermode: "x unified",
        xaxis: { title: { text: "round" }, tickformat: "d", ...whole, hoverformat: "d", unifiedhovertitle: { text: "round %{x}" } },
        yaxis: { title: { text: text(chart.ylabel) }, range: [low - (chart.percent ? edge : 0), high + edge] },
        shapes: chosen.map(x => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: GREY, width: 1 } })),
        annotations: chosen.map(x => ({ x, y: 1, yref: "paper", text: "chosen on validation", showarrow: false,
          xanchor: x > 2 / 3 * Math.max(...chart.lines.flatMap(line => line.x)) ? "right" : "left", yanchor: "top",
          font: { size: 11, color: GREY } })) } };
    },

    cells(chart, shown, colors) {
      const { down, across, counts } = chart, [low, high] = chart.range;
      const totals = counts && counts.map(row => row.reduce((a, b) => a + b, 0));
      const values = counts ? counts.map((row, y) => row.map(n => totals[y] ? 100 * n / totals[y] : null)) : chart.values;
      const numbers = across.length <= MOST_NUMBERS && down.length <= 2 * MOST_NUMBERS;
      const right = (y, x) => y === x, gap = numbers ? 1 : 0;
      const hover = values.map((row, y) => row.map((value, x) => {
        if (value === null) return "";
        const images = counts ? `${number(counts[y][x], 0)} of ${number(totals[y], 0)} images, ` : "";
        const head = `${chart.ylabel} ${down[y]}`.trim(), tail = `${chart.xlabel} ${across[x]}`;
        return `${text(head)}<br>${text(tail)}<br><b>${images}${number(value, chart.digits + 1)}${high === 100 ? " %" : ""}</b>`;
      }));
      const written = values.map((row, y) => row.map((value, x) => !numbers || value === null
        || (chart.diagonal && !right(y, x) && Math.round(value) === 0) ? "" : value.toFixed(chart.digits)));
      const only = (table, keep) => table.map((row, y) => row.map((v, x) => keep(y, x) ? v : null));
      const layer = (keep, color, top, pen) => ({ type: "heatmap", z: only(values, keep), zmin: low, zmax: top === low ? low + 1 : top,
        colorscale: [[0, colors.paper], [1, color]], showscale: !numbers && color === RIGHT, hovertext: only(hover, keep),
        colorbar: { thickness: 10, outlinewidth: 0, tickfont: { color: colors.ink } }, xgap: gap, ygap: gap,
        hoverinfo: "text", hoverongaps: false, text: written.map((row, y) => row.map((t, x) => keep(y, x) ? t : "")),
        texttemplate: numbers ? "%{text}" : "", textfont: { color: pen } });
      const share = (value, top) => Math.min(1, Math.max(0, (value - low) / (top - low || 1)));
      const layers = (keep, color, top) => numbers ? ["#000", "#fff"].map(pen => layer((y, x) => keep(y, x)
        && ink(colors.paper, color, share(values[y][x], top)) === pen, color, top, pen)) : [layer(keep, color, top)];
      const data = (chart.diagonal ? [...layers(right, RIGHT, high), ...layers((y, x) => !right(y, x), WRONG, high / 2)]
        : layers(() => true, RIGHT, high)).filter(one => one.z.flat().some(value => value !== null));
      const axis = { zeroline: false, showgrid: false, ticks: "" };
      const names = ticks(across, numbers ? MOST_NUMBERS : colors.narrow ? 5 : 10), longest = Math.max(...names.ticktext.map(s => s.length));
      const turned = longest > 3 ? { tickangle: -45 } : { tickangle: 0 };
      const height = Math.min(560, row(CELL, down) * down.length) + 110 + (longest > 3 ? 5 * longest : 0);
      return { data, height, layout: { plot_bgcolor: colors.soft,
        xaxis: { ...axis, ...names, ...turned, title: { text: text(chart.xlabel) } },
        yaxis: { ...axis, ...ticks(down, MOST_TICKS, wrapped), title: { text: text(chart.ylabel) }, autorange: "reversed" } } };
    },

    bars(chart, shown, colors) {
      const places = chart.names.map((_, n) => n);
      const data = chart.parts.filter(shown).map(part => ({ type: "bar", orientation: "h", y: places, x: part.x,
        marker: { color: part.color }, hoverinfo: "text", textposition: "none",
        hovertext: part.x.map((x, n) => `${text(chart.names[n])}<br>${text(part.name)}: <b>${number(x, Number.isInteger(x) ? 0 : 2)}</b> ${text(chart.xlabel)}`) }));
      const names = chart.names.map((name, n) => chart.bold[n] ? `<b>${wrapped(name, n, chart.names)}</b>` : wrapped(name, n, chart.names));
      return { data, height: Math.max(170, row(24, chart.names) * places.length + 80), layout: { barmode: "stack", bargap: .25, hovermode: "closest",
        xaxis: { title: { text: text(chart.xlabel) }, rangemode: "tozero" },
        yaxis: { tickmode: "array", tickvals: places, ticktext: names, autorange: "reversed", showgrid: false,
          title: { text: text(chart.ylabel) } } } };
    },

    intervals(chart, shown, colors) {
      const marks = chart.marks.filter(shown);
      const data = [{ type: "scatter", mode: "markers+text", x: marks.map(m => m.value), y: marks.map((_, n) => n),
        marker: { size: 10, color: marks.map(m => m.color) }, text: marks.map(m => number(m.value)), textposition: "top center",
        cliponaxis: false, hoverinfo: "text", hovertext: marks.map(m => `${text(m.name)}<br><b>${number(m.value)} %</b>`
          + (m.interval ? `<br>95 % interval ${number(m.interval[0])} to ${number(m.interval[1])}` : "")) }];
      marks.forEach((m, n) => m.interval && data.unshift({ type: "scatter", mode: "lines", x: m.interval, y: [n, n],
        line: { color: m.color, width: 3 }, hoverinfo: "skip" }));
      const lines = Object.entries(chart.lines);
      const all = marks.flatMap(m => [m.value, ...(m.interval || [])]).concat(lines.map(l => l[1]));
      const [low, high] = [Math.min(...all, 100), Math.max(...all, 0)], edge = Math.max(2, .08 * (high - low));
      return { data, height: row(46, marks.map(m => m.name)) * marks.length + 90, layout: { hovermode: "closest",
        xaxis: { title: { text: text(chart.xlabel) }, range: [Math.max(-2, low - edge), Math.min(103, high + edge)] },
        yaxis: { tickmode: "array", tickvals: marks.map((_, n) => n), ticktext: marks.map(m => m.name).map(wrapped), showgrid: false,
          range: [marks.length - .5, -.9], zeroline: false },
        shapes: lines.map(([_, x], n) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", layer: "below",
          line: { color: GREY, width: 1.5, dash: n ? "dash" : "dot" } })) } };
    },
  };

  const named = (axis, own) => ({ ...axis, ...own, title: { font: { size: 13 }, standoff: 8, ...own.title } });
  const rows = chart => chart.lines && chart.kind === "lines" ? chart.lines : chart.parts || [];

  function draw(one) {
    const { chart, place } = one, colors = { ...theme(), narrow: place.clientWidth < 450 };
    const shown = row => !hidden.has(one.scope + row.name);
    const { data, layout, height } = kinds[chart.kind](chart, shown, colors);
    const axis = { color: colors.ink, gridcolor: faded(GREY, .25), zeroline: false, automargin: true, fixedrange: true,
      linecolor: faded(GREY, .5) };
    Plotly.react(place, data, { ...layout, height, autosize: true, showlegend: false, dragmode: false,
      margin: { l: 46, r: 14, t: 14, b: 42 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: layout.plot_bgcolor || "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 13, color: colors.ink },
      hoverlabel: { bgcolor: colors.soft, bordercolor: colors.line, font: { color: colors.ink, size: 13 }, namelength: -1, align: "left" },
      xaxis: named(axis, layout.xaxis), yaxis: named(axis, layout.yaxis) }, CONFIG);
    one.buttons.forEach(button => button.setAttribute("aria-pressed", String(shown({ name: button.dataset.row }))));
  }

  function toggle(key) {
    hidden.has(key) ? hidden.delete(key) : hidden.add(key);
    charts.filter(one => rows(one.chart).concat(one.chart.marks || []).some(row => one.scope + row.name === key)).forEach(draw);
  }

  function legend(one) {
    const named = rows(one.chart).filter(row => row.name);
    if (one.chart.legend === false || named.length < 2) return;
    const box = document.createElement("div");
    box.className = "legend";
    for (const row of named) {
      const button = document.createElement("button"), swatch = document.createElement("i");
      button.type = "button";
      button.dataset.row = row.name;
      button.title = "Click to hide or show";
      swatch.style.borderTop = `${one.chart.kind === "lines" ? 3 : 10}px ${{ dot: "dotted", dash: "dashed" }[row.dash] || "solid"} ${row.color}`;
      button.append(swatch, row.name);
      button.addEventListener("click", () => toggle(one.scope + row.name));
      box.append(button);
    }
    one.buttons = [...box.children];
    one.place.after(box);
  }

  // The rows of one page have the same names in all plots, so hiding one hides it everywhere.
  document.querySelectorAll("figure > script").forEach((source, n) => {
    const chart = JSON.parse(source.textContent), place = document.createElement("div");
    place.className = "live";
    source.after(place);
    charts.push({ chart, place, scope: chart.rows ? "rows " : `${n} `, buttons: [] });
  });
  document.documentElement.classList.add("drawn");
  charts.forEach(legend);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(draw));

  // One plot after another, so that the page can be read meanwhile.
  (function next(n) {
    if (n === charts.length) return void (document.documentElement.dataset.plots = n);
    draw(charts[n]);
    setTimeout(next, 0, n + 1);
  })(0);
})();
