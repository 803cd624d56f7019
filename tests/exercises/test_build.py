"""The course `exercises/build/`: right code passes every step, wrong code fails at the right one.

Solutions are the milestones' own functions in the skeletons; mistakes are changes of their text.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from exercises.build.__main__ import main
from exercises.build.check import FOLDER, ROOT, Course, Parts, problem
from m2_batching.demo import main as m2_demo
from m3_paged.scheduler import Scheduler as PagedScheduler
from milestone_llm.core.errors import InputError
from milestone_llm.frontend.scheduler_file import scheduler_class

MILESTONES = {"m2": "m2_batching", "m3": "m3_paged", "m4": "m4_prefix_chunked"}
FILES = {
    "m2": ["scheduler"],
    "m3": ["block_pool", "block_manager", "scheduler"],
    "m4": ["caching_pool", "prefix_cache", "scheduler"],
}
"""What is to be written in each course; a file imports those before it."""
SHARED = {"prefix_cache": [ROOT / "milestone_llm" / "frontend" / "block_hashes.py"]}
"""Where functions of such a file stand in the house, besides the milestone's own file."""
NUM_TODO = {"m2": 6, "m3": 16, "m4": 17}
"""Functions to be written."""
COURSES = {name: Course.named(name) for name in FILES}
STEPS = [(name, number) for name in COURSES for number in range(1, len(COURSES[name].steps) + 1)]
CHUNK = """    def _chunk(self, request: Request, budget: int) -> int:
        if not self.config.enable_chunked_prefill:
            return request.num_uncomputed_tokens
        longest = self.config.long_prefill_token_threshold or budget
        return min(request.num_uncomputed_tokens, budget, longest)
"""


# --- skeletons and solutions --------------------------------------------------------------------


def functions(text: str) -> dict[str, ast.FunctionDef]:
    """Functions and methods of a file by their names."""
    nodes = ast.walk(ast.parse(text))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def lines_of(text: str, node: ast.FunctionDef) -> str:
    """The source of a function, whole lines."""
    return "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])


def todo(text: str) -> list[str]:
    """Functions that are to be written."""
    found = functions(text).items()
    return [name for name, node in found if "raise NotImplementedError(" in lines_of(text, node)]


def skeletons(course: str) -> dict[str, str]:
    """The reader's files, if nobody has begun to write."""
    paths = {file: FOLDER / course / f"{file}.py" for file in FILES[course]}
    texts = {file: path.read_text(encoding="utf-8") for file, path in paths.items()}
    if sum(len(todo(text)) for text in texts.values()) != NUM_TODO[course]:
        pytest.skip(f"the course {course} has been begun")
    return texts


def solutions(course: str) -> dict[str, str]:
    """The same files, with what is to be written taken from the milestone."""
    return {file: solved(course, file, text) for file, text in skeletons(course).items()}


def solved(course: str, file: str, text: str) -> str:
    paths = [ROOT / MILESTONES[course] / f"{file}.py", *SHARED.get(file, [])]
    sources = {}
    for model in (path.read_text(encoding="utf-8") for path in paths):
        sources |= {name: lines_of(model, node) for name, node in functions(model).items()}
    sources["_chunk"] = CHUNK  # a part of `_add_row` there
    helpers = [sources[name] for name in ("_grow", "_shared_indices") if name in sources]
    names = functions(text)
    for name in sorted(todo(text), key=lambda name: -names[name].lineno):
        text = text.replace(lines_of(text, names[name]), sources[name])
    return text.replace("    # -- as it is", "\n".join([*helpers, "    # -- as it is"]))


@pytest.fixture
def written(monkeypatch, tmp_path):
    """Gives the parts of a course as if a reader had written these texts into its files."""

    def parts(course: str, texts: dict[str, str]) -> Parts:
        own = Parts(f"exercises.build.{course}")
        for file, text in texts.items():
            module = ModuleType(f"{own.package}.{file}")
            monkeypatch.setitem(sys.modules, module.__name__, module)
            exec(compile(text, str(FOLDER / course / f"{file}.py"), "exec"), vars(module))
        own.scheduler_path = str(tmp_path / "scheduler.py")
        Path(own.scheduler_path).write_text(texts["scheduler"], encoding="utf-8")
        return own

    return parts


# --- right, missing and wrong code ----------------------------------------------------------------


@pytest.mark.parametrize("course", COURSES)
def test_right_code_passes_every_step(course, written):
    parts = written(course, solutions(course))
    found = [problem(step, parts) for step in COURSES[course].steps]
    assert found == [None] * len(found)


def test_memory_may_be_asked_before_rows(written):
    texts, first = solutions("m2"), "        if len(self.running) >= self.config.max_num_seqs:"
    memory = "        if not self.kv.can_allocate():\n            return self.kv.describe()\n"
    assert first in texts["scheduler"]
    texts["scheduler"] = texts["scheduler"].replace(first, memory + first)
    parts = written("m2", texts)
    found = [problem(step, parts) for step in COURSES["m2"].steps[:-1]]
    assert found == [None] * len(found)


@pytest.mark.parametrize(("course", "number"), STEPS)
def test_a_skeleton_says_what_is_to_be_written(course, number):
    skeletons(course)
    step = COURSES[course].steps[number - 1]
    found = problem(step, COURSES[course].parts)
    assert "Not written yet: " in found
    assert "\nHint: " in found
    assert "Traceback" not in found
    if number < len(COURSES[course].steps) - 1:
        assert f"exercises/build/{course}/" in found


LIFO = """
        while self.waiting:
            request = list(self.waiting)[-1]
            if reason := self.reason_to_wait(request, budget):
                plan.waiting_reasons[request.request_id] = reason
                break
            self.waiting.remove(request)"""
OVERTAKING = """
        for request in list(self.waiting):
            if reason := self.reason_to_wait(request, budget):
                plan.waiting_reasons[request.request_id] = reason
                continue
            self.waiting.remove(request)"""
IN_ORDER = """
        while self.waiting:
            request = self.waiting.peek()
            if reason := self.reason_to_wait(request, budget):
                plan.waiting_reasons[request.request_id] = reason
                break  # the first that does not fit stops it: nobody overtakes
            self.waiting.pop()"""
PREEMPT = 'self.preempter.preempt(victim, plan, f"no free block for {request.request_id}")'
LEAK = "\n            ".join(
    (
        "from milestone_llm.core.plan import Preemption",
        'plan.preempted.append(Preemption(victim, "memory"))',
        'plan.waiting_reasons[victim.request_id] = f"no free block for {request.request_id}"',
        "victim.num_preemptions += 1",
        "victim.status, victim.num_computed_tokens = RequestStatus.WAITING, 0",
        "self.kv.pool.num_blocks += 1",
        "self.kv.pool.ref_counts.append(0)",
        "self.kv.pool.free_blocks.append(self.kv.pool.num_blocks - 1)",
    )
)
MISTAKES = {
    "last come, first served": (
        ("m2", 3, "scheduler", IN_ORDER, LIFO),
        "c is admitted, while a, which is before it in the queue, waits",
    ),
    "no limit of rows": (
        ("m2", 3, "scheduler", "if reason := self.reason_to_wait(request, budget):", "if False:"),
        "raised in _admit.*No KV memory was left to give",
    ),
    "no reason": (
        ("m2", 3, "scheduler", "plan.waiting_reasons[request.request_id] = reason", "pass"),
        "c waits, and the plan does not say why",
    ),
    "a region is kept": (
        ("m2", 4, "scheduler", "self.kv.free(request.request_id)", "pass"),
        "b has finished and still owns its region 1",
    ),
    "no budget": (
        ("m2", 5, "scheduler", "if num_new_tokens > budget and self.running:", "if False:"),
        "The rows add up to 8 tokens: max_num_batched_tokens=6",
    ),
    "overtaking": (
        ("m2", 5, "scheduler", IN_ORDER, OVERTAKING),
        "e is admitted, while d, which is before it in the queue, waits",
    ),
    "too long for ever": (
        ("m2", 6, "scheduler", "if num_new_tokens > budget and self.running:",
         "if num_new_tokens > budget:"),
        "a has no row in this step: it waits, and should be admitted",
    ),
    "too long beside others": (
        ("m2", 6, "scheduler", "num_new_tokens > budget and self.running:",
         "budget < num_new_tokens <= self.config.max_num_batched_tokens:"),
        "The rows add up to 8 tokens: max_num_batched_tokens=4.*b goes alone",
    ),
    "a region that no event tells of": (
        ("m2", 2, "scheduler", "self.kv.allocate(request.request_id)",
         "self.kv.regions[request.request_id] = self.kv.free_regions.pop(0)"),
        r"a owns region 0, but self.events tell of \[\]",
    ),
    "events are cleared": (
        ("m2", 4, "scheduler", "plan = StepPlan()", "plan = self.events.clear() or StepPlan()"),
        r"a owns no region, but self.events tell of \[0\]",
    ),
    "the newest block first": (
        ("m3", 1, "block_pool", "popleft()", "pop()"),
        "longest free first|has been free the longest",
    ),
    "free while shared": (
        ("m3", 2, "block_pool", "if self.ref_counts[block] == 0:", "if True:"),
        "another table still holds block 0",
    ),
    "freed twice": (
        ("m3", 2, "block_pool", 'assert self.ref_counts[block] > 0, f"block {block} is freed',
         'assert True, f"block {block} is freed'),
        r"Nobody holds block 0, and free\(0\) does not complain",
    ),
    "the first block back first": (
        ("m3", 3, "block_manager", "for block in reversed(table):", "for block in table:"),
        "a gives its last block back first",
    ),
    "no growth": (
        ("m3", 4, "block_manager", "        self._grow(request_id, end)\n", ""),
        "block 0 is full: a new one",
    ),
    "the same list": (
        ("m3", 5, "block_manager", "self.block_tables[request_id] = list(blocks)",
         "self.block_tables[request_id] = blocks"),
        "a and b have the same list",
    ),
    "no copy": (
        ("m3", 5, "block_manager", "self.pool.ref_counts[table[index]] > 1", "False"),
        "b gets block 2, a copy",
    ),
    "admission without memory": (
        ("m3", 6, "scheduler", "if not self.kv.can_allocate(request.num_tokens):", "if False:"),
        "raised in allocate.*called by _admit.*No KV memory was left to give",
    ),
    "the oldest goes": (
        ("m3", 7, "scheduler", "self.by_seniority()[-1]", "self.by_seniority()[0]"),
        "Preempted: a. Expected: c.",
    ),
    "blocks leak at a preemption": (
        ("m3", 7, "scheduler", PREEMPT, LEAK),
        "c does not run any more and still owns its blocks",
    ),
    "newcomers after a preemption": (
        ("m3", 7, "scheduler", "if plan.preempted:", "if False:"),
        "mid has a row and should have none in this step.*nobody is admitted",
    ),
    "lost at a preemption": (
        ("m3", 7, "scheduler", "self.waiting.add(victim)", "pass"),
        r"Who waits after this step\n  yours     \['d'\]\n  expected  \['c', 'd'\]",
    ),
    "resumed as new": (
        ("m3", 8, "scheduler", "is_new = not request.num_preemptions", "is_new = True"),
        "plan.admitted has c, d; it should have d",
    ),
    "nobody is more urgent": (
        ("m3", 8, "scheduler", 'if self.config.policy == "priority":', "if False:"),
        "The rows are in the order low, high; expected: high, low",
    ),
    "a name without its parent": (
        ("m4", 1, "prefix_cache", "hashlib.sha256(parent + ", "hashlib.sha256("),
        "The same tokens after another parent have the same hash",
    ),
    "merged copies": (
        ("m4", 2, "caching_pool", "if block_hash in self.block_of or block in self.hash_of:",
         "if False:"),
        "block 0 has this content already",
    ),
    "a block in use is evicted": (
        ("m4", 3, "caching_pool", "block, _ = self.free_blocks.popitem(last=False)",
         "block = next(iter([*self.block_of.values(), *self.free_blocks]))\n"
         "        self.free_blocks.pop(block, None)\n        self.ref_counts[block] = 0"),
        "3 has been free the longest",
    ),
    "old content is found": (
        ("m4", 3, "caching_pool", "            self.forget(block)\n", ""),
        "block 1 will be overwritten",
    ),
    "found and still free": (
        ("m4", 3, "caching_pool", "        del self.free_blocks[block]\n", ""),
        "it is in use again, and must not be given to anybody",
    ),
    "a block that is not full": (
        ("m4", 4, "prefix_cache",
         "min(end, len(request.token_ids)) // self.kv.block_size",
         "-(-min(end, len(request.token_ids)) // self.kv.block_size)"),
        "A block that is not full is not findable",
    ),
    "a hit on the last token": (
        ("m4", 4, "prefix_cache", "            num_tokens -= 1\n", ""),
        "the last token is computed whatever is cached",
    ),
    "revived blocks do not count": (
        ("m4", 5, "prefix_cache", "return num_new + num_revived <=", "return num_new <="),
        "they come off the free list",
    ),
    "a copy of a block that nobody holds": (
        ("m4", 5, "prefix_cache", "self.pool.ref_counts[hit.blocks[-1]] > 0",
         "self.pool.ref_counts[hit.blocks[-1]] >= 0"),
        "b has gone, and block 1 alone is free.*without a copy",
    ),
    "the hit is not used": (
        ("m4", 5, "prefix_cache", "self.kv.adopt(request.request_id, hit.blocks)",
         "self.kv.adopt(request.request_id, [])"),
        "it begins with the blocks that were found",
    ),
    "a chunk beyond the budget": (
        ("m4", 6, "scheduler", "return min(request.num_uncomputed_tokens, budget, longest)",
         "return request.num_uncomputed_tokens"),
        "The rows add up to 12 tokens: max_num_batched_tokens=8",
    ),
    "decode rows last": (
        ("m4", 7, "scheduler", 'if self.config.prefill_policy == "prefill_first":', "if True:"),
        "p's row begins at token 0 and has 8; it should begin at 0 and have 6|a has no row",
    ),
    "a hit is computed again": (
        ("m4", 8, "scheduler", "request.num_computed_tokens = num_cached = hit.num_tokens",
         "num_cached = hit.num_tokens"),
        "b's row begins at token 0 and has 11; it should begin at 8 and have 3",
    ),
    "a hit costs budget": (
        ("m4", 8, "scheduler", "request.num_tokens - hit.num_tokens",
         "request.num_tokens + hit.num_tokens"),
        "b has no row in this step.*prompts come whole",
    ),
    "blocks of an error are found": (
        ("m4", 8, "scheduler", 'if request.finish_reason == "error":', "if False:"),
        "what is in its blocks may be wrong",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught_by_its_step(name, written):
    (course, number, file, right, wrong), message = MISTAKES[name]
    texts = solutions(course)
    assert right in texts[file]
    texts[file] = texts[file].replace(right, wrong)
    parts = written(course, texts)
    steps = COURSES[course].steps
    assert [problem(step, parts) for step in steps[: number - 1]] == [None] * (number - 1)
    found = problem(steps[number - 1], parts)
    assert found is not None
    assert re.search(message, found, flags=re.S), found
    assert "Traceback" not in found


# --- the command, and the file that an engine takes -----------------------------------------------


def test_the_command_shows_progress_and_checks_one_step(capsys, monkeypatch):
    monkeypatch.setattr("exercises.build.__main__.course_names", lambda: list(FILES))
    for course in FILES:
        skeletons(course)
    assert main([]) == 1
    shown = capsys.readouterr().out
    for name in COURSES:
        assert f"next\n     python -m exercises.build {name} 1\n" in shown
    assert main(["m2", "3"]) == 1
    shown = capsys.readouterr().out
    assert "m2, step 3 of 8: first come, first served, while rows last" in shown
    assert "You write it in exercises/build/m2/scheduler.py." in shown
    assert "Check again: python -m exercises.build m2 3" in shown
    with pytest.raises(SystemExit):
        main(["m2", "9"])
    assert "m2 has the steps 1 to 8, got 9" in capsys.readouterr().err


def test_an_exception_in_the_readers_code_is_shown_with_its_line_and_the_traffic(written):
    texts = solutions("m2")
    texts["scheduler"] = texts["scheduler"].replace("plan.admitted.append(request)", "1 / 0")
    found = problem(COURSES["m2"].steps[1], written("m2", texts))
    assert "ZeroDivisionError: division by zero\nraised in _admit() in exercises/build/m2" in found
    assert "before step 0  comes a (prompt of 4 tokens, 9 to generate)" in found
    assert "Traceback" not in found


def test_the_scheduler_of_another_milestone_is_refused():
    with pytest.raises(InputError, match="it is of another milestone"):
        scheduler_class(str(ROOT / "m2_batching/scheduler.py"), PagedScheduler)


def test_the_demo_serves_with_the_readers_scheduler_beside_ours(written, tmp_path, capsys):
    texts = {
        "scheduler": solutions("m2")["scheduler"].replace("no row is left", "the rows are out")
    }
    path = written("m2", texts).scheduler_path
    options = ["--model", "tiny-llama", "--max-tokens", "3", "--out", str(tmp_path)]
    assert m2_demo([*options, "--scheduler", path]) == 0
    shown = capsys.readouterr().out
    assert "r2: the rows are out" in shown
    assert "continuous and yours gave the same tokens." in shown


def test_the_course_is_linked_from_its_chapters():
    readme = (ROOT / "exercises" / "README.md").read_text(encoding="utf-8")
    for course, milestone in MILESTONES.items():
        chapter = (ROOT / "docs" / f"{milestone}.md").read_text(encoding="utf-8")
        assert f"python -m exercises.build {course}" in chapter
        assert all(f"](build/{course}/{file}.py)" in readme for file in FILES[course])
