"""The other form of a linear layer: same numbers, used during a step, and only then."""

from __future__ import annotations

import pytest
import torch

import m2_batching
from engine_helpers import greedy, hf_greedy, make_engine, random_prompts, tiny_model
from m2_batching import cpu_linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 16, 20, 21, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_both_forms_give_the_same_numbers(num_tokens: int, has_bias: bool) -> None:
    layer = torch.nn.Linear(24, 35, bias=has_bias, dtype=torch.float64)
    tokens = torch.randn(1, num_tokens, 24, dtype=torch.float64)
    expected = layer(tokens)
    with cpu_linear.fast_for_few_rows(CPU):
        output = layer(tokens)
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_linear_layers_are_torchs_own_before_and_after_even_when_a_step_raises() -> None:
    before = torch.nn.Linear.forward
    with cpu_linear.fast_for_few_rows(CPU):
        assert torch.nn.Linear.forward is not before
    with pytest.raises(RuntimeError), cpu_linear.fast_for_few_rows(CPU):
        raise RuntimeError
    with cpu_linear.fast_for_few_rows(torch.device("cuda")):
        assert torch.nn.Linear.forward is before
    assert torch.nn.Linear.forward is before


def test_batches_of_every_size_around_the_limits_give_the_tokens_of_generate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: set[int] = set()
    original = cpu_linear._linear

    def noting(module: torch.nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
        sizes.add(tokens.shape[1])
        return original(module, tokens)

    monkeypatch.setattr(cpu_linear, "_linear", noting)
    prompts = random_prompts([3] * 22, seed=4)
    lengths = [1 + index // 2 for index in range(22)]
    engine = make_engine(m2_batching, tiny_model(), max_num_seqs=22)
    outputs = engine.generate(prompts, [greedy(length) for length in lengths])
    expected = [hf_greedy("llama", p, length) for p, length in zip(prompts, lengths, strict=True)]
    assert [output.token_ids for output in outputs] == expected
    assert {2, 4, 20, 22} <= sizes


def test_command_prints_both_forms(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "NUM_LAYERS", 1)
    threads = torch.get_num_threads()
    try:
        cpu_linear.main()
    finally:
        torch.set_num_threads(threads)
    assert "(W @ x.T).T" in capsys.readouterr().out
