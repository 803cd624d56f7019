// What is so at the cursor, in words and numbers: the batch, the token budget, the queues, what
// happened, how long it took.

const MAX_ROWS = 24; // of a table at first; a button shows all
const PHASE_SIGNS = { prefill: "▸", decode: "•", padding: "░", waiting: "…", preempted: "✕", swapped: "⇄" };

// Text that comes from a trace is never taken for HTML.
const escapeHtml = (text) =>
  String(text).replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

function who(run, name) {
  const pressed = state.pinned === name;
  return `<button class="who" data-who="${escapeHtml(name)}" aria-pressed="${pressed}" title="Light up ${escapeHtml(name)}">
    <i style="background:${colorOf(run, name)}"></i><span>${escapeHtml(shorten(name, 12))}</span></button>`;
}

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

function drawPanels(view) {
  const { run, at, box } = view;
  const record = run.records[at];
  const set = (name, html) => {
    box.querySelector(`[data-panel="${name}"]`).innerHTML = html;
  };
  set("batch", batchTable(view, record));
  set("budget", budgetBar(run, record));
  set("queues", queues(run, record, at));
  set("happened", whatHappened(run, record));
  set("times", stepTimes(record));
  set("kv", kvText(record));
}

function batchTable(view, record) {
  const { run } = view;
  if (!record.batch.length) return `<p class="soft">Nothing was computed.</p>`;
  const rows = view.showsAll ? record.batch : record.batch.slice(0, MAX_ROWS);
  const hasCached = record.batch.some((row) => row.num_cached_tokens);
  const hasText = record.batch.some((row) => row.sampled_token in run.meta.texts);
  const head = `<tr><th>who</th><th>phase</th><th class="n">tokens</th><th class="n">context</th>
    ${hasCached ? '<th class="n">cached</th>' : ""}<th class="n">sampled</th>${hasText ? "<th>text</th>" : ""}</tr>`;
  const cells = rows.map((row) => {
    const token = row.sampled_token;
    const text = token === null ? "" : JSON.stringify(run.meta.texts[token] ?? "");
    return `<tr data-row="${escapeHtml(row.request_id)}"><td>${who(run, row.request_id)}</td>
      <td>${PHASE_SIGNS[row.phase]} ${row.phase}</td><td class="n">+${row.num_new_tokens}</td>
      <td class="n">${row.phase === "padding" ? "–" : rowEnd(row)}</td>
      ${hasCached ? `<td class="n">${row.num_cached_tokens || "–"}</td>` : ""}
      <td class="n">${token ?? "–"}</td>${hasText ? `<td class="text">${escapeHtml(text)}</td>` : ""}</tr>`;
  });
  const rest = record.batch.length - rows.length;
  const more = rest ? `<p><button data-all>show ${plural(rest, "more row")}</button></p>` : "";
  return `<table>${head}${cells.join("")}</table>${more}`;
}

function budgetBar(run, record) {
  const { num_decode_tokens: decode, num_prefill_tokens: prefill, num_padding_tokens: padding } = record;
  const used = decode + prefill + padding;
  const part = (kind, count, title) =>
    count ? `<div class="${kind}" style="width:${(100 * count) / run.budget}%" title="${escapeHtml(title)}"></div>` : "";
  const chunks = record.batch.filter((row) => row.phase === "prefill");
  const bar =
    part("decode", decode, `${decode} decode`) +
    chunks.map((row) => part("prefill", row.num_new_tokens, `${row.request_id}: +${row.num_new_tokens}`)).join("") +
    part("padding", padding, `${padding} padding`);
  const left = run.budget - used;
  const known = run.meta.budget ? `${left.toLocaleString("en")} left` : `${left.toLocaleString("en")} less than the largest step`;
  const named = [["decode", decode], ["prefill", prefill], ["padding", padding]]
    .filter(([, count]) => count)
    .map(([kind, count]) => `<span><b>${count.toLocaleString("en")}</b> ${kind}</span>`);
  const of = run.meta.budget ? `of max_num_batched_tokens=${run.budget}` : `of ${run.budget} at most seen`;
  return `<div class="meter" role="img" aria-label="${used} tokens ${of}">${bar}</div>
    <p class="legend">${named.join("")}<span>${known}</span><span>${of}</span></p>`;
}

function queues(run, record, at) {
  const line = (name, label, why) =>
    `<li>${who(run, name)} <span class="soft">${label}</span> <span class="why">${escapeHtml(why)}</span></li>`;
  const waits = (names, label) => names.map((name) => line(name, label, `– ${whyWaits(run, at, name)}`));
  const inBatch = new Set(record.batch.map((row) => row.request_id));
  const queued = [...record.swapped, ...record.waiting];
  // m5_kernels has planned the next step when it records one: who waited may be running by then.
  const joined = Object.keys(record.waiting_reasons).filter((name) => !queued.includes(name));
  const idle = record.running.filter((name) => !inBatch.has(name) && !joined.includes(name));
  const items = [
    ...waits(record.swapped, "swapped out"),
    ...record.waiting.flatMap((name) => waits([name], hasRunBefore(run, name, at) ? "preempted, waits" : "waits")),
    ...joined.map((name) => line(name, "waits", `– ${record.waiting_reasons[name]}; it has left the queue since`)),
    ...idle.map((name) => line(name, "runs without a row", `– ${record.admitted.includes(name) ? "it begins with the next step" : "the step's tokens were spent, or its first row comes next"}`)),
  ];
  const shown = items.slice(0, 8);
  const rest = items.length - shown.length;
  const list = items.length ? `<ul class="list">${shown.join("")}</ul>` : `<p class="soft">Nobody waits.</p>`;
  return `${list}${rest ? `<p class="soft">… and ${rest} more behind them</p>` : ""}
    <p class="legend"><span><b>${record.running.length}</b> running after the step</span></p>`;
}

function hasRunBefore(run, name, at) {
  const { rows } = requestOf(run, name);
  return rows.length > 0 && rows[0].at < at;
}

const KIND_NAMES = { copy_on_write: "copy", swap_out: "swap out", swap_in: "swap in" };

function whatHappened(run, record) {
  const all = together(record.step_events);
  if (!all.length) return `<p class="soft">Nobody came or went, no block changed hands.</p>`;
  const items = all.slice(0, 14).map(({ kind, request_id: name, reason, blocks }) => {
    const about = blocks.length ? blockList(kind, blocks) : reason;
    return `<li><span class="kind">${MARK_SIGNS[kind] || ""} ${KIND_NAMES[kind] || kind}</span>
      ${name === null ? "" : who(run, name)} <span class="why">${escapeHtml(about)}</span></li>`;
  });
  const rest = all.length - items.length;
  return `<ul class="list">${items.join("")}</ul>${rest > 0 ? `<p class="soft">… and ${rest} more</p>` : ""}`;
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

function blockList(kind, blocks) {
  if (kind === "copy_on_write") return `block ${blocks[0]} → ${blocks[1]}`;
  const shown = blocks.slice(0, 8).join(" ");
  return `${blocks.length === 1 ? "" : `${blocks.length}: `}${shown}${blocks.length > 8 ? " …" : ""}`;
}

function stepTimes(record) {
  const parts = ["schedule", "execute", "update"].map((name) => [name, record[`${name}_ms`]]);
  const sum = parts.reduce((total, [, ms]) => total + ms, 0) || 1;
  const bar = parts.map(([name, ms]) => `<div class="${name}" style="width:${(100 * ms) / sum}%"></div>`);
  const named = parts.map(([name, ms]) => `<span><b class="number">${ms.toFixed(2)} ms</b> ${name}</span>`);
  return `<div class="meter" role="img" aria-label="step time">${bar.join("")}</div>
    <p class="legend">${named.join("")}<span>began at ${record.start_s.toFixed(3)} s</span></p>`;
}

function kvText(record) {
  const { unit, total, used, free, cached, stored_tokens: stored, reserved_tokens: reserved } = record.kv;
  const units = unit === "token" ? "" : `<span><b>${used.toLocaleString("en")}</b> of ${plural(total, unit)} used</span><span>${free.toLocaleString("en")} free${cached ? `, ${cached} of them can be found` : ""}</span>`;
  const empty = reserved ? `${Math.round(100 * (1 - stored / reserved))} % of the reserved places empty` : "nothing reserved";
  return `<p class="legend">${units}<span><b>${stored.toLocaleString("en")}</b> tokens stored after the step</span><span>${empty}</span></p>`;
}
