// What is so at the cursor, in words and numbers: the batch, the token budget, the queues, what
// happened, how long it took.

const MAX_ROWS = 24; // of a table at first; a button shows all
const PHASE_SIGNS = { prefill: "▸", decode: "•", padding: "░", waiting: "…", preempted: "✕", swapped: "⇄" };

function who(run, name) {
  return el("button.who", { "data-who": name, "aria-pressed": state.pinned === name, title: `Light up ${name}${beginningOf(name) ? `: ${beginningOf(name)}` : ""}` },
    el("i", { style: { background: colorOf(run, name) } }), el("span", short(name)));
}

function drawPanels(view) {
  const { run, at, box } = view;
  const record = run.records[at];
  const set = (name, ...parts) => box.querySelector(`[data-panel="${name}"]`).replaceChildren(...parts);
  set("batch", ...batchTable(view, record));
  set("budget", ...budgetBar(run, record));
  set("queues", ...queues(run, record, at));
  set("happened", ...whatHappened(run, record));
  set("times", ...stepTimes(record));
  set("kv", kvText(run, at));
  const words = wordsSoFar(run, at);
  set("words", ...words);
  box.querySelector(".words").hidden = !words.length;
  drawDevice(view);
}

// Each request that has come, its prompt, and the text that it has got so far. Of very many, those
// that the step concerns.
function wordsSoFar(run, at) {
  const { texts, prompts } = run.meta;
  const promptOf = (name) => prompts[name.split("/")[0]] ?? beginningOf(name) ?? "";
  const record = run.records[at];
  const here = new Set([...record.batch.map((row) => row.request_id), ...record.running, ...record.waiting, ...record.swapped]);
  const isAll = run.requests.size <= MAX_ROWS;
  const names = [...run.requests.keys()].filter((name) => (isAll ? firstSeen(run, name) <= at : here.has(name))).slice(0, MAX_ROWS);
  if (!names.some((name) => promptOf(name)) && !Object.keys(texts).length) return [];
  const answer = (name) => requestOf(run, name).rows.filter((each) => each.at <= at && each.row.sampled_token !== null)
    .map(({ row }) => `${row.num_accepted_tokens ? "…" : ""}${texts[row.sampled_token] ?? ""}`).join("");
  return names.map((name) => el("li", { "data-row": name }, who(run, name), el("span", el("span.why", promptOf(name)), " ", el("b", answer(name)))));
}

const firstSeen = (run, name) => Math.min(...requestOf(run, name).spans.slice(0, 1).map(({ from }) => from));

function positions({ phase, start, num_new_tokens: count }) {
  if (phase === "padding") return `– (+${count})`;
  return count === 1 ? start : `${start}–${start + count - 1} (+${count})`;
}

// In bold the blocks that the step writes to; of a long table the first and the last ones.
function blockTable(run, row) {
  const isWritten = (index) => (index + 1) * run.blockSize > row.start && index * run.blockSize < rowEnd(row);
  const words = row.blocks.map((block, index) => el(isWritten(index) ? "b" : "span", block === NULL_BLOCK ? "– " : `${block} `));
  if (words.length > 9) words.splice(2, words.length - 8, "… ");
  return el("span.table", { title: row.blocks.join(" ") }, words);
}

function batchTable(view, record) {
  const { run } = view;
  if (!record.batch.length) return [el("p.soft", "Nothing was computed.")];
  const rows = view.showsAll ? record.batch : record.batch.slice(0, MAX_ROWS);
  const { unit } = record.kv;
  const columns = [
    ["th", "td", "who", (row) => who(run, row.request_id)],
    ["th", "td", "phase", (row) => `${PHASE_SIGNS[row.phase]} ${row.phase}`],
    ["th.n", "td.n", "positions", positions],
    ["th.n", "td.n", "guessed", (row) => (row.num_draft_tokens ? `${row.num_accepted_tokens ?? 0} of ${row.num_draft_tokens}` : "–")],
    ["th.n", "td.n", "allowed", (row) => row.num_allowed_tokens || "–"],
    ["th.n", "td.n", "cached", (row) => row.num_cached_tokens || "–"],
    ["th", "td", unit === "block" ? "block table" : unit, (row) => blockTable(run, row)],
    ["th.n", "td.n", "sampled", (row) => row.sampled_token ?? "–"],
    ["th", "td.text", "text", (row) => el("span", { translate: "no" }, row.sampled_token === null ? "" : JSON.stringify(run.meta.texts[row.sampled_token] ?? ""))],
  ].filter(([, , title]) => {
    if (title === "guessed") return record.batch.some((row) => row.num_draft_tokens);
    if (title === "allowed") return record.batch.some((row) => row.num_allowed_tokens);
    if (title === "cached") return record.batch.some((row) => row.num_cached_tokens);
    if (title === "text") return record.batch.some((row) => row.sampled_token in run.meta.texts);
    return title !== "token"; // m1_single has neither blocks nor regions
  });
  const head = el("tr", columns.map(([th, , title]) => el(th, title)));
  const lines = rows.map((row) => el("tr", { "data-row": row.request_id }, columns.map(([, td, , cell]) => el(td, cell(row)))));
  const rest = record.batch.length - rows.length;
  return [el("table", head, lines), rest ? el("p", el("button", { "data-all": "" }, `show ${plural(rest, "more row")}`)) : ""];
}

// Parts of a bar, `[kind, size, title]`, as wide as their share of `most`.
function meter(label, most, parts) {
  const drawn = parts.filter(([, size]) => size);
  return el("div.meter", { role: "img", "aria-label": label },
    drawn.map(([kind, size, title]) => el(`div.${kind}`, { style: { width: `${(100 * size) / most}%` }, title })));
}

const named = (count, text) => el("span", el("b", count.toLocaleString("en")), ` ${text}`);

function budgetBar(run, record) {
  const { num_decode_tokens: decode, num_prefill_tokens: prefill, num_padding_tokens: padding } = record;
  const used = decode + prefill + padding;
  const chunks = record.batch.filter((row) => row.phase === "prefill");
  const parts = [
    ["decode", decode, `${decode} decode`],
    ...chunks.map((row) => ["prefill", row.num_new_tokens, `${row.request_id}: +${row.num_new_tokens}`]),
    ["padding", padding, `${padding} padding`],
  ];
  const left = (run.budget - used).toLocaleString("en");
  const counts = Object.entries({ decode, prefill, padding }).filter(([, count]) => count);
  const of = run.meta.budget ? `of max_num_batched_tokens=${run.budget}` : `of ${run.budget} at most seen`;
  return [
    meter(`${used} tokens ${of}`, run.budget, parts),
    el("p.legend", counts.map(([kind, count]) => named(count, kind)),
      el("span", run.meta.budget ? `${left} left` : `${left} less than the largest step`), el("span", of)),
    record.expert_load ? expertLoad(record.expert_load) : "",
  ];
}

// The mean over the layers, and the most popular expert of any.
function expertLoad({ num_experts, num_met, largest_share }) {
  return el("p.legend", named(num_met.toFixed(1), `of ${num_experts} experts met in a layer, on average`),
    named(`${(100 * largest_share).toFixed(1)} %`, "is the largest share of one expert"));
}

function queues(run, record, at) {
  const now = queuesBefore(run, at + 1);
  const line = (name, label, why) => el("li", who(run, name), el("span.soft", label), el("span.why", `– ${worded(run, why)}`));
  const waits = (name, label) => line(name, label, whyWaits(run, at, name, now));
  const idle = now.running.filter((name) => !record.batch.some((row) => row.request_id === name));
  const items = [
    ...now.swapped.map((name) => waits(name, "swapped out")),
    ...now.waiting.map((name) => waits(name, hasRunBefore(run, name, at) ? "preempted, waits" : "waits")),
    ...idle.map((name) => line(name, "runs without a row", "the step's tokens were spent, or its first row comes next")),
  ];
  const rest = Math.max(0, items.length - 8);
  return [
    items.length ? el("ul.list", items.slice(0, 8)) : el("p.soft", "Nobody waits."),
    rest ? el("p.soft", `… and ${rest} more behind them`) : "",
    el("p.legend", named(now.running.length, "running after the step")),
  ];
}

// What a request came with, after a length. A hash stands for a block and all before it.
function promptFacts(run, name, length, isNew = true) {
  const { prompt, index } = requestOf(run, name);
  if (!prompt) return length;
  const earlier = [...run.requests.values()].slice(0, index).filter((other) => other.prompt?.hashes[0] === prompt.hashes[0]);
  const alike = earlier.map((other) => [prompt.hashes.findLastIndex((hash, block) => hash === other.prompt.hashes[block]) + 1, short(other.name)]);
  const [count, other] = alike.sort(([one], [two]) => two - one)[0] ?? [0];
  const urgency = run.records[0].policy === "priority" ? `, priority ${prompt.priority}` : "";
  return `${length}${urgency}${count && isNew ? `, begins like ${other}: ${count * run.blockSize} tokens (hash ${prompt.hashes[count - 1]})` : ""}`;
}

const hasRunBefore = (run, name, at) => requestOf(run, name).rows[0]?.at < at;

const KIND_NAMES = { copy_on_write: "copy", swap_out: "swap out", swap_in: "swap in" };

function whatHappened(run, record) {
  const all = together(record.step_events);
  if (!all.length) return [el("p.soft", "Nobody came or went, no block changed hands.")];
  const told = (kind, name, reason) => (kind === "arrived" ? promptFacts(run, name, plural(requestOf(run, name).prompt?.num_tokens ?? 0, "token")) : worded(run, reason));
  const items = all.slice(0, 14).map(({ kind, request_id: name, reason, blocks }) =>
    el("li", el("span.kind", `${MARK_SIGNS[kind] || ""} ${KIND_NAMES[kind] || kind}`),
      name === null ? "" : who(run, name), el("span.why", blocks.length ? blockList(record.kv.unit, kind, blocks) : told(kind, name, reason))));
  const rest = all.length - items.length;
  return [el("ul.list", items), rest > 0 ? el("p.soft", `… and ${rest} more`) : ""];
}

// Neighbours of one kind and one request, or of none, are one line.
function together(list) {
  const merged = [];
  for (const each of list) {
    const last = merged[merged.length - 1];
    const isSame = last && each.blocks.length && last.kind === each.kind && last.request_id === each.request_id;
    if (isSame && each.kind !== "copy_on_write") last.blocks = last.blocks.concat(each.blocks);
    else merged.push({ ...each });
  }
  return merged;
}

function blockList(unit, kind, blocks) {
  if (kind === "copy_on_write") return `block ${blocks[0]} → ${blocks[1]}`;
  const shown = blocks.slice(0, 8).join(" ");
  return `${blocks.length === 1 ? unit : `${blocks.length} ${unit}s:`} ${shown}${blocks.length > 8 ? " …" : ""}`;
}

function stepTimes(record) {
  const parts = ["schedule", "execute", "update"].map((name) => [name, record[`${name}_ms`], ""]);
  const sum = parts.reduce((total, [, ms]) => total + ms, 0) || 1;
  return [
    meter("step time", sum, parts),
    el("p.legend", parts.map(([name, ms]) => el("span", el("b.number", `${ms.toFixed(2)} ms`), ` ${name}`)),
      el("span", `began at ${record.start_s.toFixed(3)} s`)),
  ];
}

function kvText(run, at) {
  const { unit, total } = run.records[at].kv;
  const { used, stored, reserved, numCached } = run.usage[at];
  const empty = reserved ? `${Math.round(100 * (1 - stored / reserved))} % of the reserved places empty` : "nothing reserved";
  const found = numCached ? `, ${numCached} of them can be found` : "";
  return el("p.legend",
    unit === "token" ? "" : [named(used, `of ${plural(total, unit)} used`), el("span", `${(total - used).toLocaleString("en")} free${found}`)],
    named(stored, "tokens stored"), named(reserved, "reserved"), el("span", empty));
}
