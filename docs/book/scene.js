// The scene: at one second of a run, each request's words, and below them KV memory. Runs are read
// and followed by the explorer's run.js; those of a changed request come from Python, by asking.js.

const data = JSON.parse(byId("scene-data").textContent);
const PER_BLOCK = 16;
const PER_LINE = data.sides[0].fields.max_model_len / PER_BLOCK; // so a region is a line of blocks
const NUM_BLOCKS = data.sides[2].fields.kv_cache_tokens / PER_BLOCK;
const PIECES = /\s?\p{L}+|\s?\p{N}|\s?[^\s\p{L}\p{N}]+|\s+/gu;
const UNKNOWN = " ·"; // a word that only the model knows
const isCalm = matchMedia("(prefers-reduced-motion: reduce)");
const scene = { at: 0, time: 0, end: 1, sides: [], requests: [], drawn: null, shown: null, pinned: null, pointed: null, version: 0, clock: null };
python.address = "play/worker.js";

// --- prompts and words -----------------------------------------------------------------------------

const isAlike = (count, from) => data.words.every(({ texts }) => texts.at(from(count)) === data.words[0].texts.at(from(count)));
const numAlike = (from) => [...Array(99).keys()].findIndex((count) => !isAlike(count, from));
const NUM_BEFORE = numAlike((count) => count); // tokens that the chat template puts around a prompt
const NUM_AFTER = numAlike((count) => -1 - count);
const idOf = new Map(data.words.flatMap(({ texts, ids }) => texts.map((text, index) => [text, ids[index] % data.vocabulary])));
const hashOf = (text) => [...text].reduce((sum, letter) => (31 * sum + letter.codePointAt()) % data.vocabulary, 7);

// The tokens of a prompt. An unknown one may begin as a known one does; the rest is cut into words.
function wordsOf(prompt) {
  const known = data.words.find((each) => each.prompt === prompt);
  if (known) return { texts: known.texts, answer: known.answer };
  const { texts } = data.words[0];
  const begins = data.words.map((each) => {
    const own = each.texts.slice(NUM_BEFORE, -NUM_AFTER);
    return own.slice(0, own.findIndex((_, index) => !prompt.startsWith(own.slice(0, index + 1).join(""))));
  });
  const begin = begins.reduce((one, other) => (other.length > one.length ? other : one));
  const rest = prompt.slice(begin.join("").length).match(PIECES) ?? [];
  return { texts: [...texts.slice(0, NUM_BEFORE), ...begin, ...rest, ...texts.slice(-NUM_AFTER)], answer: [] };
}

function requestFor(prompt, arrival, output) {
  const words = wordsOf(prompt);
  return { prompt, arrival, ...words, output: output ?? (words.answer.length || 24) };
}

const copies = () => scene.requests.map((each) => ({ ...each })); // the reader goes on changing them
const firstRequests = () => data.arrivals.map((arrival, index) => requestFor(data.words[index].prompt, arrival));
const textsOf = ({ texts, answer, output }) => [...texts, ...Array.from({ length: output }, (_, index) => answer[index] ?? UNKNOWN)];
const shown = (text) => text.replaceAll("\n", "↵").replace("<|im_end|>", " ■");
const told = (texts) => el("span", { translate: "no" }, `“${shown(texts.join("")).trim()}”`);

// --- runs --------------------------------------------------------------------------------------------

function settingOf(asked, ...ats) {
  const requests = asked.map(({ arrival, texts, output }) => (
    { arrival, prompt: texts.length, output, tokens: texts.map((text) => idOf.get(text) ?? hashOf(text)) }));
  return { requests, sides: ats.map((at) => ({ engine: data.sides[at].engine, fields: data.sides[at].fields })) };
}

// The first line of an answer says what is not in the records.
function takeRun(at, run, requests) {
  const { problem, figures } = run.meta.sides[0];
  scene.sides[at] = { problem, figures, run, requests, version: scene.version };
  const ends = scene.sides.filter((each) => !each.problem).map(({ run: { records }, run: own }) => stepEnd(own, records.length - 1, "seconds"));
  scene.end = Math.max(1, ...ends);
}

async function takeRecorded() {
  const version = ++scene.version;
  const runs = await Promise.all(data.runs.map(readRun));
  if (version !== scene.version) return;
  runs.forEach((run, at) => takeRun(at, run, copies()));
  tellState("");
  showSide();
}

// The engine that is seen first, then the others. What comes for older requests is of no use.
async function changed() {
  const version = ++scene.version;
  const requests = copies();
  pause();
  byId("scene-again").hidden = false;
  tellState(busyWords());
  showSide();
  try {
    if (!data.hasPlayground) throw new Error("The schedulers run in Python for the browser, which this copy of the book lacks: npm is needed where `make book` runs.");
    for (const at of [scene.at, ...[...data.sides.keys()].filter((each) => each !== scene.at)]) {
      const [first, ...lines] = (await askPython("/run", settingOf(requests, at))).split("\n");
      if (version !== scene.version) return;
      takeRun(at, runOf(JSON.parse(first), lines), requests);
      if (at === scene.at) showSide();
    }
    tellState("");
    showSide();
  } catch (error) {
    if (version === scene.version) tellState("", error.message);
  }
}

function tellState(busy, problem = "") {
  byId("scene-busy").textContent = busy;
  Object.assign(byId("scene-problem"), { textContent: problem, hidden: !problem });
}

// --- one engine ----------------------------------------------------------------------------------------

const stepNow = () => {
  const { run } = scene.shown;
  const at = stepAt(run, scene.time, "seconds");
  return { run, at, isIdle: scene.time > stepEnd(run, at, "seconds") + 2e-3 };
};

// An engine that refuses the requests leaves the run before it on the page, and so does Python that
// has not answered yet: greyed.
function showSide() {
  const { name, told: sentence, chapter, course } = data.sides[scene.at];
  const side = scene.sides[scene.at];
  byId("scene-milestone").value = scene.at + 1;
  byId("scene-milestone").setAttribute("aria-valuetext", `M${scene.at + 1}: ${name}`);
  byId("scene-told").textContent = sentence;
  for (const stop of document.querySelectorAll("[data-stop]")) stop.classList.toggle("here", Number(stop.dataset.stop) === scene.at + 1);
  byId("scene").classList.toggle("stale", Boolean(side.problem) || side.version !== scene.version);
  if (side.version === scene.version) tellState(byId("scene-busy").textContent, side.problem);
  if (side.problem) return;
  scene.shown = side;
  const { figures, run, requests } = side;
  byId("scene-time").max = scene.end;
  byId("scene-figures").textContent = `first tokens within ${figures.ttft_max.toFixed(1)} s, all done after ${figures.makespan.toFixed(1)} s; ` +
    `${Math.round(figures.vain)} % computed for nothing, ${Math.round(figures.kv_empty)} % of KV memory kept empty`;
  const links = byId("scene-links");
  const before = Math.max(1, scene.at);
  const link = (name) => links.querySelector(`[data-link="${name}"]`);
  Object.assign(link("chapter"), { href: chapter, textContent: `chapter M${scene.at + 1}` });
  if (data.hasPlayground) {
    link("playground").href = `${data.links.playground}#${encodeURIComponent(JSON.stringify(settingOf(requests, before - 1, before)))}`;
    Object.assign(link("course"), { href: `${data.links.playground}#course=${course}`, textContent: `course ${course}` });
  }
  const order = requests.toSorted((one, other) => one.arrival - other.arrival);
  lanes.forEach((lane, row) => {
    lane.request = requests[row];
    lane.arrival = lane.request.arrival - order[0].arrival; // a run begins with its first request
    lane.name = `r${order.indexOf(lane.request)}`;
    lane.rows = requestOf(run, lane.name).rows.filter((each) => each.row.sampled_token !== null);
    lane.texts = textsOf(lane.request);
    const answer = lane.texts.slice(lane.request.texts.length).slice(0, lane.rows.length); // memory may end it
    lane.tokens = answer.map((text, index) => el("button.token", { tabindex: -1, "data-index": index, "aria-label": `${inLanguage(`${lane.name}, token ${index + 1}`)}: ${shown(text)}` }, shown(text)));
    lane.words.replaceChildren(...lane.tokens);
    lane.who.textContent = lane.name;
    lane.box.style.setProperty("--own", colorOf(run, lane.name));
  });
  scene.drawn = null;
  drawStrips();
  draw();
}

function moveTo(time) {
  scene.time = Math.max(0, Math.min(scene.end, time));
  draw();
}

function stepBy(count) {
  pause();
  const { run, at, isIdle } = stepNow();
  const next = at + count;
  if (next < 0 || (isIdle && count > 0)) return;
  moveTo(next < run.records.length ? stepBegin(run, next, "seconds") : stepEnd(run, at, "seconds") + 0.01);
}

function draw() {
  const { run, at, isIdle } = stepNow();
  byId("scene-time").value = scene.time;
  byId("scene-second").textContent = `${scene.time.toFixed(2)} s`;
  byId("scene-time").setAttribute("aria-valuetext", `${scene.time.toFixed(2)} seconds, step ${at}`);
  for (const lane of lanes) {
    lane.now.style.left = `${(100 * scene.time) / scene.end}%`;
    const count = lane.rows.filter((each) => stepEnd(run, each.at, "seconds") <= scene.time + 1e-6).length;
    const hasCome = lane.arrival <= scene.time;
    if (lane.count === count && lane.hasCome === hasCome && scene.drawn === at) continue;
    Object.assign(lane, { count, hasCome });
    lane.tokens.forEach((token, index) => token.classList.toggle("comes", index >= count));
    lane.words.scrollLeft = Math.max(0, (lane.tokens[count - 1]?.offsetLeft ?? 0) - lane.words.clientWidth + 60);
    if (!lane.words.querySelector(".token[tabindex='0']:not(.comes)") && count) lane.tokens[0].tabIndex = 0;
    const [kind, english] = stateOf(run, at, isIdle, lane);
    const text = inLanguage(english);
    lane.box.dataset.state = kind;
    if (lane.state.textContent !== text) lane.state.textContent = text;
  }
  const drawn = isIdle ? -1 - at : at;
  if (scene.drawn === drawn) return;
  scene.drawn = drawn;
  drawBlocks();
  tellAbout();
}

function stateOf(run, at, isIdle, { name, rows, count, arrival, hasCome }) {
  const phase = isIdle ? null : requestOf(run, name).spans.find(({ from, to }) => from <= at && at <= to)?.phase;
  if (phase === "padding") return ["padding", "has ended; its row is still computed"];
  if (count === rows.length) return ["ended", "has ended"];
  if (phase === "waiting") return ["waiting", `waits: ${whyWaits(run, at, name)}`.replace("waits: waits", "waits")];
  if (phase === "preempted") return ["waiting", "preempted: its blocks were taken"];
  if (!phase && hasCome) return ["waiting", "waits: a step is under way"];
  if (!phase) return ["absent", `comes at ${arrival.toFixed(1)} s`];
  const row = run.records[at].batch.find((each) => each.request_id === name);
  if (phase === "decode") return ["decode", "decodes: a token a step"];
  const found = row.num_cached_tokens ? `, ${row.num_cached_tokens} were found` : "";
  return ["prefill", `reads its prompt: tokens ${row.start} to ${rowEnd(row) - 1}${found}`];
}

function drawStrips() {
  const { run } = scene.shown;
  for (const lane of lanes) {
    const width = lane.strip.parentElement.clientWidth;
    const context = prepare(lane.strip, width, 14);
    const { spans, color } = requestOf(run, lane.name);
    for (const { phase, from, to, cachedShare } of spans) {
      const [begin, end] = [stepBegin(run, from, "seconds"), stepEnd(run, to, "seconds")].map((time) => (time * width) / scene.end);
      drawPhase(context, phase, begin, 0, end - begin, 14, color, cachedShare);
    }
  }
}

// --- KV memory -----------------------------------------------------------------------------------------

// Per block, or per part of a region or row: who has it, and for each slot "written", "kept", "waste" or "".
function blocksNow() {
  const { run, at, isIdle } = stepNow();
  const memory = memoryAt(run, at);
  const cells = Array.from({ length: NUM_BLOCKS }, () => ({ names: [], slots: Array(PER_BLOCK).fill(""), isFound: false }));
  const fill = (first, names, kinds) => kinds.forEach((kind, slot) => {
    const cell = cells[first + Math.floor(slot / PER_BLOCK)];
    if (cell) [cell.names, cell.slots[slot % PER_BLOCK]] = [names, kind];
  });
  if (memory.unit === "token") {
    if (!isIdle) memory.rows.forEach((row, index) => {
      const stored = row.phase === "padding" ? 0 : rowEnd(row);
      fill(index * PER_LINE, [row.request_id], Array.from({ length: memory.width }, (_, slot) => (slot < memory.width - stored ? "waste" : "written")));
    });
  } else {
    const [size, step] = memory.unit === "block" ? [PER_BLOCK, 1] : [memory.size, PER_LINE];
    for (const [block, names] of isIdle ? [] : memory.owners)
      fill(block * step, names, Array.from({ length: size }, (_, slot) => (slot < memory.fill.get(block) ? "written" : "kept")));
    for (const block of isIdle ? cachedAt(run, at + 1) : memory.cached) if (cells[block] && !cells[block].names.length) cells[block].isFound = true;
  }
  return { unit: memory.unit, cells };
}

const UNITS = {
  token: "KV memory: the rows of a batch",
  region: "KV memory: three regions of 128 tokens",
  block: "KV memory: 24 blocks of 16 tokens",
};

function drawBlocks() {
  const { run } = scene.shown;
  const { unit, cells } = blocksNow();
  byId("scene-unit").textContent = UNITS[unit];
  byId("blocks").dataset.unit = unit;
  cells.forEach(({ names, slots, isFound }, block) => {
    const cell = blocks[block];
    cell.className = ["block", names.length ? "owned" : "", names.length > 1 ? "shared" : "", isFound ? "found" : ""].join(" ");
    cell.style.setProperty("--own", names.length ? colorOf(run, names[0]) : "");
    cell.setAttribute("aria-label", `${placeName(unit, block)}: ${names.join(", ") || (isFound ? "free, can be found" : "free")}`);
    const owner = names.length > 2 ? `×${names.length}` : names.join(" ");
    const isFirst = block % PER_LINE === 0;
    cell.lastChild.replaceChildren(...(unit === "block" ? [el("small", block), ` ${owner}`] : isFirst ? [owner] : []));
    slots.forEach((kind, slot) => (cell.children[slot].className = kind));
  });
}

const placeName = (unit, block) => (unit === "block" ? `block ${block}` : `${unit === "token" ? "row" : "region"} ${Math.floor(block / PER_LINE)}`);

// Who has memory at this second: name -> { table, tokens }.
function tablesNow() {
  const { run, at, isIdle } = stepNow();
  const isPaged = run.records[at].kv.unit === "block";
  return isIdle ? new Map() : new Map((isPaged ? holdersAt(run, at) : []).map(([name, table, tokens]) => [name, { table, tokens }]));
}

// --- what a word or a block says about itself -------------------------------------------------------------

const laneOf = (name) => lanes.find((lane) => lane.name === name);
const boldAt = (table, entry) => table.map((block, index) => [index ? " " : "", el(index === entry ? "b" : "span", block)]);

function placeOf(name, position) {
  const { run, at, isIdle } = stepNow();
  if (isIdle) return null;
  const { unit, rows, width } = memoryAt(run, at);
  const row = run.records[at].batch.findIndex((each) => each.request_id === name);
  if (unit === "token") {
    if (row < 0 || rows[row].phase === "padding" || position >= rowEnd(rows[row])) return null;
    const column = width - rowEnd(rows[row]) + position;
    return { cell: row * PER_LINE + Math.floor(column / PER_BLOCK), slot: column % PER_BLOCK, where: [`row ${row}, column ${column} of the rectangle`] };
  }
  const [, table, tokens] = holdersAt(run, at).find(([other]) => other === name) ?? [];
  if (!table || position >= tokens) return null;
  const [entry, slot] = [Math.floor(position / PER_BLOCK), position % PER_BLOCK];
  if (unit === "region") return { cell: table[0] * PER_LINE + entry, slot, where: [`slot ${position} of region ${table[0]}`] };
  return { cell: table[entry], slot, where: [`slot ${slot} of block ${table[entry]}, entry ${entry} of ${name}'s block table [`, boldAt(table, entry), `] (${position} = ${entry} × ${PER_BLOCK} + ${slot})`] };
}

function aboutToken({ name, index }) {
  const { run, at } = stepNow();
  const lane = laneOf(name);
  const position = lane.request.texts.length + index;
  const place = placeOf(name, position);
  const sampled = lane.rows[index];
  const writer = requestOf(run, name).rows.findLast(({ at: step, row }) => step <= at && row.start <= position && position < rowEnd(row));
  light(place);
  return [
    el("h3", told([lane.tokens[index].textContent]), `: token ${index + 1} of ${name}'s answer, position ${position}`),
    el("p", `Step ${sampled.at} has sampled it, at ${stepEnd(run, sampled.at, "seconds").toFixed(2)} s. `, place && writer
      ? ["Its keys and values are in ", place.where, `. Step ${writer.at} writes them: it computes this token, to sample the next one.`]
      : whyNowhere(lane, index)),
  ];
}

function whyNowhere({ name, tokens, box }, index) {
  const { state } = box.dataset;
  if (state === "padding") return `${name} has ended. Its row is still computed, and its keys and values serve nothing.`;
  if (index === tokens.length - 1) return `It has no keys and values: ${name} ends with it, and no step computes it.`;
  if (state === "ended") return `${name} has ended, and has given its memory back.`;
  if (state === "waiting") return `${name} was preempted: its keys and values will be computed anew.`;
  return "It has no keys and values yet: the next step computes it, and writes them.";
}

function aboutBlock({ block }) {
  const { unit, cells } = blocksNow();
  const { names, isFound, slots } = cells[block];
  const title = placeName(unit, block);
  light({ cell: block });
  if (unit !== "block") {
    const line = cells.slice(block - (block % PER_LINE)).slice(0, PER_LINE).flatMap((cell) => cell.slots);
    const count = (kind) => line.filter((each) => each === kind).length;
    return [el("h3", title), el("p", names.length ? `${names[0]}: ${count("written")} tokens are stored, ${count("waste") + count("kept")} slots are ${unit === "token" ? "padding" : "kept empty"}.` : "Free.",
      " There is no block table here, so no part of it can be given to another request. M3 has one.")];
  }
  const tables = tablesNow();
  const lines = names.map((name) => {
    const { table } = tables.get(name);
    return el("span", `${name} [`, boldAt(table, table.indexOf(block)), "] ");
  });
  const free = isFound ? "Free, but what is in it can still be found: a prompt with the same beginning takes it again." : "Free.";
  const others = lanes.map((lane) => lane.name).filter((name) => tables.has(name) && !names.includes(name)).sort();
  const isChosen = scene.pinned?.block === block && !scene.pinned.to;
  const buttons = [...others, ...(names.length ? ["nobody"] : [])].map((name) => el("button", { "data-give": name }, name));
  const full = slots.filter((kind) => kind === "written").length;
  return [el("h3", title, names.length ? `: ${full} of ${PER_BLOCK} slots are written` : ""), ...(lines.length ? [el("p", `Positions ${positionsOf(names[0], block)}: `, told(textsIn(names[0], block))), el("p", "Block tables: ", lines)] : [el("p", free)]),
    ...(buttons.length ? [isChosen ? el("p.scene-line", "Give it to ", buttons) : el("p.soft", "Drag it to another request, or choose it: click, or Enter.")] : [])];
}

const entryOf = (name, block) => tablesNow().get(name).table.indexOf(block);
const positionsOf = (name, block, entry = entryOf(name, block)) => `${entry * PER_BLOCK} to ${(entry + 1) * PER_BLOCK - 1}`;
const textsIn = (name, block) => laneOf(name).texts.slice(0, tablesNow().get(name).tokens).slice(entryOf(name, block) * PER_BLOCK).slice(0, PER_BLOCK);

// What would be wrong if a block were in the table of another request.
function aboutGift({ block, to }) {
  const { unit, cells } = blocksNow();
  const { names, slots, isFound } = cells[block];
  const tables = tablesNow();
  const isPrefix = scene.at === 3;
  const [owner] = names;
  const target = tables.get(to);
  const title = el("h3", `${placeName(unit, block)}: ${owner ? `${owner} →` : "free →"} ${to}`);
  const museum = (name, isAlarm = false) => {
    const [number, symptom] = data.exhibits[name];
    return el("p", isAlarm ? "A false alarm of the museum: " : "In the museum: ", el("a", { href: data.links.museum }, `exhibit ${number}`), `, “${symptom}”. `, el("code", `python -m exercises.museum ${number}`));
  };
  light({ cell: block });
  if (unit !== "block") return [title, el("p", "There are no block tables on this engine.")];
  if (to === "nobody") return [title, el("p", `It is in no table, and not in the free list. Free + owned is one less than ${NUM_BLOCKS}, for ever.`), museum("free_blocks_fall")];
  if (!target) return [title, el("p", `${to} has no block table at this second.`)];
  if (names.includes(to)) return [title, el("p", `It is in ${to}'s table already.`)];
  if (!owner && !isFound) return [title, el("p", `Nothing is wrong: ${to} has it earlier than it needs it. It takes one when its last block is full.`), museum("block_too_late", true)];
  if (!owner) return [title, el("p", `The pool gives such blocks, too, when no other is free, and forgets what could be found there. If it does not, a request that begins as before finds ${to}'s words.`), museum("anothers_words")];
  const upTo = (name) => laneOf(name).texts.slice(0, (entryOf(owner, block) + 1) * PER_BLOCK).join("");
  if (isPrefix && upTo(owner) === upTo(to)) return [title, el("p", `Nothing is wrong: both begin with the same words up to here. M4 shares such a block by itself, even in the step that writes it.`), museum("shared_unwritten", true)];
  const read = el("p", `${to} would read ${owner}'s `, told(textsIn(owner, block)), ` as its own positions ${positionsOf(to, block, target.table.length)}.`);
  if (!isPrefix) return [title, read, el("p", `Two tables and one reference: when ${owner} ends, the block is free, another request writes there, and ${to} reads that. The engine's own check (`, el("code", "check_invariants=True"), ") finds it in the same step. Without it, a user notices this:"), museum("anothers_words")];
  if (slots.includes("kept")) return [title, read, el("p", "And it is not full: whoever finds it relies on slots that no step has written."), museum("second_turn")];
  return [title, read, el("p", "A block is found by the hash of all words up to its end. This happens if two texts have one hash."), museum("crafted_prompt")];
}

// What the pointer or the focus is at; else what was clicked.
function tellAbout() {
  const what = scene.pointed ?? scene.pinned;
  const { run, at, isIdle } = stepNow();
  const key = JSON.stringify([what, scene.pinned, scene.at, scene.drawn, scene.version]);
  if (scene.told === key) return; // a button that is drawn anew while it is pressed has no click
  scene.told = key;
  light(null);
  const isShown = what?.name && laneOf(what.name)?.tokens[what.index]?.matches(":not(.comes)");
  const told = !what || (what.name && !isShown) ? [
    el("p.soft", "Point at a token: its slot, its block, the step that wrote it. Point at a block: whose it is, and what is in it."),
    el("p.soft", isIdle ? "No request is here at this second." : `Step ${run.records[at].step}: ${plural(run.records[at].batch.length, "row")}, ${plural(stepTokens(run.records[at]), "token")}.`),
  ] : what.to ? [...aboutGift(what), el("p", el("button", { "data-back": what.block }, "back"))] : what.name ? aboutToken(what) : aboutBlock(what);
  const hadFocus = byId("scene-about").contains(document.activeElement);
  byId("scene-about").replaceChildren(...told);
  if (hadFocus) byId("scene-about").querySelector("button")?.focus();
}

function light(place) {
  for (const lit of document.querySelectorAll("#blocks .lit, #blocks .lit-slot")) lit.classList.remove("lit", "lit-slot");
  if (!place) return;
  blocks[place.cell]?.classList.add("lit");
  if (place.slot !== undefined) blocks[place.cell]?.children[place.slot].classList.add("lit-slot");
}

function point(what) {
  scene.pointed = what;
  tellAbout();
}

function pin(what) {
  scene.pinned = what;
  point(null);
}

// --- time ------------------------------------------------------------------------------------------------

function play() {
  if (scene.time >= scene.end) scene.time = 0;
  let before = performance.now();
  const tick = (now) => {
    moveTo(scene.time + (now - before) / 1000);
    before = now;
    if (scene.time >= scene.end) return pause();
    scene.clock = requestAnimationFrame(tick);
  };
  scene.clock = requestAnimationFrame(tick);
  byId("scene-play").textContent = "❚❚ pause";
  byId("scene-about").ariaLive = "off";
}

function pause() {
  cancelAnimationFrame(scene.clock);
  scene.clock = null;
  byId("scene-play").textContent = "▶ play";
  byId("scene-about").ariaLive = "polite";
}

function choose(number) {
  scene.at = number - 1;
  history.replaceState(null, "", `#m${number}`);
  showSide();
}

// Chapters link to their milestone, the museum to the blocks.
function openLink() {
  const [, number] = /^#m([1-4])$/.exec(location.hash) ?? [];
  const isOfBlocks = location.hash === "#kv";
  scene.at = isOfBlocks ? 3 : Number(number ?? 1) - 1;
  scene.time = data.second;
  pause();
  showSide();
  if (isOfBlocks) {
    pin({ block: blocksNow().cells.findIndex(({ names, slots }) => names.length === 1 && !slots.includes("kept")) });
    byId("scene-below").scrollIntoView({ block: "nearest" });
  }
  if (location.hash === "#own") lanes[0].box.querySelector("input").focus();
  return location.hash.length > 1;
}

// --- controls ----------------------------------------------------------------------------------------------

const lanes = Array.from(data.arrivals, (_, row) => {
  const [who, state, words, strip, now] = ["b.who", "span.state", "div.words", "canvas", "i.now"].map((name) => el(name));
  Object.entries({ role: "group", translate: "no", "aria-label": inLanguage(`words of request ${row + 1}`) }).forEach(([name, value]) => words.setAttribute(name, value));
  const field = (name, attributes) => el("input", { "data-field": name, "data-row": row, "aria-label": inLanguage(`${name} of request ${row + 1}`), ...attributes });
  const box = el("div.lane", who, field("prompt", { type: "text", translate: "no", list: "scene-prompts", spellcheck: "false", autocomplete: "off" }),
    el("label", field("arrival", { type: "number", min: 0, step: 0.1 }), "s"), el("label", field("output", { type: "number", min: 1, step: 1 }), "tok"),
    state, el("div.strip", strip, now), words);
  return { box, who, state, words, strip, now, tokens: [], rows: [], count: 0 };
});
const blocks = Array.from({ length: NUM_BLOCKS }, (_, block) => el("button.block", { "data-block": block, tabindex: block ? -1 : 0 }, Array.from({ length: PER_BLOCK }, () => el("i")), el("span")));

function fillFields() {
  lanes.forEach(({ box }, row) => {
    for (const input of box.querySelectorAll("input")) input.value = scene.requests[row][input.dataset.field];
    showEnd(box.querySelector("input"));
  });
}

// Prompts with a common beginning differ at their ends.
function showEnd(input) {
  const isAlike = ({ prompt }) => prompt !== input.value && prompt.slice(0, 30) === input.value.slice(0, 30);
  Object.assign(input, { scrollLeft: scene.requests.some(isAlike) ? input.scrollWidth : 0, title: input.value });
}

// Words and blocks are one stop of Tab each; arrows go on from there.
function moveFocus(event) {
  const { target, key } = event;
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
  const isWord = target.matches(".token");
  if (!steps || !(isWord || target.matches(".block"))) return;
  event.preventDefault();
  const row = lanes.findIndex(({ words }) => words === target.parentElement);
  const next = isWord ? lanes[row + steps[1]]?.tokens[Number(target.dataset.index) + steps[0]] : blocks[Number(target.dataset.block) + steps[0] + PER_LINE * steps[1]];
  if (!next || next.matches(".comes")) return;
  target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function whatIs(element) {
  const token = element?.closest?.(".token");
  const block = element?.closest?.(".block");
  if (token) return { name: lanes.find(({ words }) => words === token.parentElement).name, index: Number(token.dataset.index) };
  return block ? { block: Number(block.dataset.block) } : null;
}

// A block that is dragged to a request, or to one of its blocks.
function drag(event) {
  const cell = event.target.closest(".block");
  if (!cell || event.button || byId("blocks").dataset.unit !== "block") return;
  const block = Number(cell.dataset.block);
  const ghost = el("b.ghost", String(block));
  const under = ({ clientX, clientY }) => {
    const found = document.elementFromPoint(clientX, clientY);
    const lane = lanes.find(({ box }) => box.contains(found));
    return lane?.name ?? blocksNow().cells[whatIs(found)?.block]?.names[0];
  };
  const move = (now) => {
    if (!ghost.isConnected && Math.hypot(now.clientX - event.clientX, now.clientY - event.clientY) < 8) return;
    pause();
    if (!ghost.isConnected) document.body.append(ghost);
    Object.assign(ghost.style, { left: `${now.clientX}px`, top: `${now.clientY}px` });
    const name = under(now);
    for (const { box, name: own } of lanes) box.classList.toggle("target", own === name);
  };
  const end = (last) => {
    for (const [kind, act] of acts) removeEventListener(kind, act);
    for (const { box } of lanes) box.classList.remove("target");
    const to = last.type === "pointerup" && ghost.isConnected && under(last);
    ghost.remove();
    if (to) setTimeout(() => pin({ block, to })); // after the click that ends it
  };
  const acts = [["pointermove", move], ["pointerup", end], ["pointercancel", end]];
  for (const [kind, act] of acts) addEventListener(kind, act);
}

function connectScene() {
  const box = byId("scene");
  const on = (kind, act) => box.addEventListener(kind, act);
  byId("scene-milestone").oninput = ({ target }) => choose(Number(target.value));
  byId("scene-time").oninput = ({ target }) => moveTo(Number(target.value), pause());
  byId("scene-again").onclick = () => {
    scene.requests = firstRequests();
    fillFields();
    byId("scene-again").hidden = true;
    takeRecorded();
  };
  on("click", ({ target }) => {
    const { stop, step, give, back } = target.closest("button")?.dataset ?? {};
    const what = whatIs(target);
    if (stop) choose(Number(stop));
    else if (step) stepBy(Number(step));
    else if (give) pin({ ...scene.pinned, to: give });
    else if (back) pin({ block: Number(back) });
    else if (target.id === "scene-play") scene.clock ? pause() : play();
    else if (what) {
      pause();
      pin(what);
    }
  });
  on("change", ({ target }) => {
    const { field, row } = target.dataset;
    if (!field) return;
    const old = scene.requests[row];
    if (field === "prompt") scene.requests[row] = requestFor(target.value, old.arrival);
    else old[field] = Number(target.value);
    fillFields();
    changed();
  });
  on("focusin", ({ target }) => target.dataset.field && data.hasPlayground && startWorker());
  for (const kind of ["pointerover", "focusin"]) on(kind, ({ target }) => whatIs(target) && point(whatIs(target)));
  on("focusout", ({ target }) => target.dataset.field === "prompt" && showEnd(target));
  for (const kind of ["pointerout", "focusout"]) on(kind, ({ target }) => whatIs(target) && point(null));
  on("keydown", moveFocus);
  on("pointerdown", drag);
  addEventListener("hashchange", openLink);
  new ResizeObserver(drawStrips).observe(byId("scene-lanes"));
  new MutationObserver(drawStrips).observe(document.documentElement, { attributeFilter: ["data-theme"] });
}

async function runScene() {
  byId("scene-lanes").replaceChildren(...lanes.map(({ box }) => box));
  byId("blocks").replaceChildren(...blocks);
  byId("scene-prompts").replaceChildren(...data.words.map(({ prompt }) => el("option", { value: prompt })));
  scene.requests = firstRequests();
  fillFields();
  await takeRecorded();
  connectScene();
  byId("scene-play").hidden = isCalm.matches;
  if (!openLink() && !isCalm.matches) {
    scene.time = 0;
    play();
  }
  byId("scene").dataset.ready = "yes";
}

runScene();
