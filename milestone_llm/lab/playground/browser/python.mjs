// Python, its libraries and the engine, started: in a worker, and in the tests under Node.

export async function startPython(loadPyodide, read) {
  const [python, libraries, engine] = await Promise.all([loadPyodide(), read("libraries.zip"), read("engine.zip")]);
  python.unpackArchive(libraries, "zip", { extractDir: "/libraries" });
  python.unpackArchive(engine, "zip", { extractDir: "/engine" });
  const answer = python.runPython(`
import sys
sys.dont_write_bytecode = True  # the reader's files change more than once a second
sys.path[:0] = ["/engine", "/libraries"]
from milestone_llm.lab.playground.browser.files import Files
Files().answer`);
  return (path, body) => {
    const told = answer(path, JSON.stringify(body));
    const [isFine, text] = told.toJs();
    told.destroy();
    return { isFine, text };
  };
}
