"""Can one user find out what another has asked? By the tokens that a guess saves."""

from m1_single import SamplingParams
from m4_prefix_chunked import LLMEngine

SECRET = [7, 3, 9, 1] * 12
GUESSES = {"right": [*SECRET, 5], "wrong": [7, 3, 9, 2] * 12 + [5]}


def saved(salts: tuple[str, str]) -> dict[str, int]:
    """One user asks, then another guesses; what does the cache save the second?"""
    engine = LLMEngine("tiny-llama", device="cpu", max_model_len=64)
    engine.generate([SECRET], SamplingParams(max_tokens=1, cache_salt=salts[0]))
    params = SamplingParams(max_tokens=1, cache_salt=salts[1])
    outputs = {name: engine.generate([guess], params)[0] for name, guess in GUESSES.items()}
    return {name: output.metrics.num_cached_tokens for name, output in outputs.items()}


print("no salts:       ", saved(("", "")))
print("a salt for each:", saved(("alice", "bob")))
