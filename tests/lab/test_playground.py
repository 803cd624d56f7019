"""The playground plans what the engines plan, and every preset shows what it says."""

from __future__ import annotations

import importlib
import json
import operator
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from docs.questions.playground_formula import steps
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.workloads import serve
from milestone_llm.lab.playground.machine import MACHINES
from milestone_llm.lab.playground.own import Here, OwnFile
from milestone_llm.lab.playground.own_process import InAProcess
from milestone_llm.lab.playground.service import Playground, presets
from milestone_llm.lab.playground.setting import (
    MAX_MODEL_LEN,
    RequestSpec,
    Setting,
    Side,
    defaults_of,
)
from milestone_llm.lab.playground.simulate import assemble, run_setting
from milestone_llm.models.tiny_models import build_tiny_model
from milestone_llm.trace.jsonl import read_run
from milestone_llm.trace.records import StepRecord

PRESETS = {preset["question"]: Setting.of(preset) for preset in presets()}
GROUPED = PRESETS["What do layers with a window give back?"]
PAGED = Side("m3_paged", {"max_model_len": 64, "kv_cache_tokens": 96, "max_num_seqs": 4})
CROWD = Setting([RequestSpec(0.1 * i, 12 + i, 24) for i in range(5)], [PAGED])
"""Not all of them fit into memory."""


def one_side(question: str) -> Setting:
    """A preset's first side."""
    setting = PRESETS[question]
    return replace(setting, sides=setting.sides[:1])


def plan_of(record: StepRecord) -> dict[str, Any]:
    """What was decided in a step: all but times and sampled tokens."""
    data = record.to_dict()
    for name in [name for name in data if name.endswith(("_ms", "_s"))]:
        del data[name]
    for row in data["batch"]:
        del row["sampled_token"]
    return data


# --- the run is the engine's ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        one_side("What does a static batch waste?"),
        one_side("What starves?"),
        replace(CROWD, sides=[replace(PAGED, fields={**PAGED.fields, "preemption": "swap"})]),
        one_side("What does a common beginning save?"),
        one_side("Should one prompt take a whole step?"),
        replace(GROUPED, sides=GROUPED.sides[1:]),
    ],
    ids=["m1", "m2", "m3", "m4 cache", "m4 chunks", "m4 groups"],
)
def test_an_engine_plans_the_same_steps(setting):
    """A request comes before a step here, and not at a time: this machine takes another time."""
    (outcome,) = run_setting(setting)
    assert outcome.problem == ""
    (side,) = setting.sides
    scheduler, config = assemble(side.fields, side.engine, windows=setting.windows())
    fields = {name: getattr(config, name) for name in defaults_of(side.engine)}
    fields["max_model_len"] = scheduler.max_model_len
    if hasattr(scheduler, "num_blocks") and config.kv_cache_tokens is None:
        fields["kv_cache_tokens"] = scheduler.num_blocks * config.block_size
    model = build_tiny_model("llama", max_position_embeddings=MAX_MODEL_LEN)
    if setting.layers:
        kinds = ["sliding_attention" if each else "full_attention" for each in setting.windows()]
        layers = {"num_hidden_layers": len(kinds), "layer_types": kinds, "sliding_window": 32}
        model = build_tiny_model("gemma3", max_position_embeddings=MAX_MODEL_LEN, **layers)
    package = importlib.import_module(side.engine)
    engine = package.LLMEngine(model, device="cpu", trace="memory", **fields)
    steps = {name: each.step for each in outcome.records for name in each.arrived}
    serve(engine, [own.item(at, steps[f"r{at}"]) for at, own in enumerate(setting.in_order())])
    assert list(map(plan_of, engine.tracer.records)) == list(map(plan_of, outcome.records))


def test_what_the_runs_above_are_about_happens_in_them():
    crowd = run_setting(CROWD)[0].figures
    shared = run_setting(PRESETS["What does a common beginning save?"])[1].figures
    assert crowd["preemptions"] > 1
    assert shared["cached"] == 7 * 160


@pytest.mark.parametrize("question", PRESETS)
def test_a_preset_shows_what_it_says(question):
    setting = PRESETS[question]
    assert setting.shows
    assert setting.answer
    outcomes = dict(zip("AB", run_setting(setting), strict=True))
    assert [outcome.problem for outcome in outcomes.values()] == ["", ""]
    for claim in setting.shows:
        figure, left, sign, right = claim.replace(":", "").split()
        values = [outcomes[side].figures[figure] for side in (left, right)]
        assert {"<": operator.lt, ">": operator.gt}[sign](*values), (claim, values)


def test_swap_gains_nothing_on_the_h200_as_the_answer_says():
    setting = replace(PRESETS["Swap or recompute?"], machine="h200")
    recompute, swap = (outcome.figures for outcome in run_setting(setting))
    assert recompute["preemptions"] == swap["preemptions"] > 0, "there is something to compare"
    assert swap["makespan"] == pytest.approx(recompute["makespan"], rel=0.02)


def test_time_goes_on_by_the_formula_and_jumps_to_who_comes_next():
    setting = Setting([RequestSpec(2.0, 10, 2), RequestSpec(90.0, 1, 1)], [Side("m2_batching")])
    (outcome,) = run_setting(setting)
    machine = MACHINES["laptop"]
    weights = 4 * (machine.layer_weights + machine.head_weights)
    operations = 2 * 10 * machine.layer_weights + 2 * machine.head_weights
    operations += 4 * machine.query_size * 10 * 5
    step = machine.overhead_s + (weights + 10 * machine.kv_bytes) / machine.memory
    step += operations / machine.arithmetic
    assert outcome.figures["ttft_max"] == pytest.approx(step, rel=1e-4)
    assert [record.start_s for record in outcome.records] == pytest.approx([0, step, 88], rel=1e-4)


def test_the_formula_is_within_30_percent_of_every_step_that_was_measured():
    for *what, measured, formula in steps():
        assert formula == pytest.approx(measured, rel=0.3), what


# --- settings ------------------------------------------------------------------------------------


def test_a_link_holds_the_whole_setting():
    for setting in PRESETS.values():
        assert Setting.of(setting.to_link()) == setting
        assert Setting.of(json.loads(setting.to_json())) == setting


def test_a_saved_trace_is_read_as_any_other(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(Playground().trace(json.loads(CROWD.to_json())))
    assert list(map(plan_of, read_run(path))) == list(map(plan_of, run_setting(CROWD)[0].records))


def test_random_requests_are_those_of_the_bench():
    asked = {"count": 30, "rate": 2, "seed": 3, "prompt": [5, 9], "output": [1, 4]}
    throw = Playground().answers["/random"]
    requests = json.loads(throw(asked))
    assert requests == json.loads(throw(asked))
    assert {each["prompt"] for each in requests} == set(range(5, 10))
    assert requests[-1]["arrival"] == pytest.approx(15, rel=0.4)


@pytest.mark.parametrize(
    ("request_spec", "side", "told"),
    [
        (
            RequestSpec(prompt=64),
            PAGED,
            "r0: the prompt has 64 tokens, but max_model_len=64 leaves",
        ),
        (RequestSpec(output=0), PAGED, "r0: max_tokens must be a whole number, at least 1"),
        (RequestSpec(), Side("m3_paged", {"kv_cache_tokens": 0}), "kv_cache_tokens must be at lea"),
        (RequestSpec(), Side("m3_paged", {"kv_cache_tokens": 10**12}), "here are at most 100,000"),
        (RequestSpec(), Side("m3_paged", {"max_num_seq": 4}), "did you mean 'max_num_seqs'?"),
        (RequestSpec(), Side("m9"), "engine must be one of"),
    ],
)
def test_what_an_engine_refuses_is_told_in_its_words(request_spec, side, told):
    (outcome,) = run_setting(Setting([request_spec], [side]))
    assert told in outcome.problem
    assert outcome.records == []
    assert "\n" not in outcome.problem


@pytest.mark.parametrize("layers", ["32, none", "0, all", "32,", "all," * 12 + "all"])
def test_windows_that_are_none_are_refused(layers):
    (outcome,) = run_setting(Setting([RequestSpec()], [Side()], layers=layers))
    assert outcome.problem.startswith("layers must be up to 12 windows of tokens")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"requests": [{}] * 10_000}, "requests: List should have at most 200 items"),
        ({"requests": [{"arrival": float("nan")}]}, r"r0: arrival: "),
        ({"requests": [{"when": 1}]}, r"r0: when: Unexpected keyword"),
        ({"requests": [{}, {"prompt": -5}]}, "r1: prompt: must be .* 0, got -5"),
        ([], "dictionary or an instance of Setting"),
    ],
)
def test_what_is_no_setting_is_refused(data, told):
    if isinstance(data, dict):
        data = {"sides": [{}], **data}
    with pytest.raises(InputError, match=told):
        Setting.of(data)


def test_a_long_run_is_stopped_and_what_was_computed_is_shown(monkeypatch):
    monkeypatch.setattr("milestone_llm.lab.playground.simulate.MAX_STEPS", 20)
    (outcome,) = run_setting(Setting([RequestSpec(0, 8, 40)], [Side("m2_batching")]))
    assert (
        outcome.problem
        == "stopped: the playground computes at most 20 steps and 40,000 rows of a run"
    )
    assert len(outcome.records) == 20


# --- one's own scheduler -------------------------------------------------------------------------

OWN = """from m3_paged.scheduler import Scheduler


class Mine(Scheduler):
    steps = 0

    def schedule(self):
        self.steps += 1
        {line}
        return super().schedule()
"""


def run_own(tmp_path, line, version_class=Here):
    path = tmp_path / "mine.py"
    path.write_text(OWN.format(line=line))
    file = OwnFile(path, version_class)
    sides = [PAGED, replace(PAGED, engine="own")]
    return run_setting(replace(CROWD, sides=sides), file.refresh()), file


def test_ones_own_scheduler_runs_in_place_of_the_milestones(tmp_path):
    (theirs, mine), _ = run_own(tmp_path, "pass")
    assert mine.problem == ""
    assert list(map(plan_of, mine.records)) == list(map(plan_of, theirs.records))


@pytest.mark.parametrize(
    ("line", "told", "where"),
    [
        ("1 / (4 - self.steps)", "ZeroDivisionError: division by zero", "mine.py, line 9: 1 / (4"),
        ("if self.steps == 4: self.kv.blocks.pool.ref_counts[0] += 1", "AssertionError: ", "line "),
    ],
)
def test_an_exception_and_a_broken_invariant_are_told_with_step_and_line(
    line, told, where, tmp_path
):
    (_, mine), _ = run_own(tmp_path, line)
    assert mine.problem.startswith(told)
    assert where in mine.where
    assert mine.step == 3
    assert len(mine.records) in (3, 4)


@pytest.mark.slow
def test_what_does_not_end_is_ended_at_its_line_and_the_next_version_runs(tmp_path, monkeypatch):
    (_, mine), file = run_own(tmp_path, "pass", InAProcess)
    assert mine.problem == ""
    monkeypatch.setattr("milestone_llm.lab.playground.own_process.SECONDS", 1.0)
    setting = replace(CROWD, sides=[replace(PAGED, engine="own")])

    def saved(text):
        file.path.write_text(text)
        (outcome,) = run_setting(setting, file.refresh())
        return outcome

    for line in ("while True: pass", "import sys; sys.settrace(None)\n        while True: pass"):
        outcome = saved(OWN.format(line=line))
        assert outcome.problem.startswith("stopped after")
        assert outcome.where.endswith("while True: pass")
    outcome = saved("while True: pass\n")
    assert outcome.problem.startswith("stopped after")
    assert outcome.where == "mine.py, line 1: while True: pass"
    assert "SystemExit" in saved("raise SystemExit(3)\n").problem
    assert "status 3" in saved(OWN.format(line="import os; os._exit(3)")).problem
    outcome = saved(OWN.format(line="pass"))
    assert outcome.problem == ""
    assert outcome.records


def test_the_page_needs_no_tensors():
    """`make play` installs neither torch nor numpy, and a browser has none."""
    program = "import sys; sys.modules.update(dict.fromkeys(['numpy', 'torch', 'transformers']));"
    program += "from milestone_llm.lab.playground.service import Playground, presets;"
    program += "assert all(Playground().run(preset) for preset in (presets()[0], presets()[-1]))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_saved_file_is_loaded_again_and_the_old_one_stays_beside_it(tmp_path):
    _, file = run_own(tmp_path, "pass")
    assert file.refresh() == file.refresh()
    setting = replace(CROWD, sides=[replace(PAGED, engine=e) for e in ("own before", "own")])
    file.path.write_text(OWN.format(line="self.config.no_such_field"))
    before, after = run_setting(setting, file.refresh())
    assert before.problem == ""
    assert "no_such_field" in after.problem
    file.path.write_text("class Mine(:\n")
    before, after = run_setting(setting, file.refresh())
    assert file.version == 3
    assert before.problem == "", "the last one that ran"
    assert (after.problem[:11], after.where) == ("SyntaxError", "mine.py, line 1: class Mine(:")
    assert after.step is None


def test_what_lies_beside_the_file_is_loaded_again_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    beside = tmp_path / "own_block_rules.py"
    beside.write_text("LIMIT = 1\n")
    (_, mine), file = run_own(
        tmp_path, "from own_block_rules import LIMIT; assert self.steps <= LIMIT"
    )
    assert mine.step == 1
    file.refresh()
    assert file.version == 1, "nothing was saved since"
    beside.write_text("LIMIT = 10\n")
    setting = replace(CROWD, sides=[replace(PAGED, engine=e) for e in ("own before", "own")])
    assert [outcome.step for outcome in run_setting(setting, file.refresh())] == [10, 10]
    assert file.version == 2
