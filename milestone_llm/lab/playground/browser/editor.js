// The reader's code: a milestone's scheduler to change, or a course to write. Bundled by pack.py.
//
// What is written stays in this browser. It runs, or is checked, when the reader stops typing.
import { indentWithTab } from "@codemirror/commands";
import { python } from "@codemirror/lang-python";
import { indentUnit } from "@codemirror/language";
import { EditorView, keymap } from "@codemirror/view";
import { basicSetup } from "codemirror";

const PAUSE_MS = 500;
const code = { texts: {}, name: "", view: null, timer: null };
const keyOf = (name) => `code:${name}`;
const writtenIn = (name) => localStorage.getItem(keyOf(name)) ?? code.texts[name];
const courseOf = (name) => name.match(/^exercises\/build\/(\w+)\//)?.[1];

// With the name of a course, its first file.
export async function openEditor(course) {
  code.texts = JSON.parse(await ask("/files", null));
  const title = (name) => (courseOf(name) ? `course ${courseOf(name)}: ${name.split("/").at(-1)}` : `a copy of ${name}`);
  const names = Object.keys(code.texts);
  const pick = el("select", { id: "code-pick", "aria-label": "file" }, options(names.map((name) => [name, title(name)])));
  const save = el("button", { id: "code-save" }, "save file");
  const again = el("button", { id: "code-again" }, "begin again");
  const box = el("div", { id: "code-box" });
  const told = el("pre", { id: "code-told", role: "status", tabindex: 0 });
  const section = el("section.card", { id: "code", "aria-label": "Your code" }, el("div.line", el("h3", "Your code"), pick, again, save), box, told);
  section.addEventListener("change", (event) => event.stopPropagation()); // no change of the setting
  byId("play-cards").before(section);
  const root = box.attachShadow({ mode: "open" }); // the page's policy lets no other style in
  const onChange = EditorView.updateListener.of((update) => update.docChanged && written(update.state.doc.toString()));
  const name = EditorView.contentAttributes.of({ "aria-label": "Your code: Escape, then Tab leaves it" });
  const height = EditorView.theme({ "&": { height: "100%", fontSize: "12.5px" }, ".cm-scroller": { overflow: "auto" } });
  const extensions = [basicSetup, python(), indentUnit.of("    "), keymap.of([indentWithTab]), onChange, name, height];
  code.view = new EditorView({ parent: root, root, extensions });
  code.view.scrollDOM.tabIndex = 0;
  pick.onchange = () => open(pick.value);
  again.onclick = () => replace(code.texts[code.name]);
  save.onclick = () => download(courseOf(code.name) ? code.name.split("/").at(-1) : "my_scheduler.py", code.view.state.doc.toString());
  const milestone = `${lab.setting.sides.at(-1).engine}/scheduler.py`;
  const firstOfCourse = names.find((each) => courseOf(each) === course);
  pick.value = firstOfCourse ?? (milestone in code.texts ? milestone : names[0]);
  open(pick.value);
}

const replace = (text) => code.view.dispatch({ changes: { from: 0, to: code.view.state.doc.length, insert: text } });

// A course has the page to itself, and begins where there is something to write.
function open(name) {
  code.name = name;
  replace(writtenIn(name));
  lab.course = courseOf(name) ?? "";
  document.body.classList.toggle("course", lab.course !== "");
  const at = writtenIn(name).indexOf("raise NotImplementedError");
  if (lab.course && at >= 0) code.view.dispatch({ selection: { anchor: at }, effects: EditorView.scrollIntoView(at, { y: "center" }) });
}

function written(text) {
  if (text === code.texts[code.name]) localStorage.removeItem(keyOf(code.name));
  else localStorage.setItem(keyOf(code.name), text);
  clearTimeout(code.timer);
  code.timer = setTimeout(() => (courseOf(code.name) ? check() : run(text)).catch(({ message }) => tell(message)), PAUSE_MS);
}

const tell = (text) => (byId("code-told").textContent = text);

async function check() {
  const course = courseOf(code.name);
  const names = Object.keys(code.texts).filter((name) => courseOf(name) === course);
  tell("checking …");
  tell(await ask("/check", { course, files: Object.fromEntries(names.map((name) => [name, writtenIn(name)])) }));
}

// Beside the milestone's own, as soon as something is changed.
async function run(text) {
  const { engines } = lab.data;
  const milestone = await ask("/write", { name: code.name, text });
  const isChanged = text !== code.texts[code.name];
  const { sides } = lab.setting;
  const [one, other] = sides.map(({ engine }) => engine);
  tell(isChanged ? `A is ${milestone}'s scheduler, B is yours. Save it for: python -m ${milestone}.demo --scheduler my_scheduler.py` : "Change something: your scheduler runs beside the milestone's.");
  if (!isChanged && !sides.some(({ engine }) => engine === "own")) return;
  engines.own = { title: "yours", defaults: engines[milestone].defaults };
  if (one === milestone && other === "own") return changed();
  becomeOnesOwn();
  const side = sides.find(({ engine }) => engine === "own") ?? sides.at(-1);
  lab.setting.sides = structuredClone([{ ...side, engine: milestone }, { ...side, engine: "own" }]);
  return changed();
}
