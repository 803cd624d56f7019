// Answers the page's questions, one after the other. The first waits until Python is there.
import { loadPyodide } from "./pyodide/pyodide.mjs";
import { startPython } from "./python.mjs";

const here = (name) => new URL(name, import.meta.url).href;

// The library was compiled anew: it is not what Pyodide's own sums say.
const load = () => loadPyodide({ indexURL: here("pyodide/"), checkIntegrity: false });

async function read(name) {
  const response = await fetch(here(name));
  if (!response.ok) throw new Error(`${name}: ${response.statusText}`);
  return response.arrayBuffer();
}

const started = startPython(load, read);
started.then(() => postMessage({ isReady: true }), (error) => postMessage({ failure: String(error) }));

onmessage = async ({ data: { id, path, body } }) => {
  const answer = await started;
  try {
    postMessage({ id, ...answer(path, body) });
  } catch (error) {
    postMessage({ id, isFine: false, text: String(error) });
  }
};
