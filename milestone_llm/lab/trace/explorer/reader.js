// Where records come from: lines inside the page, or a server that feeds it while the engine runs.
// A line is a record, as `page_line` in milestone_llm/lab/trace/live.py writes it.

const MAX_LIVE_RECORDS = 4000; // then the page begins anew with what comes

// Of a block table that only grew, a line has the new blocks alone. `tables` are those before.
function readRecord(line, tables) {
  const record = JSON.parse(line);
  for (const row of record.batch) {
    if (row.new_blocks) row.blocks = tables.get(row.request_id).concat(row.new_blocks);
    delete row.new_blocks;
    tables.set(row.request_id, row.blocks);
  }
  return record;
}

// --- inside the page -------------------------------------------------------------------------------

// Base64 of gzip. The first line says what the trace itself does not: a label, limits, text of tokens.
async function readRun(base64) {
  const bytes = Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const [first, ...lines] = (await new Response(stream).text()).split("\n");
  const run = makeRun(JSON.parse(first));
  const tables = new Map();
  for (const line of lines) addRecord(run, readRecord(line, tables));
  return run;
}

// --- from a server ---------------------------------------------------------------------------------

async function runLive(url) {
  const panel = byId("live");
  panel.hidden = false;
  let key = null;
  for (;;) {
    const status = await readLive(url, key, panel).catch((error) => error.message);
    if (status === 401 || status === 403) key = await askForKey(panel, key !== null);
    else {
      panel.textContent = `Not connected (${status}). Trying again in 2 seconds.`;
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

// A key goes in the header and nowhere else; it is forgotten when the page is closed.
function askForKey(panel, isWrong) {
  panel.innerHTML = `<form class="key"><label for="key">${isWrong ? "That key was refused." : "This server asks for its API key."}</label>
    <input id="key" type="password" autocomplete="off" required> <button class="strong">connect</button></form>`;
  panel.querySelector("input").focus();
  return new Promise((resolve) => {
    panel.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      resolve(panel.querySelector("input").value);
    });
  });
}

async function readLive(url, key, panel) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(url, { headers, cache: "no-store" });
  if (!response.ok) return response.status;
  panel.textContent = "Connected. Send a request to the server, and watch.";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const tables = new Map();
  let rest = "";
  showRuns([makeRun({ label: "live" })]);
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return "the server closed the connection";
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) takeLine(line, tables, panel);
    showLive();
  }
}

// Instead of a record a line may say how many were dropped, because this page was too slow.
function takeLine(line, tables, panel) {
  const { meta, records } = views[0].run;
  if (line.startsWith('{"num_dropped"')) {
    panel.textContent = `This page is slower than the engine: ${plural(JSON.parse(line).num_dropped, "step")} were dropped for it.`;
    return;
  }
  const { texts, ...record } = readRecord(line, tables);
  Object.assign(meta.texts, texts);
  if (records.length >= MAX_LIVE_RECORDS) showRuns([makeRun({ label: "live", texts: meta.texts })]);
  addRecord(views[0].run, record);
}
