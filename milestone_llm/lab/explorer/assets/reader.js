// Where records come from: lines inside the page, or a server that feeds it while the engine runs.
// A line is a record, as `PageLines` in milestone_llm/lab/explorer/live.py writes it.

const MAX_LIVE_RECORDS = 4000; // then the page begins anew with what comes

// Of a block table that only grew, a line has the new blocks alone. `tables` are those before.
function readRecord(line, tables) {
  const record = JSON.parse(line);
  for (const row of record.batch) {
    if (row.new_blocks) row.blocks = tables.get(row.request_id).concat(row.new_blocks);
    delete row.new_blocks;
    tables.set(row.request_id, row.blocks);
  }
  record.waiting_reasons = new Map(Object.entries(record.waiting_reasons)); // a name may be "constructor"
  return record;
}

function runOf(meta, lines) {
  const [run, tables] = [makeRun(meta), new Map()];
  for (const line of lines) addRecord(run, readRecord(line, tables));
  return run;
}

// --- inside the page -------------------------------------------------------------------------------

// Base64 of gzip. The first line says what the trace itself does not: a label, limits, text of tokens.
async function readRun(base64) {
  const bytes = Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const [first, ...lines] = (await new Response(stream).text()).split("\n");
  return runOf(JSON.parse(first), lines);
}

// --- from a server ---------------------------------------------------------------------------------

// `server` says where records are, and what the server is: { url, model, budget }.
async function runLive(server) {
  byId("live").hidden = false;
  const live = { ...server, key: null };
  connectPrompt(live);
  for (;;) {
    const status = await readLive(live).catch((error) => error.message);
    if (status === 401 || status === 403) live.key = await askForKey(live.key !== null);
    else {
      tell(`Not connected (${status}). Trying again in 2 seconds.`);
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

const tell = (text) => (byId("live-status").textContent = text);
const headersOf = ({ key }) => (key ? { Authorization: `Bearer ${key}` } : {});

// A key goes in the header and nowhere else; it is forgotten when the page is closed.
function askForKey(isWrong) {
  const [form, input] = [byId("key-form"), byId("key")];
  form.hidden = false;
  form.querySelector("label").textContent = isWrong ? "That key was refused." : "This server asks for its API key.";
  input.focus();
  return new Promise((resolve) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.hidden = true;
      resolve(input.value);
    }, { once: true });
  });
}

async function readLive(live) {
  const response = await fetch(live.url, { headers: headersOf(live), cache: "no-store" });
  if (!response.ok) return response.status;
  tell("Connected. Send a request, here or from a terminal, and watch.");
  const tables = new Map();
  const makeLive = (texts) => makeRun({ label: live.model || "live", budget: Number(live.budget) || null, texts });
  let run = makeLive({});
  for await (const lines of linesOf(response)) {
    for (const line of lines) {
      if (run.records.length >= MAX_LIVE_RECORDS) run = makeLive(run.meta.texts);
      takeLine(run, line, tables);
    }
    if (run.records.length) showLive(run);
  }
  return "the server closed the connection";
}

// Whole lines of an answer, as many as come at once.
async function* linesOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield lines;
  }
}

// Instead of a record a line may say how many were dropped, because this page was too slow.
function takeLine(run, line, tables) {
  if (line.startsWith('{"num_dropped"'))
    return tell(`This page is slower than the engine: ${plural(JSON.parse(line).num_dropped, "step")} were dropped for it.`);
  const { texts, beginnings: names = {}, ...record } = readRecord(line, tables);
  Object.assign(run.meta.texts, texts);
  for (const [name, words] of Object.entries(names)) beginnings.set(name, words);
  addRecord(run, record);
}

// An answer as it comes.
async function tellAnswer(response) {
  if (!response.ok) throw new Error((await response.json()).error.message);
  let text = "";
  for await (const lines of linesOf(response)) {
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      byId("answer").textContent = text += event.choices[0]?.text ?? "";
    }
  }
}

// A prompt to be sent from here, and the same as a line for a terminal.
function connectPrompt(live) {
  const form = byId("prompt-form");
  const body = () => JSON.stringify({ model: live.model, prompt: byId("prompt").value, max_tokens: Number(byId("max-tokens").value), temperature: 0 });
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const show = () => {
    const key = live.key ? ' -H "Authorization: Bearer $API_KEY"' : "";
    byId("curl").textContent = `curl ${location.origin}/v1/completions${key} -H "Content-Type: application/json" -d ${quoted(body())}`;
  };
  form.addEventListener("input", show);
  form.addEventListener("focusin", show);
  byId("copy").addEventListener("click", () => {
    getSelection().selectAllChildren(byId("curl"));
    navigator.clipboard?.writeText(byId("curl").textContent);
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    byId("answer").textContent = "…";
    const headers = { ...headersOf(live), "Content-Type": "application/json" };
    const whole = JSON.stringify({ ...JSON.parse(body()), stream: true });
    await fetch("/v1/completions", { method: "POST", headers, body: whole }).then(tellAnswer)
      .catch((error) => (byId("answer").textContent = `refused: ${error.message}`));
  });
  show();
}
