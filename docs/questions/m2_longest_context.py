"""What does one masked attention call for all decode rows read that nobody needs?"""

from m1_single import SamplingParams
from m2_batching import LLMEngine
from m2_batching.attention import AttentionMetadata


def read_and_needed(prompt_lengths: list[int]) -> tuple[int, int]:
    """KV positions that attention reads and needs in the step after these prompts."""
    engine = LLMEngine("tiny-llama", device="cpu", max_num_seqs=8, max_model_len=1024)
    for length in prompt_lengths:
        engine.add_request([5] * length, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    rows = engine.scheduler.schedule().rows
    meta = AttentionMetadata.build(rows, engine.runner.cache)
    num_read = meta.decode_batch.num_entries * meta.max_decode_context_len
    return num_read, int(meta.decode_context_lens.sum())


print("prompts                                        read   needed   share")
for lengths in ([64] * 8, [16, 32, 48, 64, 80, 96, 112, 128], [16] * 7 + [900]):
    num_read, num_needed = read_and_needed(lengths)
    print(f"{lengths!s:44}{num_read:7}{num_needed:9}{num_needed / num_read:8.0%}")
