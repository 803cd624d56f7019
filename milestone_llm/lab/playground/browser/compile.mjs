// Compiles folders with the very Python of the browser: node compile.mjs PYODIDE.mjs JOBS
// JOBS is JSON: for each folder where it will be, and whether its sources stay beside what is compiled.
import { pathToFileURL } from "node:url";

const [pyodide, jobs] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(pyodide));
const python = await loadPyodide();
for (const [index, { root }] of JSON.parse(jobs).entries()) {
  python.FS.mkdir(`/in${index}`);
  python.FS.mount(python.FS.filesystems.NODEFS, { root }, `/in${index}`);
}
python.globals.set("jobs", jobs);
python.runPython(`
import compileall, json, pathlib, py_compile

for index, job in enumerate(json.loads(jobs)):
    root = f"/in{index}"
    options = {"stripdir": root, "prependdir": job["place"], "legacy": not job["has_sources"]}
    options["optimize"] = 0 if job["has_sources"] else 2  # nobody reads docstrings of libraries here
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    if not compileall.compile_dir(root, quiet=1, invalidation_mode=mode, **options):
        raise SystemExit(f"{job['root']} cannot be compiled")
    for path in pathlib.Path(root).rglob("*.py"):
        if not job["has_sources"]:
            path.unlink()
`);
