"""What a first user would wait for is done before the server says that it is ready."""

import random
from types import SimpleNamespace

import pytest

import m5_kernels
from helpers.engines import PACKAGES, every_milestone, make_engine
from helpers.servers import random_engine_outputs
from m5_kernels import SamplingParams
from m5_kernels.sampler import SamplingFeatures
from milestone_llm.serving.api.service import Service
from milestone_llm.serving.engine import process
from milestone_llm.serving.engine.loop import EngineLoop
from milestone_llm.structured import StructuredOutputsParams
from milestone_llm.trace.jsonl import read_run


@every_milestone
def test_a_warm_up_changes_nothing_that_a_request_could_see(package):
    cold, warm = make_engine(package), make_engine(package, trace="memory")
    warm.warm_up()
    assert warm.step_log.counts == cold.step_log.counts
    assert random_engine_outputs(warm) == random_engine_outputs(cold)
    assert warm.tracer.records[0].step == 0
    assert warm.stats()["kv"]["used"] == 0


@every_milestone
@pytest.mark.parametrize("max_model_len", [2, 3])
def test_a_warm_up_counts_nothing_whatever_the_limits(package, max_model_len):
    fields = {"max_model_len": max_model_len}
    if package in PACKAGES[2:]:
        fields |= {"block_size": 1, "kv_cache_tokens": 5, "max_num_seqs": 20}
    engine = make_engine(package, **fields)
    cold = engine.stats()
    engine.warm_up()
    warm = engine.stats()
    cold["kv"].pop("cached"), warm["kv"].pop("cached")  # these are there, though nobody's salt
    assert warm == cold


def test_a_warm_up_comes_first(oracle):
    oracle.add_request([3, 4], request_id="here")
    with pytest.raises(RuntimeError, match="there are 1 requests"):
        oracle.warm_up()
    oracle.abort("here")


def test_the_tables_of_grammars_are_built_before_a_server_is_ready(model_folder, monkeypatch):
    """They take a second, in which nobody else's Python runs."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    monkeypatch.setattr(process, "freeze_gc_heap", lambda: None)
    engine = process.EngineSpec("m1_single", str(model_folder), {"device": "cpu"}).build()
    client = SimpleNamespace(info=EngineLoop(engine).info)
    service = Service(SimpleNamespace(client=client, max_choices=4), has_page=False)
    monkeypatch.setattr("llguidance.hf.from_tokenizer", None)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    for grammars in (engine.input_processor.grammars, service._grammars):
        assert grammars.rule_of(params) is not None


def test_a_server_writes_its_trace_and_keeps_none(tmp_path, monkeypatch):
    """A server may run for weeks, and records would fill its memory."""
    monkeypatch.setattr(process, "freeze_gc_heap", lambda: None)
    fields = {"device": "cpu", "trace": str(tmp_path / "steps.jsonl")}
    engine = process.EngineSpec("m1_single", "tiny-llama", fields).build()
    engine.generate([3, 4], SamplingParams(max_tokens=2, ignore_eos=True))
    assert [record.step for record in read_run(tmp_path / "steps.jsonl")] == [0, 1]
    assert engine.tracer.records == []


@pytest.mark.gpu
def test_no_graph_is_left_to_capture():
    engine = m5_kernels.LLMEngine("tiny-llama", max_num_seqs=20, dtype="bfloat16")
    engine.warm_up()
    captured = dict(engine.runner.graphs._graphs)
    assert set(captured) == {(bucket, SamplingFeatures()) for bucket in engine.runner.buckets.all()}
    engine.generate([[5, 6, 7]] * 9, SamplingParams(temperature=0, max_tokens=5))
    assert engine.runner.graphs._graphs == captured


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_no_kernel_is_left_to_compile(monkeypatch, quantization):
    """To compile one stops all requests for a second, to load one for a fifth of that."""
    triton = pytest.importorskip("triton")
    fields = {"max_num_seqs": 40, "dtype": "bfloat16", "quantization": quantization}
    engine = m5_kernels.LLMEngine("tiny-llama", **fields)
    engine.warm_up()
    compiled = []
    hook = lambda *, repr, **others: compiled.append(repr)  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    loaded, run = [], triton.compiler.CompiledKernel.run.fget
    note = lambda kernel: (kernel.module or loaded.append(kernel.name), run(kernel))[1]  # noqa: E731
    monkeypatch.setattr(triton.compiler.CompiledKernel, "run", property(note))
    draw = random.Random(0)
    for _ in range(150):  # requests come while others decode
        for _ in range(draw.choice([0, 0, 1, 2, 12])):
            prompt = [draw.randrange(3, 100) for _ in range(draw.randrange(1, 90))]
            heat = draw.choice([0.0, 1.0])
            params = SamplingParams(
                max_tokens=draw.randrange(1, 40),
                temperature=heat,
                top_p=draw.choice([0.9, 1.0]),
                repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
                logprobs=draw.choice([None, None, 3]),
                prompt_logprobs=draw.choice([None, None, None, 2]),
            )
            engine.add_request(prompt, params)
        engine.step()
    assert compiled == loaded == []
