// What the Python of a packed playground answers to [path, body]s: node answers.mjs FOLDER < JSON
import { readFile } from "node:fs/promises";
import { pathToFileURL } from "node:url";

const [folder] = process.argv.slice(2);
const inFolder = (name) => import(pathToFileURL(`${folder}/${name}`));
const { loadPyodide } = await inFolder("pyodide/pyodide.mjs");
const { startPython } = await inFolder("python.mjs");
const load = () => loadPyodide({ indexURL: `${folder}/pyodide/`, checkIntegrity: false });
const answer = await startPython(load, async (name) => (await readFile(`${folder}/${name}`)).buffer);
const asked = JSON.parse(await readFile("/dev/stdin", "utf8"));
process.stdout.write(JSON.stringify(asked.map(([path, body]) => answer(path, body).text)));
