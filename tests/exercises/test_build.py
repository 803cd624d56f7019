"""The course `exercises/build/`: what it says of code that is missing, wrong or raises.

That right code passes is in tests/test_rules.py. Here a reader's file is the milestone's own, with
a mistake in it.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path, PurePath
from types import ModuleType

import pytest

from exercises.build.check import FOLDER, ROOT, Course, Parts, course_names, problem
from helpers.forked import run_python
from m2_batching.demo import main as m2_demo
from m3_paged.scheduler import Scheduler as PagedScheduler
from milestone_llm.core.errors import InputError
from milestone_llm.frontend.custom_scheduler import scheduler_class

COURSES = {name: course for name in course_names() if (course := Course.named(name)).files}
SCHEDULERS = ("m2", "m3", "m4")
STEPS = [
    (name, number)
    for name, course in COURSES.items()
    for number in range(1, len(course.steps))  # in the last, nothing is written
] + [("tensor_parallel", 3)]


def text_of(course: str, file: str) -> str:
    """A milestone's own file, as it would stand in the course."""
    whole = [replace(each, todo={}, without=()) for each in COURSES[course].files]
    return replace(COURSES[course], files=whole).texts()[f"exercises/build/{course}/{file}.py"]


@pytest.fixture
def written(monkeypatch, tmp_path):
    """Gives the parts of a course as if a reader had written these texts into its files."""

    def parts(course: str, **texts: str) -> Parts:
        own = Parts(f"exercises.build.{course}")
        for name in (PurePath(file.name).stem for file in COURSES[course].files):
            module = ModuleType(f"{own.package}.{name}")
            monkeypatch.setitem(sys.modules, module.__name__, module)
            text = texts.get(name) or text_of(course, name)
            exec(compile(text, str(FOLDER / course / f"{name}.py"), "exec"), vars(module))
            if name == "scheduler":
                own.scheduler_path = str(tmp_path / "scheduler.py")
                Path(own.scheduler_path).write_text(text, encoding="utf-8")
        return own

    return parts


# --- right, missing and wrong code ----------------------------------------------------------------


@pytest.mark.parametrize("course", COURSES)
def test_the_milestones_own_parts_serve(course):
    assert problem(COURSES[course].steps[-1], Parts(COURSES[course].milestone)) is None


@pytest.mark.parametrize("course", SCHEDULERS)
def test_a_reason_to_wait_may_have_any_words(course, written):
    parts = written(course)
    reason_to_wait = parts.Scheduler.reason_to_wait
    parts.Scheduler.reason_to_wait = lambda *given: reason_to_wait(*given) and "not now"
    for step in COURSES[course].steps[:-1]:
        assert problem(step, parts) is None, step.title


@pytest.mark.parametrize(("course", "number"), STEPS)
def test_a_skeleton_says_what_is_to_be_written(course, number, written):
    texts = {PurePath(path).stem: text for path, text in COURSES[course].texts().items()}
    step = COURSES[course].steps[number - 1]
    found = problem(step, written(course, **texts))
    assert "Not written yet: " in found
    assert "\nHint: " in found
    assert "Traceback" not in found
    if number < len(COURSES[course].steps) - 1:
        assert f"exercises/build/{course}/" in found


OVERTAKING = (
    """
                break  # the first that does not fit stops it: nobody overtakes
            self.waiting.pop()""",
    """
                fitting = [each for each in self.waiting if not self.reason_to_wait(each, budget)]
                if not fitting:
                    break
                request = fitting[0]
            self.waiting.remove(request)""",
)
MISTAKES = {  # course, step, file, what stands there, the mistake, words of what is told
    "no weight": (
        "m0", 1, "m0_transformer", "return weight * x", "return x", "Multiply them by weight"),
    "a norm that subtracts the mean": (
        "m0", 1, "m0_transformer", "return weight * x", "x = x - x.mean(-1, keepdim=True)\n"
        "    return weight * x", "That is LayerNorm"),
    "eps after the root": (
        "m0", 1, "m0_transformer", "torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)",
        "1 / (x.square().mean(-1, keepdim=True).sqrt() + eps)", "under the root"),
    "neighbours are turned": (
        "m0", 2, "m0_transformer", "first, second = x[..., :half], x[..., half:]",
        "first, second = x[..., ::2], x[..., 1::2]\n"
        "    c, s = angles.cos(), angles.sin()\n"
        "    turned = [first * c - second * s, second * c + first * s]\n"
        "    return torch.stack(turned, -1).flatten(-2)", "numbers 2i and 2i"),
    "turned the other way": (
        "m0", 2, "m0_transformer", "cos, sin = angles.cos(), angles.sin()",
        "cos, sin = angles.cos(), -angles.sin()", "turns the other way"),
    "always from position 0": (
        "m0", 2, "m0_transformer", "torch.arange(start, start + x.shape[1])",
        "torch.arange(x.shape[1])", "That begins at position 0"),
    "scores that are too large": (
        "m0", 3, "m0_transformer", " / head_dim**0.5", "", "the root of head_dim"),
    "no mask": (
        "m0", 3, "m0_transformer", "scores.masked_fill(is_later, -torch.inf)", "scores",
        "Each token sees all others"),
    "the mask of a prompt for a chunk": (
        "m0", 3, "m0_transformer", "triu(num_tokens - num_new + 1)", "triu(1)",
        "1 new token of 5.*New token i is taken for token i"),
    "a token that does not see itself": (
        "m0", 3, "m0_transformer", "num_new + 1)", "num_new)", "A token sees itself, too"),
    "heads in turn": (
        "m0", 3, "m0_transformer", "repeat_interleave(group, 0)", "repeat(group, 1, 1)",
        "6 query heads, 2 KV heads.*repeat_interleave"),
    "silu of up": (
        "m0", 4, "m0_transformer", "F.silu(gate) * up", "gate * F.silu(up)", "belongs to gate"),
    "keys that are turned in each step": (
        "m0", 5, "m0_transformer", "torch.cat([cache[0], key], 1)",
        "torch.cat([rotate(cache[0], 0, theta), key], 1)", "cached keys were rotated again"),
    "values that are turned": (
        "m0", 5, "m0_transformer", 'value = heads("self_attn.v_proj.weight")',
        'value = rotate(heads("self_attn.v_proj.weight"), start, theta)', "Values are not rotated"),
    "positions that forget the cache": (
        "m0", 5, "m0_transformer", "start = 0 if cache is None else cache[0].shape[1]",
        "start = 0", "rotated from position 0"),
    "a cache that does not grow": (
        "m0", 5, "m0_transformer", "if cache is not None:", "if False:",
        "Its shape is|as many tokens"),
    "a token that ends the line too early": (
        "m0", 6, "m0_transformer", "sums - probabilities < top_p", "sums < top_p",
        "all four count"),
    "a line that top_p does not shorten": (
        "m0", 6, "m0_transformer", "uniform * sums[num_kept - 1]", "uniform",
        "the line is 0.85 long"),
    "temperature the wrong way": (
        "m0", 6, "m0_transformer", "logits / temperature", "logits * temperature",
        "squares probabilities"),
    "no limit of rows": (
        "m2", 3, "scheduler", "if reason := self.reason_to_wait(request, budget):", "if False:",
        "raised in allocate.*called by _admit.*No KV memory was left to give"),
    "a region is kept": (
        "m2", 4, "kv_cache_manager", "if request.request_id in self.regions:", "if False:",
        "b has finished and still owns its region 1"),
    "overtaking": (
        "m2", 5, "scheduler",
        OVERTAKING[0], OVERTAKING[1],
        "e is admitted, while d, which is before it in the queue, waits"),
    "too long for ever": (
        "m2", 6, "scheduler", "if num_new_tokens > budget and self.running:",
        "if num_new_tokens > budget:",
        "a has no row in this step: it waits, and should be admitted"),
    "the newest block first": (
        "m3", 1, "block_pool", "popleft()", "pop()", "has been free the longest"),
    "free while shared": (
        "m3", 2, "block_pool", "if self.ref_counts[block] == 0:", "if True:",
        "another table still holds block 0"),
    "the first block back first": (
        "m3", 3, "block_manager", "for block in reversed(table):", "for block in table:",
        "a gives its last block back first"),
    "no growth": (
        "m3", 4, "block_manager", "        self._grow(request_id, end)\n", "",
        "block 0 is full: a new one"),
    "no copy": (
        "m3", 5, "block_manager", "self.pool.ref_counts[table[index]] > 1", "False",
        "b gets block 2, a copy"),
    "admission without memory": (
        "m3", 6, "scheduler", "if not self.kv.can_allocate(request):", "if False:",
        "raised in allocate.*called by _admit.*No KV memory was left to give"),
    "newcomers after a preemption": (
        "m3", 7, "scheduler", "if plan.preempted:", "if False:",
        "mid has a row and should have none in this step.*nobody is admitted"),
    "resumed as new": (
        "m3", 8, "scheduler", "is_new = not request.num_preemptions", "is_new = True",
        "plan.admitted has c, d; it should have d"),
    "a name without its parent": (
        "m4", 1, "prefix_cache", "import hash_block, hash_salt",
        "import hash_salt\nhash_block = lambda parent, tokens: hash_salt(repr(tokens))",
        "The same tokens after another parent"),
    "merged copies": (
        "m4", 2, "caching_pool", "if block_hash in self.block_of or block in self.hash_of:",
        "if False:", "block 0 has this content already"),
    "old content is found": (
        "m4", 3, "caching_pool", "            self.forget(block)\n", "",
        "block 1 will be overwritten"),
    "a block that is not full": (
        "m4", 4, "prefix_cache", "min(end, len(request.token_ids)) // self.kv.block_size",
        "-(-min(end, len(request.token_ids)) // self.kv.block_size)",
        "A block that is not full is not findable"),
    "revived blocks do not count": (
        "m4", 5, "prefix_cache", "return num_new + num_revived <=", "return num_new <=",
        "they come off the free list"),
    "a chunk beyond the budget": (
        "m4", 6, "scheduler", "num_new_tokens = min(num_new_tokens, budget, longest)", "pass",
        "The rows add up to 12 tokens: max_num_batched_tokens=8"),
    "decode rows last": (
        "m4", 7, "scheduler", 'if self.config.prefill_policy == "prefill_first":', "if True:",
        "p's row begins at token 0 and has 8; it should begin at 0 and have 6|a has no row"),
    "a hit is computed again": (
        "m4", 8, "kv_cache_manager", "request.num_computed_tokens = hit.num_tokens", "pass",
        "b's row begins at token 0 and has 11; it should begin at 8 and have 3"),
    "the other dimension": (
        "tensor_parallel", 1, "m5_cut_model", "weight.chunk(size, 0)", "weight.chunk(size, 1)",
        "That is the other dimension"),
    "every second row": (
        "tensor_parallel", 1, "m5_cut_model", "weight.chunk(size, 0)[rank]", "weight[rank::size]",
        "Heads are neighbours"),
    "norms that are cut": (
        "tensor_parallel", 1, "m5_cut_model", "    return weight\n",
        "    return weight.chunk(size, 0)[rank]\n", "Norms are whole"),
    "no sum after the MLP": (
        "tensor_parallel", 2, "m5_cut_model", "x + all_reduce(mlp(normed, w))",
        "x + mlp(normed, w)", "needs two all-reduces"),
    "parts that stay parts": (
        "tensor_parallel", 2, "m5_cut_model", "x + all_reduce(", "x + (", "this rank alone"),
    "one sum for both halves": (
        "tensor_parallel", 2, "m5_cut_model", "x = x + all_reduce(part)", "x = x + part",
        "the norm before the MLP needs the whole x"),
    "the residual in the sum": (
        "tensor_parallel", 2, "m5_cut_model", "x = x + all_reduce(part)",
        "x = all_reduce(x + part)", "it would count twice"),
    "what all_reduce returns": (
        "tensor_parallel", 3, "m5_cut_model", "dist.all_reduce(part)\n    return part",
        "return dist.all_reduce(part)", "NoneType"),
    "no all_reduce": (
        "tensor_parallel", 3, "m5_cut_model", "dist.all_reduce(part)\n    return part",
        "return part", "Does all_reduce return the sum"),
    "the first block is the oldest": (
        "replicas", 1, "router", "in reversed(block_hashes[: self._max_blocks])",
        "in block_hashes[: self._max_blocks]", "the last block of a prompt is the oldest"),
    "used again and not renewed": (
        "replicas", 1, "router", "            replica.blocks.move_to_end(block_hash)\n", "",
        "it moves to the end"),
    "the shortest beginning": (
        "replicas", 2, "router", "(-each.num_cached(block_hashes), each.load)",
        "(each.num_cached(block_hashes), each.load)", "a has two of its blocks"),
    "the busiest among equals": (
        "replicas", 2, "router", "each.load)", "-each.load[0])", "a has 64 tokens to do"),
    "affinity alone": (
        "replicas", 3, "router", "most = BUSIER * mean + num_tokens", "most = 1e9",
        "a has 160, and the limit"),
    "this request forgotten": (
        "replicas", 3, "router", "BUSIER * mean + num_tokens", "BUSIER * mean",
        "Before the second, the limit is"),
    "a long prompt counted as a short one": (
        "replicas", 4, "router", "mean + num_tokens", "mean + min(96, num_tokens)",
        "longest queue.*round robin"),

}  # fmt: skip
"""At least one for each step in which something is written."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught_by_its_step(name, written):
    course, number, file, right, wrong, message = MISTAKES[name]
    text = text_of(course, file)
    assert right in text
    parts = written(course, **{file: text.replace(right, wrong)})
    steps = COURSES[course].steps
    assert [problem(step, parts) for step in steps[: number - 1]] == [None] * (number - 1)
    found = problem(steps[number - 1], parts)
    assert found is not None
    assert re.search(message, found, flags=re.S), found
    assert "Traceback" not in found


# --- the command, and the file that an engine takes -----------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """Runs the command where nothing has been begun."""
    for path in ROOT.iterdir():
        is_package = path.is_dir() and (path / "__init__.py").exists()
        if path.name == "docs" or (is_package and path.name != "exercises"):
            (tmp_path / path.name).symlink_to(path)
    mine = [PurePath(path).name for course in COURSES.values() for path in course.texts()]
    shutil.copytree(FOLDER.parent, tmp_path / "exercises", ignore=shutil.ignore_patterns(*mine))

    def build(*arguments: str) -> str:
        ran = run_python("-m", "exercises.build", *arguments, root=tmp_path)
        return ran.stdout + ran.stderr

    build.root = tmp_path
    return build


def test_the_command_shows_progress_begins_a_course_and_checks_one_step(checkout):
    shown = checkout()
    for name in COURSES:
        assert f"next\n     python -m exercises.build {name} 1\n" in shown
    file = "exercises/build/m2/scheduler.py"
    assert not (checkout.root / file).exists()  # a look begins nothing
    shown = checkout("m2", "3")
    assert re.search(rf"how: .*{file}\n", shown)
    assert "m2, step 3 of 8: first come, first served, while rows last" in shown
    assert f"You write it in {file}." in shown
    assert "Check again: python -m exercises.build m2 3" in shown
    manager = "exercises/build/m2/kv_cache_manager.py"
    assert f"Not written yet: reset() in {manager}" in checkout("m2", "8")
    (checkout.root / file).write_text("MINE = 1\n", encoding="utf-8")
    assert "how:" not in checkout("m2", "1")
    assert (checkout.root / file).read_text(encoding="utf-8") == "MINE = 1\n"
    assert "m2 has the steps 1 to 8, got 9" in checkout("m2", "9")


def test_an_exception_in_the_readers_code_is_shown_with_its_line_and_the_traffic(written):
    text = text_of("m2", "scheduler").replace("plan.admitted.append(request)", "1 / 0")
    found = problem(COURSES["m2"].steps[1], written("m2", scheduler=text))
    assert "ZeroDivisionError: division by zero\nraised in _admit() in exercises/build/m2" in found
    assert "before step 0  comes a (prompt of 4 tokens, 9 to generate)" in found
    assert "Traceback" not in found


def test_the_scheduler_of_another_milestone_is_refused():
    with pytest.raises(InputError, match="it is of another milestone"):
        scheduler_class(str(ROOT / "m2_batching/scheduler.py"), PagedScheduler)


@pytest.mark.usefixtures("no_pixels")
def test_the_demo_serves_with_the_readers_scheduler_beside_ours(written, tmp_path, capsys):
    text = text_of("m2", "scheduler").replace("no row is left", "the rows are out")
    path = written("m2", scheduler=text).scheduler_path
    options = ["--model", "tiny-llama", "--max-tokens", "3", "--out", str(tmp_path)]
    assert m2_demo([*options, "--scheduler", path]) == 0
    shown = capsys.readouterr().out
    assert "r2: the rows are out" in shown
    assert "continuous and yours gave the same tokens." in shown


def test_the_course_is_linked_from_its_chapters():
    chapters = {name: COURSES[name].milestone for name in SCHEDULERS}
    chapters |= {"m0": "m0_transformer", "tensor_parallel": "m5_several_gpus", "replicas": "scale"}
    assert chapters.keys() == COURSES.keys()
    for name, chapter_name in chapters.items():
        chapter = (ROOT / "docs" / f"{chapter_name}.md").read_text(encoding="utf-8")
        assert f"python -m exercises.build {name}" in chapter
