// Questions to Python in a worker, which starts with the first.

const MOST_SECONDS = 10; // for an answer: a loop that Python cannot stop ends with its worker
const python = { worker: null, address: "worker.js", isReady: false, failure: "", waiting: new Map(), lastId: 0 };

const busyWords = () => (python.isReady ? "computing …" : "Python is on its way: 11 MB, once …");

async function askPython(path, body) {
  startWorker();
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

function startWorker() {
  if (python.worker || python.failure) return;
  if (location.protocol === "file:") return failWorker("Python starts only where a web server serves this page: python -m http.server");
  python.addresses ??= window.trustedTypes?.createPolicy("python", { createScriptURL: (address) => address });
  python.worker = new Worker(python.addresses?.createScriptURL(python.address) ?? python.address, { type: "module" });
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
