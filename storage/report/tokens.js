
// One sample, token by token: blocks of equal loss mask, a colour for each token, a read-out for mouse and keyboard.

const TOKENS_SHOWN = 4000, HEAT_NATS = 3;
const SIGNED = { gap: 0.1, advantage: 2 }; // colour of a token by a signed number -> the number of the strongest colour

// Expands the columns of a sample: one entry per token with its segment (0 = before the first trained token).
function expandTokens({ tokens, mask, logprobs, gaps, advantages, versions, spans }) {
  const out = [];
  let trained = 0;
  const at = (values, k) => (values && values.length ? values[values.length === 1 ? 0 : k] : null); // one for all, or one each
  mask.forEach((length, segment) => {
    for (let k = 0; k < length; k++) {
      const isTrained = segment % 2 === 1;
      out.push({ id: tokens[out.length], segment, trained: isTrained, logprob: isTrained ? at(logprobs, trained) : null,
        gap: isTrained ? at(gaps, trained) : null, advantage: isTrained ? at(advantages, trained) : null,
        version: isTrained && versions && versions[0] >= 0 && versions[0] === versions[1] ? versions[0] : null });
      trained += isTrained;
    }
  });
  if (spans) assignVersions(out.filter((token) => token.trained), spans);
  return out;
}

// Spans are [policy version, number of tokens]. They also count tokens that were masked later, which are the first ones.
function assignVersions(trained, spans) {
  const flat = spans.flatMap(([version, count]) => Array(count).fill(version));
  const masked = flat.length - trained.length;
  trained.forEach((token, k) => { token.version = flat[masked + k] ?? null; });
}

function tokenView(view, sample) {
  const tokens = expandTokens(sample);
  const modes = [["logprob", "rollout log-prob"], ["gap", "gap: log-prob of the trainer minus rollout"], ["advantage", "advantage"],
    ["mask", "loss mask"], ["version", "policy version"]]
    .filter(([name]) => name === "mask" || tokens.some((token) => token[name] !== null));
  if (!modes.some(([name]) => name === view.colour)) view.colour = modes[0][0];
  const select = element("select", { id: "colour", onchange: () => { view.colour = select.value; paint(); } },
    ...modes.map(([name, title]) => element("option", { value: name }, title)));
  select.value = view.colour;
  const readout = element("p", { className: "readout", role: "status" }, "Point at a token, or use the arrow keys.");
  const key = element("p", {});
  const box = element("div", { className: "tokens", tabIndex: 0, "aria-label": "Tokens" });
  const spans = [];
  const paint = () => {
    spans.forEach((span, k) => { span.style.backgroundColor = tokenColour(tokens[k], view.colour); });
    key.replaceChildren(...colourKey(view.colour, tokens));
  };
  const fill = (limit) => {
    spans.length = 0;
    box.replaceChildren(...segments(tokens.slice(0, limit), view.samples.token_texts, spans));
    if (tokens.length > limit) {
      box.append(element("button", { type: "button", onclick: () => fill(Infinity) }, "Show all " + tokens.length + " tokens"));
    }
    paint();
  };
  if (view.paints) view.paints.push({ modes, paint }); // one choice of the colour for several samples
  readTokens(box, spans, (k) => { readout.textContent = describeToken(tokens[k], k); });
  fill(TOKENS_SHOWN);
  const heading = view.paints ? [] : [element("h3", {}, "Tokens"), element("div", { className: "controls" }, element("label", {}, "colour", select))];
  return element("div", {}, ...heading, key, readout, box);
}

// Tokens in blocks of equal loss mask: the prompt, then turns of the model and, between them, of tools or environment.
function segments(tokens, texts, spans) {
  const blocks = [];
  let last = -1;
  for (const token of tokens) {
    if (token.segment !== last) {
      last = token.segment;
      const title = token.trained ? "model, turn " + (token.segment + 1) / 2 : token.segment ? "not trained (tool or environment)" : "prompt";
      blocks.push(element("span", { className: "segment" + (token.trained ? " model" : "") }, element("small", { className: "soft" }, title)));
    }
    const text = texts[token.id];
    const span = text === undefined
      ? element("span", { className: "token id", title: "the tokenizer has no text for the id " + token.id }, "#" + token.id)
      : element("span", { className: "token" }, text);
    span.dataset.at = spans.length;
    spans.push(span);
    blocks.at(-1).append(span);
  }
  return blocks;
}

function readTokens(box, spans, show) {
  let at = -1;
  const choose = (next) => {
    if (!spans.length) return;
    if (spans[at]) spans[at].classList.remove("at");
    at = Math.max(0, Math.min(spans.length - 1, next));
    spans[at].classList.add("at");
    show(at);
  };
  box.addEventListener("pointerover", (event) => { if (event.target.dataset.at) choose(Number(event.target.dataset.at)); });
  box.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    choose(at + by);
  });
}

function describeToken(token, position) {
  const parts = ["token " + position, "id " + token.id, token.trained ? "loss mask 1" : "loss mask 0"];
  if (token.logprob !== null) parts.push("log-prob " + formatNumber(token.logprob) + " (probability " + formatPercent(Math.exp(token.logprob)) + ")");
  if (token.gap !== null) parts.push("gap " + formatNumber(token.gap));
  if (token.advantage !== null) parts.push("advantage " + formatNumber(token.advantage));
  if (token.version !== null) parts.push("policy version " + token.version);
  return parts.join(", ");
}

const mix = (colour, share) => "color-mix(in srgb, var(" + colour + ") " + Math.round(100 * share) + "%, transparent)";

function tokenColour(token, mode) {
  if (mode === "mask") return token.trained ? mix("--s0", 0.3) : "transparent";
  if (mode === "version") return token.version === null ? "transparent" : mix("--s" + (token.version % 5), 0.3);
  if (mode in SIGNED) return isNumber(token[mode]) ? mix(token[mode] < 0 ? "--s1" : "--s0", 0.6 * Math.min(1, Math.abs(token[mode]) / SIGNED[mode])) : "transparent";
  return isNumber(token.logprob) ? mix("--heat", 0.75 * Math.min(1, -token.logprob / HEAT_NATS)) : "transparent";
}

function colourKey(mode, tokens) {
  const entry = (colour, text) => {
    const box = element("i");
    box.style.backgroundColor = colour;
    return element("span", { className: "key" }, box, text);
  };
  if (mode === "mask") return [entry(mix("--s0", 0.3), "1: trained"), entry("transparent", "0: not trained")];
  if (mode === "version") {
    const versions = [...new Set(tokens.map((token) => token.version))].filter((version) => version !== null);
    return versions.map((version) => entry(mix("--s" + (version % 5), 0.3), "version " + version));
  }
  if (mode in SIGNED) {
    const most = SIGNED[mode];
    return [-most, -most / 2, 0, most / 2, most].map((value) => entry(tokenColour({ [mode]: value }, mode),
      formatNumber(value) + (Math.abs(value) < most ? "" : value < 0 ? " or less" : " or more")));
  }
  return [0, 1, 2, HEAT_NATS].map((nats) => entry(mix("--heat", (0.75 * nats) / HEAT_NATS), nats ? "\u2212" + nats + (nats === HEAT_NATS ? " or less" : "") : "0"));
}
