"""Each chapter links a word of the glossary to its explanation where it first uses it."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
CHAPTERS = [p for p in sorted(DOCS.glob("*.md")) if p.name not in ("README.md", "glossary.md")]
WORDS = re.findall(r"^### (.+)$", (DOCS / "glossary.md").read_text(encoding="utf-8"), flags=re.M)
WORD = re.compile(
    r"(?<![\w-])(" + "|".join(sorted(WORDS, key=len, reverse=True)) + r")s?(?![\w-])", re.I
)
NOT_PROSE = re.compile(
    r"```.*?```|<!-- measured:.*?<!-- end -->|<!--.*?-->|`[^`\n]*`"  # code, outputs, comments
    r"|^#.*?$|^<.*?$|!\[.*?\]\(.*?\)"  # headings, HTML, pictures
    r"|\[[^\]]*\]\((?!glossary\.md#).*?\)",  # links to elsewhere
    flags=re.S | re.M,
)


def anchor(word: str) -> str:
    """The anchor of a heading: `KV cache` has `kv-cache`."""
    return word.lower().replace(" ", "-")


def unlinked(page: str) -> list[tuple[int, str]]:
    """(line, word) of each first use that does not link to the glossary.

    A blank takes the place of what is not prose, so that lines keep their numbers.
    """
    prose = NOT_PROSE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), page)
    first = {}
    for use in WORD.finditer(prose):
        first.setdefault(anchor(use[1]), use)
    return [
        (page.count("\n", 0, use.start()) + 1, use[0])
        for name, use in first.items()
        if not re.match(rf"[^\]\[]*\]\(glossary\.md#{name}\)", prose[use.end() :])
    ]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.name)
def test_the_first_use_of_a_word_links_to_the_glossary(chapter):
    missing = [
        f"docs/{chapter.name}:{line}: write [{word}](glossary.md#{anchor(WORD.match(word)[1])})"
        for line, word in unlinked(chapter.read_text(encoding="utf-8"))
    ]
    assert not missing, "a word of the glossary has no link where it is first used\n" + "\n".join(
        missing
    )


def test_links_to_the_glossary_lead_to_a_word():
    for page in CHAPTERS:
        found = set(re.findall(r"\(glossary\.md#([^)]*)\)", page.read_text(encoding="utf-8")))
        assert found <= {anchor(word) for word in WORDS}, page.name


def test_only_prose_counts_and_only_the_first_use():
    page = "# Prefill\n\n`prefill` ![prefill](x.png) [prefill](m4.md)\n\n```\nprefill\n```\n"
    assert unlinked(page) == []
    linked = "A [prefill](glossary.md#prefill) is first, a prefill later.\n"
    assert unlinked(page + linked) == []
    assert unlinked(page + "A\nprefill. " + linked) == [(9, "prefill")]
    assert unlinked("[Two steps](glossary.md#step) and a step.") == []
