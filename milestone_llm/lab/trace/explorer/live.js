// A page that a server feeds while the engine runs: records come as lines of one long answer. A line
// is a record, or says how many were dropped because this page was too slow.

const MAX_LIVE_RECORDS = 4000; // then the page begins anew with what comes

async function runLive(url) {
  const panel = document.getElementById("live");
  panel.hidden = false;
  let key = null;
  for (;;) {
    const status = await readLive(url, key, panel).catch((error) => error.message);
    if (status === 401 || status === 403) key = await askForKey(panel, key !== null);
    else {
      told(panel, `Not connected (${status}). Trying again in 2 seconds.`);
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
  told(panel, "Connected. Send a request to the server, and watch.");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let restore = makeRestorer();
  let rest = "";
  replaceRun(makeRun({ label: "live" }));
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return "the server closed the connection";
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const text = line.replace(/^data: ?/, "").trim(); // server-sent events will do as well
      if (!text.startsWith("{")) continue;
      takeLine(restore, JSON.parse(text), panel);
    }
    showLive();
  }
}

function takeLine(restore, data, panel) {
  const { run } = views[0];
  if (data.num_dropped !== undefined) {
    run.numDropped = data.num_dropped;
    told(panel, `This page is slower than the engine: ${plural(run.numDropped, "step")} were dropped for it.`);
    return;
  }
  Object.assign(run.meta.texts, data.texts || {});
  const { texts, ...record } = data;
  const whole = restore(record);
  if (run.records.length >= MAX_LIVE_RECORDS) replaceRun(makeRun({ label: "live", texts: run.meta.texts }));
  addRecord(views[0].run, whole);
}

function told(panel, text) {
  panel.textContent = text;
}
