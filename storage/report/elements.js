
"use strict";
// What the pages share: elements, formatting, tables. Text of a run is inserted only as text nodes, never as markup.

// uPlot formats with the browser's language, which is invalid under a POSIX locale ("en-US@posix").
try {
  Intl.getCanonicalLocales(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}

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

// ---- formatting -------------------------------------------------------------------------------------------------------

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function formatNumber(value) {
  if (value === null || value === undefined) return "\u2013";
  if (!isNumber(value)) return String(value); // "NaN", "Infinity"
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(2);
  return (Math.abs(value) >= 1e4 ? integerFormat : numberFormat).format(value).replace("-", "\u2212");
}

// A device is a GPU; in a run without GPUs, an engine process.
const nameDevice = (label, onGpus) => label.replace("per device", onGpus ? "per GPU" : "per engine process");

// Name and value of the reward of the trained rounds; nothing without one.
function rewardFact(first, last, numRounds) {
  if (first === null) return [];
  return [numRounds > 1 ? ["reward, trained rounds 0 to " + (numRounds - 1), formatNumber(first) + " \u2192 " + formatNumber(last)]
    : ["reward, trained round 0", formatNumber(first)]];
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

// ---- building blocks --------------------------------------------------------------------------------------------------

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

// The thumbnails of a sample's images, or the sentences that say why there are none; nothing without images.
function imageRow({ id, images }, pictures) {
  const picture = (name, k) => {
    const found = pictures[name] || "This image is not in the page.", title = "image " + (k + 1) + " of sample " + id + ", blobs/" + name;
    const is_shown = /^data:image\/(png|jpeg);base64,/.test(found);
    return is_shown ? element("img", { src: found, alt: title, title }) : element("p", { className: "soft", title }, found);
  };
  return images ? element("div", { className: "pictures" }, ...images.map(picture)) : null;
}

const card = (...children) => element("div", { className: "card" }, ...children);
