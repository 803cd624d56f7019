"""Which share of a static batch is of use to somebody, and what decides that?"""

from m1_single import LLMEngine, SamplingParams


def share(prompt_lengths: list[int], output_lengths: list[int], max_num_seqs: int) -> float:
    """Serve prompts of these lengths, each exactly this many tokens, and ask the engine."""
    engine = LLMEngine("tiny-llama", device="cpu", max_num_seqs=max_num_seqs, max_model_len=512)
    engine.generate(
        [[5] * length for length in prompt_lengths],
        [SamplingParams(max_tokens=length, ignore_eos=True) for length in output_lengths],
    )
    return engine.stats()["useful_share"]


print("prompts           outputs             rows   useful share")
for prompts, outputs, max_num_seqs in (
    ([16, 16, 16, 16], [40, 40, 40, 40], 4),
    ([16, 16, 16, 16], [10, 20, 30, 40], 4),
    ([16, 16, 16, 16], [5, 5, 5, 40], 4),
    ([5, 5, 5, 64], [40, 40, 40, 40], 4),
    ([5, 5, 5, 64], [5, 5, 5, 40], 4),
    ([5, 5, 5, 64], [5, 5, 5, 40], 1),
):
    result = share(prompts, outputs, max_num_seqs)
    print(f"{prompts!s:18}{outputs!s:20}{max_num_seqs:4}{result:12.0%}")
