// What a page of the book does: search, dark or light, replays, paper, the chapters on a phone.
"use strict";

const byId = (id) => document.getElementById(id);
const root = document.documentElement;
const { up, nothing, answers: titleOfAnswers } = byId("text").dataset;
const find = byId("find");
const found = byId("found");
const frames = [...document.querySelectorAll(".replay iframe")];
const MOST_FOUND = 12;

byId("menu").onclick = ({ currentTarget }) => currentTarget.setAttribute("aria-expanded", document.body.classList.toggle("open"));
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest" });

// --- the other language, at the same heading, or the scene's engine: both have its anchor ----------------------------------

byId("language")?.addEventListener("click", ({ currentTarget }) => {
  const before = [...document.querySelectorAll("main :is(h2, h3)[id]")].filter((each) => each.getBoundingClientRect().top < 120);
  currentTarget.hash = byId("scene") ? location.hash : before.at(-1)?.id ?? "";
});

// --- dark or light, and replays, which say how high they are ---------------------------------------

const tellTheme = (frame) => frame.contentWindow.postMessage({ theme: root.dataset.theme }, "*");
byId("theme").onclick = () => {
  localStorage.theme = root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  frames.forEach(tellTheme);
};
addEventListener("message", ({ source, data }) => {
  const frame = frames.find((each) => each.contentWindow === source);
  if (!frame || !(data?.height > 0)) return;
  if (!frame.dataset.height) tellTheme(frame);
  // it never shrinks while it plays: the text below stays where it is
  frame.dataset.height = Math.max(data.height, frame.dataset.width === String(frame.clientWidth) ? frame.dataset.height : 0);
  frame.dataset.width = frame.clientWidth;
  frame.style.height = `${Number(frame.dataset.height) + 2}px`;
});

frames.forEach(tellTheme); // those that are there already

// On paper, a chapter is light, and answers are at its end.
addEventListener("beforeprint", () => {
  const answers = document.createElement("section");
  answers.id = "answers";
  const title = document.createElement("h2");
  title.textContent = titleOfAnswers;
  answers.append(title);
  for (const each of document.querySelectorAll("main details")) {
    const copy = each.cloneNode(true);
    copy.open = true;
    answers.append(copy);
  }
  if (answers.children.length > 1) byId("text").append(answers);
  root.dataset.screen = root.dataset.theme;
  root.dataset.theme = "light";
});
addEventListener("afterprint", () => {
  byId("answers")?.remove();
  root.dataset.theme = root.dataset.screen;
});

// --- search ----------------------------------------------------------------------------------------

// SEARCH (search.js) has [address, heading, text, code] for each part of a chapter, and for each file,
// class and function. All words of a question must be there, and what it has in "quotes" as it is.
// Chinese has no spaces: each two characters that follow one another are a word.
const isHan = (words) => /\p{Script=Han}/u.test(words);

function pairsOf(run) {
  if (!isHan(run) || run.length < 3) return [run];
  return [...run].slice(1).map((character, index) => [...run][index] + character);
}

function termsOf(question) {
  const terms = [...question.toLowerCase().matchAll(/"([^"]+)"?|\p{Script=Han}+|[^\s"\p{Script=Han}]+/gu)];
  return terms.flatMap(([whole, phrase]) => (phrase ? [phrase.trim()] : pairsOf(whole.trim()))).filter(Boolean);
}

// A page that is there in both languages is shown in that of the page, or of the question.
const isChinese = ([address]) => /^(docs\/zh\/|README\.zh)/.test(address);
const pageOf = ([address]) => address.replace(/#.*/, "");
const translated = new Set();

function isShown(part, inChinese) {
  if (!translated.size)
    for (const each of SEARCH.filter(isChinese)) translated.add(pageOf(each).replace("zh/", "").replace("README.zh", "index"));
  return inChinese ? !translated.has(pageOf(part)) : !isChinese(part);
}

const escaped = (term) => term.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

// Whole words count most, then beginnings of words, then any letters.
function weight(within, term) {
  if (!within.includes(term)) return 0;
  if (isHan(term)) return 2;
  const whole = new RegExp(`(?<![\\p{L}\\d])${escaped(term)}s?(?![\\p{L}\\d])`, "u");
  if (whole.test(within)) return 3;
  return new RegExp(`(?<![\\p{L}\\d])${escaped(term)}`, "u").test(within) ? 2 : 1;
}

const lower = new Map(); // of parts, when they are asked for the first time
function lowered(part) {
  if (!lower.has(part)) lower.set(part, part.slice(1).map((each) => each.toLowerCase()));
  return lower.get(part);
}

function score(part, terms, phrase) {
  const [title, text, code] = lowered(part);
  const scores = terms.map((term) => 6 * weight(title, term) + 2 * weight(text, term) + weight(code, term));
  if (!scores.every(Boolean)) return 0;
  let sum = scores.reduce((total, each) => total + each) / terms.length;
  if (terms.length > 1) sum += 8 * weight(title, phrase) + 5 * weight(text, phrase);
  if (title.replace(/^(class|def) |（.*/g, "") === phrase) sum += 20;
  const isRecord = part[0].startsWith("docs/measurements/");
  return part[0].startsWith("docs/") && !isRecord ? sum : sum * (isRecord ? 0.4 : 0.7);
}

// The text around the first term, in which all terms are marked.
function excerpt(text, terms, phrase) {
  const low = text.toLowerCase();
  const first = terms.find((term) => low.includes(term));
  const begin = first ? Math.max(0, low.indexOf(first) - 45) : 0;
  const shown = text.slice(begin, begin + 130);
  const pattern = new RegExp(`(${[phrase, ...terms].map(escaped).join("|")})`, "gi");
  const parts = shown.split(pattern).map((words, index) => {
    if (index % 2 === 0) return words;
    const mark = document.createElement("mark");
    mark.textContent = words;
    return mark;
  });
  return [begin ? "…" : "", ...parts, begin + 130 < text.length ? "…" : ""];
}

find.oninput = () => {
  const terms = termsOf(find.value);
  const phrase = find.value.toLowerCase().replaceAll('"', "").trim();
  const inChinese = root.lang.startsWith("zh") || isHan(find.value);
  const parts = terms.length ? SEARCH.filter((part) => isShown(part, inChinese)) : [];
  const scored = parts.map((part) => [score(part, terms, phrase), part]).filter(([value]) => value);
  const best = scored.sort(([one], [other]) => other - one).slice(0, MOST_FOUND);
  const items = best.map(([, [address, title, text]]) => {
    const [item, link, told] = ["li", "a", "small"].map((name) => document.createElement(name));
    link.href = `${up}/${address}`;
    link.textContent = title;
    told.append(`${address.split("#")[0].replace(/^docs\/|\.html$/g, "")}${text && ": "}`, ...excerpt(text, terms, phrase));
    link.append(told);
    item.append(link);
    return item;
  });
  found.replaceChildren(...(items.length ? items : [nothing]));
  found.hidden = !terms.length;
};

addEventListener("keydown", (event) => {
  const stops = [find, ...found.querySelectorAll("a")];
  const at = found.hidden ? -1 : stops.indexOf(document.activeElement);
  if (event.key === "/" && document.activeElement !== find) {
    event.preventDefault();
    find.focus();
  } else if (event.key === "Escape") {
    find.value = "";
    found.hidden = true;
  } else if (event.key === "Enter" && at === 0) {
    stops[1]?.click();
  } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && at >= 0) {
    event.preventDefault();
    stops[(at + (event.key === "ArrowDown" ? 1 : -1) + stops.length) % stops.length].focus();
  }
});
found.onclick = () => (found.hidden = true); // a heading of this page
addEventListener("pointerdown", ({ target }) => target.closest(".find") || (found.hidden = true));
document.body.dataset.ready = true;
