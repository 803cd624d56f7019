// What a page of the book does: search, dark or light, the chapters on a phone.
"use strict";

const byId = (id) => document.getElementById(id);
const root = document.documentElement;
const { up } = byId("text").dataset;
const find = byId("find");
const found = byId("found");
const MOST_FOUND = 12;

byId("theme").onclick = () => (localStorage.theme = root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark");
byId("menu").onclick = ({ currentTarget }) => currentTarget.setAttribute("aria-expanded", document.body.classList.toggle("open"));
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest" });

// SEARCH (search.js) has [address, heading, text] for each part of a chapter. All words must be there.
function score([, title, text], words) {
  const count = (within, word) => within.toLowerCase().split(word).length - 1;
  const scores = words.map((word) => 20 * Math.min(count(title, word), 1) + Math.min(count(text, word), 5));
  return scores.every(Boolean) ? scores.reduce((sum, each) => sum + each) : 0;
}

function excerpt(text, word) {
  const begin = Math.max(0, text.toLowerCase().indexOf(word) - 40);
  return `${begin ? "…" : ""}${text.slice(begin, begin + 110)}…`;
}

find.oninput = () => {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  const scored = words.length ? SEARCH.map((part) => [score(part, words), part]).filter(([value]) => value) : [];
  const best = scored.sort(([one], [other]) => other - one).slice(0, MOST_FOUND);
  const items = best.map(([, [address, title, text]]) => {
    const [item, link, told] = ["li", "a", "small"].map((name) => document.createElement(name));
    link.href = `${up}/${address}`;
    link.textContent = title;
    told.textContent = `${address.split("#")[0].replace(/^docs\/|\.html$/g, "")}: ${excerpt(text, words[0])}`;
    link.append(told);
    item.append(link);
    return item;
  });
  found.replaceChildren(...(items.length ? items : ["Nothing is found."]));
  found.hidden = !words.length;
};

addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== find) {
    event.preventDefault();
    find.focus();
  } else if (event.key === "Escape") {
    find.value = "";
    found.hidden = true;
  } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const stops = [find, ...found.querySelectorAll("a")];
    const at = found.hidden ? -1 : stops.indexOf(document.activeElement);
    if (at < 0) return;
    event.preventDefault();
    stops[(at + (event.key === "ArrowDown" ? 1 : -1) + stops.length) % stops.length].focus();
  }
});
found.onclick = () => (found.hidden = true); // a heading of this page
document.body.dataset.ready = true;
