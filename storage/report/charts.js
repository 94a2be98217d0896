
// Curves, time line and lineage: SVG drawn for the width of its container, with a read-out for mouse, touch and
// keyboard.

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Calls draw(width) now and whenever the width of `node` changes.
function drawForWidth(node, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (node.clientWidth && node.clientWidth !== width) draw((width = node.clientWidth));
  }).observe(node);
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// ---- curves
// -----------------------------------------------------------------------------------------------------------

const CURVES = [
  { title: "Reward", unit: "mean of a round", series: [["rollout/raw_reward", "reward"]] },
  { title: "Loss", unit: "", series: [["train/loss", "loss"]] },
  { title: "KL", unit: "nats per token", series: [["train/kl_loss", "to the reference"], ["train/ppo_kl", "old \u2212 current"]] },
  { title: "Entropy", unit: "nats per token", series: [["train/entropy_loss", "entropy"]] },
  { title: "Response length", unit: "tokens", series: [["rollout/response_len/mean", "mean"], ["rollout/response_len/max", "max"]] },
  { title: "Truncated, failed, removed", unit: "fraction of samples", series: [
    ["rollout/truncated_ratio", "truncated"], ["rollout/failed_ratio", "failed"], ["rollout/removed_ratio", "removed"]] },
  { title: "Gap of log-probs", unit: "mean |train \u2212 rollout|, nats", series: [["train/train_rollout_logprob_abs_diff", "gap"]] },
  { title: "Staleness", unit: "policy versions", series: [["rollout/staleness/mean", "mean"], ["rollout/staleness/max", "max"]] },
  { title: "Gradient norm", unit: "before clipping", series: [["train/grad_norm", "norm"]] },
  { title: "Speed", unit: "tokens per second", series: [
    ["perf/tokens_per_gpu_per_sec", "generated, per GPU"], ["perf/actor_train_tok_per_s", "trained"]] },
];

function showCurves(overview) {
  const { round, metrics } = overview.rounds;
  const grid = element("div", { className: "curves" });
  const missing = [];
  for (const { title, unit, series } of CURVES) {
    const found = series.filter(([name]) => (metrics[name] || []).some(isNumber));
    if (found.length) grid.append(chart(title, unit, "round", found.map(([name, label]) => ({ label, x: round, y: metrics[name] }))));
    else missing.push(title);
    if (title === "Reward") grid.append(...evaluationCurves(overview.evaluations));
  }
  const node = section("curves", "Curves", grid);
  if (missing.length) node.append(element("p", { className: "soft" }, "Not recorded in this run: " + missing.join(", ") + "."));
  if (round.length) node.append(metricChooser(round, metrics));
}

function evaluationCurves(evaluations) {
  const tasks = [...new Set(evaluations.map((entry) => entry.task))];
  const charts = [];
  for (let i = 0; i < tasks.length; i += 4) { // at most four data sets in a chart
    charts.push(chart("Evaluation reward", "mean and 95 % interval", "policy version", tasks.slice(i, i + 4).map((task) => {
      const entries = evaluations.filter((entry) => entry.task === task);
      const values = (suffix) => entries.map((entry) => entry.metrics["eval/" + task + suffix]);
      return { label: task, x: entries.map((entry) => entry.version), y: values(""), low: values("-ci_low"), high: values("-ci_high"), points: true };
    })));
  }
  return charts;
}

function metricChooser(round, metrics) {
  const names = Object.keys(metrics);
  const place = element("div", {});
  const draw = (name) => place.replaceChildren(chart(name, "", "round", [{ label: name, x: round, y: metrics[name] }]));
  const select = element("select", { onchange: () => draw(select.value) }, ...names.map((name) => element("option", { value: name }, name)));
  return element("details", { className: "screen", ontoggle: () => place.children.length || draw(names[0]) },
    element("summary", {}, "Any of the " + names.length + " recorded metrics"),
    element("div", { className: "controls" }, element("label", {}, "metric", select)), place);
}

const PLOT = { left: 50, right: 10, top: 8, bottom: 32, height: 190 };

// One figure: title, legend, SVG, read-out, and a table of the numbers.
function chart(title, unit, xTitle, series) {
  const readout = element("p", { className: "readout", role: "status" });
  const holder = element("div", {});
  const legend = element("span", { className: "legend" });
  if (series.length > 1 || series[0].low) {
    series.forEach(({ label }, i) => legend.append(element("span", {}, svg("svg", { viewBox: "0 0 16 7", "aria-hidden": "true" },
      svg("line", { x1: 0, y1: 3.5, x2: 16, y2: 3.5, class: "series c" + i + " d" + i })), label)));
  }
  const positions = [...new Set(series.flatMap((s) => s.x))].sort((a, b) => a - b);
  const describe = (x) => xTitle + " " + x + ": " + series.map((s) => s.label + " " + valueAt(s, x)).join(", ");
  const state = { at: positions.length - 1 };
  const show = (at) => {
    state.at = Math.max(0, Math.min(positions.length - 1, at));
    readout.textContent = describe(positions[state.at]);
    if (state.moveCursor) state.moveCursor(positions[state.at]);
  };
  drawForWidth(holder, (width) => holder.replaceChildren(drawChart(title, xTitle, series, positions, width, state, show)));
  show(state.at);
  const rows = () => positions.map((x) => [{ n: String(x) }, ...series.map((s) => ({ n: valueAt(s, x) }))]);
  return element("figure", { className: "card" },
    element("figcaption", {}, element("b", {}, title), element("small", {}, unit), legend), readout, holder,
    lazyDetails("Numbers", () => scrolling(table([xTitle, ...series.map((s) => s.label)], rows()), "tall")));
}

function valueAt({ x, y, low, high }, at) {
  const i = x.indexOf(at);
  if (i < 0) return "\u2013";
  const interval = low && isNumber(low[i]) ? " (" + formatNumber(low[i]) + " to " + formatNumber(high[i]) + ")" : "";
  return formatNumber(y[i]) + interval;
}

function drawChart(title, xTitle, series, positions, width, state, show) {
  const { left, right, top, bottom, height } = PLOT;
  const values = series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]).filter(isNumber);
  let [low, high] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  if (low === high) [low, high] = low ? [low - Math.abs(low) / 2, high + Math.abs(high) / 2] : [0, 1];
  if (low > 0 && low < high / 3) low = 0;
  const marks = ticks(low, high, 5);
  [low, high] = [Math.min(low, marks[0]), Math.max(high, marks.at(-1))];
  const [first, last] = [positions[0], positions.at(-1)];
  const px = (x) => left + ((width - left - right) * (x - first)) / (last - first || 1);
  const py = (y) => top + (height - top - bottom) * (1 - (y - low) / (high - low));
  const node = svg("svg", { class: "chart", viewBox: "0 0 " + width + " " + height, tabindex: 0, role: "img",
    "aria-label": title + " over " + xTitle + "; arrow keys read the values" });
  for (const y of marks) {
    node.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) }),
      svg("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, formatNumber(y)));
  }
  const wholeTicks = ticks(first, last, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger);
  for (const x of wholeTicks) node.append(svg("text", { x: px(x), y: height - bottom + 15, "text-anchor": "middle" }, String(x)));
  node.append(svg("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, xTitle));
  series.forEach((s, i) => node.append(...seriesShapes(s, i, px, py)));
  const cursor = svg("line", { class: "cursor", y1: top, y2: height - bottom });
  node.append(cursor);
  state.moveCursor = (x) => { cursor.setAttribute("x1", px(x)); cursor.setAttribute("x2", px(x)); };
  state.moveCursor(positions[state.at]);
  listen(node, state, show, (x) => nearest(positions, first + ((x - left) / (width - left - right || 1)) * (last - first)), positions.length);
  return node;
}

function seriesShapes({ x, y, low, high, points }, i, px, py) {
  const shapes = [];
  const known = x.map((_, k) => k).filter((k) => low && isNumber(low[k]) && isNumber(high[k]));
  if (known.length) {
    const outline = [...known.map((k) => px(x[k]) + "," + py(high[k])), ...known.reverse().map((k) => px(x[k]) + "," + py(low[k]))];
    shapes.push(svg("polygon", { class: "band f" + i, points: outline.join(" ") }));
    for (const k of known) shapes.push(svg("line", { class: "series c" + i, x1: px(x[k]), x2: px(x[k]), y1: py(low[k]), y2: py(high[k]) }));
  }
  let path = "", pen = "M"; // the line has a gap where a value is missing or not finite
  y.forEach((value, k) => {
    if (isNumber(value)) { path += pen + px(x[k]).toFixed(2) + " " + py(value).toFixed(2); pen = "L"; } else pen = "M";
  });
  shapes.push(svg("path", { class: "series c" + i + " d" + i, d: path || "M0 0" }));
  if (points || x.length === 1) {
    y.forEach((value, k) => { if (isNumber(value)) shapes.push(svg("circle", { class: "f" + i, cx: px(x[k]), cy: py(value), r: 3 })); });
  }
  return shapes;
}

function nearest(sorted, value) {
  let [low, high] = [0, sorted.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}

// Connects pointer and arrow keys with show(position); find(x) returns the position at an x coordinate of the view box.
function listen(node, state, show, find, count) {
  node.addEventListener("pointermove", (event) => {
    const box = node.getBoundingClientRect();
    const at = find(((event.clientX - box.left) / box.width) * node.viewBox.baseVal.width, event);
    if (at >= 0) show(at);
  });
  const keys = { ArrowLeft: () => state.at - 1, ArrowRight: () => state.at + 1, Home: () => 0, End: () => count - 1 };
  node.addEventListener("keydown", (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    show(keys[event.key]());
  });
}

// ---- time line
// --------------------------------------------------------------------------------------------------------

const LANES = [["rollout", "rollout"], ["step", "train"], ["checkpoint", "checkpoint"], ["eval", "evaluate"], ["export", "export"]];
const LANE_HEIGHT = 26, LANE_LEFT = 78;

function showTimeline(overview) {
  const stages = overview.stages.filter((stage) => LANES.some(([kind]) => kind === stage.kind)).sort((a, b) => a.start - b.start);
  if (!stages.length) return;
  const rounds = stages.filter((stage) => stage.kind === "step" || stage.kind === "rollout").map((stage) => stage.index);
  const [first, last] = [Math.min(...rounds, Infinity), Math.max(...rounds, -Infinity)];
  const own = stages.filter((stage) => !stage.inherited && (stage.kind === "step" || stage.kind === "rollout")).map((stage) => stage.index);
  const range = { from: own.length ? Math.min(...own) : first, to: last };
  const readout = element("p", { className: "readout", role: "status" }, "Point at a bar, or use the arrow keys.");
  const holder = element("div", {});
  let redraw = () => {};
  drawForWidth(holder, (width) => {
    redraw = () => holder.replaceChildren(drawTimeline(stages, overview.gaps, range, width, readout));
    redraw();
  });
  const node = section("timeline", "Time line", card(...rangeControls(range, first, last, () => redraw()), readout, holder,
    element("p", { className: "soft" }, "A bar ends when its stage was committed, and is as long as the seconds that the commit records. " +
      "Pale bars belong to the parent of a fork; grey areas are times between two starts of the run.")));
  const shown = overview.events.slice(0, 200);
  const more = overview.events.length > shown.length ? element("li", {}, "and " + (overview.events.length - shown.length) + " more") : null;
  node.append(card(element("h3", {}, "Interruptions and faults"), shown.length
    ? element("ul", {}, ...shown.map((event) => element("li", {}, formatDate(event.at) + ": " + event.text)), more)
    : element("p", {}, "None: the run was started once, no group was reused from an earlier attempt, and no sample failed.")));
}

function rangeControls(range, first, last, redraw) {
  if (!(last > first)) return [];
  const outputs = {};
  const input = (name, title) => {
    outputs[name] = element("output", {}, String(range[name]));
    const slider = element("input", { type: "range", min: first, max: last, step: 1, value: range[name], oninput: () => {
      range[name] = Number(slider.value);
      outputs[name].textContent = slider.value;
      redraw();
    } });
    slider.setAttribute("value", range[name]);
    slider.value = range[name];
    return [slider, element("label", {}, element("span", {}, title + " ", outputs[name]), slider)];
  };
  const [from, fromLabel] = input("from", "from round");
  const [to, toLabel] = input("to", "to round");
  const all = element("button", { type: "button", onclick: () => {
    [from.value, to.value] = [first, last];
    for (const slider of [from, to]) slider.dispatchEvent(new Event("input"));
  } }, "All rounds");
  return [element("div", { className: "controls" }, fromLabel, toLabel, all)];
}

// The stages whose round (of checkpoints, evaluations and exports: policy version) is in the range.
function stagesInRange(stages, { from, to }) {
  const [low, high] = [Math.min(from, to), Math.max(from, to)];
  const isRound = (stage) => stage.kind === "step" || stage.kind === "rollout";
  return stages.filter((stage) => stage.index >= low && stage.index <= high + (isRound(stage) ? 0 : 1));
}

function drawTimeline(stages, gaps, range, width, readout) {
  const shown = stagesInRange(stages, range);
  const start = shown.reduce((least, stage) => Math.min(least, stage.start), Infinity);
  const end = shown.reduce((most, stage) => Math.max(most, stage.end), -Infinity);
  const height = LANES.length * LANE_HEIGHT + 24;
  const scale = (width - LANE_LEFT - 8) / (end - start || 1);
  const px = (time) => LANE_LEFT + scale * (time - start);
  const node = svg("svg", { class: "chart", viewBox: "0 0 " + width + " " + height, tabindex: 0, role: "img",
    "aria-label": "Time line of the stages; arrow keys read them in time" });
  for (const gap of gaps.filter((entry) => entry.end > start && entry.start < end)) {
    node.append(svg("rect", { class: "gap", x: px(gap.start), y: 0, width: scale * (gap.end - gap.start), height: height - 24 }));
  }
  for (const seconds of ticks(0, end - start, Math.max(2, Math.floor(width / 130)))) {
    node.append(svg("line", { class: "grid", x1: px(start + seconds), x2: px(start + seconds), y1: 0, y2: height - 22 }),
      svg("text", { x: px(start + seconds), y: height - 6, "text-anchor": "middle" }, seconds ? formatSeconds(seconds) : "0"));
  }
  LANES.forEach(([, title], lane) => node.append(svg("text", { x: 0, y: lane * LANE_HEIGHT + 17 }, title)));
  const bars = drawBars(node, shown, px, scale);
  const state = { at: -1 };
  const show = (at) => {
    if (bars[state.at]) bars[state.at].classList.remove("chosen");
    state.at = Math.max(0, Math.min(shown.length - 1, at));
    if (bars[state.at]) bars[state.at].classList.add("chosen");
    readout.textContent = describeStage(shown[state.at], start);
  };
  listen(node, state, show, (_, event) => (event.target.dataset.at ? Number(event.target.dataset.at) : -1), shown.length);
  return node;
}

// Draws one bar per stage; a bar that would cover the same pixel as the previous one in its lane is left out.
function drawBars(node, shown, px, scale) {
  const covered = LANES.map(() => -Infinity);
  return shown.map((stage, at) => {
    const lane = LANES.findIndex(([kind]) => kind === stage.kind);
    const x = px(stage.start), length = Math.max(1.5, scale * (stage.end - stage.start) - 0.5);
    if (x + length < covered[lane] + 0.5) return null;
    covered[lane] = x + length;
    const bar = svg("rect", { class: "f" + lane + (stage.inherited ? " inherited" : ""), "data-at": at, x, width: length,
      y: lane * LANE_HEIGHT + 4, height: LANE_HEIGHT - 8, rx: Math.min(2, length / 3) });
    node.append(bar);
    return bar;
  });
}

function describeStage(stage, start) {
  const lane = LANES.find(([kind]) => kind === stage.kind)[1];
  const what = stage.kind === "rollout" || stage.kind === "step" ? "round " : "version ";
  const parts = Object.entries(stage.seconds).filter(([, value]) => value >= 0.001).sort((a, b) => b[1] - a[1]).slice(0, 4);
  return lane + " " + (stage.task ? stage.task + " " : "") + what + stage.index + ": " + formatSeconds(stage.end - stage.start) +
    ", committed after " + formatSeconds(stage.end - start) + " (" + parts.map(([name, value]) => name + " " + formatSeconds(value)).join(", ") + ")";
}

// ---- lineage
// ----------------------------------------------------------------------------------------------------------

function showLineage(overview) {
  const { lineage, header } = overview;
  const holder = element("div", {});
  drawForWidth(holder, (width) => holder.replaceChildren(drawLineage(lineage, header, width)));
  const row = (kind, entry) => [kind + (entry.task ? " " + entry.task : ""), { n: String(entry.version) }, { n: formatBytes(entry.bytes) },
    Object.entries(entry.inputs).map(([role, key]) => role + ": " + key).join("; ") || "\u2013", entry.inherited ? "parent" : ""];
  const rows = [
    ...lineage.checkpoints.map((entry) => row("checkpoint", entry)),
    ...lineage.expired.map((version) => ["expired checkpoint", { n: String(version) }, "", "", ""]),
    ...lineage.evaluations.map((entry) => row("evaluation", entry)),
    ...lineage.rescores.map((entry) => row("rescored", entry)), ...lineage.exports.map((entry) => row("export", entry))];
  const forks = lineage.parents.map(({ run, at }) => "fork of " + run + " at round " + at);
  const models = Object.entries(lineage.models).map(([role, key]) => role + " model: " + key.replace(".commit.json", ""));
  section("lineage", "Lineage", card(holder,
    element("p", { className: "soft" }, ["made from " + (lineage.sources.join(", ") || header.model || "an unnamed model"), ...models, ...forks].join(" \u00b7 ")),
    lazyDetails("Checkpoints, evaluations and exports with their inputs", () => scrolling(table(["", "version", "size", "inputs", "from"], rows), "tall"))));
}

// The policy versions from left to right; below each, its checkpoint, evaluations and exports.
function drawLineage(lineage, header, width) {
  const lanes = [["checkpoints", lineage.checkpoints, 2], ["evaluations", lineage.evaluations, 3], ["exports", lineage.exports, 4]];
  const last = Math.max(header.num_rounds, 1);
  const [left, top, step] = [88, 26, 30];
  const px = (version) => left + ((width - left - 26) * version) / last;
  const node = svg("svg", { class: "chart", viewBox: "0 0 " + width + " " + (top + step * 3 + 16), role: "img",
    "aria-label": "Lineage: model, " + header.num_rounds + " rounds, and what was made from the policy versions" });
  node.append(svg("text", { x: 0, y: top + 4 }, "policy version"), svg("line", { class: "spine", x1: px(0), x2: px(last), y1: top, y2: top }));
  for (const version of ticks(0, last, Math.max(2, Math.floor(width / 110))).filter(Number.isInteger)) {
    node.append(svg("line", { class: "spine", x1: px(version), x2: px(version), y1: top - 4, y2: top + 4 }),
      svg("text", { x: px(version), y: top - 10, "text-anchor": "middle" }, version === 0 ? "model" : String(version)));
  }
  for (const { at, run } of lineage.parents) {
    node.append(svg("circle", { class: "hollow", cx: px(at), cy: top, r: 6 }, svg("title", {}, "fork of " + run + " at round " + at)));
  }
  lanes.forEach(([title, entries, color], lane) => {
    const y = top + step * (lane + 1);
    node.append(svg("text", { x: 0, y: y + 4 }, title));
    for (const { version } of entries) {
      node.insertBefore(svg("line", { class: "grid", x1: px(version), x2: px(version), y1: top + 5, y2: y }), node.firstChild);
    }
    for (const { version, task, inherited } of entries) {
      node.append(svg("circle", { class: "f" + color + (inherited ? " inherited" : ""), cx: px(version), cy: y, r: 5 },
        svg("title", {}, title + ": " + (task ? task + ", " : "") + "version " + version)));
    }
  });
  for (const version of lineage.expired) {
    node.append(svg("circle", { class: "hollow", cx: px(version), cy: top + step, r: 5 }, svg("title", {}, "expired checkpoint of version " + version)));
  }
  return node;
}
