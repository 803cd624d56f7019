// The page: its state, what moves the cursor, and what is drawn anew when something changes.
//
//   state.time       the cursor, in steps or in seconds; all runs share it
//   state.from, .to  the part of the axis that is seen
//   state.lit        the request that is lit up, in the timeline, the tables and the KV memory

const state = { time: 0, from: 0, to: 1, axis: "steps", lit: null, pinned: null, timer: null };
let views = []; // one for each run: { run, box, at, timeline, memory, showsAll }
const byId = (id) => document.getElementById(id);

function say(text) {
  byId("said").textContent = text;
}

// --- building ------------------------------------------------------------------------------------

function makeView(run) {
  const box = document.createElement("section");
  box.className = "run";
  box.setAttribute("aria-label", run.meta.label || "run");
  const panel = (name, title) => `<div class="card"><h3>${title}</h3><div data-panel="${name}"></div></div>`;
  box.innerHTML = `<header><h2></h2><p class="soft number" data-panel="facts"></p></header>
    <div class="card timeline">
      <div class="rows" tabindex="0" role="group" aria-label="Timeline: a line for each request"><canvas></canvas><div class="lit"></div>
        <div class="here"></div><div class="line"></div><div class="veil"></div></div>
      <div class="lanes"><canvas></canvas><div class="here"></div><div class="line"></div><div class="veil"></div></div>
    </div>
    <div class="panels">
      <div class="stack">${panel("budget", "Token budget")}<div class="card"><h3>Batch</h3><div class="scroll" tabindex="0" role="group" aria-label="Batch" data-panel="batch"></div></div></div>
      <div class="stack memory"><div class="card"><h3>KV memory</h3>
        <div class="blocks"><canvas tabindex="0" role="application" aria-label="KV memory, block by block: arrow keys move"></canvas></div>
        <p class="tip" aria-live="polite"></p><div data-panel="kv"></div></div>${panel("times", "Step time")}</div>
      <div class="stack">${panel("queues", "Who waits, and why")}${panel("happened", "What happened, in order")}</div>
    </div>`;
  byId("runs").append(box);
  const view = { run, box, at: 0, showsAll: false };
  view.timeline = makeTimeline(view);
  view.memory = makeMemory(view);
  return view;
}

function showRuns(runs) {
  byId("runs").replaceChildren();
  byId("runs").classList.toggle("two", runs.length > 1);
  views = runs.map(makeView);
  fit();
}

function showLive() {
  const [{ run, at }] = views;
  const wasLast = at >= run.records.length - 2 || !state.follows;
  state.follows = true;
  const previousEnd = state.to;
  const end = endOf();
  if (wasLast) state.time = lastTime();
  if (end > previousEnd || run.records.length < 3) {
    const span = Math.min(end, state.axis === "steps" ? 240 : 30);
    [state.from, state.to] = [Math.max(0, end - span), Math.max(end, 1)];
  }
  requestAnimationFrame(drawAll);
}

// --- time ----------------------------------------------------------------------------------------

const filled = () => views.filter((view) => view.run.records.length);
const lastIndex = (view) => view.run.records.length - 1;

function endOf() {
  return Math.max(1e-3, ...filled().map((view) => stepEnd(view.run, lastIndex(view), state.axis)));
}

// Where the last step begins.
function lastTime() {
  return Math.max(0, ...filled().map((view) => stepBegin(view.run, lastIndex(view), state.axis)));
}

function fit() {
  [state.from, state.to] = [0, endOf()];
  moveTo(Math.min(state.time, lastTime()), false);
  drawAll();
}

function zoom(factor, around = state.time) {
  const end = endOf();
  const span = Math.min(end, Math.max(state.axis === "steps" ? 4 : end / 2000, (state.to - state.from) * factor));
  const share = (around - state.from) / (state.to - state.from);
  place(around - share * span, span);
}

function pan(time) {
  place(state.from + time, state.to - state.from);
}

function place(from, span) {
  state.from = Math.max(0, Math.min(endOf() - span, from));
  state.to = state.from + span;
  for (const view of views) view.timeline.draw();
}

// The cursor goes to a time. With `isSeen` the axis follows it.
function moveTo(time, isSeen = true) {
  state.time = Math.max(0, Math.min(lastTime(), time));
  let isOutside = state.time < state.from || state.time >= state.to;
  if (isSeen && isOutside) place(state.time - (state.to - state.from) / 3, state.to - state.from);
  for (const view of filled()) {
    view.at = stepAt(view.run, state.time, state.axis);
    view.timeline.move();
    drawPanels(view);
    view.memory.draw();
  }
  lightRows();
  showWhere();
  if (filled().length) drawGuess(views[0]);
}

function showWhere() {
  const [view] = filled();
  const slider = byId("cursor");
  slider.max = lastTime();
  slider.value = state.time;
  if (!view) return;
  const record = view.run.records[view.at];
  const text = state.axis === "steps"
    ? `step ${record.step} of ${view.run.records[lastIndex(view)].step}`
    : `${state.time.toFixed(3)} s, step ${record.step}`;
  byId("where").textContent = text;
  slider.setAttribute("aria-valuetext", `${text}: ${plural(record.batch.length, "row")}, ${record.waiting.length} waiting`);
}

// Steps are counted in the run with most of them; by seconds, the next step of any run comes next.
function stepBy(count) {
  if (state.axis === "steps") return moveTo(Math.floor(state.time) + count);
  const times = filled().map((view) => {
    const at = Math.max(0, Math.min(lastIndex(view), view.at + count));
    return stepBegin(view.run, at, "seconds");
  });
  const ahead = times.filter((time) => (count > 0 ? time > state.time : time < state.time));
  if (ahead.length) moveTo(count > 0 ? Math.min(...ahead) : Math.max(...ahead));
}

function jump(direction) {
  const kind = byId("kind").value;
  let best = null;
  for (const { run, at } of filled())
    for (const mark of run.marks) {
      if (kind && mark.kind !== kind) continue;
      if (direction > 0 ? mark.at <= at : mark.at >= at) continue;
      const time = stepBegin(run, mark.at, state.axis);
      if (best === null || (direction > 0 ? time < best.time : time >= best.time)) best = { time, mark, run };
    }
  if (best === null) return say("no further event");
  if (guessing.isOn && direction > 0) return say("what comes next is to be guessed");
  moveTo(best.time);
  const { mark, run } = best;
  if (mark.name !== null) light(mark.name);
  say(`step ${run.records[mark.at].step}: ${mark.name ?? ""} ${mark.kind} ${mark.reason ?? ""}`);
}

function play() {
  const button = byId("play");
  if (state.timer !== null) {
    clearInterval(state.timer);
    state.timer = null;
  } else {
    if (state.time >= lastTime()) moveTo(0);
    state.timer = setInterval(() => {
      const before = state.time;
      stepBy(1);
      if (state.time === before) play(); // the end
    }, 1000 / Number(byId("speed").value));
  }
  button.textContent = state.timer === null ? "▶ play" : "❚❚ pause";
  button.setAttribute("aria-label", state.timer === null ? "Play" : "Pause");
}

// --- a request lit up everywhere -------------------------------------------------------------------

function light(name, isFromMemory = false) {
  const lit = name ?? state.pinned;
  if (lit === state.lit && !isFromMemory) return;
  state.lit = lit;
  for (const view of views) {
    view.timeline.light();
    view.memory.draw();
  }
  lightRows();
}

function lightRows() {
  for (const row of document.querySelectorAll("[data-row]"))
    row.classList.toggle("lit-row", row.dataset.row === state.lit);
}

// --- drawing, controls, keys -----------------------------------------------------------------------

function drawAll() {
  for (const view of filled()) {
    const { run, box } = view;
    box.querySelector("h2").textContent = run.meta.label || run.records[0].milestone;
    box.querySelector('[data-panel="facts"]').textContent = runFacts(run);
    view.timeline.draw();
    view.memory.width = 0;
  }
  moveTo(state.time, false);
  const [first] = filled();
  byId("facts").textContent = first
    ? "Everything on this page is from the trace of a real run."
    : "No step has come yet.";
}

function runFacts(run) {
  const last = run.records[run.records.length - 1];
  let [useful, computed] = [0, 0];
  for (const record of run.records) {
    useful += record.num_prefill_tokens + record.num_decode_tokens;
    computed += stepTokens(record);
  }
  const name = run.meta.label && run.meta.label !== last.milestone ? `${last.milestone}, ` : "";
  const share = computed ? `, ${Math.round((100 * useful) / computed)} % of the computed positions useful` : "";
  const seconds = stepEnd(run, run.records.length - 1, "seconds").toFixed(2);
  return `${name}${plural(run.records.length, "step")} in ${seconds} s, ${plural(run.requests.size, "request")}${share}`;
}

function setAxis(axis) {
  const ats = views.map((view) => view.at);
  state.axis = axis;
  [state.from, state.to] = [0, endOf()];
  if (filled().length) state.time = stepBegin(views[0].run, ats[0], axis);
  drawAll();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (filled().length) drawAll();
  if (!byId("keys").hidden) drawKeys();
}

function toggleGuess() {
  guessing.isOn = !guessing.isOn;
  if (guessing.isOn && state.timer !== null) play();
  byId("guess").setAttribute("aria-pressed", guessing.isOn);
  for (const id of ["cursor", "last", "play", "forward"]) byId(id).disabled = guessing.isOn;
  if (guessing.isOn && state.time >= lastTime()) moveTo(0);
  if (filled().length) drawGuess(views[0]);
}

const KEYS = [
  ["← →", "one step back, on"], ["Home End", "first, last step"], ["space", "play, pause"], ["p n", "event before, next event"],
  ["+ − 0", "zoom in, out, all of it"], ["a d", "move the part that is seen"], ["s", "axis: steps or seconds"],
  ["g", "guess the next step"], ["t", "dark or light"], ["?", "this help"],
];
const PHASES = ["prefill", "decode", "waiting", "preempted", "swapped", "padding"];

function drawKeys() {
  const keys = KEYS.map(([key, what]) => `<div><dt>${key.split(" ").map((one) => `<kbd>${one}</kbd>`).join(" ")}</dt><dd>${what}</dd></div>`);
  const signs = PHASES.map((phase) => `<div><dt><canvas data-phase="${phase}"></canvas></dt><dd>${phase}${phase === "prefill" ? "; the hatched part was found in the prefix cache" : ""}</dd></div>`);
  const marks = Object.entries(MARK_SIGNS).map(([kind, sign]) => `<div><dt>${sign}</dt><dd>${kind.replaceAll("_", "-")}</dd></div>`);
  byId("keys").innerHTML = `<h3>Keys</h3><dl>${keys.join("")}</dl><h3 style="margin-top:12px">Signs of the timeline</h3><dl>${signs.join("")}${marks.join("")}</dl>`;
  for (const canvas of document.querySelectorAll("[data-phase]"))
    drawPhase(prepare(canvas, 64, 18), canvas.dataset.phase, 2, 0, 60, 18, requestColor(0), canvas.dataset.phase === "prefill" ? 0.4 : 0);
}

function toggleHelp() {
  const keys = byId("keys");
  keys.hidden = !keys.hidden;
  byId("help").setAttribute("aria-expanded", !keys.hidden);
  if (!keys.hidden) drawKeys();
}

const forward = () => (guessing.isOn ? say("what comes next is to be guessed") : stepBy(1));
const toggleTheme = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
const span = () => (state.to - state.from) / 4;
const ACTIONS = {
  ArrowLeft: () => stepBy(-1), ArrowRight: forward, Home: () => moveTo(0),
  End: () => (guessing.isOn ? null : moveTo(lastTime())), " ": () => (guessing.isOn ? null : play()),
  p: () => jump(-1), n: () => jump(1), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), 0: fit,
  a: () => pan(-span()), d: () => pan(span()), g: toggleGuess, t: toggleTheme, "?": toggleHelp,
  s: () => {
    byId("axis").value = state.axis === "steps" ? "seconds" : "steps";
    setAxis(byId("axis").value);
  },
};

function connect() {
  for (const button of document.querySelectorAll("[data-key]"))
    button.addEventListener("click", () => ACTIONS[button.dataset.key]());
  byId("axis").addEventListener("change", (event) => setAxis(event.target.value));
  byId("cursor").addEventListener("input", (event) => moveTo(Number(event.target.value)));
  byId("speed").addEventListener("change", () => {
    if (state.timer !== null) {
      play();
      play();
    }
  });
  document.addEventListener("keydown", (event) => {
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.id !== "cursor";
    const isPressing = event.target.tagName === "BUTTON" && event.key === " ";
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping || isPressing) return;
    if (!ACTIONS[event.key]) return;
    event.preventDefault();
    ACTIONS[event.key]();
  });
  const runs = document.body;
  runs.addEventListener("pointerover", (event) => {
    const row = event.target.closest?.("[data-row], .who");
    if (row) light(row.dataset.row ?? row.dataset.who);
  });
  runs.addEventListener("pointerout", (event) => {
    if (event.target.closest?.("[data-row], .who")) light(null);
  });
  runs.addEventListener("focusin", (event) => {
    if (event.target.matches(".who")) light(event.target.dataset.who);
  });
  runs.addEventListener("click", (event) => {
    const button = event.target.closest(".who");
    if (button) {
      state.pinned = state.pinned === button.dataset.who ? null : button.dataset.who;
      for (const other of document.querySelectorAll(".who")) other.setAttribute("aria-pressed", other.dataset.who === state.pinned);
      light(state.pinned);
    }
    if (event.target.matches("[data-all]")) {
      for (const view of views) view.showsAll = true;
      moveTo(state.time, false);
    }
  });
  let width = byId("runs").clientWidth;
  new ResizeObserver(() => {
    if (byId("runs").clientWidth === width) return; // panels grow and shrink with every step
    width = byId("runs").clientWidth;
    requestAnimationFrame(drawAll);
  }).observe(byId("runs"));
}

async function main() {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  const live = byId("live-url");
  try {
    const traces = [...document.querySelectorAll('script[type="text/x-trace"]')];
    const runs = await Promise.all(traces.map((trace) => readRun(trace.textContent.trim())));
    showRuns(runs);
    connect();
    document.body.dataset.ready = "yes";
    if (live) await runLive(live.dataset.url);
  } catch (error) {
    byId("problem").hidden = false;
    byId("problem").textContent = `The page cannot show this trace: ${error.message}`;
    throw error;
  }
}

main();
