"""Ctrl-C at any line of the engine: the step has happened or it has not, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from engine_helpers import (
    assert_empty,
    every_milestone,
    make_engine,
    run_to_end,
    tiny_model,
    word_tokenizer,
)
from m1_single import RequestOutput, SamplingParams
from read_back import ReadBackRunner, right_output

ROOT = Path(__file__).parents[1]
STRIDE = 1 if os.environ.get("STORM") else 193
"""Every how manieth line is interrupted; a prime, so that all lines of a loop come up."""
OUTSIDE = ("sampling.py", "tracer.py", "records.py", "outputs.py")
PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [12, 13], [5, 6, 7, 8, 9, 10, 20, 21, 22]]


class Interrupter:
    """Raises `KeyboardInterrupt` at the n-th line that the engine's own files run."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.num_lines = 0
        self.where = ""

    def __enter__(self) -> Interrupter:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        is_ours = path.startswith(str(ROOT)) and "/tests/" not in path and ".venv" not in path
        return self._line if is_ours and not path.endswith(OUTSIDE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at:
                self.where = f"{frame.f_code.co_name} in {Path(path).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def engine_of(package: Any) -> Any:
    """An engine whose runner reads all KV back; memory for two and a half requests."""
    fields: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 24}
    if package.__name__ >= "m3":
        fields |= {"block_size": 4, "kv_cache_tokens": 40}
    model = tiny_model(num_hidden_layers=1)
    engine = make_engine(package, model, tokenizer=word_tokenizer(), **fields)
    engine.core.runner = ReadBackRunner(fields.get("block_size"))
    return engine


def params_of(index: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=5 + 3 * index, stop=["w0 w0"])


EXPECTED = {
    f"q{index}": right_output(prompt, params_of(index), max_model_len=24)
    for index, prompt in enumerate(PROMPTS)
}


def submit(engine: Any) -> None:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params_of(index), request_id=f"q{index}")


def outcome(outputs: Iterable[RequestOutput]) -> dict[str, tuple[list[int], str]]:
    """Tokens and reason of the requests that are done; their text has been checked."""
    done = {}
    for output in outputs:
        if output.finished:
            assert output.text == word_tokenizer().decode(
                output.token_ids, skip_special_tokens=True
            )
            done[output.request_id] = (output.token_ids, output.finish_reason)
    return done


def num_lines_of(work: Callable[[], object]) -> int:
    """Lines that some work runs, the second time: what is done once is done."""
    work()
    with Interrupter(at=-1) as counting:
        work()
    return counting.num_lines


@every_milestone
def test_an_interrupt_at_any_line_of_a_step_loses_nothing(package):
    engine = engine_of(package)

    def work() -> dict[str, tuple[list[int], str]]:
        submit(engine)
        return outcome(run_to_end(engine).values())

    assert work() == EXPECTED
    num_interrupted = 0
    for at in range(1, num_lines_of(work) - 5, STRIDE):
        delivered = {}
        interrupter = Interrupter(at)
        submit(engine)
        with contextlib.suppress(KeyboardInterrupt), interrupter:
            while engine.has_unfinished_requests():
                delivered |= outcome(engine.step())
        num_interrupted += bool(interrupter.where)
        engine.scheduler.check_invariants()
        delivered |= outcome(run_to_end(engine).values())
        # What `step` had taken out of its queue when it was interrupted, nobody has; nor has
        # anybody an output whose text was being read.
        if not interrupter.where.startswith(("step", "take", "<lambda>", "text")):
            assert delivered.keys() == EXPECTED.keys(), interrupter.where
        for name, output in delivered.items():
            assert output == EXPECTED[name], interrupter.where
        assert_empty(engine)
    assert num_interrupted > 10


@every_milestone
def test_after_an_interrupted_generate_the_same_prompts_give_the_same_tokens(package):
    engine = engine_of(package)
    params = [params_of(index) for index in range(len(PROMPTS))]

    def work() -> list[tuple[list[int], str]]:
        outputs = engine.generate(PROMPTS, params)
        return [(output.token_ids, output.finish_reason) for output in outputs]

    for at in range(7, num_lines_of(work), 3 * STRIDE):
        with contextlib.suppress(KeyboardInterrupt), Interrupter(at):
            work()
        assert_empty(engine)
        assert work() == list(EXPECTED.values())
