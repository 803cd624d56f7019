"""What a profiler says becomes times of steps, whatever its clock shows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from device_trace import NUM_KERNELS, device_run

from docs.questions.m5_device_trace import _short, summary


@pytest.mark.parametrize("is_pipelined", [False, True], ids=["waited for", "pipelined"])
def test_kernels_are_put_to_the_step_that_launched_them(is_pipelined):
    records = device_run(is_pipelined)
    assert [record.step for record in records] == list(range(len(records)))
    for record in records:
        device = record.device
        assert device is not None
        assert (device["num_kernels"], device["is_graph"]) == (NUM_KERNELS, is_pipelined)
        assert device["num_launches"] == (1 if is_pipelined else NUM_KERNELS)
        assert device["busy_us"] == pytest.approx(NUM_KERNELS * 4 + NUM_KERNELS / 5 * 8, abs=0.5)
        names = [part["name"] for part in device["host"]]
        assert names == ["plan", "launch", "wait", "settle"]
        launch = device["host"][1]
        assert launch["start_us"] <= device["start_us"] + 2
        if not is_pipelined:
            assert (
                device["start_us"] + device["us"]
                <= device["host"][1]["start_us"] + 20 + launch["us"]
            )
    begins = [1e6 * record.start_s + record.device["start_us"] for record in records]
    assert all(after > before for before, after in pairwise(begins))
    kept = [record for record in records if record.device["kernels"]]
    kinds = {(record.num_prefill_tokens > 0, record.num_decode_tokens > 0) for record in records}
    assert len(kept) == len(kinds) == 3
    assert all(len(record.device["kernels"]) == NUM_KERNELS for record in kept)
    assert len(summary(records)) == len(records) + 1


def test_a_kernels_name_is_what_is_left_without_types_and_namespaces():
    names = {
        "_rms_norm_kernel": "_rms_norm_kernel",
        "void cublasLt::splitKreduce_kernel<32, 16, int>(float*)": "splitKreduce_kernel",
        "void at::native::(anonymous namespace)::gather<4, 64>(char*)": "gather",
        "Memcpy HtoD (Pinned -> Device)": "Memcpy HtoD",
    }
    assert {name: _short(name) for name in names} == names
