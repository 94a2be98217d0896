
// The page of a report: its sections, in order. Data is in script elements as gzip in base64; `decode` reads one of them.

async function decode(name) {
  const source = document.getElementById("data-" + name);
  const binary = atob(source.textContent);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// ---- sections ---------------------------------------------------------------------------------------------------------

function showHeader(overview) {
  const header = overview.header;
  const facts = [
    ["rounds trained of planned", header.num_rounds + " of " + header.num_planned_rounds],
    ...rewardFact(header.first_reward, header.final_reward, header.num_rounds),
    ["last checkpoint", header.last_checkpoint === null ? "none" : "version " + header.last_checkpoint],
    ["samples on this page", integerFormat.format(overview.samples.num_shown)],
    ["start to last commit", header.last_commit_at ? formatSeconds(header.last_commit_at - header.started_at) : "\u2013"],
  ];
  const parent = header.parent ? "fork of " + header.parent.run + " at round " + header.parent.at + " \u00b7 " : "";
  const terms = [
    ["flow", header.flow], ["model", header.model], ["code", header.code_versions.join(", ")],
    ["dates", parent + "started " + formatDate(header.started_at) + ", last commit " + formatDate(header.last_commit_at)],
  ];
  document.getElementById("header").replaceChildren(
    element("h1", {}, header.run),
    element("dl", {}, ...terms.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value || "\u2013")])),
    element("div", { className: "facts" }, ...facts.map(([name, value]) =>
      element("div", { className: "fact" }, element("b", {}, value), element("span", {}, name)))));
  document.getElementById("footer").textContent = "Report of " + formatDate(header.generated_at) +
    ". Made from the commits in the store; this page loads nothing else.";
}

// ---- curves -----------------------------------------------------------------------------------------------------------

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
    ["perf/tokens_per_gpu_per_sec", "generated, per device"], ["perf/actor_train_tok_per_s", "trained"]] },
];

function showCurves(overview) {
  const { round, metrics } = overview.rounds;
  const grid = element("div", { className: "curves" });
  const missing = [];
  for (const { title, unit, series } of CURVES) {
    const found = series.filter(([name]) => (metrics[name] || []).some(isNumber));
    if (found.length) grid.append(chart(title, unit, "round", found.map(([name, label]) => ({ label: nameDevice(label, overview.header.on_gpus), x: round, y: metrics[name] }))));
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

// ---- time line --------------------------------------------------------------------------------------------------------

const STAGES = { rollout: ["rollout", "--s0"], step: ["train", "--s1"], checkpoint: ["checkpoint", "--s2"], eval: ["evaluate", "--s3"], export: ["export", "--s4"] };
const KINDS = Object.keys(STAGES);

function showTimeline(overview) {
  const stages = overview.stages.filter((stage) => stage.kind in STAGES).sort((a, b) => a.start - b.start);
  if (!stages.length) return;
  const rounds = stages.filter((stage) => stage.kind === "step" || stage.kind === "rollout").map((stage) => stage.index);
  const [first, last] = [Math.min(...rounds, Infinity), Math.max(...rounds, -Infinity)];
  const own = stages.filter((stage) => !stage.inherited && (stage.kind === "step" || stage.kind === "rollout")).map((stage) => stage.index);
  const range = { from: own.length ? Math.min(...own) : first, to: last };
  let start = 0;
  const chart = lanes(KINDS.map((kind) => STAGES[kind][0]), "Time line of the stages", (x) => (x ? formatSeconds(x) : "0"), ({ stage }) => describeStage(stage, start));
  const redraw = () => {
    const shown = stagesInRange(stages, range);
    start = shown.reduce((least, stage) => Math.min(least, stage.start), Infinity);
    const end = shown.reduce((most, stage) => Math.max(most, stage.end), -Infinity);
    const bars = shown.map((stage) => ({ stage, lane: KINDS.indexOf(stage.kind), start: stage.start - start, end: stage.end - start, colour: STAGES[stage.kind][1], pale: stage.inherited }));
    const gaps = overview.gaps.filter((gap) => gap.end > start && gap.start < end).map((gap) => ({ start: gap.start - start, end: gap.end - start }));
    chart.update(bars, gaps, [0, end - start || 1]);
  };
  redraw();
  const node = section("timeline", "Time line", card(...rangeControls(range, first, last, redraw), chart,
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

function describeStage(stage, start) {
  const lane = STAGES[stage.kind][0];
  const what = stage.kind === "rollout" || stage.kind === "step" ? "round " : "version ";
  const parts = Object.entries(stage.seconds).filter(([, value]) => value >= 0.001).sort((a, b) => b[1] - a[1]).slice(0, 4);
  return lane + " " + (stage.task ? stage.task + " " : "") + what + stage.index + ": " + formatSeconds(stage.end - stage.start) +
    ", committed after " + formatSeconds(stage.end - start) + " (" + parts.map(([name, value]) => name + " " + formatSeconds(value)).join(", ") + ")";
}

// ---- lineage ----------------------------------------------------------------------------------------------------------

function showLineage(overview) {
  const { lineage, header } = overview;
  const row = (kind, entry) => [kind + (entry.task ? " " + entry.task : ""), { n: String(entry.version) }, { n: formatBytes(entry.bytes) },
    Object.entries(entry.inputs).map(([role, key]) => role + ": " + key).join("; ") || "\u2013", entry.inherited ? "parent" : ""];
  const rows = [
    ...lineage.checkpoints.map((entry) => row("checkpoint", entry)),
    ...lineage.expired.map((version) => ["expired checkpoint", { n: String(version) }, "", "", ""]),
    ...lineage.evaluations.map((entry) => row("evaluation", entry)),
    ...lineage.regrades.map((entry) => row("regraded", entry)), ...lineage.exports.map((entry) => row("export", entry))];
  const forks = lineage.parents.map(({ run, at }) => "fork of " + run + " at round " + at);
  const models = Object.entries(lineage.models).map(([role, key]) => role + " model: " + key.replace(".commit.json", ""));
  section("lineage", "Lineage", card(lineageChart(lineage, header),
    element("p", { className: "soft" }, ["made from " + (lineage.sources.join(", ") || header.model || "an unnamed model"), ...models, ...forks].join(" \u00b7 ")),
    lazyDetails("Checkpoints, evaluations and exports with their inputs", () => scrolling(table(["", "version", "size", "inputs", "from"], rows), "tall"))));
}

// The versions of the policy from left to right, and what was made of each.
function lineageChart(lineage, header) {
  const last = Math.max(header.num_rounds, 1);
  const point = (lane, version, colour, text, more) => ({ lane, start: version, end: version, colour, text, ...more });
  const of = (lane, title, entries, colour) => entries.map(({ version, task, inherited }) =>
    point(lane, version, colour, title + (task ? " " + task : "") + " of version " + version, { pale: inherited }));
  const points = [
    { lane: 0, start: 0, end: last, colour: "--faint", text: "versions 0 (the model) to " + header.num_rounds },
    ...lineage.parents.map(({ run, at }) => point(0, at, "--text", "fork of " + run + " at round " + at, { over: true })),
    ...of(1, "checkpoint", lineage.checkpoints, "--s2"),
    ...lineage.expired.map((version) => point(1, version, "--faint", "expired checkpoint of version " + version, { hollow: true })),
    ...of(2, "evaluation", lineage.evaluations, "--s3"), ...of(3, "export", lineage.exports, "--s4")];
  const node = lanes(["versions", "checkpoints", "evaluations", "exports"], "Lineage by policy version", String, (bar) => bar.text,
    { hint: "Policy versions from left to right, and what was made of them.", ticks: WHOLE });
  node.update(points, [], [-0.02 * last, 1.02 * last]);
  return node;
}

// ---- tables -----------------------------------------------------------------------------------------------------------

function showEvaluations(overview) {
  const regraded = overview.regrades.filter(({ kind }) => kind === "regrade");
  const scores = [...overview.evaluations, ...overview.regrades.filter(({ kind }) => kind === "eval")];
  if (!scores.length && !regraded.length) return;
  const rows = scores.map(({ task, version, metrics }) => {
    const value = (suffix) => metrics["eval/" + task + suffix];
    const interval = (suffix) => isNumber(value(suffix + "-ci_low"))
      ? { n: formatNumber(value(suffix + "-ci_low")) + " to " + formatNumber(value(suffix + "-ci_high")) } : null;
    return [task, { n: String(version) }, { n: formatNumber(value("")) }, interval(""), { n: formatNumber(value("-pass@1")) },
      { n: formatPercent(value("-truncated_ratio")) }, { n: formatPercent(value("-failed_ratio")) },
      { n: formatNumber(value("/response_len/mean")) }, { n: formatNumber(value("/num_prompts")) }];
  });
  const titles = ["data set", "version", "mean reward", "95 % interval", "pass@1", "truncated", "failed", "mean length", "prompts"];
  const node = section("evaluations", "Evaluations", ...(scores.length ? [card(scrolling(table(titles, rows)))] : []));
  if (regraded.length) node.append(regradedCard(regraded));
  if (overview.comparisons.length) node.append(comparisonCard(overview.comparisons));
}

function regradedCard(rounds) {
  const names = ["num_samples", "old_reward", "reward", "changed", "right_to_wrong", "wrong_to_right", "failed", "gradient_cosine"];
  const rows = rounds.map(({ task, version, metrics }) =>
    [task, { n: String(version) }, ...names.map((name) => ({ n: formatNumber(metrics["regrade@" + task + "/" + name]) }))]);
  const titles = ["grading", "round", ...names.map((name) => name.replaceAll("_", " "))];
  return card(element("h3", {}, "Training rounds, graded again"), scrolling(table(titles, rows), "tall"));
}

function comparisonCard(comparisons) {
  const signed = (value) => (value > 0 ? "+" : "") + formatNumber(value);
  const rows = comparisons.map((entry) => [
    entry.task, { n: entry.first + " \u2192 " + entry.last },
    ...(entry.problem ? [entry.problem, "", "", "", "", "", ""] : [
      { n: formatNumber(entry.mean_a) }, { n: formatNumber(entry.mean_b) }, { n: signed(entry.difference) },
      { n: signed(entry.low) + " to " + signed(entry.high) },
      { n: String(entry.wins) }, { n: String(entry.losses) }, { n: String(entry.ties) }]),
  ]);
  const titles = ["data set", "versions", "first", "last", "difference", "95 % interval", "better", "worse", "equal"];
  return card(element("h3", {}, "First and last evaluated version"), scrolling(table(titles, rows)),
    element("p", { className: "soft" }, "The interval is a bootstrap over the prompts' differences (paired). The last " +
      "three columns count prompts on which the last version is better or worse than the first, or equal."));
}

function showCosts(overview) {
  const { device_seconds: devices, num_devices: counts, parts, rounds } = overview.costs;
  const money = (seconds) => (overview.costs.price_per_device_hour === null ? []
    : [{ n: formatNumber(seconds / 3600 * overview.costs.price_per_device_hour) }]);
  const used = Object.entries(devices).flatMap(([name, stages]) => {
    const total = Object.values(stages).reduce((a, b) => a + b, 0);
    return Object.entries(stages).sort((a, b) => (a[0] === "idle") - (b[0] === "idle") || b[1] - a[1]).map(([stage, value]) =>
      [counts[name] + " x " + name, stage, { n: formatSeconds(value) }, { n: formatPercent(value / total) }, ...money(value), bar(value / total)]);
  });
  if (!used.length) return;
  const { metrics, wall_seconds: wall, num_starts: starts } = overview.costs;
  const joules = Object.entries(overview.costs.joules).sort((a, b) => b[1] - a[1]);
  const energy = joules.length ? [element("p", {}, "Energy of the GPUs: " + formatNumber(metrics["usage/energy_kwh"]) + " kWh (" +
    joules.map(([stage, value]) => stage + " " + formatNumber(value) + " J").join(", ") + ").")] : [];
  const total = "The run was active for " + formatSeconds(wall) + " in " + starts + (starts === 1 ? " start" : " starts") + " and used " +
    formatNumber(metrics["usage/device_hours"]) + " device-hours, " + formatPercent(metrics["usage/idle_ratio"]) + " of them idle" +
    ("usage/money" in metrics ? ", for " + formatNumber(metrics["usage/money"]) : "") + ".";
  const ofParts = Object.entries(parts).flatMap(([kind, entries]) => Object.entries(entries).map(([part, value]) => [kind, part, value]));
  const all = ofParts.reduce((sum, [, , value]) => sum + value, 0);
  const node = section("costs", "Costs",
    card(element("p", {}, total), ...energy,
      scrolling(table(["devices", "stage", "device-time", "share", ...(money(0).length ? ["price"] : []), ""], used)),
      element("p", { className: "soft" }, "Devices are GPUs; without GPUs, the trainer's processes and the engines. Idle time includes starts, weight updates and waits.")),
    card(element("h3", {}, "Parts of the stages"), scrolling(table(["stage", "part", "time", "share", ""], ofParts.map(([kind, part, value]) =>
      [kind === "step" ? "train" : kind, part, { n: formatSeconds(value) }, { n: formatPercent(value / all) }, bar(value / all)])))));
  node.querySelectorAll("td:last-child").forEach((cell) => cell.classList.add("barcell"));
  node.append(roundCosts(rounds));
}

function bar(share) {
  const node = element("div", { className: "bar" });
  node.style.width = 100 * share + "%";
  return node;
}

function roundCosts(rounds) {
  const values = {
    "rollout, device-time": (round) => round.device_seconds.rollout, "training, device-time": (round) => round.device_seconds.training,
    "samples trained": (round) => round.kept_samples, "samples removed": (round) => round.removed_samples,
    "groups dropped": (round) => round.dropped_groups,
    ...(rounds.some((round) => Object.keys(round.joules).length)
      ? { "energy in J": (round) => Object.values(round.joules).reduce((a, b) => a + b, 0) } : {}),
    "tokens trained": (round) => round.trained_tokens, "tokens wasted": (round) => round.wasted_tokens,
  };
  const sum = (value) => rounds.map(value).filter(isNumber).reduce((a, b) => a + b, 0);
  const samples = sum(values["samples trained"]);
  const rows = Object.entries(values).map(([name, value]) => {
    const format = name.endsWith("time") ? formatSeconds : formatNumber;
    return [name, ...[sum(value), rounds.length ? sum(value) / rounds.length : null, samples ? sum(value) / samples : null].map((v) => ({ n: format(v) }))];
  });
  return card(element("h3", {}, "Per round and per trained sample"),
    scrolling(table(["", "total", "per round", "per trained sample"], rows)),
    lazyDetails("All rounds", () => scrolling(table(["round", ...Object.keys(values)], rounds.map((round) =>
      [round.rollout_id, ...Object.values(values).map((value) => value(round) ?? null)])), "tall")));
}

function showOptions(overview) {
  const changed = overview.options.filter((row) => row.changed || "parent" in row);
  const isFork = overview.options.some((row) => "parent" in row);
  const titles = ["option", "value", "default", ...(isFork ? ["parent"] : [])];
  const cells = (row) => [
    element("span", {}, element("span", { className: "soft" }, row.section + "."), row.name),
    element("code", {}, formatValue(row.value)), element("code", {}, formatValue(row.default)),
    ...(isFork ? ["parent" in row ? element("code", {}, formatValue(row.parent)) : ""] : []),
  ];
  const long = (node) => { node.classList.add("long"); return node; };
  const node = section("configuration", "Configuration",
    long(card(element("h3", {}, "What differs from the defaults"), scrolling(table(titles, changed.map(cells))),
      lazyDetails("All " + overview.options.length + " options; highlighted: not the default", () => scrolling(
        table(titles, overview.options.map(cells), (r) => (overview.options[r].changed ? "changed" : "")), "tall")))));
  for (const change of overview.changes) {
    node.append(card(element("h3", {}, "Changed at " + formatDate(change.at)),
      scrolling(table(["option", "before", "after"], change.options.map(([name, before, after]) =>
        [name, element("code", {}, formatValue(before)), element("code", {}, formatValue(after))])))));
  }
}

function showError(error) {
  document.getElementById("main").append(element("p", { className: "error", role: "alert" },
    "This page could not be shown completely: " + error + ". It needs a browser with DecompressionStream " +
    "(Chromium 80, Firefox 113, Safari 16.4 or later), and the whole file."));
}

async function start() {
  const overview = await decode("overview");
  document.getElementById("sections").append(element("ul"));
  showHeader(overview);
  showCurves(overview);
  showTimeline(overview);
  showEvaluations(overview);
  const samples = section("samples", "Samples");
  showCosts(overview);
  showLineage(overview);
  showOptions(overview);
  performance.mark("overview");
  if (document.readyState === "loading") {
    await new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve));
  }
  await showSamples(samples, overview.samples);
  performance.mark("samples");
  document.documentElement.dataset.ready = "samples";
}

// The other scripts define functions that `start` calls: begin after all of them have run.
queueMicrotask(() => start().catch(showError));
