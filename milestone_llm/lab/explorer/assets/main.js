// The page: its state, what moves the cursor, and what is drawn anew when something changes.
//
//   state.time       the cursor, in steps or in seconds; all runs share it
//   state.from, .to  the part of the axis that is seen
//   state.lit        the request that is lit up, in the timeline, the tables and the KV memory

const state = { time: 0, from: 0, to: 1, axis: "steps", lit: null, pinned: null, timer: null };
let views = []; // one for each run: { run, box, at, timeline, memory, showsAll }

function say(text) {
  byId("said").textContent = text;
}

// --- building ------------------------------------------------------------------------------------

function makeView(run) {
  const box = byId("run").content.firstElementChild.cloneNode(true);
  box.setAttribute("aria-label", run.meta.label || "run");
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
  showRun(0);
  const about = runs.find((run) => run.lookAt !== null);
  if (about) state.time = stepBegin(about, about.lookAt, state.axis);
  fit();
}

// A narrow window has room for one of two runs: a switch says which.
function showRun(shown) {
  byId("runs").dataset.shown = shown;
  const button = ({ run }, index) => el("button", { "data-run": index, "aria-pressed": index === shown }, titleOf(run));
  byId("which").replaceChildren(...(views.length > 1 ? views.map(button) : []));
}

// After new records of a live run: the cursor goes on with them if it stands at the end.
function showLive(run) {
  if (views[0]?.run !== run) {
    showRuns([run]);
    state.numShown = 0;
  }
  const wasLast = stepAt(run, state.time, state.axis) >= state.numShown - 1; // drawn or not
  state.numShown = run.records.length;
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
  if (filled().length) drawGuess();
}

function showWhere() {
  const [view] = filled();
  const slider = byId("cursor");
  slider.max = lastTime();
  slider.value = state.time;
  if (!view) return;
  const record = view.run.records[view.at];
  const place = `step ${record.step} (${view.at + 1} of ${lastIndex(view) + 1})`; // a live page may begin late
  const text = state.axis === "steps" ? place : `${state.time.toFixed(3)} s, ${place}`;
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
    box.querySelector("h2").textContent = titleOf(run);
    box.querySelector('[data-panel="facts"]').textContent = runFacts(run);
    view.timeline.draw();
    view.memory.width = 0;
  }
  document.body.classList.toggle("empty", !filled().length);
  drawLegend();
  moveTo(state.time, false);
}

function runFacts(run) {
  const { milestone } = run.records[0];
  const seconds = stepEnd(run, run.records.length - 1, "seconds").toFixed(2);
  const facts = [
    run.meta.label && run.meta.label !== milestone ? milestone : "",
    `${plural(run.records.length, "step")} in ${seconds} s`,
    plural(run.requests.size, "request"),
    `policy ${run.records[0].policy}`,
    run.computed ? `${Math.round((100 * run.useful) / run.computed)} % of the computed positions useful` : "",
  ];
  return facts.filter(Boolean).map(inLanguage).join(IS_CHINESE ? "，" : ", ");
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
}

function toggleGuess() {
  guessing.isOn = !guessing.isOn;
  if (guessing.isOn && state.timer !== null) play();
  byId("guess").setAttribute("aria-pressed", guessing.isOn);
  for (const id of ["cursor", "last", "play", "forward"]) byId(id).disabled = guessing.isOn;
  if (guessing.isOn && state.time >= lastTime()) moveTo(0);
  if (!filled().length) return;
  const { run, at } = guessedView();
  const asked = guessing.isOn ? nextChange(run, at) : -1; // there is something to guess at once
  moveTo(asked > at ? stepBegin(run, asked, state.axis) : state.time);
}

const KEYS = [
  ["← →", "one step back, on"], ["Home End", "first, last step"], ["space", "play, pause"], ["p n", "event before, next event"],
  ["+ − 0", "zoom in, out, all of it"], ["a d", "move the part that is seen"], ["s", "axis: steps or seconds"],
  ["g", "guess the next step"], ["t", "dark or light"], ["?", "this help"],
];
function drawKeys() {
  const line = ([keys, what]) => el("div", el("dt", keys.split(" ").map((one) => [el("kbd", one), " "])), el("dd", what));
  byId("keys").replaceChildren(el("h3", "Keys"), el("dl", KEYS.map(line)));
}

// What occurs on the page: phases and signs of the timelines, then what the lanes are made of.
function drawLegend() {
  const runs = filled().map((view) => view.run);
  const has = (phase) => runs.some((run) => [...run.requests.values()].some(({ spans }) => spans.some((span) => span.phase === phase)));
  const hasMark = (kind) => kind !== "admitted" && kind !== "evict" && runs.some((run) => run.marks.some((mark) => mark.kind === kind));
  const areas = { "KV stored": "--stored", "reserved, empty": "reserved", "free, but can be found": runs.some((run) => run.hasCache) ? "cached" : null };
  const sign = (title, draw) => {
    const canvas = el("canvas");
    draw(prepare(canvas, 26, 14));
    return el("span", canvas, title);
  };
  const phases = { prefill: "--prefill", decode: "--decode", waiting: "--soft", preempted: "--soft", swapped: "--soft", padding: "" };
  byId("legend").replaceChildren(
    el("span", runs.length ? "a colour is a request's" : ""),
    ...Object.entries(phases).filter(([phase]) => has(phase)).map(([phase, color]) =>
      sign(phase === "padding" ? "padding: waste" : phase, (context) => drawPhase(context, phase, 0, 0, 26, 14, css(color || "--soft")))),
    ...(runs.some((run) => run.hasHits) ? [sign("found in the prefix cache", (context) => drawPhase(context, "prefill", 0, 0, 26, 14, css("--prefill"), 0.9))] : []),
    ...Object.entries(MARK_SIGNS).filter(([kind]) => hasMark(kind)).map(([kind, mark]) => el("span", el("b", mark), ` ${kind.replaceAll("_", "-")}`)),
    ...(runs.some((run) => run.lookAt !== null) ? [el("span", el("b", "┆┆"), " the step to look at")] : []),
    ...Object.entries(areas).filter(([, fill]) => fill && runs.length).map(([title, fill]) => sign(title, (context) => fillArea(context, fill, 0, 2, 26, 11))),
  );
}

function toggleHelp() {
  const keys = byId("keys");
  keys.hidden = !keys.hidden;
  byId("help").setAttribute("aria-expanded", !keys.hidden);
  if (!keys.hidden) drawKeys();
}

const forward = () => (guessing.isOn ? say("what comes next is to be guessed") : stepBy(1));
function toggleTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  storedTheme(theme);
  setTheme(theme);
}
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
  byId("kind").append(...options(Object.entries(MARK_SIGNS).map(([kind, sign]) => [kind, `${sign} ${kind.replaceAll("_", "-")}`])));
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
    if (event.target.matches("[data-run]")) {
      showRun(Number(event.target.dataset.run));
      drawAll();
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

// The reader's choice for all pages of this server, the book's included. From disk there may be none.
function storedTheme(chosen) {
  try {
    if (chosen) localStorage.theme = chosen;
    return localStorage.theme;
  } catch {
    return undefined;
  }
}

// In a frame: the page around it says which theme it has, and gives the frame the height that it wants.
function embed() {
  document.body.classList.add("embed");
  const tellHeight = () => parent.postMessage({ height: Math.ceil(document.body.getBoundingClientRect().height) }, "*");
  addEventListener("message", ({ source, data }) => {
    if (source !== parent || !["dark", "light"].includes(data?.theme)) return;
    setTheme(data.theme);
    tellHeight(); // that page may have begun to listen only now
  });
  new ResizeObserver(tellHeight).observe(document.body);
}

// On paper it is light, and all steps are seen.
function printInLight() {
  let before;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    setTheme("light");
  });
  addEventListener("afterprint", () => setTheme(before));
}

async function main() {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = storedTheme() ?? (isDark ? "dark" : "light");
  if (location.hash === "#embed" && parent !== window) embed();
  printInLight();
  const live = byId("live-source");
  try {
    const traces = [...document.querySelectorAll('script[type="text/x-trace"]')];
    const runs = await Promise.all(traces.map((trace) => readRun(trace.textContent.trim())));
    showRuns(runs);
    connect();
    if (byId("part")) await runPart();
    document.body.dataset.ready = "yes";
    if (live) await runLive(live.dataset);
  } catch (error) {
    byId("problem").hidden = false;
    byId("problem").textContent = `The page cannot show this trace: ${error.message}`;
    throw error;
  }
}

main();
