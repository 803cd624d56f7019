"""Programs for each process of a tensor-parallel engine in `m5/extras/tensor_parallel/`.

A program writes its results to a file of its own; the tests read the files and check them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers import m5_models
from m5_kernels import LLMEngine, SamplingParams
from m5_kernels.extras.tensor_parallel.all_reduce_norm import (
    SymmetricBuffer,
    all_reduce_add_rms_norm,
)
from m5_kernels.extras.tensor_parallel.collectives import Collectives
from m5_kernels.extras.tensor_parallel.ranks import Ranks
from m5_kernels.kernels.launch import Launch
from m5_kernels.kernels.pdl import LATE, NEVER
from m5_kernels.kernels.rms_norm import rms_norm_torch
from milestone_llm.structured import StructuredOutputsParams
from milestone_llm.structured.grammars import Grammars

LIMITS: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_model_len": 96,
    "max_num_batched_tokens": 48,
    "kv_cache_tokens": 192,
    "device": "cpu",  # also on a machine with GPUs
    "async_scheduling": True,  # as on GPUs
    "block_size": 8,
    "check_invariants": True,
}


def start(
    program: str, rank: int, size: int, port: int, folder: str, options: dict[str, Any]
) -> None:
    """Be one rank: run a program of this file, with its output in `folder`."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    log = os.open(Path(folder) / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    result = globals()[program](rank, size, **options)
    (Path(folder) / f"result{rank}.json").write_text(json.dumps(result))
    sys.exit(0)


def _engine(model: Any, size: int, **fields: Any) -> Any:
    return LLMEngine(model, **{**LIMITS, "tensor_parallel_size": size, **fields})


def _tokens(engine: Any, seed: int = 1) -> list[list[list[int]]]:
    outputs = engine.generate(*m5_models.workload(seed, longest=20))
    return [[each.token_ids for each in output.outputs] for output in outputs]


# --- programs -------------------------------------------------------------------------------------


def families(rank: int, size: int, cases: dict[str, Any], device: str = "cpu") -> Any:
    """Return tokens of every case over all ranks; rank 0 also those of one rank alone."""
    found = {}
    where = f"cuda:{rank}" if device == "cuda" else device
    for name, (family, changes, fields) in cases.items():
        model = m5_models.with_biases(family, **changes).to(where)
        found[name] = _of(_engine(model, size, device=device, **fields))
        if rank == 0:
            found[f"{name} alone"] = _of(_engine(model, 1, device=where, **fields))
    return found


def _of(engine: Any) -> dict[str, Any]:
    """Return the tokens of an engine, and the sizes of its rank's tensors."""
    neurons = engine.decoder.layers[0].mlp.gate_up
    return {
        "tokens": _tokens(engine),
        "kv_bytes": engine.stats()["kv"]["bytes_per_token"],
        "mlp_rows": len(neurons),
        "first_neuron": getattr(neurons, "integers", neurons)[0, :4].tolist(),
        "used": engine.stats()["kv"]["used"],
        "has_groups": bool(engine.runner.cache.group_of_layers),
    }


def guesses(rank: int, size: int, device: str = "cpu") -> Any:
    """Return tokens of requests that repeat themselves: with drafts on all ranks, without on
    one."""
    where = f"cuda:{rank}" if device == "cuda" else device
    model = m5_models.circling(vocab_size=40).to(where)
    prompts = [[first, 2, 3, 4, 5] * 4 for first in range(4)]
    params = [
        SamplingParams(temperature=0.3 * (i % 2), seed=i, max_tokens=40, ignore_eos=True)
        for i in range(4)
    ]
    together = _engine(model, size, device=device, speculation="ngram")
    alone = _engine(model, 1, device=where)
    return {
        "together": [output.token_ids for output in together.generate(prompts, params)],
        "alone": [output.token_ids for output in alone.generate(prompts, params)],
        "accepted": together.stats()["spec_decode_num_accepted_tokens"],
    }


def random_steps(rank: int, size: int, num_steps: int, seed: int) -> Any:
    """Run steps with random traffic. Returns all plans and outputs."""
    rng = random.Random(seed)
    fields = {"kv_cache_tokens": 160, "policy": "priority", "speculation": "ngram"}
    fields |= {"aging_seconds": 1e9}  # ranks have different clocks; no request waits so long
    engine = _engine(m5_models.circling(), size, trace="memory", **fields)
    outputs, num_added = {}, 0
    beginnings = [[rng.randrange(199) for _ in range(24)] for _ in range(3)]
    done = 0
    while done < num_steps or engine.has_unfinished_requests():
        if done < num_steps and len(engine.requests) < 10 and rng.random() < 0.5:
            length = rng.choice([0, 8, 24])
            prompt = rng.choice(beginnings)[:length] + [
                rng.randrange(199) for _ in range(rng.randint(1, 40))
            ]
            prompt = (prompt * rng.choice([1, 1, 2]))[:64]  # repetitions become drafts
            params = SamplingParams(
                max_tokens=rng.randint(1, 30),
                temperature=rng.choice([0.0, 0.9]),
                ignore_eos=True,
                n=rng.choice([1, 1, 1, 2]),
            )
            engine.add_request(prompt, params, priority=rng.randint(0, 2))
            num_added += 1
        if engine.requests and rng.random() < 0.05:
            engine.abort(rng.choice(sorted(engine.requests)))
        if rng.random() < 0.01:
            engine.reset_prefix_cache()
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = [each.token_ids for each in output.outputs]
        done += 1
    stats = engine.stats()
    return {
        "plans": [
            repr((each.batch, each.preempted, each.events)) for each in engine.tracer.records
        ],
        "outputs": outputs,
        "steps": stats["steps"],
        "preemptions": stats["preemptions"],
        "hits": stats["prefix_cache"]["hits"],
        "guesses": stats["spec_decode_num_draft_tokens"],
        "aborted": num_added - len(outputs),
        "used": stats["kv"]["used"],
    }


def folder_part(rank: int, size: int, model: str) -> Any:
    """Load an engine from a folder. Returns which weights are in memory, and the tokens."""
    engine = _engine(model, size)
    own = sum(
        weight.target.numel()
        for layer in engine.decoder.layers
        for weight in layer.stored(engine.decoder.config)
        if weight.target is not None
    )
    elements = sum(parameter.numel() for parameter in engine.model.parameters())
    alone = LLMEngine(model, **LIMITS)
    return {
        "together": _tokens(engine),
        "alone": _tokens(alone),
        "layer_elements": own,
        "module_elements": elements,
    }


def only_rank_0_is_asked(rank: int, size: int) -> Any:
    """Let rank 0 run a program with two engines and an abort; the other ranks follow."""
    if rank:
        Ranks.join(size, "cpu").follow(LLMEngine)
        return "followed to the end"
    first, second = _engine("tiny-llama", size), _engine("tiny-qwen3", size)
    first.warm_up()
    many_stops = SamplingParams(min_tokens=1, stop_token_ids=list(range(20, 60)))
    doomed = first.add_request([3] * 90, many_stops)
    first.step()  # no row samples
    first.abort(doomed)
    found = [_tokens(first), _tokens(second), _tokens(first, seed=2)]
    del first  # the other ranks drop theirs, too
    third = _engine("tiny-llama", size)
    alone = [LLMEngine(name, **LIMITS) for name in ("tiny-llama", "tiny-qwen3")]
    alone[0].add_request([3] * 40)  # requests without a seed of their own are seeded by number
    alone[0].abort("r0")
    expected = [_tokens(alone[0]), _tokens(alone[1]), _tokens(alone[0], seed=2)]
    return {
        "found": [*found, _tokens(third)],
        "expected": [*expected, _tokens(LLMEngine("tiny-llama", **LIMITS))],
    }


def rules(rank: int, size: int, model: str) -> Any:
    """Ask only rank 0 for structured outputs, together with a free text."""
    compiled: list[tuple[str, bool]] = []
    compile_one = Grammars._compile

    def noted(grammars: Grammars, wanted: StructuredOutputsParams) -> Any:
        thread = threading.current_thread()
        compiled.append((wanted.key, thread is threading.main_thread()))
        return compile_one(grammars, wanted)

    setattr(Grammars, "_compile", noted)  # noqa: B010
    if rank:
        Ranks.join(size, "cpu").follow(LLMEngine)
        return compiled
    colour = StructuredOutputsParams(choice=("red", "green"))
    number = StructuredOutputsParams(regex="[0-9]{3}-[a-f]{2,5}")
    params = [
        SamplingParams(temperature=0.9, seed=3, max_tokens=20, structured_outputs=wanted)
        for wanted in (colour, None, number)
    ]
    engines = _engine(model, size), LLMEngine(model, **LIMITS)
    found, expected = [
        [output.token_ids for output in engine.generate(["a", "b", "c"], params)]
        for engine in engines
    ]
    return {"found": found, "expected": expected, "rules": [colour.key, number.key]}


def different_calls(rank: int, size: int) -> Any:
    """Give rank 1 another prompt than rank 0."""
    engine = _engine("tiny-llama", size)
    engine.generate([[5, 6, 7 + rank]])
    return "nobody minded"


def dies_in_a_step(rank: int, size: int) -> Any:
    """Kill rank 1 while rank 0 waits for its part of a sum."""
    engine = _engine("tiny-llama", size)
    engine.generate([[5, 6, 7]])
    if rank == 1:
        setattr(  # noqa: B010 - of the class: a decoder keeps the bound method
            Collectives, "all_reduce", lambda self, part: os.kill(os.getpid(), signal.SIGKILL)
        )
    engine.generate([[5, 6, 7, 8]])
    return "went on"


def fused_kernel(rank: int, size: int) -> Any:
    """Compare the one-shot all-reduce with its specification, in graphs, with poisoned buffers."""
    device = Ranks.join(size).device
    errors = []
    for hidden, dtype in ((64, torch.float32), (1000, torch.bfloat16), (5120, torch.bfloat16)):
        buffers = SymmetricBuffer(33, hidden, dtype, device)
        buffers.data.fill_(torch.nan)
        torch.cuda.synchronize()
        dist.barrier()
        weight = torch.randn(hidden, device=device).to(dtype)
        dist.broadcast(weight, 0)
        for trial, rows in enumerate((1, 33, 2, 7, 33, 1)):
            generator = torch.Generator(device).manual_seed(trial)
            shape = (size + 1, rows, hidden)
            *parts, residual = torch.randn(shape, generator=generator, device=device).to(dtype)
            total = residual.float() + torch.stack(parts).float().sum(0)
            expected = rms_norm_torch(total.to(dtype), weight, 1e-6)
            for pdl in (NEVER, LATE):
                mine = residual.clone()
                buffer = (2 * trial + pdl) % 3
                found = all_reduce_add_rms_norm(
                    parts[rank], mine, weight, 1e-6, buffers, buffer, Launch(pdl)
                )
                errors.append((found.float() - expected.float()).abs().max().item())
                errors.append((mine.float() - total).abs().max().item() / 4)
    return max(errors)
