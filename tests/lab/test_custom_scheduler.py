"""A reader's file takes the place of a milestone's scheduler: which class, which milestone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import m3_paged.scheduler
from helpers.schedulers import of_length
from m2_batching import EngineConfig
from m2_batching.scheduler import Scheduler
from m3_paged.demo import main as m3_demo
from milestone_llm.core.errors import InputError
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.frontend.custom_scheduler import (
    load_class,
    milestone_of,
    place_of,
    scheduler_class,
)

ROOT = Path(__file__).parents[2]
MILESTONES = ["m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked"]
MINE = """
from m3_paged.scheduler import Scheduler

class Mine(Scheduler):
    number = 1

    def schedule(self):
        return 1 / (self.number - 1)
"""


@pytest.mark.parametrize("milestone", MILESTONES)
def test_a_copy_of_a_scheduler_is_that_of_its_milestone(milestone, tmp_path):
    copy = tmp_path / "my_scheduler.py"
    copy.write_text((ROOT / milestone / "scheduler.py").read_text("utf-8"), "utf-8")
    assert milestone_of(copy) == milestone
    own = load_class(copy, "Scheduler", BaseScheduler)
    assert issubclass(own, BaseScheduler)
    assert own.__module__ != f"{milestone}.scheduler"


def test_a_file_is_read_anew_even_within_a_second(tmp_path):
    path = tmp_path / "mine.py"
    for number in (1, 2):  # as long, and as old for a cache that looks at seconds
        path.write_text(MINE.replace("number = 1", f"number = {number}"))
        os.utime(path, (1e9, 1e9))
        assert load_class(path, "Scheduler", BaseScheduler).number == number
    assert milestone_of(path) == "m3_paged"


def test_the_scheduler_of_contributing_serves_the_shortest_prompt_first(tmp_path):
    """It takes `*args`, and is still of its milestone."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    path = tmp_path / "my_scheduler.py"
    path.write_text(text)
    own = scheduler_class(str(path), Scheduler)(EngineConfig(max_num_seqs=3), 64)
    for arrival, (name, length) in enumerate({"long": 9, "first": 2, "second": 2}.items()):
        own.add(of_length(name, length, arrival=arrival))
    plan = own.schedule()
    assert [row.request.request_id for row in plan.rows] == ["first", "second", "long"]


def test_a_scheduler_that_is_made_of_other_things_is_of_another_milestone(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        MINE + "    def __init__(self, config, num_blocks, max_model_len):\n        pass\n"
    )
    with pytest.raises(InputError, match="it is of another milestone"):
        scheduler_class(str(path), m3_paged.scheduler.Scheduler)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("x = 1", "it defines none"),
        (MINE + "\nclass Other(Mine):\n    pass\n", "it defines Mine, Other"),
        ("def f(:\n", "mine.py, line 1"),
    ],
)
def test_a_file_without_a_scheduler_is_refused_in_one_line_before_a_model_is_read(
    text, said, tmp_path, capsys
):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    options = ["--model", "no-such-model", "--out", str(tmp_path)]
    assert m3_demo([*options, "--scheduler", str(path)]) == 2
    assert said in (complaint := capsys.readouterr().err)
    assert complaint.count("\n") == 1


def test_the_line_of_an_exception_is_that_of_ones_own_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    mine = load_class(path, "Scheduler", BaseScheduler)
    with pytest.raises(ZeroDivisionError) as raised:
        mine.schedule(mine)
    assert place_of(raised.value, tmp_path) == "mine.py, line 8: return 1 / (self.number - 1)"
    path.write_text("def f(:\n")
    with pytest.raises(SyntaxError) as broken:
        load_class(path, "Scheduler")
    assert place_of(broken.value, tmp_path) == "mine.py, line 1: def f(:"


@pytest.mark.usefixtures("no_pixels")
def test_a_demo_runs_ones_own_scheduler_beside_ours_and_writes_its_page(tmp_path, capsys):
    path = tmp_path / "mine.py"
    lines = (
        MINE.replace("        return 1 / (self.number - 1)", "        return super().schedule()")
        + "\n    def reason_to_wait(self, request, budget):\n"
        + "        return 'one at a time' if self.running else None\n"
    )
    path.write_text(lines)
    options = ["--model", "tiny-llama", "--max-tokens", "40", "--out", str(tmp_path)]
    page, trace = tmp_path / "run.html", tmp_path / "run.jsonl"
    options += ["--scheduler", str(path), "--explore", str(page), "--trace", str(trace)]
    assert m3_demo(options) == 0
    assert page.exists()
    assert "one at a time" in trace.read_text("utf-8")
    totals = capsys.readouterr().out.partition("Summary")[2]
    (preemptions,) = re.findall(r"^ *preemptions +(\d+) +(\d+) *$", totals, re.M)
    assert int(preemptions[0]) > int(preemptions[1]) == 0
