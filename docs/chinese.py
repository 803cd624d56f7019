"""Hold the Chinese pages in step with the English ones.

    python docs/chinese.py                          name the pages whose English has changed since
    python docs/chinese.py docs/zh/m1_single.md     this page follows the English of now

A Chinese page is README.zh.md, or a file of docs/zh/ with the name of the English one. It has the
prose. Everything else is the English page's, and docs/build.py fills it in: blocks in their order,
the anchor of each heading, and the place that a link leads to. In a block of `sh`, comments may be
Chinese. The first line of a page has Git's hash of the English text that it follows.

The second command writes that line. A page that is not there yet begins as the English one, to be
translated where it stands.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_HEAD = re.compile(r"<!-- follows \S+, blob (\w+) -->\n+")
_BLOCK = re.compile(
    r"<!-- (?:measured|table): .*?<!-- end -->"
    r"|(?:<!-- (?:run|code): [^>]*-->\n\n)?^```.*?^```$"
    r"|<!-- (?:run|code|draw|replay|scene): .*?-->",
    re.S | re.M,
)
_HEADING = re.compile(r'^(?P<level>#+) (?:<a id="[^"]*"></a>)?(?P<words>.*)$', re.M)
_LINK = re.compile(r"\]\((?P<file>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
_LINE = re.compile(r"(\.py#L)\d+")
_FIGURE = re.compile(r"(?<![A-Za-z0-9_.-])\d+(?:,\d{3})*(?:\.\d+)?", re.A)


def pages() -> list[Path]:
    """Return the Chinese pages that there are."""
    return [ROOT / "README.zh.md", *sorted((ROOT / "docs/zh").glob("*.md"))]


def chinese(page: Path) -> Path:
    """Return where the Chinese form of an English page is, or would be."""
    return ROOT / "README.zh.md" if page == ROOT / "README.md" else page.parent / "zh" / page.name


def english(page: Path) -> Path:
    """Return the page that a Chinese one follows; of any other page, itself."""
    if page == ROOT / "README.zh.md":
        return ROOT / "README.md"
    return ROOT / "docs" / page.name if page.parent == ROOT / "docs/zh" else page


def slug(words: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-")


def filled(page: Path, text: str) -> str:
    """Return the text of a Chinese page with the blocks, anchors and links of the English one.

    Raises:
        ValueError: the English page has other headings, or another number of blocks.
    """
    source = english(page).read_text(encoding="utf-8")
    prose, blocks = _parts(text)
    source_prose, source_blocks = _parts(source)
    if len(blocks) != len(source_blocks):
        pairs = zip_longest(map(_first_line, blocks), map(_first_line, source_blocks))
        unlike = next((f"{own}, not {other}" for own, other in pairs if own != other), "")
        raise ValueError(f"{len(blocks)} blocks, in English {len(source_blocks)}: {unlike}")
    headings = [_HEADING.findall(part) for part in (prose, source_prose)]
    for own, other in zip_longest(*headings, fillvalue=("", "none")):
        if own[0] != other[0]:
            raise ValueError(f"the heading {' '.join(own)!r} is, in English, {' '.join(other)!r}")
    anchors = iter(_anchors([words for _, words in headings[1]]))
    prose = _HEADING.sub(lambda match: _with_anchor(match, next(anchors)), prose)
    prose = _LINK.sub(lambda match: _led(match, page, page), prose)
    for own, block in zip(blocks, source_blocks, strict=True):
        if not (block.startswith("```sh") and _bare(own) == _bare(block)):
            own = block if "```" in block[:4] else _moved(block, english(page), page)
        prose = prose.replace("\0", own, 1)
    return prose


def differences(page: Path) -> Iterator[str]:
    """Yield what a Chinese page has otherwise than the English one, by heading: figures, links,
    names of code."""
    own, source = (_sections(each) for each in (page, english(page)))
    for heading, mine, theirs in zip(own[0], own[1], source[1], strict=True):
        for kind, mine_of, theirs_of in zip(
            ("figures", "links", "code"), mine, theirs, strict=True
        ):
            for words, rest in (
                ("too many", mine_of - theirs_of),
                ("missing", theirs_of - mine_of),
            ):
                if rest:
                    yield f"{page.name}, {heading}: {kind} {words}: {', '.join(rest.elements())}"


def changes(page: Path) -> str:
    """Return how the English prose differs from what a Chinese page follows; empty if it does not,
    and if Git does not have that text, as in a clone without history."""
    followed = _HEAD.match(page.read_text(encoding="utf-8"))
    if followed is None:
        return "no first line `<!-- follows ... -->`"
    show = ["git", "cat-file", "blob", followed[1]]
    try:
        shown = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    except OSError:
        return ""
    if shown.returncode:
        return ""
    before, now = map(_paragraphs, (shown.stdout, english(page).read_text(encoding="utf-8")))
    lines = difflib.unified_diff(before, now, n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def follow(page: Path) -> None:
    """Write that a page follows the English text of now. A new page is begun."""
    original = english(page)
    source = original.read_text(encoding="utf-8")
    store = ["git", "hash-object", "-w", str(original)]
    blob = subprocess.run(store, cwd=ROOT, capture_output=True, text=True, check=True).stdout[:12]
    head = f"<!-- follows {original.relative_to(ROOT).as_posix()}, blob {blob} -->\n\n"
    page.parent.mkdir(exist_ok=True)
    text = page.read_text(encoding="utf-8") if page.exists() else _moved(source, original, page)
    page.write_text(filled(page, head + _HEAD.sub("", text, count=1)), encoding="utf-8")


def _parts(text: str) -> tuple[str, list[str]]:
    """Return the prose, with a NUL in the place of each block, and the blocks."""
    return _BLOCK.sub("\0", text), _BLOCK.findall(text)


def _first_line(block: str) -> str:
    return block.partition("\n")[0]


def _bare(block: str) -> list[str]:
    """Return the lines of a block of `sh` without comments."""
    return [line.split("#")[0].rstrip() for line in block.splitlines()]


def _anchors(headings: list[str]) -> list[str]:
    """Return the anchors of headings; the second of the same words ends in -1."""
    seen: Counter[str] = Counter()
    found = []
    for anchor in map(slug, headings):
        found.append(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def _with_anchor(heading: re.Match[str], anchor: str) -> str:
    level, words = heading["level"], heading["words"]
    return f"# {words}" if level == "#" else f'{level} <a id="{anchor}"></a>{words}'


def _led(link: re.Match[str], old: Path, new: Path) -> str:
    """Return a link as it is on page `new`. On page `old` it leads where it shall: to the Chinese
    page if there is one, except from there to its English."""
    file = link["file"]
    if not file or re.match("[a-z]+:", file):
        return link[0]
    there = english(_at(old, file))
    is_translated = there != english(new) and chinese(there).is_file()
    shown = relpath(chinese(there) if is_translated else there, new.parent).replace("\\", "/")
    return f"]({shown}{link['anchor'] or ''})"


def _at(page: Path, file: str) -> Path:
    return ROOT / relpath(page.parent / file, ROOT)


def _moved(text: str, old: Path, new: Path) -> str:
    return _LINK.sub(lambda match: _led(match, old, new), text)


def _sections(page: Path) -> tuple[list[str], list[list[Counter[str]]]]:
    """Return the headings of a page, and the figures, links and names of code below each."""
    text = _HEAD.sub("", page.read_text(encoding="utf-8"), count=1)
    parts = re.split(r"(?m)^(?=#+ )", _parts(text)[0])
    headings = [_HEADING.sub(r"\g<words>", _first_line(part)) for part in parts]
    return headings, [_counted(page, part) for part in parts]


def _counted(page: Path, text: str) -> list[Counter[str]]:
    links: Counter[str] = Counter()
    for match in _LINK.finditer(text):
        file = match["file"]
        there = _at(page, file) if file and not re.match("[a-z]+:", file) else None
        if there is None or english(there) != english(page):  # not the link to the other language
            to = english(there).relative_to(ROOT).as_posix() if there else file
            links[to + (match["anchor"] or "")] += 1
    words = re.sub(r'<a id="[^"]*"></a>', "", _LINK.sub("]", text))
    code = Counter(set(re.findall(r"`([^`]+)`", words)))
    return [Counter(_FIGURE.findall(re.sub("`[^`]+`", "", words))), links, code]


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs of the prose, each as one line; lines of code have no number."""
    prose = _LINE.sub(r"\1", _parts(text)[0].replace("\0", ""))
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", prose) if part.strip(" \n\0")]


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns 0: who changes English need not know Chinese."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=Path, help="these follow the English of now")
    options = parser.parse_args(argv)
    for page in options.pages:
        follow(page.resolve())
    for page in [] if options.pages else pages():
        if changed := changes(page):
            print(f"{page.relative_to(ROOT)}: its English has changed\n{changed}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
