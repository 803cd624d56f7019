"""Log-probabilities of prompt tokens are those of Hugging Face's forward, in every milestone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.engines import every_milestone, greedy, make_engine, random_prompts, tiny_model

PROMPTS = random_prompts([1, 2, 21, 33, 18])
PROMPTS.append(PROMPTS[3][:20] + PROMPTS[4])


def expected(prompt: list[int]) -> torch.Tensor:
    """`[len(prompt) - 1, vocab_size]`: how likely each next token was."""
    ids = torch.tensor([prompt])
    logits = tiny_model()(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    return logits[:-1].float().log_softmax(-1)


def check(output: Any, num_top: int) -> None:
    prompt, entries = output.prompt_token_ids, output.prompt_logprobs
    assert entries[0] is None
    assert len(entries) == len(prompt)
    for token_id, entry, logprobs in zip(prompt[1:], entries[1:], expected(prompt), strict=True):
        top = logprobs.topk(num_top)
        assert {token_id, *top.indices.tolist()} == set(entry)
        for other, each in entry.items():
            assert each.logprob == pytest.approx(float(logprobs[other]), abs=1e-4)
            assert each.rank == 1 + int((logprobs > logprobs[other]).sum())


@every_milestone
def test_prompt_logprobs_are_those_of_hugging_face(package: Any) -> None:
    engine = make_engine(package)
    wanted = [greedy(4, prompt_logprobs=index % 3) for index in range(len(PROMPTS))]
    wanted[1] = greedy(4)
    for _ in range(2):  # the second time all prompts are cached, where there is a prefix cache
        outputs = engine.generate(PROMPTS, wanted)
        assert outputs.pop(1).prompt_logprobs is None
        for output, index in zip(outputs, (0, 2, 3, 4, 5), strict=True):
            check(output, index % 3)
            assert output.metrics.num_cached_tokens == 0


@pytest.mark.parametrize("name", ["m4_prefix_chunked", "m5_kernels"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_chunks_preemption_and_completions(name: str, preemption: str) -> None:
    package = pytest.importorskip(name)
    engine = make_engine(
        package, max_num_seqs=6, max_num_batched_tokens=7, block_size=4, kv_cache_tokens=88,
        max_model_len=80, preemption=preemption, swap_space_tokens=64,
    )  # fmt: skip
    params = [greedy(20, prompt_logprobs=1, n=1 + index % 2) for index in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    plain = [greedy(20, n=each.n) for each in params]
    alone = [
        make_engine(package).generate([p], [q])[0] for p, q in zip(PROMPTS, plain, strict=True)
    ]
    for output, one in zip(outputs, alone, strict=True):
        check(output, 1)
        assert [each.token_ids for each in output.outputs] == [
            each.token_ids for each in one.outputs
        ]
