"""What the host does for each row of a step, counted in calls: time depends on the machine."""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import torch

import m5_kernels
from engine_helpers import FakeRunner, every_milestone, greedy, make_engine, random_prompts

NUM_ROWS = 32
NUM_STEPS = 16
"""As many as a block has tokens: one of them begins a new one."""
MOST_CALLS = {
    "m1_single": 20,
    "m2_batching": 21,
    "m3_paged": 28,
    "m4_prefix_chunked": 35,
    "m5_kernels": 54,
}
"""Of Python's functions, for a row in a step: a few more than there are."""


def decoding_engine(package: Any) -> Any:
    """An engine whose device takes no time, amid the decoding of `NUM_ROWS` requests."""
    engine = make_engine(package, max_num_seqs=NUM_ROWS, max_model_len=128, check_invariants=False)
    if package is m5_kernels:
        tokens = torch.full((NUM_ROWS,), 5, dtype=torch.int32)
        engine.runner.graphs = SimpleNamespace(replay=lambda bucket, needs: tokens)
    else:
        engine.core.runner = FakeRunner()
    for prompt in random_prompts([24] * NUM_ROWS):
        engine.add_request(prompt, greedy(max_tokens=100))
    for _ in range(4):
        engine.core.step()
        engine.step_log.close_steps()
    return engine


@every_milestone
def test_a_row_of_a_decode_step_takes_few_calls(package):
    engine, num_calls = decoding_engine(package), 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for _ in range(NUM_STEPS):
            assert len(engine.core.step()) == NUM_ROWS
            engine.step_log.close_steps()
    finally:
        sys.setprofile(before)
    assert num_calls / NUM_STEPS / NUM_ROWS <= MOST_CALLS[package.__name__]
