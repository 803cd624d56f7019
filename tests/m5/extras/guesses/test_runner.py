"""Steps with guesses padded to buckets, and what is made of the tokens of their places."""

from __future__ import annotations

from typing import Any

import m4_prefix_chunked
import m5_kernels
from engine_helpers import make_engine, make_request, random_prompts, tiny_model
from m1_single import SamplingParams
from m4_prefix_chunked.speculation import GuessingRow
from m5_helpers import RecomputedGraphs
from m5_kernels.extras.guesses.guesses import MISSING, REJECTED
from m5_kernels.extras.guesses.runner import kept_tokens, shape_of
from m5_kernels.step_graphs import MAX_CHUNKS, StepShape
from milestone_llm.core.outputs import SampledToken


def test_guesses_that_came_true_stand_before_the_last_token_of_their_request():
    a, b, c = (make_request(name) for name in "abc")
    places = [(a, 5), (a, 6), (a, 7), (a, MISSING), (b, 8), (b, REJECTED), (c, -1)]
    rows = {
        request: GuessingRow(request, start=3, num_new_tokens=num, draft_token_ids=[0] * (num - 1))
        for request, num in ((a, 4), (b, 2), (c, 1))
    }
    sampled = kept_tokens(
        [rows[request] for request, _ in places], [SampledToken(token) for _, token in places]
    )
    assert sampled["a"] == [SampledToken(5), SampledToken(6), SampledToken(7)]
    assert [row.num_missing for row in rows.values()] == [1, 0, 0]
    assert (sampled["b"], sampled["c"]) == ([SampledToken(8)], [SampledToken(-1)])


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


def test_steps_with_guesses_have_buckets_of_their_own():
    fields: dict[str, Any] = {"max_num_seqs": 200, "speculation": "ngram"}
    guessing = make_engine(m5_kernels, tiny_model(), speculation_max_num_seqs=16, **fields).runner
    assert guessing.sizes == [1, 2, 4, 8, 16, 32, 48, 64]
    assert shape_of(48) == StepShape(48, 48, 48, 0)
    guessing.graphs = graphs = RecomputedGraphs(guessing.step)
    guessing.capture_graphs()
    assert [bucket.num_seqs for bucket, _ in graphs.tried] == [64, 48, 32, 16, 8, 4, 2]
