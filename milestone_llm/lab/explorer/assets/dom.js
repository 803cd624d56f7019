// Elements of the page. What a trace says becomes text or the value of an attribute: nothing on this
// page is parsed as HTML, and its content security policy forbids it.

// el("td.n", { title: "why" }, "text", [el("b", 3)]): children that are null or "" are left out.
function el(name, ...parts) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const part of parts.flat(Infinity)) {
    if (part === null || part === "") continue;
    if (typeof part !== "object" || part instanceof Node) element.append(part);
    else for (const [key, value] of Object.entries(part)) setAttribute(element, key, value);
  }
  return element;
}

// The policy forbids style="..." but not what a script of the page sets.
function setAttribute(element, key, value) {
  if (key === "style") Object.assign(element.style, value);
  else element.setAttribute(key, value);
}

const options = (entries) => entries.map(([value, title]) => el("option", { value }, title));
const byId = (id) => document.getElementById(id);
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

// Long names are a server's, which all look alike: their prompt's beginning tells them apart, else the end.
const beginnings = new Map();
const beginningOf = (name) => beginnings.get(name.split("/")[0]);
function short(name) {
  if (name.length <= 10) return name;
  const [end, completion = ""] = /.{4}(\/\d+)?$/.exec(name);
  const words = beginningOf(name);
  return words ? `${words.length > 9 ? `${words.slice(0, 8)}…` : words}${completion}` : `…${end}`;
}
// What a scheduler says, with names as the page has them.
const worded = (run, text) => text.replace(/\S+/g, (word) => (run.requests.has(word) ? short(word) : word));
