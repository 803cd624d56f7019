"""What a debugger shows of requests, queues, schedulers and KV memory fits into a line or two."""

import pytest

import m1_single
from engine_helpers import PACKAGES, greedy, make_engine
from milestone_llm.core.sampling_params import SamplingParams


def test_sampling_params_show_what_differs_from_the_default():
    params = SamplingParams(temperature=0, max_tokens=4, stop="\n")
    assert repr(params) == "SamplingParams(temperature=0, max_tokens=4, stop=('\\n',))"
    assert eval(repr(params)) == params
    assert repr(SamplingParams()) == "SamplingParams()"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.__name__)
def test_a_scheduler_says_who_runs_and_who_waits(package):
    engine = make_engine(package, max_num_seqs=2)
    for _ in range(3):
        engine.add_request([1, 2, 3, 4, 5], greedy(4))
    engine.step()
    text = "running ['r0', 'r1'], waiting <RequestQueue ['r2']>>"
    assert repr(engine.scheduler).endswith(text)
    assert "m4" in repr(engine.scheduler) or package.__name__ in repr(engine.scheduler)
    if package is not m1_single:
        kv = repr(engine.scheduler.kv)
        assert "'r0'" in kv
        assert "0x" not in kv
