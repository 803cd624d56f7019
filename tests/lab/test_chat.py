"""The demo of all milestones, and the chat in the terminal."""

from __future__ import annotations

import builtins
import io
import signal
from typing import Any

import pytest
from rich.console import Console

import m4_prefix_chunked
from m1_single import SamplingParams
from milestone_llm.core.errors import InputError
from milestone_llm.lab import chat
from milestone_llm.lab.answer import WordWrap, print_answer
from milestone_llm.lab.demo.__main__ import main as demo_main
from milestone_llm.models.checkpoint import LoadedModel

pytest_plugins = ["helpers.benches"]


def test_words_are_printed_when_they_are_complete_and_wrap() -> None:
    out = io.StringIO()
    words = WordWrap(Console(file=out, width=12, color_system=None))
    seen = []
    for text in (
        "Bl",
        "Blue li",
        "Blue light is",
        "Blue light is scattered",
        "Blue light is scattered.\n\n分",
    ):
        words.show(text)
        seen.append(out.getvalue())
    assert seen == ["", "Blue", "Blue light", "Blue light\nis", "Blue light\nis\nscattered.\n\n分"]
    words.show("Blue light is scattered.\n\n分散 end", is_whole=True)
    assert out.getvalue().endswith("\n\n分散 end")


@pytest.mark.usefixtures("one_thread", "no_pixels")
def test_the_demo_prints_a_line_a_step_for_each_milestone_and_writes_its_page(
    capsys: Any, tmp_path: Any
) -> None:
    assert demo_main(["--model", "tiny-llama", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    heads = [line[:-1].partition(" ─")[0] for line in out.splitlines() if line[:1] == "M"]
    assert [head[:4] for head in heads if head[2:3] == ":"] == [
        "M1: ",
        "M2: ",
        "M3: ",
        "M4: ",
        "M5: ",
    ]
    lines = out.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("step  r0"))
    assert lines[begin + 1].split()[:2] == ["0", "▸8"]
    assert lines[begin + 40].split()[:3] == ["39", lines[begin + 40].split()[1], "■"]
    assert "M1, M2, M3, M4 and M5 gave the same tokens." in out
    assert all(len(line) <= 80 for line in out.splitlines() if "page: " not in line)
    assert (tmp_path / "demo.html").stat().st_size > 10_000


@pytest.fixture
def talk(smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Run a chat on lines of input; an exception among them is raised. Returns what it printed."""

    def engine(model: str, **fields: Any) -> Any:
        return m4_prefix_chunked.LLMEngine(smollm2.model, tokenizer=smollm2.tokenizer, **fields)

    def run(*lines: Any, options: tuple[str, ...] = ()) -> tuple[str, str]:
        given = iter(lines)

        def read(*_: Any) -> str:
            line = next(given, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)
        monkeypatch.setattr("m5_kernels.LLMEngine", engine)
        assert chat.main([*options]) == 0
        return capsys.readouterr()

    return run


def test_a_chat_shows_what_the_cache_found_and_goes_on_after_a_long_line(talk: Any) -> None:
    options = ("--max-tokens", "16", "--max-model-len", "96")
    two = "What is 2 + 2?"
    out, err = talk(
        two, "/help", "word " * 99, two, "/new", "", KeyboardInterrupt(), options=options
    )
    assert out.count("The answer to this classic math problem is 4.\n") == 2
    costs = [line.partition(" cached")[0] for line in out.splitlines() if line.startswith("[")]
    assert costs == ["[0 of 38 prompt tokens", "[48 of 68 prompt tokens"]
    assert "no command /help: /new" in err
    assert "max_model_len=96" in err
    assert "prompt tokens came from the prefix cache." in out


def test_ctrl_c_ends_an_answer_and_keeps_its_words(smollm2: LoadedModel, capsys: Any) -> None:
    engine = m4_prefix_chunked.LLMEngine(
        smollm2.model, tokenizer=smollm2.tokenizer, max_model_len=128
    )
    steps: list[None] = []
    step = engine.driver.step

    def interrupted() -> None:
        steps.append(None)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        step()

    engine.driver.step = interrupted
    output = print_answer(engine, "What is 2 + 2?", SamplingParams(temperature=0))
    assert output
    assert output.text == "The answer to"
    again = print_answer(engine, "What is 2 + 2?", SamplingParams(temperature=0, max_tokens=1))
    assert again
    first, second = capsys.readouterr().out.split("]\n")[:2]
    assert first.startswith("The answer to\n[0 of 38 prompt tokens cached")
    assert second.startswith("The\n[32 of 38 prompt tokens cached")
    assert not engine.has_unfinished_requests()
    with pytest.raises(InputError):
        print_answer(engine, "word " * 200, SamplingParams())
