"""The chapters as a book for a browser: `python -m docs.book FOLDER`, or `make book`

The Markdown files are read as they are, in the order of the tables of docs/README.md, and so are
all files that they link to: code becomes a page with an anchor for each line, a folder becomes a
list. The book works on any web server, at any path, and from disk, too. No page asks another server
for anything. A broken link or anchor is an error. If npm is installed, the book has the playground,
with Python for the reader's browser. Its first page is the scene of scene.py, and README.md is the
second; Chinese readers begin at `index.zh.html`.

A line `<!-- replay: QUESTION -->` in a chapter becomes a frame that replays the runs of that preset
of the playground. GitHub does not show it. `<!-- replay: pages/m2.html -->` becomes one with a
recorded run, which takes the place of a picture right before the line. `<!-- scene: m2 -->` becomes
a link to the scene, at M2's second, and `<!-- sizing -->` the sliders of `sizing.js`.
"""

from __future__ import annotations

import argparse
import ast
import html
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound

from docs import scene
from docs.chinese import chinese, english, slug
from milestone_llm.cli import Formatter, ended_in_one_line
from milestone_llm.consoles import console
from milestone_llm.core.errors import InputError
from milestone_llm.lab.explorer.page import Run, chinese_words, write_page
from milestone_llm.lab.playground.browser.files import COURSES
from milestone_llm.lab.playground.browser.pack import has_npm, pack
from milestone_llm.lab.playground.service import presets
from milestone_llm.lab.playground.setting import Setting
from milestone_llm.lab.playground.simulate import FIGURES, Outcome, run_setting
from milestone_llm.lab.playground.sizing import page_data

ROOT = Path(__file__).resolve().parents[1]
ASSETS = Path(__file__).parent / "book"
ENGLISH, CHINESE = "en", "zh-Hans"
SCENE = {ENGLISH: PurePosixPath("index.html"), CHINESE: PurePosixPath("index.zh.html")}
FIRST = {
    ENGLISH: [PurePosixPath("README.md"), PurePosixPath("docs/README.md")],
    CHINESE: [PurePosixPath("README.zh.md"), PurePosixPath("docs/zh/README.md")],
}
WORDS = {
    ENGLISH: {
        "name": "An LLM inference engine in five milestones",
        "skip": "to the text",
        "chapters": "chapters",
        "search": "search",
        "theme": "dark or light",
        "here": "on this page",
        "nothing": "Nothing is found.",
        "query": "",
        "answers": "Answers",
        "begin": "Begin here",
        "all": "For all chapters",
        "play": "Open the playground",
        "courses": "Courses: ",
        "replay": "Replay: ",
        "whole": "whole page",
        "change": "change it",
        "other": "中文",
        "scene": "The scene",
        "happen": "See it happen, on the first page",
    },
    CHINESE: {
        "name": "五个里程碑写成的 LLM 推理引擎",
        "skip": "跳到正文",
        "chapters": "各章",
        "search": "搜索",
        "theme": "深色或浅色",
        "here": "本页内容",
        "nothing": "没有找到。",
        "query": "?lang=zh",
        "answers": "答案",
        "begin": "从这里开始",
        "all": "各章都用到",
        "play": "打开 playground",
        "courses": "课程：",
        "replay": "回放：",
        "whole": "整页",
        "change": "改一改",
        "other": "English",
        "scene": "场景",
        "happen": "在首页看它发生",
    },
}
AS_TEXT = {".css", ".html", ".js", ".json", ".jsonl", ".md", ".py", ".toml", ".txt"}
REPLAYS = PurePosixPath("docs/pages")
QUOTE = '"'
RECORDED = "data-recorded"
STYLES = {"": "default", ':root[data-theme="dark"] ': "github-dark"}

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)[^)\s]*\)")
_COMMENT = re.compile(
    r"<!--\s*(?:replay: (?P<replay>.*?)|scene: (?P<scene>\w+)|(?P<sizing>sizing)|.*?)\s*-->", re.S
)
_HEAD = re.compile(r"---\n(.*?)\n---\n", re.S)
_ELSEWHERE = re.compile(r"[a-z]+:")
_ADDRESS = re.compile(r'<[^<>]*\b(href|src)="([^"]*)"')
_ANCHOR = re.compile(r'<[^<>]*\bid="([^"]*)"')


@dataclass
class Heading:
    """A part of a chapter, for the search and for the list next to the text."""

    level: int
    words: str
    anchor: str
    texts: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    """Blocks of code and drawings, from which no excerpt is shown."""


class Book:
    """Writes all pages into a folder; `build` returns how many."""

    def __init__(self, folder: Path, *, has_playground: bool = False) -> None:
        self.folder, self.has_playground = folder, has_playground
        self.markdown = MarkdownIt("commonmark", {"html": True, "highlight": _fence})
        self.markdown.enable(["table", "strikethrough"])
        self.template = (ASSETS / "page.html").read_text(encoding="utf-8")
        self.groups = {language: contents(language) for language in FIRST}
        self.chapters = {
            language: [page for _, pages in groups for page in pages]
            for language, groups in self.groups.items()
        }
        # and all that these link to
        self.wanted = list(dict.fromkeys(page for each in self.chapters.values() for page in each))
        self.pages: dict[PurePosixPath, str] = {}
        self.search: list[tuple[str, str, str, str]] = []

    def build(self) -> int:
        """Write every page that a reader can reach.

        Raises:
            InputError: there are broken links.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.wanted:  # the list grows meanwhile
            self._write_file(path)
        for language in SCENE:
            self._write_scene(language)
        style = (ASSETS / "book.css").read_text(encoding="utf-8")
        for scope, name in STYLES.items():
            style += HtmlFormatter(style=name).get_style_defs(f"{scope}.code") + "\n"
        (self.folder / "book.css").write_text(style, encoding="utf-8")
        shutil.copy(ASSETS / "book.js", self.folder)
        entries = json.dumps(self.search, separators=(",", ":"))
        (self.folder / "search.js").write_text(f"const SEARCH = {entries};\n", encoding="utf-8")
        if broken := sorted(broken_links(self.pages, self.folder)):
            raise InputError("links that lead nowhere:\n" + "\n".join(broken))
        return len(self.wanted)

    def _write_scene(self, language: str) -> None:
        """Write the first page for the readers of a language."""
        words, (readme, index) = WORDS[language], FIRST[language]
        play = f"play/index.html{words['query']}" if self.has_playground else ""
        links = {
            "playground": play or "docs/playground.html",
            "course": play or "exercises/index.html",
            "chapter": f"{index.parent}/m1_single.html",
            "museum": "docs/museum.html",
            "live page": "docs/using.html#serve-it",
            "all chapters": str(target(index)),
            "install and run": f"{target(readme)}#start",
        }
        shutil.copy(ASSETS / "scene.css", self.folder)
        (self.folder / "scene.js").write_text(scene.script(), encoding="utf-8")
        head = '<link rel="stylesheet" href="scene.css">'
        body = scene.body(links, self.has_playground, str(index.parent))
        body = f'{head}{body}<script src="scene.js" defer></script>'
        self._write_page(SCENE[language], words["name"], body, language, wide=True)

    def _write_file(self, path: PurePosixPath) -> None:
        whole = ROOT / path
        if whole.is_dir():
            self._write_folder(path)
        elif path.suffix == ".md":
            self._write_chapter(path)
        elif path.suffix in AS_TEXT and path.parent != REPLAYS:
            self._write_code(path)
        else:
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(whole, self.folder / path)

    # --- chapters ------------------------------------------------------------------------------

    def _write_chapter(self, page: PurePosixPath) -> None:
        text = (ROOT / page).read_text(encoding="utf-8")
        head = _HEAD.match(text)
        text = text[head.end() :] if head else text
        title = _title(page)
        if head and not text.startswith("# "):
            text = f"# {title}\n\n{text}"
        tokens = self.markdown.parse(text)
        headings: list[Heading] = []
        for index, token in enumerate(tokens):
            if token.type == "heading_open":
                headings.append(_heading(token, tokens[index + 1], headings))
            elif token.type == "fence" and headings:
                headings[-1].blocks.append(token.content)
            elif token.type == "inline" and headings and tokens[index - 1].type != "heading_open":
                headings[-1].texts.append(_words(token))
            elif token.type == "html_block":
                token.content = _COMMENT.sub(lambda found: self._frame(page, found), token.content)
                if RECORDED in token.content and _is_picture(tokens[index - 2]):
                    tokens[index - 2].children = []
            for child in token.children or []:
                self._mend(child, page)
        body = self.markdown.renderer.render(tokens, self.markdown.options, {})
        body = body.replace("<table>", '<div class="wide" tabindex="0"><table>')
        body = body.replace("</table>", "</table></div>").replace("<p></p>\n", "")
        body = body.replace("</h1>", "</h1>" + (_head_table(head[1]) if head else ""), 1)
        place = target(page)
        self.search += [
            (f"{place}#{each.anchor}", each.words, _one_line(each.texts), _one_line(each.blocks))
            for each in headings
        ]
        toc = "".join(
            f'<li class="level{each.level}"><a href="#{each.anchor}">{html.escape(each.words)}</a>'
            for each in headings
            if each.level in (2, 3)
        )
        self._write(page, headings[0].words, body, toc=toc)

    def _mend(self, token: Token, page: PurePosixPath) -> None:
        """Turn links and pictures into those of the book, and remove comments."""
        for name in {"link_open": ["href"], "image": ["src"]}.get(token.type, []):
            token.attrSet(name, self._link(str(token.attrGet(name)), page))
        if token.type == "image":
            token.attrSet("loading", "lazy")
        if token.type == "html_inline":
            token.content = _COMMENT.sub("", token.content)

    def _link(self, link: str, page: PurePosixPath) -> str:
        """Return a link of a file of the repository as a link of its page."""
        if link.startswith("#") or _ELSEWHERE.match(link):
            return link
        path, _, anchor = link.partition("#")
        file = PurePosixPath(normpath(page.parent / path))
        if (ROOT / file).exists() and file not in self.wanted:
            self.wanted.append(file)
        if file == REPLAYS:  # its first page has links to the others
            for each in sorted((ROOT / REPLAYS).glob("*.html")):
                self._link(each.name, REPLAYS / "of")
            file = REPLAYS / "index.html"
        there = relpath(target(file), target(page).parent)
        if file.parent == REPLAYS:
            there += WORDS[language_of(page)]["query"]
        return f"{there}#{anchor}" if anchor else there

    def _frame(self, page: PurePosixPath, found: re.Match[str]) -> str:
        """Return a replay, which replaces the comment that asks for it."""
        question, place = found["replay"], found["scene"]
        language = language_of(page)
        words = WORDS[language]
        if found["sizing"]:
            return self._sizing(page)
        if place is not None:
            up = relpath(".", target(page).parent)
            return f'<p><a href="{up}/{SCENE[language]}#{place}">{words["happen"]}</a></p>'
        if question is None:
            return ""
        table = chinese_words() if language == CHINESE else {}
        if question.endswith(".html"):
            recorded = PurePosixPath("docs", question)
            title = re.search("<title>(.*?)</title>", (ROOT / recorded).read_text(encoding="utf-8"))
            address = self._link(relpath(recorded, page.parent), page)
            title_words = html.unescape(title[1]) if title else question
            figure = _figure(table.get(title_words, title_words), address, words)
            return figure.replace(">", f" {RECORDED}>", 1)
        preset = next((each for each in presets() if each["question"] == question), None)
        if preset is None:
            raise InputError(f"{page}: no preset of the playground asks {question!r}")
        setting = Setting.of(preset)
        outcomes = run_setting(setting)
        place = PurePosixPath("replays", f"{slug(question)}.html")
        if not (self.folder / place).exists():
            runs = [Run(each.label, each.records, each.budget) for each in outcomes]
            write_page(runs, self.folder / place)
        link = ""
        if self.has_playground:
            play = relpath("play/index.html", target(page).parent)
            link = f' <a href="{play}{words["query"]}{html.escape(setting.to_link())}">'
            link += f"{words['change']}</a>"
        address = relpath(place, target(page).parent) + words["query"]
        figures = _figures(setting, outcomes, table)
        return _figure(table.get(question, question), address, words, link, figures)

    def _sizing(self, page: PurePosixPath) -> str:
        """Return the sliders of docs/sizing.md."""
        shutil.copy(ASSETS / "sizing.js", self.folder)
        parts = {
            "up": relpath(".", target(page).parent),
            "play": relpath("play", target(page).parent) if self.has_playground else "",
            "data": json.dumps(page_data()),
        }
        text = (ASSETS / "sizing.html").read_text(encoding="utf-8")
        return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], text)

    # --- code and folders ----------------------------------------------------------------------

    def _write_code(self, path: PurePosixPath) -> None:
        text = (ROOT / path).read_text(encoding="utf-8")
        colored = highlight(text, _lexer(path.name), HtmlFormatter(nowrap=True)).splitlines()
        lines = "".join(
            f'<span id="L{number}"><a href="#L{number}" tabindex="-1">{number}</a>{line}\n</span>'
            for number, line in enumerate(colored, 1)
        )
        body = f'<pre class="code lines" tabindex="0"><code>{lines}</code></pre>'
        self.search += _names(path, text)
        self._write(path, str(path), f"<h1><code>{path}</code></h1>{body}", wide=True)

    def _write_folder(self, path: PurePosixPath) -> None:
        names = sorted(each.name for each in (ROOT / path).iterdir())
        shown = [name for name in names if not name.startswith((".", "__pycache__"))]
        links = [(name, self._link(name, path / "of")) for name in shown]
        items = "".join(f'<li><a href="{link}">{name}</a>' for name, link in links)
        self._write(path, str(path), f"<h1><code>{path}</code></h1><ul>{items}</ul>", wide=True)

    # --- around all of them --------------------------------------------------------------------

    def _write(
        self, page: PurePosixPath, title: str, body: str, *, toc: str = "", wide: bool = False
    ) -> None:
        language = language_of(page)
        self._write_page(target(page), title, body, language, page, toc=toc, wide=wide)

    def _write_page(
        self,
        place: PurePosixPath,
        title: str,
        body: str,
        language: str,
        page: PurePosixPath | None = None,
        *,
        toc: str = "",
        wide: bool = False,
    ) -> None:
        up = relpath(".", place.parent)
        parts = {
            **WORDS[language],
            "lang": language,
            "switch": self._switch(place, language, page),
            "home": str(target(FIRST[language][0])),
            "title": html.escape(title),
            "up": up,
            "nav": "".join(self._nav(page, up, language)),
            "toc": toc,
            "foot": "".join(self._neighbours(page, up)) if page else "",
            "kind": "wide-page" if wide else "",
            "body": body,
        }
        text = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], self.template)
        self.pages[place] = text
        (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / place).write_text(text, encoding="utf-8")

    def _switch(self, place: PurePosixPath, language: str, page: PurePosixPath | None) -> str:
        """Return a link to the page in the other language, if there is one."""
        other_language = next(each for each in WORDS if each != language)
        other_place = SCENE[other_language]
        if page is not None:
            original = english(ROOT / page)
            other = chinese(ROOT / page) if original == ROOT / page else original
            if not other.is_file():
                return ""
            other_place = target(PurePosixPath(relpath(other, ROOT)))
        there, name = relpath(other_place, place.parent), WORDS[language]["other"]
        return f'<a id="language" lang="{other_language}" href="{there}">{name}</a>'

    def _nav(self, page: PurePosixPath | None, up: str, language: str) -> Iterator[str]:
        words = WORDS[language]
        if self.has_playground:
            yield f'<a class="play" href="{up}/play/index.html{words["query"]}">{words["play"]}</a>'
            links = (
                f'<a href="{up}/play/index.html{words["query"]}#course={name}">'
                f"{name.capitalize()}</a>"
                for name in COURSES
            )
            yield f'<p class="courses">{words["courses"]}{"".join(links)}</p>'
        here = "" if page else ' aria-current="page"'
        yield f'<ol><li><a href="{up}/{SCENE[language]}"{here}>{words["scene"]}</a></ol>'
        for title, pages in self.groups[language]:
            yield f"<h2>{html.escape(title)}</h2><ol>"
            for each in pages:
                here = ' aria-current="page"' if each == page else ""
                name = html.escape(_title(each))
                yield f'<li><a href="{up}/{target(each)}"{here}>{name}</a>'
            yield "</ol>"

    def _neighbours(self, page: PurePosixPath, up: str) -> Iterator[str]:
        """Yield links to the previous and the next chapter."""
        chapters = self.chapters[language_of(page)]
        if page in chapters:
            at = chapters.index(page)
            for words, other in (("← {}", at - 1), ("{} →", at + 1)):
                if 0 <= other < len(chapters):
                    name = words.format(html.escape(_title(chapters[other])))
                    yield f'<a href="{up}/{target(chapters[other])}">{name}</a>'


def language_of(page: PurePosixPath) -> str:
    """Return the language of a page's prose."""
    return CHINESE if english(ROOT / page) != ROOT / page else ENGLISH


def contents(language: str = ENGLISH) -> list[tuple[str, list[PurePosixPath]]]:
    """Return titles of groups and their chapters: a group for each table of docs/README.md."""
    words, (*_, index) = WORDS[language], FIRST[language]
    blocks = (ROOT / index).read_text(encoding="utf-8").split("\n\n")
    groups, others = [(words["begin"], FIRST[language])], []
    for before, block in pairwise(["", *blocks]):
        files = [PurePosixPath(normpath(index.parent / link)) for link in _LINK.findall(block)]
        pages = [file for file in files if file.suffix == ".md"]
        if block.startswith("|"):
            title = before[:-1] if before.endswith((":", "：")) else words["chapters"].capitalize()
            groups.append((title, pages))
        else:
            others += pages
    seen = {page for _, pages in groups for page in pages}
    others = [page for page in dict.fromkeys(others) if page not in seen]
    return [*groups, (words["all"], others)]


def target(path: PurePosixPath) -> PurePosixPath:
    """Return where a file or folder of the repository is in the book."""
    if path.name == "README.md" and path != FIRST[ENGLISH][0]:
        return path.with_name("index.html")
    if (ROOT / path).is_dir():
        return path / "folder.html"
    if path.suffix == ".md":
        return path.with_suffix(".html")
    is_shown = path.suffix in AS_TEXT and path.parent != REPLAYS
    return path.with_name(f"{path.name}.html") if is_shown else path


def broken_links(pages: Mapping[PurePosixPath, str], folder: Path) -> Iterator[str]:
    """Yield broken links of pages, and addresses that a page would ask another server for."""
    anchors = {place: {"", *_ANCHOR.findall(text)} for place, text in pages.items()}
    for place, text in pages.items():
        for kind, address in _ADDRESS.findall(text):
            if _ELSEWHERE.match(address):
                if kind == "src":
                    yield f"{place}: {address} is not in the book"
                continue
            path, _, anchor = address.partition("#")
            path = path.partition("?")[0]
            there = PurePosixPath(normpath(place.parent / path)) if path else place
            if not (folder / there).is_file():
                yield f"{place}: there is no {address}"
            elif there in anchors and html.unescape(anchor) not in anchors[there]:
                yield f"{place}: {address} names no heading or line"


@cache
def _title(page: PurePosixPath) -> str:
    """Return the first heading; without one, the name of a record."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search("^# (.*)", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return found[1].replace("`", "") if found else f"Record: {page.stem}"


def _head_table(head: str) -> str:
    """Return the fields at the head of a record as a table."""
    fields = (line.partition(": ") for line in head.splitlines())
    cells = "".join(
        f"<tr><th>{html.escape(name)}<td>{html.escape(value.strip(QUOTE))}"
        for name, _, value in fields
    )
    return f'<div class="wide" tabindex="0"><table class="head">{cells}</table></div>'


def _figure(
    title: str, address: str, words: Mapping[str, str], link: str = "", figures: str = ""
) -> str:
    """Return a frame with a replay."""
    title = html.escape(title)
    return (
        f'<figure class="replay"><figcaption>{words["replay"]}{title} '
        f'<a href="{address}">{words["whole"]}</a>{link}</figcaption>'
        f'<iframe src="{address}#embed" title="{title}"></iframe>'
        f"{figures}</figure>\n"
    )


def _figures(setting: Setting, outcomes: Sequence[Outcome], translations: Mapping[str, str]) -> str:
    """Return the figures that a preset's answer is about, as a table."""
    names = [claim.partition(":")[0] for claim in setting.shows]
    lines = (
        f"<tr><th>{translations.get(FIGURES[name], FIGURES[name])}"
        + "".join(f"<td>{each.figures[name]:.3g}" for each in outcomes)
        for name in names
    )
    titles = "".join(f"<th>{html.escape(each.label)}" for each in outcomes)
    table = f'<table class="figures"><tr><th>{titles}{"".join(lines)}</table>'
    return f'<div class="wide" tabindex="0">{table}</div>'


def _names(path: PurePosixPath, text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield a file for the search, and its public classes and functions, each with the first
    sentence that it says about itself."""
    yield f"{target(path)}#", str(path), "", ""
    if path.suffix != ".py":
        return
    for node in ast.parse(text).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            kind = "class" if isinstance(node, ast.ClassDef) else "def"
            told = (ast.get_docstring(node) or "").partition("\n\n")[0]
            yield f"{target(path)}#L{node.lineno}", f"{kind} {node.name}", _one_line([told]), ""


def _one_line(texts: Sequence[str]) -> str:
    return " ".join(" ".join(texts).split())


def _is_picture(token: Token) -> bool:
    """Return whether a paragraph has a picture and nothing else."""
    return [each.type for each in token.children or []] == ["image"]


def _heading(token: Token, inline: Token, before: Sequence[Heading]) -> Heading:
    """Make a `Heading`, and give it an anchor of its own."""
    words = "".join(each.content for each in inline.children or [] if "html" not in each.type)
    if given := _ANCHOR.search(inline.content):  # that of the English heading
        inline.children = [each for each in inline.children or [] if "html" not in each.type]
        token.attrSet("id", given[1])
        return Heading(int(token.tag[1]), words, given[1])
    anchor = slug(words)
    num_same = sum(slug(each.words) == anchor for each in before)
    anchor += f"-{num_same}" if num_same else ""
    token.attrSet("id", anchor)
    return Heading(int(token.tag[1]), words, anchor)


def _words(token: Token) -> str:
    """Return the text of a paragraph or a block of code, for the search."""
    shown = {"text", "code_inline", "fence", "softbreak"}
    parts = [each for each in token.children or [token] if each.type in shown]
    return "".join(each.content or " " for each in parts)


def _fence(text: str, language: str, attributes: str) -> str:
    """Return a block of code as HTML. In a terminal session, the commands are bold."""
    if language == "console":
        lines = map(html.escape, text.splitlines())
        told = (f"<b>{line}</b>" if line.startswith("$ ") else line for line in lines)
        body = "\n".join(told)
    else:
        body = highlight(text, _lexer(language), HtmlFormatter(nowrap=True))
    return f'<pre class="code" tabindex="0"><code>{body}</code></pre>'


def _lexer(name: str) -> Lexer:
    """Return the lexer of a file or a language; for plain text if there is none."""
    find = get_lexer_for_filename if "." in name else get_lexer_by_name
    try:
        return find(name or "text", stripnl=False)
    except ClassNotFound:
        return get_lexer_by_name("text", stripnl=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m docs.book", description=__doc__, formatter_class=Formatter
    )
    parser.add_argument("folder", type=Path, help="it is written anew")
    args = parser.parse_args(arguments)
    return ended_in_one_line(lambda: build(args.folder))


def build(folder: Path) -> None:
    """Write the book, and print where it is."""
    if folder.exists() and not (folder / "search.js").exists():
        raise InputError(f"{folder} is there, and is no book: choose another folder")
    shutil.rmtree(folder, ignore_errors=True)
    has_playground = has_npm()
    console.print("Writing the book takes about a minute.")
    if has_playground:
        pack(folder / "play")
    num_pages = Book(folder, has_playground=has_playground).build()
    console.print(f"{num_pages} pages: open {folder}/index.html in a browser", soft_wrap=True)
    if has_playground:
        console.print(
            f"with the playground: python -m http.server 8080 -d {folder}", soft_wrap=True
        )
    else:
        console.print("without the playground: it wants npm and Node, https://nodejs.org")


if __name__ == "__main__":
    sys.exit(main())
