"""Steps with guesses padded to buckets, and what is made of the tokens of their places."""

from __future__ import annotations

from typing import Any

import m4_prefix_chunked
import m5_kernels
from engine_helpers import make_engine, random_prompts, tiny_model
from m1_single import SamplingParams
from m5_helpers import RecomputedGraphs
from m5_kernels.extras.guesses.runner import shape_of
from m5_kernels.step_graphs import MAX_CHUNKS


def test_padded_steps_with_guesses_give_the_tokens_of_m4(poisoned):
    """Prompts that repeat, so that there are guesses; three rows of four places in a bucket."""
    prompts = [prompt * 3 for prompt in random_prompts([5, 7, 4])]
    fields: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 80}
    engine = make_engine(m5_kernels, tiny_model(), speculation="ngram", **fields)
    guessing = engine.runner
    guessing.graphs = graphs = RecomputedGraphs(guessing.step)
    guessing.runner.graphs = others = RecomputedGraphs(guessing.runner.device_step)
    plain = make_engine(m4_prefix_chunked, tiny_model(), **fields)
    wanted, got = (
        [output.token_ids for output in each.generate(prompts, SamplingParams(seed=3))]
        for each in (plain, engine)
    )
    assert got == wanted
    assert shape_of(12) in graphs.replayed
    assert any(shape.num_chunks == MAX_CHUNKS for shape in others.replayed)
