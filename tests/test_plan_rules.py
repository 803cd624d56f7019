"""A scheduler of the reader's that breaks a rule is told so at its step, and nobody is harmed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import m4_prefix_chunked
from helpers.engines import greedy, hf_greedy, make_engine, random_prompts, run_to_end
from milestone_llm.core.errors import PlanError
from milestone_llm.core.kv import KVEvent
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.plan_rules import broken_rule_of_blocks

PROMPTS = dict(zip("xyz", random_prompts([3, 5, 9], seed=4), strict=True))
OWN = """from m4_prefix_chunked.scheduler import Scheduler as Base
from milestone_llm.core.plan import StepPlan


class Scheduler(Base):
    step = 0

    def schedule(self):
        plan, self.step = super().schedule(), self.step + 1
        if self.step == 3:
            {line}
        return plan
"""
BROKEN = {
    "a row twice": ("plan.rows.append(plan.rows[0])", "x is in this step twice"),
    "too soon": ("plan.rows[1].start -= 1", "y's row starts at 5"),
    "too late": ("plan.rows[1].start += 1", "y's row starts at 7"),
    "too many": ("plan.rows[0].num_new_tokens += 1", "x's row has 2 tokens"),
    "too few": ("plan.rows[0].num_new_tokens = -1", "x's row has -1 tokens"),
    "another's token": (
        "plan.rows[0].sampling_requests, plan.rows[1].sampling_requests = "
        "plan.rows[1].sampling_requests, plan.rows[0].sampling_requests",
        "x samples nothing",
    ),
    "a token in the prompt": (
        "self.running[2].token_ids += [1]; plan.rows[2].num_new_tokens = 1",
        "z's row samples before",
    ),
    "padding": ("plan.rows[0].is_padding = True", "x has not finished"),
    "a lost one": ("self.running.pop()", "lost: z"),
    "nothing": ("plan = StepPlan()", "the plan is empty"),
    "no plan": ("plan = None", "None"),
    "a neighbour's blocks": ("plan.rows[0].blocks = plan.rows[1].blocks", "x's row has the blocks"),
    "an invented copy": ("plan.copies = [(0, 1)]", "the plan's copies are of blocks [(0, 1)]"),
    "an invented swap": ("plan.swap_ins = [(0, 0)]", "the plan's swap_ins are of blocks [0]"),
}


def engine_with(tmp_path, text, **fields):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return make_engine(m4_prefix_chunked, scheduler=str(path), **fields)


@pytest.mark.parametrize(("line", "told"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_told_with_request_file_and_line_and_all_get_their_tokens(
    line, told, tmp_path
):
    engine = engine_with(tmp_path, OWN.format(line=line))
    for name, prompt in PROMPTS.items():
        engine.add_request(prompt, greedy(6), request_id=name)
    engine.step()
    engine.step()
    with pytest.raises(PlanError) as caught:
        engine.step()
    assert told in caught.value.rule
    assert caught.value.where == f"{tmp_path / 'mine.py'}, line 8"
    assert engine.stats()["steps"] == 2
    if "token_ids" in line:
        return  # not the plan alone was changed
    outputs = run_to_end(engine)
    for name, prompt in PROMPTS.items():
        assert outputs[name].token_ids == hf_greedy("llama", prompt, 6)


LOSING = """from m4_prefix_chunked.scheduler import Scheduler as Base

class Mine(Base):
    def {method}
"""


@pytest.mark.parametrize(
    "method",
    [
        "schedule(self):\n        self.waiting and self.waiting.pop()\n"
        "        return super().schedule()",
        "add(self, *requests):\n        pass",
    ],
    ids=["schedule", "add"],
)
def test_generate_comes_back_from_a_scheduler_that_loses_a_request(method, tmp_path):
    engine = engine_with(tmp_path, LOSING.format(method=method), max_num_seqs=2)
    with pytest.raises(PlanError, match="lost: r") as caught:
        engine.generate([PROMPTS["x"], PROMPTS["y"]], [greedy(2), greedy(4)])
    assert caught.value.where == f"{tmp_path / 'mine.py'}, line 4"
    assert not engine.has_unfinished_requests()


def test_a_plan_moves_the_blocks_that_kv_memory_has_moved():
    kv = SimpleNamespace(events=[KVEvent("copy_on_write", "x", [3, 4])], blocks_of=None)
    assert broken_rule_of_blocks(StepPlan(copies=[(3, 4)]), kv, 0) is None
    told = broken_rule_of_blocks(StepPlan(copies=[(3, 5)]), kv, 0)
    assert told == "the plan's copies are of blocks [(3, 5)], and KV memory has moved [(3, 4)]"
