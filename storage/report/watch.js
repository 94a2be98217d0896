
// The page of `penstock watch`: all runs, or one run while it runs. It asks the server every few seconds while it is
// visible, and gets what is new. Text of a run is inserted only as text nodes, never as markup.

const POLL_MS = 5000, LOAD_MS = 100;
const PARAMETERS = new URLSearchParams(location.search);
const EVALUATIONS_SHOWN = 4; // data sets in the chart

const HIDDEN_AT_ZERO = ["Staleness", "Truncated and failed", "Loss"];

const PHASES = { // stage of a commit or of the driver -> [lane or group of lanes, phase]
  rollout: ["engines", "generate"], eval: ["engines", "evaluate"], step: ["trainer", "train"], train: ["trainer", "train"],
  checkpoint: ["trainer", "save"], restore: ["trainer", "restore"], publish: ["trainer", "publish"], export: ["driver", "export"], data: ["driver", "read data"],
};
const PHASE_COLOURS = { generate: "--s0", train: "--s1", publish: "--s4", evaluate: "--s3", save: "--s2", restore: "--faint", offload: "--text", other: "--soft" };
const STATES = { running: "running", silent: "no sign of life", killed: "killed", ended: "ended", waiting: "not started" };

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
const roundOf = (title) => { // or the policy version
  const match = title.match(/(?:round|version) (\d+)/);
  return match && Number(match[1]);
};
const moment = (seconds) => new Date(seconds * 1000).toLocaleDateString("sv") + " " + clock(seconds);
const ago = (seconds) => formatSeconds(Math.max(0, Math.round(seconds)));

async function ask(what, parameters) {
  const response = await fetch(what + "?" + new URLSearchParams(parameters), { cache: "no-store" });
  if (response.status === 401) throw new Error("the login has expired: open the newest link");
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error || "the server answers " + response.status);
  return answer;
}

// Calls step() now and after the pause that it returns, while the page is visible. Failures are shown and tried again.
function poll(step) {
  let timer = 0;
  const banner = element("p", { className: "error", role: "alert", hidden: true });
  document.getElementById("header").after(banner);
  const tick = async () => {
    clearTimeout(timer);
    if (document.hidden) return;
    let pause = POLL_MS;
    const start = performance.now();
    try {
      pause = await step();
      performance.measure("refresh", { start }); // for benchmarks/live_page.py
      banner.hidden = true;
    } catch (error) {
      banner.hidden = false;
      banner.textContent = error instanceof TypeError
        ? "No answer from the server, which ends with its run. `penstock watch " + (PARAMETERS.get("run") || "") + "` starts another one."
        : "The page is not up to date: " + error.message;
    }
    clearTimeout(timer);
    timer = setTimeout(tick, pause);
  };
  document.addEventListener("visibilitychange", tick);
  tick();
}

// ---- all runs ---------------------------------------------------------------------------------------------------------

async function showRuns() {
  const { runs } = await ask("api/runs", {});
  document.getElementById("main").replaceChildren(runs.length ? card(scrolling(table(
    ["run", "state", "rounds", "reward, first to last", "evaluations of versions", "started", "store"], runs.map((run) => [
      element("a", { href: "?" + new URLSearchParams({ store: run.store, run: run.run }) }, run.run),
      stateBadge(run.state), { n: run.rounds }, run.reward, run.evaluations, run.started, run.uri]))))
    : element("p", {}, "There are no runs yet. `penstock demo` makes one."));
  document.title = "Penstock runs";
  return POLL_MS;
}

const stateBadge = (state) => element("span", { className: "state " + state }, STATES[state] || state);

// ---- one run ----------------------------------------------------------------------------------------------------------

class RunPage {
  constructor() {
    this.cursor = "";
    this.curves = { round: [], metrics: {} };
    this.evaluations = [];
    this.figures = new Map();
    this.clockOffset = 0; // seconds that the server's clock is ahead
    this.colour = "logprob";
    document.getElementById("sections").append(element("ul"));
    this.now = section("now", "Now", card());
    this.grids = {};
    for (const [id, title] of [["learning", "Reward and evaluations"], ["lanes", "Lanes of the last rounds"], ["speed", "Speed and lengths"],
      ["policy", "Policy"], ["machine", "Engines and machine"], ["samples", "Newest samples"], ["messages", "Warnings and messages"]]) {
      this.grids[id] = element("div", { className: ["lanes", "samples", "messages"].includes(id) ? "" : "curves" + (id === "learning" ? " wide" : "") });
      section(id, title, this.grids[id]);
    }
    this.samplesVisible = false;
    this.samplesKey = "";
    new IntersectionObserver(([entry]) => {
      this.samplesVisible = entry.isIntersecting;
      if (this.answer) this.showSamples().catch(() => {});
    }).observe(this.grids.samples);
    setInterval(() => this.answer && this.showNow(), 1000);
  }

  async step() {
    const answer = await ask("api/run", { store: PARAMETERS.get("store") || 0, run: PARAMETERS.get("run"), since: this.cursor });
    this.clockOffset = answer.now - Date.now() / 1000;
    this.merge(answer);
    this.answer = answer;
    this.showHeader();
    this.showNow();
    this.showCharts();
    this.showLanes();
    this.showMachine();
    this.showMessages();
    await this.showSamples();
    document.documentElement.dataset.ready = answer.num_loading ? "loading" : "run";
    return answer.num_loading ? LOAD_MS : POLL_MS;
  }

  merge({ cursor, curves, charts, evaluations }) {
    const { first, round, metrics } = curves;
    const names = new Set([...Object.keys(this.curves.metrics), ...Object.keys(metrics)]);
    const before = first ? this.curves : { round: [], metrics: {} };
    const rounds = [...before.round.slice(0, first), ...round];
    const merged = {};
    for (const name of names) {
      const old = before.metrics[name] || [], added = metrics[name] || [];
      merged[name] = Array.from({ length: rounds.length }, (_, k) => (k < first ? old[k] : added[k - first]) ?? null);
    }
    this.curves = { round: rounds, metrics: merged };
    this.cursor = cursor;
    if (evaluations) this.evaluations = evaluations;
    if (charts) this.charts = charts; // [section, title, unit, {metric: label}]
  }

  serverTime() { return Date.now() / 1000 + this.clockOffset; }

  showHeader() {
    const { header, state } = this.answer;
    const { metrics } = this.curves;
    const last = (name) => (metrics[name] || []).findLast(isNumber);
    const facts = [
      ["rounds trained of planned", header.num_rounds + " of " + header.num_planned_rounds],
      ...rewardFact(header.first_reward, header.last_reward, header.num_rounds),
      ...(isNumber(last("perf/tokens_per_gpu_per_sec")) ? [[nameDevice("tokens/s generated, per device", header.on_gpus), formatNumber(last("perf/tokens_per_gpu_per_sec"))]] : []),
      ...(last("rollout/staleness/max") ? [["staleness of the newest round, mean and max", formatNumber(last("rollout/staleness/mean")) + ", " + last("rollout/staleness/max")]] : []),
      ["last checkpoint", header.last_checkpoint === null ? "none" : "version " + header.last_checkpoint],
    ];
    const parent = header.parent ? "fork of " + header.parent.run + " at round " + header.parent.at : "";
    document.title = header.run + " \u00b7 " + header.num_rounds + "/" + header.num_planned_rounds;
    document.getElementById("header").replaceChildren(
      element("p", { className: "soft" }, element("a", { href: "?" }, "All runs"), " \u00b7 " + header.store),
      element("h1", {}, header.run, " ", stateBadge(state.kind)),
      element("p", { className: "soft" }, [header.flow, header.model, parent].filter(Boolean).join(" \u00b7 ")),
      element("div", { className: "facts" }, ...facts.map(([name, value]) => element("div", { className: "fact" }, element("b", {}, value), element("span", {}, name)))));
  }

  // The running activities. If a part of a stage has begun, only the part is returned. The status may be older than the commits,
  // so a round that is committed since then has ended.
  activities() {
    const { status, stages, is_current } = this.answer;
    const all = is_current ? status.activities : [];
    const ended = ({ title, stage, since }) => stages.some(({ kind, index, end }) => kind in PHASES && PHASES[stage] &&
      PHASES[kind][1] === PHASES[stage][1] && end > since && index === roundOf(title));
    return all.filter((one) => !ended(one) && (one.total !== null ||
      !all.some((other) => other.stage === one.stage && (other.total !== null || other.since > one.since))));
  }

  // The newest numbers of requests that are "running" or "waiting", as a curve of each engine.
  engineSeries(name) {
    const { series } = this.answer.status, start = "requests/" + name + "/";
    const keys = Object.keys(series).filter((key) => key.startsWith(start)).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    return keys.map((key) => ({ label: key.slice(start.length), x: series.at, y: series[key] }));
  }

  showNow() {
    const { state, status, header, num_loading } = this.answer;
    const now = this.serverTime();
    const since = isNumber(state.since) ? " since " + clock(state.since) + " (" + ago(now - state.since) + ")" : "";
    const start = state.num_starts > 1 ? ", start " + state.num_starts : "";
    const lines = {
      running: ["Running" + since + start + ", " + state.driver + "."],
      silent: ["No new status" + since + ", although the lease of " + state.driver + " has not expired: the machine may be gone or suspended."],
      killed: ["The driver was killed; its last sign of life was at " + moment(state.since) + "."],
      ended: ["The last start has " + ({ FINISHED: "finished", FAILED: "failed", STOPPED: "been stopped" }[state.outcome] || "ended") + " at " + moment(state.since) + "."],
      waiting: ["The run has not started yet."],
    }[state.kind];
    if (["killed", "ended"].includes(state.kind) && header.num_rounds < header.num_planned_rounds) {
      lines.push("penstock resume " + header.run + " continues after " + header.num_rounds + " rounds.");
    }
    if (num_loading) lines.push("Reading " + integerFormat.format(num_loading) + " more commits \u2026");
    const rows = this.activities();
    const activities = rows.map((one) => element("div", { className: "activity" },
      element("b", {}, one.title), element("span", { className: "soft" }, "for " + ago(status.at - one.since)),
      ...(one.total ? [element("progress", { max: one.total, value: one.done }), element("span", { className: "soft" },
        integerFormat.format(one.done) + " of " + integerFormat.format(one.total) + ", " + integerFormat.format(one.total - one.done) + " waiting or running")] : [])));
    if (this.answer.is_current) {
      const depth = status.queue["rollout/queue_depth"], requests = (name) => sum(this.engineSeries(name).map(({ y }) => y.at(-1)));
      if (!rows.length) activities.push(element("div", { className: "activity" }, element("b", {}, status.phase || (requests("running") ? "the engines generate" : "between two stages"))));
      lines.push([status.engines, ...(this.engineSeries("running").length ? [requests("running") + " requests running, " + requests("waiting") + " waiting"] : []),
        ...(depth ? ["finished rounds that wait for the trainer: " + depth] : []), "as of " + ago(now - status.at) + " ago"].filter(Boolean).join(", ") + ".");
    }
    this.now.querySelector(".card").replaceChildren(...activities, ...lines.map((line) => element("p", {}, line)));
  }

  // Shows a figure in a grid: makes it, or gives it new numbers if it has the same series.
  showFigure(grid, title, unit, xTitle, series, formatX, limits) {
    const key = grid + title, labels = series.map((one) => one.label).join("\n");
    const figure = this.figures.get(key);
    if (figure && figure.labels === labels) return figure.update(series);
    const made = chart(title, unit, xTitle, series, formatX, limits);
    made.labels = labels;
    if (figure) figure.replaceWith(made); else this.grids[grid].append(made);
    this.figures.set(key, made);
  }

  showCharts() {
    const { round, metrics } = this.curves;
    for (const [grid, title, unit, all] of this.charts) {
      const series = Object.entries(all).filter(([name]) => (metrics[name] || []).some((value) => isNumber(value) && (value !== 0 || !HIDDEN_AT_ZERO.includes(title))));
      if (title === "Loss" && (metrics["rollout/raw_reward"] || []).some(isNumber)) continue; // of supervised fine-tuning
      if (series.length) this.showFigure(grid, title, unit, "round", series.map(([name, label]) => ({ label: nameDevice(label, this.answer.header.on_gpus), x: round, y: metrics[name] })));
      if (title === "Reward" && this.evaluations.length) this.showEvaluations();
    }
    for (const [id, grid] of Object.entries(this.grids)) if (id in { learning: 0, speed: 0, policy: 0 }) showEmpty(grid, "Nothing is recorded before the first round is trained.");
  }

  showEvaluations() {
    const tasks = [...new Set(this.evaluations.map((entry) => entry.task))].slice(0, EVALUATIONS_SHOWN);
    this.showFigure("learning", "Evaluation reward", "mean and 95 % interval", "policy version", tasks.map((task) => {
      const entries = this.evaluations.filter((entry) => entry.task === task);
      const of = (name) => entries.map((entry) => entry[name]);
      return { label: task, x: of("version"), y: of("mean"), low: of("low"), high: of("high"), points: true };
    }));
  }

  // ---- lanes ----------------------------------------------------------------------------------------------------------

  laneBars() {
    const { stages, status, header, is_current } = this.answer;
    const apart = status && status.lanes.some(({ group }) => group === "evaluation");
    const bar = (of, phase, index, start, end, text) => ({ of: phase === "evaluate" && apart ? ["evaluation"] : of, start, end, text,
      colour: PHASE_COLOURS[phase] || PHASE_COLOURS.other, label: phase + (index === null ? "" : " " + index) });
    const bars = stages.map(({ kind, index, task, start, end }) => {
      const [lane, phase] = kind === "rollout" && header.flow === "sft" ? PHASES.data : PHASES[kind];
      return bar([lane], phase, index, start, end, phase + (task ? " " + task : "") + ((kind === "rollout" || kind === "step") ? " round " : " version ") + index);
    });
    for (const { lanes, phase, index, start, end } of status ? status.phases : []) {
      const name = /: (offload|onload|release|resume)/.test(phase) ? "offload" : phase;
      bars.push({ ...bar(lanes, name, index, start, end, phase + (index === null ? "" : " version " + index)), over: true });
    }
    const running = (...of) => bars.push({ ...bar(...of), pale: true });
    for (const { title, stage, since } of this.activities()) {
      const [lane, phase] = PHASES[stage] || ["driver", stage];
      running([lane], phase, roundOf(title), since, Math.max(since, status.at), title + " (running)");
    }
    for (const { name, starting_since: since } of is_current ? status.lanes : []) {
      if (since) running([name], "start", null, since, status.at, "start (running)");
    }
    const rounds = stages.filter(({ kind }) => kind === "rollout" || kind === "step").map(({ start }) => start);
    const first = rounds.length ? Math.min(...rounds) : -Infinity;
    return bars.filter((one) => one.end >= first).sort((a, b) => a.start - b.start);
  }

  // The lanes of the processes that the status names; where it names none, one for all engines or for the trainer.
  laneRows(bars) {
    const known = this.answer.status ? this.answer.status.lanes : [];
    const isMissing = (group) => bars.some(({ of }) => of.includes(group)) && !known.some((lane) => lane.group === group);
    return [...known, ...["engines", "trainer"].filter(isMissing).map((group) => ({ name: group, group, devices: "" })), { name: "driver", devices: "" }];
  }

  showLanes() {
    const { header, status, is_current } = this.answer, all = this.laneBars(), rows = this.laneRows(all);
    const bars = all.flatMap((bar) => rows.flatMap(({ name, group }, lane) => (bar.of.includes(name) || bar.of.includes(group) ? [{ ...bar, lane, name }] : [])));
    const names = rows.map(({ name, devices }) => (devices ? name + "\n" + devices : name));
    if (!this.lanes || this.lanes.names !== names.join()) {
      this.lanes = lanes(names, "Lanes of engines, trainer and driver", clock,
        ({ name, text, start, end }) => name + ": " + text + ", " + clock(start) + " to " + clock(end) + " (" + formatSeconds(end - start) + ")");
      this.lanes.names = names.join();
      const legend = Object.entries(PHASE_COLOURS).map(([name, of]) => {
        const box = element("i", { className: "box" });
        box.style.color = "var(" + of + ")";
        return element("span", {}, box, name);
      });
      this.lanesNote = element("p", { className: "soft" });
      this.grids.lanes.replaceChildren(card(element("div", { className: "legend" }, ...legend, element("span", {}, "empty: idle or waiting")), this.lanes, this.lanesNote));
    }
    const now = is_current ? this.serverTime() : Math.max(...bars.map((one) => one.end), 1);
    const start = Math.min(...bars.map((one) => one.start), now - 1);
    this.lanes.update(bars, is_current ? [{ start: status.at, end: now }] : [], [start, now]);
    const sharing = !rows.some(({ devices }) => devices.includes("GPU")) ? "" : header.colocated ? "Engines and trainer share their GPUs and take turns. " : "Engines and trainer have GPUs of their own. ";
    this.lanesNote.textContent = sharing + "The ranks of the trainer do everything together and have one lane." +
      (is_current ? " Pale bars are running; what has happened in the grey time is not known yet." : "");
  }

  // ---- machine, messages, samples -------------------------------------------------------------------------------------

  showMachine() {
    const shown = this.answer.status ? this.answer.status.series : {}, x = shown.at || [];
    const gpus = [...new Set(Object.keys(shown).filter((name) => name.startsWith("system/gpu_")).map((name) => name.split("_")[1]))];
    const of = (name, scale) => (shown[name] || []).map((value) => (isNumber(value) ? value / scale : null));
    const ofGpus = (end, scale) => spread(gpus.map((gpu) => ({ label: "GPU " + gpu, x, y: of("system/gpu_" + gpu + end, scale) })), "GPUs");
    for (const [title, unit, series, most] of x.length ? [
      ["Requests that run", "of each engine", spread(this.engineSeries("running"), "engines")],
      ["Requests that wait", "of each engine", spread(this.engineSeries("waiting"), "engines")],
      ["CPU", "percent of all cores", [{ label: "CPU", x, y: of("system/cpu_utilization_percentage", 1) }], 100],
      ["Memory", "GB", [{ label: "used", x, y: of("system/system_memory_usage_megabytes", 1000) }]],
      ["GPU use", "percent", ofGpus("_utilization_percentage", 1), 100],
      ["GPU memory", "GB", ofGpus("_memory_usage_megabytes", 1000)],
    ] : []) {
      if (series.some(({ y }) => y.some(isNumber))) this.showFigure("machine", title, unit, "time", series, clock, [0, most]);
    }
    showEmpty(this.grids.machine, "Shown when the run runs.");
  }

  showMessages() {
    const messages = this.answer.status ? this.answer.status.messages : [];
    const key = JSON.stringify(messages);
    if (key === this.messagesKey) return;
    this.messagesKey = key;
    const rows = (level) => messages.filter((message) => message.level === level).reverse().map(({ at, text }) =>
      element("li", {}, element("span", { className: "soft" }, clock(at) + "  "), text));
    const [warnings, notes] = [rows("warning"), rows("info")];
    this.grids.messages.replaceChildren(card(
      ...(warnings.length ? [element("ul", { className: "warnings" }, ...warnings)] : [element("p", {}, "No warnings.")]),
      ...(notes.length ? [element("details", { open: !warnings.length }, element("summary", {}, "Newest messages of the driver"), element("ul", {}, ...notes))] : [])));
  }

  async showSamples() {
    const { header } = this.answer;
    const key = header.newest_rollout + " " + header.newest_is_trained;
    if (header.newest_rollout === null) return showEmpty(this.grids.samples, "The first samples are shown when the first rollout is committed.");
    if (!this.samplesVisible || key === this.samplesKey) return;
    const answer = await ask("api/samples", { store: PARAMETERS.get("store") || 0, run: PARAMETERS.get("run") });
    this.samplesKey = key;
    const { index, page, token_texts: texts, statuses, pictures } = answer;
    const graded = index.reward.some(isNumber);
    const view = { colour: this.colour, samples: { token_texts: texts }, paints: [] };
    const cards = index.reward.map((reward, i) => {
      const at = (name) => (page[name] ? page[name][i] : null);
      const sample = Object.fromEntries(["tokens", "mask", "logprobs", "gaps", "advantages", "versions", "spans", "images", "id"].map((name) => [name, at(name)]));
      const best = i < Math.ceil(index.reward.length / 2);
      return card(element("h3", {}, graded ? (best ? "among the best" : "among the worst") + ": reward " + formatNumber(reward) : "sample " + (i + 1)),
        element("p", { className: "soft" }, [at("id"), statuses[index.status[i]], index.length[i] + " tokens trained", at("label") ? "label " + at("label") : ""].filter(Boolean).join(" \u00b7 ")),
        imageRow(sample, pictures), tokenView(view, sample));
    });
    const select = element("select", { onchange: () => {
      view.colour = this.colour = select.value;
      view.paints.forEach(({ paint }) => paint());
    } }, ...[...new Map(view.paints.flatMap(({ modes }) => modes))].map(([name, title]) => element("option", { value: name }, title)));
    select.value = view.colour;
    this.grids.samples.replaceChildren(element("p", { className: "soft" }, "Round " + answer.round + ": " +
      (graded ? "the highest and the lowest rewards of " : "the first of ") + integerFormat.format(answer.num_samples) + " samples."), element("div", { className: "controls" }, element("label", {}, "colour of the tokens", select)),
      element("div", { className: "samples" }, ...cards));
  }
}

const sum = (values) => values.reduce((a, b) => a + b, 0);

// The curves of some GPUs or engines; of more than four the lowest, the mean and the highest value.
function spread(curves, what) {
  if (curves.length <= 4) return curves;
  const { x } = curves[0];
  const at = (k) => curves.map(({ y }) => y[k]).filter(isNumber);
  const fold = (label, of) => ({ label, x, y: x.map((_, k) => (at(k).length ? of(at(k)) : null)) });
  return [fold("lowest", (values) => Math.min(...values)), fold("mean of " + curves.length + " " + what, (values) => sum(values) / values.length),
    fold("highest", (values) => Math.max(...values))];
}

function showEmpty(grid, text) {
  const empty = grid.querySelector(":scope > .empty");
  if (empty && grid.children.length > 1) empty.remove();
  if (!grid.children.length) grid.append(element("p", { className: "soft empty" }, text));
}

if (PARAMETERS.get("run")) {
  const page = new RunPage();
  poll(() => page.step());
} else {
  poll(showRuns);
}
