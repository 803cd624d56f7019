// A run: its records, and what follows from them. `addRecord` takes one record after the other, so
// that a recorded trace and a live one are the same thing.

// REQUEST_COLORS are those of `request_color` in milestone_llm/trace/text.py.
const requestColor = (index) => REQUEST_COLORS[index % REQUEST_COLORS.length];

function makeRun(meta) {
  return {
    meta: { label: "", budget: null, texts: {}, prompts: {}, look_at: null, ...meta },
    records: [],
    useful: 0, // of the positions `computed` so far: what the trace's reader counted
    computed: 0,
    requests: new Map(), // id -> { name, index, color, spans, rows, prompt }
    lookAt: null, // the step that the page is about, if there is one
    marks: [], // { at, kind, name, text }: what one can jump to
    budget: meta.budget || 0, // most tokens of a step; a guess grows with the largest step
    blockSize: 0,
    numBlocks: 0, // that have ever been used: blocks above have the highest numbers
    widest: 1, // tokens of a region, or of a row of a static batch
    usage: [], // per step, while it is computed: units used, and tokens { stored, reserved, cached }
    memory: { tables: new Map(), tokens: new Map(), host: new Map(), cached: new Map() },
    idle: [], // per step: [id, blocks, tokens] of who has memory but no row
    host: [], // per step: [id, number of blocks] in host memory
    cachedRuns: [], // [block, from step, to step]: free, but its content can be found
    isAhead: false, // whether a step is left when the next one has been planned (m5_kernels)
    hasHits: false, // whether a prefix was found
    hasCache: false, // whether free blocks can be found by content
  };
}

function requestOf(run, name) {
  let request = run.requests.get(name);
  if (!request) {
    const index = run.requests.size;
    request = { name, index, color: requestColor(index), spans: [], rows: [], prompt: null };
    run.requests.set(name, request);
  }
  return request;
}

const titleOf = (run) => run.meta.label || run.records[0].milestone;
const colorOf = (run, name) => run.requests.get(name).color;
const rowEnd = (row) => row.start + row.num_new_tokens;
const stepTokens = (record) =>
  record.num_prefill_tokens + record.num_decode_tokens + record.num_padding_tokens;

function addRecord(run, record) {
  const at = run.records.length;
  [run.useful, run.computed] = [record.useful, record.computed];
  run.records.push(record);
  const names = [record.arrived, record.batch.map((row) => row.request_id), record.running];
  for (const name of names.concat([record.swapped, record.waiting]).flat()) requestOf(run, name);
  for (const { request_id } of record.finished) requestOf(run, request_id);
  for (const [name, prompt] of Object.entries(record.prompts)) requestOf(run, name).prompt = prompt;
  run.isAhead ||= at > 0 && record.admitted.some((name) => run.records[at - 1].running.includes(name));
  addPhases(run, record, at);
  addMarks(run, record, at);
  if (record.kv.unit !== "token") addMemory(run, record, at);
  else addRectangle(run, record, at);
  learnBudget(run, record);
}

// --- who was in which phase ----------------------------------------------------------------------

function phasesOf(run, record) {
  const phases = new Map();
  for (const name of record.running) phases.set(name, "waiting"); // no row: the budget was spent
  for (const name of record.waiting)
    phases.set(name, requestOf(run, name).rows.length ? "preempted" : "waiting");
  for (const name of record.swapped) phases.set(name, "swapped");
  for (const row of record.batch) phases.set(row.request_id, row.phase);
  return phases;
}

function addPhases(run, record, at) {
  for (const [name, phase] of phasesOf(run, record)) {
    const { spans } = requestOf(run, name);
    const last = spans[spans.length - 1];
    if (last && last.phase === phase && last.to === at - 1) last.to = at;
    else spans.push({ phase, from: at, to: at, cachedShare: 0 });
  }
  for (const row of record.batch) {
    const { rows, spans } = requestOf(run, row.request_id);
    rows.push({ at, row });
    run.hasHits ||= row.num_cached_tokens > 0;
    if (row.num_cached_tokens) spans[spans.length - 1].cachedShare = row.num_cached_tokens / (row.num_cached_tokens + row.num_new_tokens);
  }
}

// --- what happened ------------------------------------------------------------------------------

const MARKED = ["admitted", "preempted", "resumed", "copy_on_write", "evict", "finished"];

function addMarks(run, record, at) {
  for (const { kind, request_id: name, reason } of record.step_events)
    if (MARKED.includes(kind)) run.marks.push({ at, kind, name, reason });
  if (record.step === run.meta.look_at) run.lookAt = at;
}

// --- KV memory -----------------------------------------------------------------------------------

// Block tables follow from the events, and a row says again what its request's table is. A request
// that ends in a step has its blocks until the step is done: its `free` is taken in afterwards.
function addMemory(run, record, at) {
  const { memory } = run;
  const { tables, tokens, host, cached } = memory;
  run.hasCache ||= record.kv.cached > 0;
  const before = run.records[at - 1];
  if (before && record.step !== before.step + 1) forgetWhoLeft(memory, record);
  if (!run.blockSize && record.kv.used) run.blockSize = record.kv.reserved_tokens / record.kv.used;
  const rows = new Map(record.batch.map((row) => [row.request_id, row]));
  // m5_kernels frees what ended in the step before when this one has been planned.
  const endsLater = new Set(before ? before.finished.map((entry) => entry.request_id) : []);
  record.admitted.forEach((name) => endsLater.add(name)); // a fork may end where it begins
  for (const { request_id } of record.preempted) endsLater.delete(request_id); // freed by the plan
  const later = [];
  const take = (block) => {
    if (!cached.has(block)) return;
    if (cached.get(block) < at) run.cachedRuns.push([block, cached.get(block), at - 1]);
    cached.delete(block);
  };
  record.events.forEach((event, index) => {
    const { type, request_id: name, blocks } = event;
    const table = tables.get(name) || [];
    if (type === "alloc" || type === "share") {
      tables.set(name, table.concat(blocks));
      blocks.forEach(take);
    } else if (type === "copy_on_write") {
      tables.set(name, table.map((block) => (block === blocks[0] ? blocks[1] : block)));
      take(blocks[1]);
    } else if (type === "evict") blocks.forEach(take);
    else if (type === "swap_out") host.set(name, blocks.length);
    else if (type === "swap_in") host.delete(name);
    else if (type === "free") {
      const comesAgain = record.events
        .slice(index + 1)
        .some((other) => other.request_id === name && other.type !== "free");
      // Layers with a window give some of their blocks back, and the request runs on.
      const isNew = record.admitted.includes(name) || record.resumed.includes(name);
      const own = rows.has(name) ? tablesOf(rows.get(name)) : [];
      const hasWindow = own.length > 1 || own.flat().includes(NULL_BLOCK);
      const isWhole = own.some((one) => String(one.filter((block) => block !== NULL_BLOCK)) === String(blocks));
      if (hasWindow && record.running.includes(name) && !isNew && !isWhole) {
        blocks.forEach((block) => cached.set(block, at)); // they are full
        return;
      }
      if ((rows.has(name) || endsLater.has(name)) && !comesAgain) later.push(name);
      else freeTable(run, name, at);
    }
  });
  for (const [name, row] of rows) {
    tables.set(name, row.blocks);
    tokens.set(name, rowEnd(row));
  }
  for (const name of host.keys()) if (!record.swapped.includes(name)) host.delete(name);
  run.idle[at] = [...tables].filter(([name]) => !rows.has(name)).map(([name, table]) => [name, table, tokens.get(name) || 0]);
  run.host[at] = [...host];
  addUsage(run, record, at);
  for (const name of later) freeTable(run, name, at + 1);
}

// A request that ends in a step has its blocks until the step is done; `record.kv` is what comes after.
function addUsage(run, { kv, finished }, at) {
  const fill = fillAt(run, at);
  const stored = [...fill.values()].reduce((sum, count) => sum + count, 0);
  for (const block of fill.keys()) run.numBlocks = Math.max(run.numBlocks, block + 1);
  const free = finished.length && at ? Math.min(kv.cached, run.records[at - 1].kv.cached) : kv.cached;
  run.widest = Math.max(run.widest, kv.unit === "region" ? run.blockSize : 1);
  const [reserved, cached] = [fill.size * run.blockSize, free * run.blockSize];
  run.usage[at] = { used: fill.size, stored, reserved, cached, numCached: free };
}

// A static batch gives all back at once: then its width is that of the longest row.
function addRectangle(run, { kv, batch }, at) {
  const ends = batch.filter((row) => row.phase !== "padding").map(rowEnd);
  const reserved = kv.reserved_tokens || batch.length * Math.max(0, ...batch.map(rowEnd));
  const stored = ends.reduce((sum, end) => sum + end, 0);
  run.widest = Math.max(run.widest, reserved / Math.max(1, batch.length));
  run.usage[at] = { used: 0, stored, reserved, cached: 0, numCached: 0 };
}

function freeTable(run, name, from) {
  const { tables, tokens, cached } = run.memory;
  const table = tables.get(name) || [];
  tables.delete(name);
  const kept = new Set([...tables.values()].flat());
  const numFull = Math.floor((tokens.get(name) || 0) / run.blockSize);
  table.forEach((block, index) => {
    if (index < numFull && block !== NULL_BLOCK && !kept.has(block)) cached.set(block, from);
  });
  tokens.delete(name);
}

// Records are missing in between (a live page was too slow): nobody else has memory now.
function forgetWhoLeft({ tables }, record) {
  for (const name of tables.keys()) if (!record.running.includes(name)) tables.delete(name);
}

// Who has KV memory while step `at` is computed: id, blocks, tokens.
function holdersAt(run, at) {
  const rows = run.records[at].batch.flatMap((row) => tablesOf(row).map((table) => [row.request_id, table, rowEnd(row)]));
  return rows.concat(run.idle[at]);
}

const NULL_BLOCK = -1; // in a table where a block has been given back
const tablesOf = (row) => [row.blocks, ...(row.further_blocks || [])]; // one a group of layers

// Tokens in each block then.
function fillAt(run, at) {
  const fill = new Map();
  for (const [, table, tokens] of holdersAt(run, at))
    table.forEach((block, index) => fill.set(block, Math.max(fill.get(block) || 0, Math.min(run.blockSize, tokens - index * run.blockSize))));
  fill.delete(NULL_BLOCK);
  return fill;
}

// KV memory while step `at` is computed.
function memoryAt(run, at) {
  const { kv, batch } = run.records[at];
  if (kv.unit === "token") return { unit: kv.unit, rows: batch, width: Math.max(1, ...batch.map(rowEnd), run.usage[at].reserved / Math.max(1, batch.length)) };
  const owners = new Map(); // block -> ids, in order of their tables
  for (const [name, table] of holdersAt(run, at)) for (const block of table) owners.set(block, [...(owners.get(block) ?? []), name]);
  owners.delete(NULL_BLOCK);
  return { unit: kv.unit, size: run.blockSize, owners, fill: fillAt(run, at), cached: cachedAt(run, at) };
}

// Full blocks that were freed and not taken since. Which of two equal blocks is found by its content
// the trace does not say: `kv.cached` counts those that are.
function cachedAt(run, at) {
  const blocks = new Set();
  if (!run.hasCache) return blocks;
  for (const [block, from, to] of run.cachedRuns) if (from <= at && at <= to) blocks.add(block);
  for (const [block, from] of run.memory.cached) if (from <= at) blocks.add(block);
  return blocks;
}

// --- the budget of a step ------------------------------------------------------------------------

// The trace has no limits. A reason gives one away: what is left and what was used make the budget.
function learnBudget(run, record) {
  if (run.meta.budget) return;
  const left = /left in this step: (\d+)/.exec([...record.waiting_reasons.values()].join());
  if (left) run.meta.budget = record.num_prefill_tokens + record.num_decode_tokens + Number(left[1]);
  run.budget = run.meta.budget || Math.max(run.budget, stepTokens(record));
}

// --- why somebody waits --------------------------------------------------------------------------

// Who was where when step `at` was planned: of a record that is ahead its plan is taken back.
function queuesBefore(run, at) {
  const { running, waiting, swapped } = run.records[at - 1];
  if (!run.records[at]) return { running, waiting, swapped };
  const { admitted, resumed, preempted } = run.records[at];
  const [begun, gone] = [new Set([...admitted, ...resumed]), new Set(preempted.map((each) => each.request_id))];
  const isGone = (name) => gone.has(name);
  return {
    running: [...running.filter((name) => !begun.has(name)), ...[...swapped, ...waiting].filter(isGone)],
    waiting: [...running.filter((name) => begun.has(name)), ...waiting.filter((name) => !isGone(name))],
    swapped: swapped.filter((name) => !isGone(name)),
  };
}

function whyWaits(run, at, name, { swapped, waiting } = run.records[at]) {
  const record = run.records[at];
  if (record.waiting_reasons.has(name)) return record.waiting_reasons.get(name);
  const queue = [...swapped, ...waiting]; // who was swapped out came before
  const index = queue.indexOf(name);
  const head = queue.find((other) => record.waiting_reasons.has(other));
  if (index > 0 || (index === 0 && head)) return `waits behind ${queue[index - 1] || head}`;
  if (record.preempted.length) return "nobody joins a step that preempted";
  if (index === 0) return "came when the step was planned already";
  return "it runs, but the step's tokens were spent";
}

// --- time ----------------------------------------------------------------------------------------

// Where step `at` begins and ends on the x axis: in steps, or in seconds since the trace began.
function stepBegin(run, at, axis) {
  return axis === "steps" ? at : run.records[at].start_s;
}

function stepEnd(run, at, axis) {
  if (axis === "steps") return at + 1;
  const { start_s, schedule_ms, execute_ms, update_ms } = run.records[at];
  const end = start_s + (schedule_ms + execute_ms + update_ms) / 1000;
  const next = run.records[at + 1]; // which m5_kernels begins before this one is done
  return next ? Math.min(end, next.start_s) : end;
}

function stepAt(run, time, axis) {
  let low = 0;
  let high = run.records.length - 1;
  if (axis === "steps") return Math.max(0, Math.min(high, Math.floor(time)));
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (run.records[middle].start_s <= time + 1e-9) low = middle;
    else high = middle - 1;
  }
  return low;
}
