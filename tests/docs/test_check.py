"""The questions at the end of each chapter: their answers are what the code computes."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
CHAPTERS = {
    "m0": "m0_transformer",
    "compute": "compute",
    "m1": "m1_single",
    "m2": "m2_batching",
    "m3": "m3_paged",
    "m4": "m4_prefix_chunked",
    "m5": "m5_kernels",
    "serving": "serving",
    "scale": "scale",
}


def load(name):
    """A file of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check = load("check")


def test_each_chapter_asks_its_three_questions():
    assert list(check.CHECKS) == list(CHAPTERS)
    for chapter, page in CHAPTERS.items():
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert len(check.CHECKS[chapter]) == 3, chapter
        assert text.count(f"<!-- run: python docs/check.py {chapter} --list -->") == 1, page


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_an_answer_is_what_the_code_computes(chapter):
    for question in check.CHECKS[chapter]:
        shown, is_right = question.look.evaluate(vars(check))
        assert is_right, f"{question.text}\nit is {shown}, not {question.look.expected}"


def test_an_answer_is_right_or_not_and_none_is_given_away(monkeypatch, capsys):
    text = "\n# m3\nHow many\nblocks?\np 1 + 2 == 3\n  # Two and one.\n"
    (question,) = check.read_checks(text)["m3"]
    assert question.text == "How many blocks?"
    guesses = iter(["3", "4", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(guesses))
    assert check.ask([question] * 3) == 1
    printed = capsys.readouterr().out
    verdicts = ["Right: 3. Two and one.", "Not so: 3. Two", "The answer: 3. Two"]
    places = [printed.index(verdict) for verdict in verdicts]
    assert places == sorted(places)


def test_an_answer_may_be_written_as_the_pages_write_numbers(monkeypatch, capsys):
    (question,) = check.read_checks("\n# m0\nHow many\nbytes?\np 3 * 4096 == 12288\n  # So.\n")[
        "m0"
    ]
    guesses = iter(["12,288", "12288", "12,28"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(guesses))
    assert check.ask([question] * 3) == 2


def test_a_reader_that_has_gone_ends_the_list_without_a_traceback(monkeypatch):
    """As `python docs/check.py m3 --list | head -1` does."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        monkeypatch.setattr(check.console, "quiet", False)  # it stays quiet afterwards
        with pytest.raises(SystemExit):
            check.main(["m3", "--list"])


def test_a_list_gives_no_answer_away(capsys):
    assert check.main(["m3", "--list"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1. Blocks hold 4 tokens")
    for question in check.CHECKS["m3"]:
        assert question.look.meaning not in printed
