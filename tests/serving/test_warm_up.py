"""What a first user would wait for is done before the server says that it is ready."""

import pytest

import m5_kernels
from engine_helpers import every_milestone, make_engine
from m5_kernels.sampler import Needs
from serving_helpers import random_engine_outputs


@every_milestone
def test_a_warm_up_changes_nothing_that_a_request_could_see(package):
    cold, warm = make_engine(package), make_engine(package, trace="memory")
    warm.warm_up()
    assert warm.counts == cold.counts
    assert random_engine_outputs(warm) == random_engine_outputs(cold)
    assert warm.tracer.records[0].step == 0
    assert warm.stats()["kv"]["used"] == 0


def test_a_warm_up_comes_first(oracle):
    oracle.add_request([3, 4], request_id="here")
    with pytest.raises(RuntimeError, match="there are 1 requests"):
        oracle.warm_up()
    oracle.abort("here")


@pytest.mark.gpu
def test_no_graph_is_left_to_capture():
    engine = m5_kernels.LLMEngine("tiny-llama", max_num_seqs=20, dtype="bfloat16")
    engine.warm_up()
    captured = dict(engine.runner.graphs._graphs)
    assert set(captured) == {
        (bucket, Needs(filters=filters))
        for bucket in engine.runner.graphs.buckets
        for filters in (False, True)
    }
    random_engine_outputs(engine)
    assert engine.runner.graphs._graphs == captured
