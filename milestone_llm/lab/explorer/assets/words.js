// The language of a page. Its code says everything in English; CHINESE, the table of chinese.json,
// has the Chinese of it. In a key, {n} is a number and {} any text, which is translated, too; in
// its value they come in the same order, or as {1}, {2}.

const IS_CHINESE = /^zh/.test(new URLSearchParams(location.search).get("lang") ?? document.documentElement.lang);
const NAMES_OF_WORDS = ["title", "aria-label", "aria-valuetext", "placeholder"];
const patterns = [];
const translations = new Map(); // of what was asked for

// Before anything is translated: what has no translation is remembered, too.
function addChinese(table) {
  for (const [key, value] of Object.entries(table)) {
    translations.set(key, value);
    if (!/\{n?\}/.test(key)) continue;
    const [escaped, any] = [key.replace(/[.*+?^$()|[\]\\]/g, "\\$&"), { "{n}": "(−?[\\d.,]+)", "{}": "(.+?)" }];
    patterns.push([new RegExp(`^${escaped.replace(/\{n?\}/g, (hole) => any[hole])}$`, "s"), value]);
  }
}

function chineseOf(text) {
  if (!translations.has(text)) {
    const [pattern, value] = patterns.find(([each]) => each.test(text)) ?? [];
    const parts = pattern ? pattern.exec(text).slice(1).map(inLanguage) : [];
    let next = 0;
    translations.set(text, pattern ? value.replace(/\{(\d|n?)\}/g, (_, index) => parts[Number(index) ? index - 1 : next++]) : text);
  }
  return translations.get(text);
}

// A text in the page's language, with the spaces around it, except beside wide punctuation. Without a
// translation it stays.
const WIDE = "，。：；（）";
const SPACES = new RegExp(`^\\s+(?=[${WIDE}])|(?<=[${WIDE}])\\s+$`, "g");
const inLanguage = (text) => (IS_CHINESE ? text.replace(/\S(?:.*\S)?/s, chineseOf).replace(SPACES, "") : text);

function translate(node) {
  if ((node.nodeType === Node.ELEMENT_NODE ? node : node.parentElement)?.closest("script, style, code, kbd, [translate=no]")) return;
  if (node.nodeType === Node.TEXT_NODE) {
    const text = inLanguage(node.data);
    if (text !== node.data) node.data = text;
  }
  for (const name of node.attributes ? NAMES_OF_WORDS.filter((each) => node.hasAttribute(each)) : []) {
    const text = inLanguage(node.getAttribute(name));
    if (text !== node.getAttribute(name)) node.setAttribute(name, text);
  }
  node.childNodes.forEach(translate);
}

// What the page is, and becomes: before it is painted.
if (IS_CHINESE) {
  addChinese(CHINESE);
  document.documentElement.lang = "zh-Hans";
  translate(document.documentElement);
  new MutationObserver((changes) => changes.forEach(({ type, target, addedNodes }) => (type === "childList" ? addedNodes.forEach(translate) : translate(target))))
    .observe(document.documentElement, { childList: true, characterData: true, attributes: true, attributeFilter: NAMES_OF_WORDS, subtree: true });
}
