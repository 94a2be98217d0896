
"use strict";
// The page of a report. Data is in script elements as gzip in base64; `decode` reads one of them. Text of a run is
// inserted only as text nodes, never as markup.

const numberFormat = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const integerFormat = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

async function decode(name) {
  const source = document.getElementById("data-" + name);
  const binary = atob(source.textContent);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// ---- formatting
// -------------------------------------------------------------------------------------------------------

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function formatNumber(value) {
  if (value === null || value === undefined) return "\u2013";
  if (!isNumber(value)) return String(value); // "NaN", "Infinity"
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(2);
  return (Math.abs(value) >= 1e4 ? integerFormat : numberFormat).format(value).replace("-", "\u2212");
}

function formatPercent(value) {
  return isNumber(value) ? (100 * value).toFixed(1) + " %" : formatNumber(value);
}

function formatSeconds(seconds) {
  if (!isNumber(seconds)) return formatNumber(seconds);
  if (seconds < 1) return formatNumber(Math.round(seconds * 1000)) + " ms";
  if (seconds < 60) return seconds.toFixed(1).replace(".0", "") + " s";
  const rounded = Math.round(seconds);
  const two = (number) => String(number).padStart(2, "0");
  const [hours, minutes, rest] = [Math.floor(rounded / 3600), Math.floor(rounded / 60) % 60, rounded % 60];
  return hours ? hours + " h " + two(minutes) + " min" : minutes + " min " + two(rest) + " s";
}

function formatBytes(bytes) {
  let unit = "B";
  for (const larger of ["kB", "MB", "GB", "TB"]) {
    if (bytes < 1000) break;
    [bytes, unit] = [bytes / 1000, larger];
  }
  return formatNumber(bytes) + " " + unit;
}

function formatDate(seconds) {
  if (!isNumber(seconds)) return "\u2013";
  const iso = new Date(seconds * 1000).toISOString();
  return iso.slice(0, 10) + " " + iso.slice(11, 16) + " UTC";
}

const formatValue = (value) => (value === undefined ? "\u2013" : JSON.stringify(value));

// ---- building blocks
// --------------------------------------------------------------------------------------------------

// Cells that are numbers or {n: text} are aligned to the right.
function table(titles, rows, rowClass) {
  const isRight = (cell) => typeof cell === "number" || (cell && cell.n !== undefined);
  const text = (cell) => (typeof cell === "number" ? formatNumber(cell) : isRight(cell) ? cell.n : cell);
  const right = titles.map((_, i) => rows.some((row) => isRight(row[i])));
  const head = titles.map((title, i) => element("th", { scope: "col", className: right[i] ? "n" : "" }, title));
  const body = rows.map((row, r) =>
    element("tr", { className: rowClass ? rowClass(r) : "" },
      ...row.map((cell, i) => element("td", { className: right[i] ? "n" : "" }, text(cell) ?? "\u2013"))));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

function scrolling(node, className) {
  return element("div", { className: "scroll wide " + (className || ""), tabIndex: 0 }, node);
}

// A <details> whose content is built when it is first opened.
function lazyDetails(title, build) {
  const details = element("details", {}, element("summary", {}, title));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(build());
  });
  return details;
}

function section(id, title, ...children) {
  document.querySelector("#sections ul").append(
    element("li", { className: id === "samples" ? "screen" : "" }, element("a", { href: "#" + id }, title)));
  const node = element("section", { id }, element("h2", {}, title), ...children);
  document.getElementById("main").append(node);
  return node;
}

const card = (...children) => element("div", { className: "card" }, ...children);

// ---- sections
// ---------------------------------------------------------------------------------------------------------

function showHeader(overview) {
  const header = overview.header;
  const rewards = header.first_reward === null ? [] :
    [["reward, first to last round", formatNumber(header.first_reward) + " \u2192 " + formatNumber(header.final_reward)]];
  const facts = [
    ["rounds trained of planned", header.num_rounds + " of " + header.num_planned_rounds],
    ...rewards,
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

function showEvaluations(overview) {
  const scores = [...overview.evaluations, ...overview.rescores];
  if (!scores.length) return;
  const rows = scores.map(({ task, version, metrics }) => {
    const value = (suffix) => metrics["eval/" + task + suffix];
    const interval = (suffix) => isNumber(value(suffix + "-ci_low"))
      ? { n: formatNumber(value(suffix + "-ci_low")) + " to " + formatNumber(value(suffix + "-ci_high")) } : null;
    return [task, { n: String(version) }, { n: formatNumber(value("")) }, interval(""), { n: formatNumber(value("-pass@1")) },
      { n: formatPercent(value("-truncated_ratio")) }, { n: formatPercent(value("-failed_ratio")) },
      { n: formatNumber(value("/response_len/mean")) }, { n: formatNumber(value("/num_prompts")) }];
  });
  const titles = ["data set", "version", "mean reward", "95 % interval", "pass@1", "truncated", "failed", "mean length", "prompts"];
  const node = section("evaluations", "Evaluations", card(scrolling(table(titles, rows))));
  if (overview.comparisons.length) node.append(comparisonCard(overview.comparisons));
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
  const energy = joules.length ? [element("p", {}, "Energy of the GPUs: " + formatNumber(metrics["cost/energy_kwh"]) + " kWh (" +
    joules.map(([stage, value]) => stage + " " + formatNumber(value) + " J").join(", ") + ").")] : [];
  const total = "The run was active for " + formatSeconds(wall) + " in " + starts + (starts === 1 ? " start" : " starts") + " and used " +
    formatNumber(metrics["cost/device_hours"]) + " device-hours, " + formatPercent(metrics["cost/idle_ratio"]) + " of them idle" +
    ("cost/money" in metrics ? ", for " + formatNumber(metrics["cost/money"]) : "") + ".";
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

// `start` calls functions of the other scripts, so it is called after all of them have run.
queueMicrotask(() => start().catch(showError));
