// The playground: a setting, the controls that change it, and what the server made of it.
//
// lab.setting is what `Setting` in setting.py is, with its defaults filled in; lab.head is the first
// line of the answer: figures and problems of the sides. The explorer draws the runs.

const lab = { course: "", setting: null, data: null, head: null, isAsked: false, isDue: false, told: "", drag: null };
const LATE_MS = 300;
const NUMBERS = { arrival: "at, s", prompt: "prompt", output: "output", priority: "priority", shared: "shared" };
const DICE = { count: ["how many", 12], rate: ["a second", 1], seed: ["seed", 0], prompt: ["prompt", 16], prompt_to: ["to", 128], output: ["output", 16], output_to: ["to", 128] };

async function runPart() {
  lab.data = JSON.parse(byId("play-data").textContent);
  const presets = lab.data.presets.map(({ question }, index) => [index, question]);
  byId("play-preset").replaceChildren(...options([["", "one of your own"], ...presets]));
  const dice = Object.entries(DICE).map(([name, [title, value]]) => el("label", `${title} `, el("input", { type: "number", name, value, min: 0, step: "any" })));
  byId("play-dice").replaceChildren(...dice, el("button", "take these"));
  byId("axis").value = state.axis = "seconds";
  connectPlay();
  beginAsking();
  await openLink(location.hash);
  if (lab.data.own) await watchOwn();
}

// --- asking, by ask.js -----------------------------------------------------------------------------

const showProblems = (lines) => Object.assign(byId("play-problem"), { hidden: !lines.length, textContent: lines.join("\n") });
const tellError = (error) => showProblems([error.message]);

// While one answer is on its way, further changes wait and become one question. Until the answer to
// the last is there, figures and runs are those of another setting, and look so.
async function recompute() {
  lab.isDue = true;
  if (lab.isAsked) return;
  for (lab.isAsked = true; lab.isDue; ) {
    lab.isDue = false;
    document.body.classList.add("stale");
    const isLate = setTimeout(() => (byId("play-busy").textContent = busyWords()), LATE_MS);
    const isShown = await ask("/run", lab.setting).then(showAnswer).catch(tellError);
    clearTimeout(isLate);
    byId("play-busy").textContent = "";
    document.body.classList.toggle("stale", lab.isDue || isShown !== true);
  }
  lab.isAsked = false;
}

function showAnswer(text) {
  const [first, ...lines] = text.split("\n");
  lab.head = JSON.parse(first);
  const { sides, formula, link } = lab.head;
  const runs = sides.map(({ label, budget, records }) => runOf({ label, budget }, lines.splice(0, records)));
  const isRefused = sides.some(({ records }) => !records);
  const isKept = isRefused && filled().length > 0; // the last run, greyed, until the value is mended
  if (!isKept) showRuns(runs.filter((run) => run.records.length));
  const told = sides.filter((side) => side.problem).map(({ label, problem, where, step }) =>
    `${label}${step === null ? "" : `, step ${step}`}: ${problem}${where && `\n    ${where}`}`);
  const broken = isKept ? null : runs.find((run, index) => sides[index].problem && run.records.length);
  if (broken && lab.told !== told.join("\n")) moveTo(stepBegin(broken, broken.records.length - 1, state.axis));
  showProblems(told);
  lab.told = told.join("\n");
  if (!isKept) drawFigures(sides);
  byId("play-formula").textContent = formula;
  clearTimeout(lab.timer); // a browser refuses hundreds of addresses a second
  if (!lab.course) lab.timer = setTimeout(() => history.replaceState(null, "", link), 300);
  return !isKept;
}

// --- opening, changing, saving ---------------------------------------------------------------------

async function openLink(link) {
  if (link.length < 2 || lab.course) return lab.data.own ? openSetting(lab.data.own_setting, "") : openSetting(lab.data.presets[0], 0);
  const text = await ask("/run", link).catch((error) => error);
  if (typeof text === "string") return openSetting(JSON.parse(text.split("\n", 1)[0]).setting, "");
  await openSetting(lab.data.presets[0], 0);
  tellError(text);
}

// With its defaults filled in.
function wholeSetting(given) {
  const { requests, sides, ...rest } = structuredClone(given);
  return {
    machine: "laptop", layers: "", question: "", answer: "", shows: [], ...rest,
    requests: requests.map((each) => ({ ...lab.data.request, ...each })),
    sides: sides.map((each) => ({ engine: "m4_prefix_chunked", fields: {}, ...each })),
  };
}

function openSetting(given, index) {
  lab.setting = wholeSetting(given);
  lab.began = "";
  const [one, other = one] = lab.setting.sides.map(({ fields }) => fields);
  const chosen = Object.keys({ ...one, ...other });
  const differ = chosen.filter((name) => one[name] !== other[name]); // what it is about
  lab.first = [...new Set(["engine", ...differ, ...Object.keys(lab.data.engines.m1_single.defaults), ...chosen])];
  byId("play-preset").value = index;
  byId("play-tell").setAttribute("aria-expanded", false);
  return changed();
}

// What was asked of a preset, and how its figures compare, need not hold for what the reader makes of it.
function becomeOnesOwn() {
  if (lab.setting.question) lab.began = `It began as: ${lab.setting.question}`;
  Object.assign(lab.setting, { question: "", answer: "", shows: [] });
  byId("play-preset").value = "";
}

// After every change but those amid a drag. What had the focus has it again, at the same request.
function changed() {
  const [name, of] = document.activeElement?.dataset?.focus?.split(":") ?? [];
  const request = lab.setting.requests[Number(of)];
  const { question, answer, sides } = lab.setting;
  const isTold = byId("play-tell").getAttribute("aria-expanded") === "true";
  const hint = answer ? "The figures with ▸ hold the answer." : "Drag requests, change fields, and see what becomes of the run.";
  byId("play-question").textContent = byId("play-preset").value ? "" : question || lab.began;
  byId("play-answer").textContent = isTold ? answer : hint;
  byId("play-tell").hidden = !answer;
  byId("play-dice").hidden = byId("play-random").getAttribute("aria-expanded") !== "true";
  byId("play-beside").setAttribute("aria-pressed", sides.length > 1);
  for (const button of document.querySelectorAll('[data-side="1"]')) button.hidden = sides.length < 2;
  drawRequests();
  drawSides();
  const index = lab.setting.requests.indexOf(request); // they are sorted by arrival
  if (name) document.querySelector(`[data-focus="${name}:${index < 0 ? of : index}"]`)?.focus();
  return recompute();
}

async function save({ save: what, side = 0 }) {
  const setting = { ...lab.setting, sides: lab.setting.sides.slice(Number(side)) };
  const text = what === "preset" ? `${JSON.stringify(lab.setting, null, 1)}\n` : await ask(`/${what}`, setting);
  const name = { preset: "playground.json", trace: "playground.jsonl" }[what];
  download(name, text);
}

const download = (name, text) => el("a", { download: name, href: URL.createObjectURL(new Blob([text])) }).click();

// One's own scheduler stands beside the milestone's, and beside what it was when its file was saved.
async function watchOwn() {
  const beside = (engine) => {
    const side = lab.setting.sides.find((each) => each.engine === "own") ?? lab.setting.sides[0];
    becomeOnesOwn();
    lab.setting.sides = structuredClone([{ ...side, engine }, { ...side, engine: "own" }]);
    return changed();
  };
  let version = await ask("/own", null);
  if (!lab.setting.sides.some(({ engine }) => engine.startsWith("own"))) await beside(lab.data.own);
  setInterval(async () => {
    const now = await ask("/own", null).catch(() => version);
    if (now !== version) beside("own before");
    version = now;
  }, 700);
}

// --- requests --------------------------------------------------------------------------------------

function drawRequests() {
  const { requests, sides, machine } = lab.setting;
  const isOfUse = { priority: ({ fields }) => fields.policy === "priority", shared: ({ engine }) => engine === "m4_prefix_chunked" };
  const names = Object.keys(NUMBERS).filter((name) => !(name in isOfUse) || sides.some(isOfUse[name]) || requests.some((request) => request[name]));
  const most = (value, least) => Number((1.2 * Math.max(least, ...requests.map(value))).toPrecision(2));
  requests.sort((one, other) => one.arrival - other.arrival);
  lab.seconds = most(({ arrival }) => arrival, machine === "h200" ? 0.04 : 4);
  lab.tokens = most(({ prompt, output }) => prompt + output, 20);
  const titles = ["who", `0 … ${lab.seconds} s`, `0 … ${lab.tokens} tokens`, ...names.map((name) => NUMBERS[name])];
  byId("play-rows").style.setProperty("--numbers", names.length);
  byId("play-rows").replaceChildren(el("div.request.head", titles.map((title) => el("span", title))), ...requests.map((request, index) => requestRow(request, index, names)));
}

function requestRow(request, index, names) {
  const fill = { style: { background: requestColor(index) } };
  const handle = (kind, drag) => el(`div.${kind}`, { "data-drag": drag, "data-focus": `drag-${drag}:${index}`, title: `${drag}: drag, or arrow keys`,
    role: "slider", tabindex: 0, "aria-label": `r${index} ${NUMBERS[drag]}`, "aria-valuemin": drag === "arrival" ? 0 : 1 }, kind === "dot" ? fill : "");
  const number = (name) => el("input", { type: "number", min: 0, step: "any", "data-focus": `${name}:${index}`, "data-number": name, "aria-label": `r${index} ${NUMBERS[name]}` });
  const button = (what, sign) => el("button", { [`data-${what}`]: index, "data-focus": `${what}:${index}`, "aria-label": `${what} r${index}`, title: `${what} r${index}` }, sign);
  const row = el("div.request", { "data-index": index }, el("b", el("i", fill), `r${index}`),
    el("div.track", handle("dot", "arrival")), el("div.track", el("div.bar.prompt", fill), el("div.bar.output", fill), handle("grip", "prompt"), handle("grip", "output")),
    names.map((name) => el("label", el("span", NUMBERS[name]), number(name))), button("copy", "copy"), button("delete", "✕"));
  placeRequest(row, request);
  return row;
}

// Where dot, bars and handles are, and what the numbers say.
function placeRequest(row, request) {
  const [prompt, end] = [request.prompt / lab.tokens, (request.prompt + request.output) / lab.tokens];
  const place = (selector, left, width) => Object.assign(row.querySelector(selector).style, { left: `${100 * left}%` }, width === undefined ? {} : { width: `${100 * width}%` });
  place(".dot", request.arrival / lab.seconds);
  place(".bar.prompt", 0, prompt);
  place(".bar.output", prompt, end - prompt);
  place('[data-drag="prompt"]', prompt);
  place('[data-drag="output"]', end);
  for (const input of row.querySelectorAll("input")) input.value = request[input.dataset.number];
  for (const each of row.querySelectorAll("[data-drag]")) {
    const most = { arrival: lab.seconds, prompt: lab.tokens, output: lab.tokens }[each.dataset.drag];
    const values = { "aria-valuenow": request[each.dataset.drag], "aria-valuemax": most };
    for (const [name, value] of Object.entries(values)) each.setAttribute(name, value);
  }
}

const requestOfRow = (element) => lab.setting.requests[Number(element.closest(".request").dataset.index)];

function startDrag(event) {
  const { target, clientX: x, pointerId } = event;
  const name = target.dataset.drag;
  if (!name) return;
  event.preventDefault();
  target.setPointerCapture(pointerId);
  const [request, unit] = [requestOfRow(target), (name === "arrival" ? lab.seconds : lab.tokens) / target.parentElement.clientWidth];
  lab.drag = { name, x, unit, request, row: target.closest(".request"), value: request[name] };
}

function goOnDragging({ clientX }) {
  if (!lab.drag) return;
  const { name, x, unit, row, request, value } = lab.drag;
  const moved = value + (clientX - x) * unit;
  const digits = Math.max(0, Math.ceil(-Math.log10(unit))); // no finer than a pixel
  request[name] = name === "arrival" ? Number(Math.max(0, moved).toFixed(digits)) : Math.max(1, Math.round(moved));
  placeRequest(row, request);
  becomeOnesOwn();
  recompute();
}

// A handle by the keyboard: a hundredth of its track, or a tenth.
function moveHandle(event) {
  const { target, key } = event;
  const name = target.dataset.drag;
  const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10 }[key];
  if (!name || !steps) return;
  event.preventDefault();
  event.stopPropagation(); // the cursor stays
  const [request, most] = [requestOfRow(target), name === "arrival" ? lab.seconds : lab.tokens];
  const unit = name === "arrival" ? most / 100 : Math.max(1, Math.round(most / 100));
  const moved = Math.max(name === "arrival" ? 0 : 1, request[name] + steps * unit);
  request[name] = name === "arrival" ? Number(moved.toPrecision(4)) : moved;
  becomeOnesOwn();
  changed();
}

function endDrag() {
  if (lab.drag) changed();
  lab.drag = null;
}

// --- engines and figures ---------------------------------------------------------------------------

const engineOf = (side) => lab.data.engines[side.engine] ?? lab.data.engines.m4_prefix_chunked;
const columns = (cell) => lab.setting.sides.map((side, index) => el(cell, "AB"[index]));

// A row for each field that one of the engines has, and in it a cell for each side.
function drawSides() {
  const { engines, choices } = lab.data;
  const { sides, machine, layers } = lab.setting;
  const choose = (attributes, entries, value) => Object.assign(el("select", attributes, options(entries)), { value });
  const cell = (name, side, of) => {
    const { defaults } = engineOf(side);
    const attributes = { "data-field": name, "data-of": of, "data-focus": `${name}:${"AB"[of]}`, "aria-label": `${name} of ${"AB"[of]}` };
    if (name === "engine") return choose(attributes, Object.entries(engines).map(([key, { title }]) => [key, title]), side.engine);
    if (!(name in defaults)) return "–";
    const value = side.fields[name] ?? defaults[name];
    if (choices[name]) return choose(attributes, choices[name].map((word) => [word, word]), value);
    if (typeof defaults[name] === "boolean") return choose(attributes, [["true", "on"], ["false", "off"]], value);
    return el("input", { ...attributes, type: "number", placeholder: "auto", value: value ?? "" });
  };
  const lines = (names) => names.flatMap((name) => {
    const cells = sides.map((side, of) => cell(name, side, of));
    const [one, other = one] = cells.filter((each) => each !== "–").map(({ value }) => value);
    if (one === undefined) return [];
    return el(one === other ? "tr" : "tr.differs", el("th", name.replaceAll("_", "_\u200b")), cells.map((each) => el("td", each)));
  });
  const more = Object.keys(engines.m4_prefix_chunked.defaults).filter((name) => !lab.first.includes(name));
  byId("play-sides").replaceChildren(el("tr", el("th", ""), columns("th")), ...lines(lab.first));
  byId("play-more").replaceChildren(...lines(more));
  const machines = { [machine]: machine, ...lab.data.machines }; // a link of docs/sizing.md names another
  byId("play-machine").replaceChildren(...options(Object.entries(machines)));
  byId("play-machine").value = machine;
  byId("play-layers").value = layers;
}

function changeField({ dataset: { field, of }, value }) {
  const side = lab.setting.sides[Number(of)];
  if (field === "engine") side.engine = value;
  else if (value === "") delete side.fields[field];
  else if (lab.data.choices[field]) side.fields[field] = value;
  else side.fields[field] = typeof engineOf(side).defaults[field] === "boolean" ? value === "true" : Number(value);
}

function drawFigures(sides) {
  const told = (value) => (value === undefined ? "–" : value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3))));
  const against = (a, b) => (!a || b === undefined || a === b ? "" : `${b > a ? "+" : "−"}${Math.abs(Math.round(100 * (b / a - 1)))} %`);
  const isWhole = sides.every(({ problem }) => !problem); // the figures of a beginning compare with nothing
  const rows = Object.entries(lab.data.figures).map(([name, title]) => {
    const values = sides.map(({ figures }) => figures[name]);
    const isClaimed = lab.setting.shows.some((claim) => claim.startsWith(`${name}:`));
    return el(isClaimed ? "tr.shows" : "tr", el("th", title), values.map((value) => el("td.n", told(value))), el("td.n", isWhole ? against(...values) : ""));
  });
  byId("play-figures").replaceChildren(el("tr", el("th", ""), columns("th.n"), el("th.n", sides.length > 1 ? "A → B" : "")), ...rows);
}

// --- controls --------------------------------------------------------------------------------------

function connectPlay() {
  const part = byId("part");
  const on = (kind, act) => part.addEventListener(kind, act);
  on("pointerdown", startDrag);
  on("pointermove", goOnDragging);
  for (const end of ["pointerup", "pointercancel"]) on(end, endDrag);
  on("change", ({ target }) => {
    if (target.id === "play-open") return target.files[0]?.text().then((text) => openSetting(JSON.parse(text), "")).catch(tellError);
    if (target.id === "play-preset") return target.value && openSetting(lab.data.presets[Number(target.value)], target.value);
    if (target.form) return; // numbers for the dice
    if (target.dataset.field) changeField(target);
    else if (target.dataset.number) requestOfRow(target)[target.dataset.number] = Number(target.value);
    else lab.setting[target.id === "play-layers" ? "layers" : "machine"] = target.value;
    becomeOnesOwn();
    lab.isDue = true;
    setTimeout(changed); // by then Tab has moved the focus
  });
  on("keydown", moveHandle);
  on("click", ({ target }) => {
    const { requests, sides } = lab.setting;
    const { save: what, copy, delete: gone } = target.dataset;
    if (what) return save(target.dataset).catch(tellError);
    if (copy) requests.push({ ...requests[Number(copy)] });
    else if (gone && requests.length > 1) requests.splice(Number(gone), 1);
    else if (target.id === "play-add") requests.push({ ...lab.data.request, arrival: requests.at(-1).arrival });
    else if (target.id === "play-beside") sides.length > 1 ? sides.pop() : sides.push(structuredClone(sides[0]));
    else if (target.ariaExpanded) return changed((target.ariaExpanded = target.ariaExpanded !== "true"));
    else return;
    becomeOnesOwn();
    changed();
  });
  on("submit", (event) => {
    event.preventDefault();
    const numbers = Object.fromEntries([...new FormData(event.target)].map(([name, value]) => [name, Number(value)]));
    const { prompt, prompt_to, output, output_to, ...rest } = numbers;
    ask("/random", { ...rest, prompt: [prompt, prompt_to], output: [output, output_to] })
      .then((text) => changed(Object.assign(lab.setting, { requests: JSON.parse(text) }, becomeOnesOwn()))).catch(tellError);
  });
}
