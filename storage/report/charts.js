
// Charts, drawn by uPlot: curves over rounds or time, and lanes with bars. Each has a read-out for mouse and keyboard.

const CHART_HEIGHT = 190, LANE_HEIGHT = 28;
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [4, 2]];
const plots = new Set(); // of this page, to be drawn again when the colours change

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function redrawPlots() {
  for (const plot of plots) if (plot.root.isConnected) plot.redraw(false); else plots.delete(plot);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawPlots);
for (const [event, prints] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => { document.documentElement.classList.toggle("print", prints); redrawPlots(); });
}

// Draws a plot in `holder` with its width, now and whenever that changes; calls ready(plot) after the first time.
function plotInto(holder, options, data, height, ready) {
  let plot = null;
  new ResizeObserver(() => {
    const width = holder.clientWidth;
    if (!width || (plot && plot.width === width)) return;
    if (plot) return plot.setSize({ width, height: plot.height });
    plot = new uPlot({ ...options, width, height }, data, holder);
    plots.add(plot);
    ready(plot);
  }).observe(holder);
}

const FONT = "11px system-ui, sans-serif";
const axis = (more) => ({ stroke: () => colour("--soft"), font: FONT, ticks: { show: false }, ...more,
  grid: { stroke: () => colour("--line"), width: 1, ...more.grid } });

// Connects the arrow keys with show(position); `at` returns the present position.
function listenToKeys(node, at, show, count) {
  const keys = { ArrowLeft: () => at() - 1, ArrowRight: () => at() + 1, Home: () => 0, End: () => count() - 1 };
  node.addEventListener("keydown", (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    show(Math.max(0, Math.min(count() - 1, keys[event.key]())));
  });
}

// ---- curves -----------------------------------------------------------------------------------------------------------

// One figure: title, legend, plot, read-out, and a table of the numbers. Series are {label, x, y, low, high, points}.
// `limits` are the fixed ends of the value axis, if it has any.
// `figure.update(series)` shows other numbers of the same series.
function chart(title, unit, xTitle, series, formatX = String, limits = []) {
  const readout = element("p", { className: "readout", role: "status" });
  const holder = element("div", { className: "plot", tabIndex: 0, role: "img", "aria-label": title + " over " + xTitle + "; arrow keys read the values" });
  const legend = element("span", { className: "legend" }, ...(series.length > 1 ? series.map(({ label }, i) =>
    element("span", {}, element("i", { className: "stroke k" + i }), label)) : []));
  let shown = aligned(series), plot = null, at = newest(shown);
  const show = (position) => {
    at = position;
    const x = shown.x[at];
    readout.textContent = at < 0 ? "" : xTitle + " " + formatX(x) + ": " + shown.series.map((s, i) =>
      s.label + " " + formatNumber(shown.y[i][at]) + interval(s, x)).join(", ");
  };
  const options = {
    legend: { show: false }, cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
    scales: { x: { time: false, range: () => (shown.x.length > 1 ? [shown.x[0], shown.x.at(-1)] : [(shown.x[0] || 0) - 1, (shown.x[0] || 0) + 1]) }, y: { range: (_, low, high) => valueRange([low, high, ...shown.series.flatMap((s) => [...s.low || [], ...s.high || []])], limits) } },
    axes: [axis({ size: 20, label: xTitle, labelSize: 14, labelGap: 0, labelFont: FONT, grid: { show: false }, space: 70, incrs: formatX === String ? WHOLE : undefined,
      values: (_, ticks) => ticks.map((x) => (x < 0 ? "" : formatX(x))) }), axis({ size: 50, values: (_, ticks) => ticks.map(formatNumber) })],
    series: [{}, ...series.map((s, i) => ({ label: s.label, stroke: () => colour("--s" + i), width: 1.75, dash: DASHES[i], spanGaps: Boolean(s.points),
      points: { show: s.points ? true : (u, k) => u.data[k].filter(isNumber).length < 2, size: 6, fill: () => colour("--s" + i) } }))],
    hooks: { setCursor: [(u) => { if (isNumber(u.cursor.idx)) show(u.cursor.idx); }], draw: [(u) => drawIntervals(u, shown.series)] },
  };
  plotInto(holder, options, [shown.x, ...shown.y], CHART_HEIGHT, (made) => { plot = made; plot.setData([shown.x, ...shown.y]); });
  listenToKeys(holder, () => at, (position) => {
    show(position);
    if (plot) plot.setCursor({ left: plot.valToPos(shown.x[position], "x"), top: 1 });
  }, () => shown.x.length);
  show(at);
  const numbers = lazyDetails("Numbers", () => scrolling(table([xTitle, ...shown.series.map((s) => s.label)],
    shown.x.map((x, k) => [{ n: formatX(x) }, ...shown.series.map((s, i) => ({ n: formatNumber(shown.y[i][k]) + interval(s, x) }))])), "tall"));
  const figure = element("figure", { className: "card" },
    element("figcaption", {}, element("b", {}, title), element("small", {}, unit), legend), readout, holder, numbers);
  figure.update = (newSeries) => {
    const wasNewest = at === newest(shown);
    shown = aligned(newSeries);
    show(wasNewest ? newest(shown) : Math.min(at, shown.x.length - 1));
    if (plot) plot.setData([shown.x, ...shown.y]);
    if (!numbers.open && numbers.children.length > 1) numbers.lastChild.remove(); // built again when it is opened
  };
  return figure;
}

const WHOLE = [1, 2, 5].flatMap((first) => Array.from({ length: 9 }, (_, power) => first * 10 ** power)).sort((a, b) => a - b);

// The series over all their positions: one value of each series per position, null if it has none.
function aligned(series) {
  const x = [...new Set(series.flatMap((s) => s.x))].sort((a, b) => a - b);
  const places = new Map(x.map((value, k) => [value, k]));
  const y = series.map((s) => {
    const values = Array(x.length).fill(null);
    s.x.forEach((value, k) => { if (isNumber(s.y[k])) values[places.get(value)] = s.y[k]; });
    return values;
  });
  return { x, y, series };
}

// The last position at which all series have a value, or else the last one.
function newest({ x, y }) {
  const complete = x.findLastIndex((_, k) => y.every((values) => values[k] !== null));
  return complete < 0 ? x.length - 1 : complete;
}

// The ends of an axis that shows these values. Around a single value of at most 1, it ends at 1: it may be a fraction.
function valueRange(all, [least, most] = []) {
  const values = all.filter(isNumber);
  if (values.every((value) => value === 0)) return [0, most ?? 1];
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) [low, high] = [low - Math.abs(low) / 3, Math.min(low + Math.abs(low) / 3, low > 0 && low <= 1 ? 1 : Infinity)];
  if (low > 0 && low < high / 3) low = 0;
  const margin = (high - low) / 20;
  return [least ?? (low === 0 ? 0 : low - margin), most ?? high + margin];
}

function interval({ x, low, high }, at) {
  const i = low ? x.indexOf(at) : -1;
  return i >= 0 && isNumber(low[i]) ? " (" + formatNumber(low[i]) + " to " + formatNumber(high[i]) + ")" : "";
}

function drawIntervals(u, series) {
  series.forEach(({ x, low, high }, i) => (low ? x : []).forEach((at, k) => {
    if (!isNumber(low[k]) || !isNumber(high[k])) return;
    const px = u.valToPos(at, "x", true);
    u.ctx.strokeStyle = colour("--s" + i);
    u.ctx.lineWidth = 1.25 * uPlot.pxRatio;
    u.ctx.beginPath();
    u.ctx.moveTo(px, u.valToPos(low[k], "y", true));
    u.ctx.lineTo(px, u.valToPos(high[k], "y", true));
    u.ctx.stroke();
  }));
}

// ---- lanes ------------------------------------------------------------------------------------------------------------

// Bars in lanes, the first lane on top; a name may have two lines. A bar is {lane, start, end, colour, label, pale,
// hollow, over}; if it has no length it is a point. Areas {start, end} are grey in all lanes. `describe(bar)` is the text
// of the read-out. `node.update(bars, areas, range)` shows others.
function lanes(names, xTitle, formatX, describe, { hint = "Point at a bar, or use the arrow keys.", ticks } = {}) {
  const readout = element("p", { className: "readout", role: "status" }, hint);
  const holder = element("div", { className: "plot", tabIndex: 0, role: "img", "aria-label": xTitle + "; arrow keys read the bars" });
  const shown = { bars: [], areas: [], range: [0, 1], boxes: [], chosen: -1 };
  let plot = null;
  const choose = (k) => {
    if (k === shown.chosen || !shown.bars[k]) return;
    shown.chosen = k;
    readout.textContent = describe(shown.bars[k]);
    if (plot) plot.redraw(false);
  };
  const find = (u) => {
    const [x, y] = [u.cursor.left * uPlot.pxRatio + u.bbox.left, u.cursor.top * uPlot.pxRatio + u.bbox.top];
    choose(shown.boxes.findLastIndex((box) => box && x >= box[0] - 2 && x <= box[0] + box[2] + 2 && y >= box[1] && y <= box[1] + box[3]));
  };
  const count = names.length, lines = names.map((name) => name.split("\n"));
  const options = {
    legend: { show: false }, cursor: { x: false, y: false, drag: { x: false, y: false }, points: { show: false } },
    scales: { x: { time: false, range: () => shown.range }, y: { range: [0, count] } },
    axes: [axis({ size: 24, space: 90, incrs: ticks, values: (_, marks) => marks.map((x) => formatX(x)) }),
      axis({ size: 16 + 6 * Math.max(...lines.flat().map((line) => line.length)), lineGap: 1.1, grid: { show: false },
        splits: () => lines.map((of, i) => count - i - 0.5 + (of.length - 1) * 6 / LANE_HEIGHT), values: () => names, side: 3 })],
    series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
    hooks: { setCursor: [find], draw: [(u) => drawBars(u, shown, count)] },
  };
  plotInto(holder, options, [shown.range, [null, null]], count * LANE_HEIGHT + 30, (made) => { plot = made; plot.setData([shown.range, [null, null]]); });
  listenToKeys(holder, () => shown.chosen, choose, () => shown.bars.length);
  const node = element("div", {}, readout, holder);
  node.update = (bars, areas, range) => {
    const chosen = shown.bars[shown.chosen];
    Object.assign(shown, { bars, areas, range, chosen: chosen ? bars.findIndex((bar) => bar.lane === chosen.lane && bar.start === chosen.start) : -1 });
    if (shown.chosen < 0) readout.textContent = hint;
    if (plot) plot.setData([range, [null, null]]);
  };
  return node;
}

// Of bars that would cover the same pixel of their lane, only the first is drawn, and those that are `over` others.
function drawBars(u, shown, count) {
  const { ctx, bbox } = u, ratio = uPlot.pxRatio;
  const px = (x) => Math.max(bbox.left, Math.min(bbox.left + bbox.width, u.valToPos(x, "x", true)));
  ctx.save();
  ctx.fillStyle = colour("--line");
  for (const { start, end } of shown.areas) ctx.fillRect(px(start), bbox.top, px(end) - px(start), bbox.height);
  const covered = {};
  ctx.font = 10 * ratio + "px system-ui, sans-serif";
  [ctx.textBaseline, ctx.textAlign] = ["middle", "left"];
  shown.boxes = shown.bars.map((bar, k) => {
    const top = u.valToPos(count - bar.lane, "y", true) + 3 * ratio, height = (LANE_HEIGHT - 6) * ratio;
    const x = px(bar.start), length = Math.max(1.5 * ratio, px(bar.end) - x - 0.5 * ratio);
    if (bar.end < shown.range[0] || bar.start > shown.range[1]) return null;
    if (k !== shown.chosen && x + length < (covered[bar.lane] ?? -Infinity) + 0.5 && !bar.over) return null;
    covered[bar.lane] = Math.max(covered[bar.lane] ?? -Infinity, x + length);
    ctx.globalAlpha = bar.pale ? 0.35 : 1;
    ctx.fillStyle = ctx.strokeStyle = colour(bar.colour);
    ctx.lineWidth = 1.5 * ratio;
    const box = bar.start === bar.end ? [x - 5 * ratio, top, 10 * ratio, height] : [x, top, length, height];
    ctx.beginPath();
    if (bar.start === bar.end) ctx.arc(x, top + height / 2, 5 * ratio, 0, 7);
    else ctx.rect(...box);
    if (bar.hollow) ctx.stroke(); else ctx.fill();
    if (k === shown.chosen) { ctx.strokeStyle = colour("--text"); ctx.stroke(); }
    ctx.globalAlpha = 1;
    if (bar.label && ctx.measureText(bar.label).width + 8 * ratio < length) {
      ctx.fillStyle = colour(bar.pale ? "--text" : "--page");
      ctx.fillText(bar.label, x + 4 * ratio, top + height / 2);
    }
    return box;
  });
  ctx.restore();
}
