"""The Chinese pages are in step with the English ones, and what is not is named."""

import re
import subprocess

import pytest
from markdown_it import MarkdownIt

from docs import chinese
from docs.chinese import changes, differences, filled, follow

PAGES = chinese.pages()
SOURCE = """# One page

It has [a word](glossary.md#block) in `code`, and 16 of 4,096.

```console
$ python -m m1_single.demo
```

## What is *new*

See [M1](m1_single.md).

```sh
make demo    # speaks
```

<!-- measured: docs/measurements/x.json
by: python x.py -->

| [record](measurements/x.json) |

<!-- end -->
"""
TRANSLATED = """# 一页

[词](../glossary.md#block)，`code`，4,096 中的 16。

```text
```

## 新的

见 [M1](m1_single.md)。

```sh
make demo    # 说话
```

<!-- measured: x -->
<!-- end -->
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A Chinese page that has just been written, of a repository with two pages."""
    monkeypatch.setattr(chinese, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "docs/zh").mkdir(parents=True)
    (tmp_path / "docs/page.md").write_text(SOURCE)
    for folder in ("docs", "docs/zh"):
        (tmp_path / folder / "glossary.md").touch()
    page = tmp_path / "docs/zh/page.md"
    page.write_text(TRANSLATED)
    follow(page)
    return page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_chinese_page_has_what_the_english_one_has(page):
    """Headings, blocks, links, figures and names of code."""
    text = page.read_text(encoding="utf-8")
    assert filled(page, text) == text, "`python docs/build.py` brings it up to date"
    assert list(differences(page)) == []
    # `**词。**词` is not bold
    assert "**" not in re.sub(r"<code.*?</code>", "", MarkdownIt().render(text), flags=re.S)


def test_blocks_anchors_and_links_are_those_of_the_english_page(page):
    text = page.read_text()
    assert "```console\n$ python -m m1_single.demo\n```" in text
    assert '## <a id="what-is-new"></a>新的' in text
    assert "[词](glossary.md#block)" in text  # there is a Chinese one
    assert "[M1](../m1_single.md)" in text  # there is none
    assert "[record](../measurements/x.json)" in text
    assert "make demo    # 说话\n" in text
    assert filled(page, text.replace("m1_single.demo", "by.hand")) == text
    assert "make demo    # speaks\n" in filled(page, text.replace("make demo", "make test"))


@pytest.mark.parametrize(
    ("there", "instead", "told"),
    [
        ("4,096", "4,069", "一页: figures missing: 4,096"),
        ("`code`", "code", "一页: code missing: code"),
        ("(../m1_single.md)", "(../m2.md)", "新的: links missing: docs/m1_single.md"),
    ],
    ids=str,
)
def test_what_a_translation_lacks_is_named_by_its_heading(page, there, instead, told):
    assert list(differences(page)) == []
    page.write_text(page.read_text().replace(there, instead))
    assert any(told in each for each in differences(page))


def test_another_number_of_headings_or_blocks_is_refused(page):
    text = page.read_text()
    with pytest.raises(ValueError, match="heading"):
        filled(page, text.replace("## ", "### "))
    with pytest.raises(ValueError, match="2 blocks, in English 3"):
        filled(page, text.replace("```console\n$ python -m m1_single.demo\n```", ""))


def test_a_page_whose_english_has_changed_is_named_with_what_has(page):
    original = chinese.english(page)
    original.write_text(SOURCE.replace("m1_single.demo", "m2_batching.demo"))
    assert changes(page) == ""  # outputs are filled in
    original.write_text(SOURCE.replace("16 of", "all of"))
    assert changes(page).splitlines() == [
        "-It has [a word](glossary.md#block) in `code`, and 16 of 4,096.",
        "+It has [a word](glossary.md#block) in `code`, and all of 4,096.",
    ]
    follow(page)
    assert changes(page) == ""
