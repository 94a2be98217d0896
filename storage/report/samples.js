
// The sample browser. The index has one number per sample and field; texts and tokens are in pages, which are decoded
// when a row of them is shown or searched.

const ROWS_SHOWN = 25, PAGES_CACHED = 12;

class Samples {
  constructor(data, summary) {
    Object.assign(this, data);
    this.summary = summary;
    this.size = this.index.round.length;
    this.pages = new Map(); // number -> promise of the decoded page, least recently used first
  }

  page(number) {
    const page = this.pages.get(number) || decode("page-" + number);
    this.pages.delete(number);
    this.pages.set(number, page);
    if (this.pages.size > PAGES_CACHED) this.pages.delete(this.pages.keys().next().value);
    return page;
  }

  pageOf(i) {
    const after = this.page_starts.findIndex((start) => start > i);
    return after < 0 ? this.page_starts.length - 1 : after - 1;
  }

  async texts(i) {
    const number = this.pageOf(i);
    const page = await this.page(number);
    const k = i - this.page_starts[number];
    const at = (name) => (page[name] ? page[name][k] : null);
    return { id: at("id"), prompt: page.prompts[page.prompt[k]], response: at("response"), label: at("label") || "", tokens: at("tokens"),
      mask: at("mask"), logprobs: at("logprobs"), gaps: at("gaps"), advantages: at("advantages"), versions: at("versions"), spans: at("spans"), rewards: at("rewards"), metadata: at("metadata"), images: at("images") };
  }

  // The samples that match all numeric conditions.
  select({ set, round, toRound, status, low, high, prompt }) {
    const { index } = this;
    const found = [];
    for (let i = 0; i < this.size; i++) {
      const reward = index.reward[i];
      if (index.set[i] !== set || (round !== null && index.round[i] < round) || (toRound !== null && index.round[i] > toRound)) continue;
      if ((status >= 0 && index.status[i] !== status) || (prompt !== null && index.prompt[i] !== prompt)) continue;
      if ((low !== null && !(reward !== null && reward >= low)) || (high !== null && !(reward !== null && reward <= high))) continue;
      found.push(i);
    }
    return found;
  }

  // Those whose prompt, response or label contains `text`, without regard to case; null if `isStale()`.
  async search(found, text, isStale, report) {
    const wanted = text.toLowerCase();
    const out = [];
    let last = -1;
    for (const i of found) {
      const number = this.pageOf(i);
      if (number !== last) {
        last = number;
        report(number);
        await this.page(number);
        if (isStale()) return null;
      }
      const sample = await this.texts(i);
      if ([sample.prompt, sample.response, sample.label].some((part) => part.toLowerCase().includes(wanted))) out.push(i);
    }
    return isStale() ? null : out;
  }
}

async function showSamples(node, summary) {
  if (!summary.num_shown) {
    node.append(element("p", {}, "This run has no samples yet."));
    return;
  }
  const samples = new Samples(await decode("samples"), summary);
  const view = { samples, filter: null, found: [], start: 0, current: -1, colour: "logprob", searches: 0 };
  const all = summary.num_shown === summary.num_total;
  const counts = [summary.num_shown, summary.num_total].map((count) => integerFormat.format(count));
  const reason = summary.limited_by === "tokens" ? ", so that the page stays small" : "";
  view.controls = filterControls(view);
  view.status = element("p", { className: "soft", role: "status" });
  view.list = element("ul", { className: "list scroll" });
  view.detail = element("div", { className: "card", tabIndex: -1 });
  node.append(element("p", { className: "soft", id: "selection" }, all ? "All " + counts[0] + " samples." :
      counts[0] + " of " + counts[1] + " samples, selected with seed " + summary.seed + reason + ": whole groups, spread over all rounds."),
    view.controls.node, view.status,
    element("div", { className: "columns" }, element("div", { className: "card" }, listButtons(view), view.list), view.detail));
  await applyFilter(view);
}

// ---- filter -----------------------------------------------------------------------------------------------------------

function filterControls(view) {
  const { samples } = view;
  const later = () => { clearTimeout(view.timer); view.timer = setTimeout(() => applyFilter(view), 250); };
  const number = (name, step) => element("input", { type: "number", id: "filter-" + name, step, oninput: later });
  const inputs = {
    set: element("select", { id: "filter-set", onchange: () => applyFilter(view) }, ...samples.sets.map((name, i) =>
      element("option", { value: i }, i ? "evaluation " + name : "training rollouts"))),
    round: number("round", 1), toRound: number("to-round", 1), low: number("low", "any"), high: number("high", "any"),
    status: element("select", { id: "filter-status", onchange: () => applyFilter(view) }, element("option", { value: -1 }, "any"),
      ...samples.statuses.map((name, i) => element("option", { value: i }, name))),
    text: element("input", { type: "search", id: "filter-text", placeholder: "prompt, response or label", oninput: later }),
    prompt: null,
  };
  const step = (by) => () => {
    const rounds = [...new Set(samples.select({ ...noFilter, set: Number(inputs.set.value) }).map((i) => samples.index.round[i]))];
    const now = rounds.indexOf(Number(inputs.round.value || NaN));
    const next = rounds[now < 0 ? (by > 0 ? 0 : rounds.length - 1) : Math.max(0, Math.min(rounds.length - 1, now + by))];
    inputs.round.value = inputs.toRound.value = next;
    applyFilter(view);
  };
  const reset = () => {
    for (const name of ["round", "toRound", "low", "high", "text"]) inputs[name].value = "";
    [inputs.status.value, inputs.prompt] = [-1, null];
    applyFilter(view);
  };
  const labels = { set: "samples of", round: "from round", toRound: "to round", low: "reward from", high: "to", status: "status", text: "text" };
  const node = element("div", { className: "controls" },
    ...Object.entries(labels).map(([name, title]) => element("label", {}, title, inputs[name])),
    element("button", { type: "button", id: "previous-round", onclick: step(-1) }, "\u2190 round"),
    element("button", { type: "button", id: "next-round", onclick: step(1) }, "round \u2192"),
    element("button", { type: "button", id: "reset", onclick: reset }, "Reset"));
  return { node, inputs };
}

const noFilter = { set: 0, round: null, toRound: null, status: -1, low: null, high: null, prompt: null };

function readFilter({ inputs }) {
  const value = (name) => (inputs[name].value === "" ? null : Number(inputs[name].value));
  return { set: Number(inputs.set.value), round: value("round"), toRound: value("toRound"), low: value("low"), high: value("high"),
    status: Number(inputs.status.value), prompt: inputs.prompt, text: inputs.text.value.trim() };
}

async function applyFilter(view) {
  clearTimeout(view.timer);
  const search = ++view.searches;
  const filter = readFilter(view.controls);
  let found = view.samples.select(filter);
  if (filter.text) {
    const report = (page) => { view.status.textContent = "Searching page " + (page + 1) + " of " + view.samples.page_starts.length + " \u2026"; };
    found = await view.samples.search(found, filter.text, () => search !== view.searches, report);
    if (found === null) return; // a newer search has started
  }
  Object.assign(view, { filter, found, start: 0 });
  const only = filter.prompt === null ? "" : " of prompt " + filter.prompt;
  view.status.textContent = integerFormat.format(found.length) + (found.length === 1 ? " sample" : " samples") + only + meanReward(view, found) + ".";
  await showList(view);
  if (found.length) await showDetail(view, 0); else view.detail.replaceChildren(element("p", { className: "soft" }, "No sample matches."));
}

function meanReward({ samples }, found) {
  const rewards = found.map((i) => samples.index.reward[i]).filter(isNumber);
  return rewards.length ? ", mean reward " + formatNumber(rewards.reduce((a, b) => a + b, 0) / rewards.length) : "";
}

// ---- list -------------------------------------------------------------------------------------------------------------

function listButtons(view) {
  const move = (by) => () => {
    view.start = Math.max(0, Math.min(view.found.length - 1, view.start + by));
    showList(view);
  };
  view.position = element("span", { className: "soft" });
  view.buttons = [-ROWS_SHOWN, ROWS_SHOWN].map((by) => element("button", { type: "button", onclick: move(by) }, by < 0 ? "\u2190 page" : "page \u2192"));
  return element("div", { className: "controls" }, ...view.buttons, view.position);
}

async function showList(view) {
  const shown = view.found.slice(view.start, view.start + ROWS_SHOWN);
  const rows = await Promise.all(shown.map(async (i, k) => listRow(view, i, view.start + k, await view.samples.texts(i))));
  view.list.replaceChildren(...rows.map((row) => element("li", {}, row)));
  view.position.textContent = shown.length ? view.start + 1 + "\u2013" + (view.start + shown.length) + " of " + integerFormat.format(view.found.length) : "";
  view.buttons[0].disabled = view.start === 0;
  view.buttons[1].disabled = view.start + ROWS_SHOWN >= view.found.length;
}

function listRow(view, i, position, sample) {
  const { index, statuses } = view.samples;
  const what = index.set[i] ? "version " : "round ";
  return element("button", { type: "button", "data-sample": i, "aria-current": String(i === view.current), onclick: () => chooseRow(view, position) },
    element("span", { className: "line" }, element("b", {}, formatNumber(index.reward[i])), element("span", {}, what + index.round[i]),
      element("span", {}, "prompt " + index.prompt[i]), element("span", {}, statuses[index.status[i]]), element("span", {}, index.length[i] + " tokens")),
    element("span", { className: "preview mono soft" }, shorten(sample.prompt)),
    element("span", { className: "preview mono" }, shorten(sample.response)));
}

// The beginning of a text and, of a long one, its end, where the answer is.
function shorten(text) {
  return text.length <= 160 ? text : text.slice(0, 80) + " \u2026 " + text.slice(-78);
}

// On a narrow screen the detail is below the list: scroll to it.
async function chooseRow(view, position) {
  await showDetail(view, position);
  if (view.detail.offsetLeft === view.list.parentElement.offsetLeft) view.detail.scrollIntoView();
}

// ---- detail -----------------------------------------------------------------------------------------------------------

async function showDetail(view, position) {
  const i = view.found[position];
  view.current = i;
  const sample = await view.samples.texts(i);
  if (sample.images) view.pictures = view.pictures || (await decode("pictures"));
  if (view.current !== i) return; // another sample was chosen while this page was decoded
  view.list.querySelectorAll("button").forEach((row) => row.setAttribute("aria-current", String(Number(row.dataset.sample) === i)));
  const { index, statuses } = view.samples;
  const move = (by, title) => element("button", { type: "button", disabled: !(position + by in view.found),
    onclick: () => showDetail(view, position + by) }, title);
  const rewards = Object.entries(sample.rewards || {}).map(([name, value]) => name + " " + formatNumber(value)).join(", ");
  const [oldest, newest] = sample.versions || [-1, -1];
  const terms = [
    ["sample", sample.id], [index.set[i] ? "evaluated version" : "round", String(index.round[i])],
    ["reward", formatNumber(index.reward[i]) + (rewards ? " (" + rewards + ")" : "")], ["status", statuses[index.status[i]]],
    ["policy version", oldest < 0 ? "not generated by a policy" : oldest === newest ? String(oldest) : oldest + " to " + newest],
    ["tokens", index.length[i] + " trained of " + sample.tokens.length + ", prompt included"],
    ...(sample.label ? [["label", sample.label]] : []),
  ];
  view.detail.replaceChildren(
    element("div", { className: "controls" }, move(-1, "\u2190 sample"), move(1, "sample \u2192"),
      element("button", { type: "button", id: "same-prompt", onclick: () => showSamePrompt(view, i) }, "This prompt in all rounds")),
    element("dl", {}, ...terms.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])),
    element("h3", {}, "Prompt"), element("div", { className: "text" }, sample.prompt),
    imageRow(sample, view.pictures),
    element("h3", {}, "Response"), element("div", { className: "text" }, sample.response || "(empty)"),
    tokenView(view, sample), promptHistory(view, i),
    ...(sample.metadata ? [element("details", {}, element("summary", {}, "Metadata"), element("div", { className: "text" }, sample.metadata))] : []));
}

function showSamePrompt(view, i) {
  const { inputs } = view.controls;
  for (const name of ["round", "toRound", "low", "high", "text"]) inputs[name].value = "";
  inputs.status.value = -1;
  inputs.prompt = view.samples.index.prompt[i];
  return applyFilter(view);
}

// The rewards of the samples of one prompt, by round.
function promptHistory(view, i) {
  const { index } = view.samples;
  const rounds = new Map();
  for (const k of view.samples.select({ ...noFilter, set: index.set[i], prompt: index.prompt[i] })) {
    rounds.set(index.round[k], [...(rounds.get(index.round[k]) || []), index.reward[k]]);
  }
  const rows = [...rounds].map(([round, rewards]) => {
    const graded = rewards.filter(isNumber);
    return [{ n: String(round) }, { n: String(rewards.length) },
      { n: graded.length ? formatNumber(graded.reduce((a, b) => a + b, 0) / graded.length) : "\u2013" },
      rewards.slice(0, 16).map(formatNumber).join(" ") + (rewards.length > 16 ? " \u2026" : "")];
  });
  return element("div", { id: "history" }, element("h3", {}, "Prompt " + index.prompt[i] + " over the run"),
    scrolling(table([index.set[i] ? "version" : "round", "samples", "mean reward", "rewards"], rows)));
}
