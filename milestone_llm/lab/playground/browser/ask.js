// The page asks Python in a worker. Until that is there, presets have recorded answers.

const MOST_SECONDS = 10; // for an answer: a loop that Python cannot stop ends with its worker
const python = { worker: null, isReady: false, failure: "", waiting: new Map(), lastId: 0, recorded: null };

const busyWords = () => (python.isReady ? "computing …" : "Python is on its way: 11 MB, once …");

function beginAsking() {
  startWorker();
  const button = el("button", { id: "code-open" }, "write your own");
  byId("play-beside").after(button);
  const open = async () => {
    button.disabled = true;
    byId("play-busy").textContent = busyWords();
    await import("./editor.js").then(({ openEditor }) => openEditor(lab.course)).catch(tellError);
    byId("play-busy").textContent = "";
  };
  button.onclick = open;
  lab.course = /^#course=(\w+)$/.exec(location.hash)?.[1] ?? ""; // a link opens a course
  if (lab.course) open();
}

async function ask(path, body) {
  startWorker();
  python.recorded ??= recordedAnswers().catch(() => new Map());
  const known = path === "/run" && !python.isReady && (await python.recorded).get(JSON.stringify(body));
  if (known) return known;
  if (python.failure) throw new Error(python.failure);
  const { isFine, text } = await new Promise((resolve) => {
    const id = ++python.lastId;
    python.waiting.set(id, resolve);
    python.worker.postMessage({ id, path, body });
    python.started.then(() => setTimeout(() => python.waiting.has(id) && endWorker(), 1000 * MOST_SECONDS));
  });
  if (!isFine) throw new Error(text);
  return text;
}

// By setting, and by link.
async function recordedAnswers() {
  const texts = await (await fetch("answers.json")).json();
  return new Map(texts.flatMap((text, index) => {
    const { setting, link } = JSON.parse(text.split("\n", 1)[0]);
    const asked = [wholeSetting(lab.data.presets[index]), wholeSetting(setting), link];
    return asked.map((each) => [JSON.stringify(each), text]);
  }));
}

function startWorker() {
  if (python.worker || python.failure) return;
  if (location.protocol === "file:") return failWorker("Python starts only where a web server serves this page: python -m http.server");
  python.addresses ??= window.trustedTypes?.createPolicy("python", { createScriptURL: (address) => address });
  python.worker = new Worker(python.addresses?.createScriptURL("worker.js") ?? "worker.js", { type: "module" });
  python.started = new Promise((resolve) => (python.tellStarted = resolve));
  python.worker.onerror = () => failWorker("Python cannot be started in this browser");
  python.worker.onmessage = ({ data: { id, isReady, failure, ...answer } }) => {
    if (failure) return failWorker(`Python cannot be started: ${failure}`);
    if (isReady) return python.tellStarted(Object.assign(document.body.dataset, { python: (python.isReady = isReady) }));
    python.waiting.get(id)(answer);
    python.waiting.delete(id);
  };
}

// The next question starts another.
function endWorker() {
  python.worker.terminate();
  Object.assign(python, { worker: null, isReady: false });
  answerAll(`stopped after ${MOST_SECONDS} s: does a loop go on for ever? Python starts anew with your next change`);
}

function failWorker(text) {
  python.failure = text;
  answerAll(text);
}

function answerAll(text) {
  for (const resolve of python.waiting.values()) resolve({ isFine: false, text });
  python.waiting.clear();
}
