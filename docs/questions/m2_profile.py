"""Where does the time of a step go? Python's profiler on M2's steps, with our functions only."""

import cProfile
import pstats
from pathlib import Path

from m2_batching import LLMEngine, SamplingParams

ROOT = str(Path(__file__).parents[2])
engine = LLMEngine("tiny-llama", device="cpu", max_num_seqs=8)
params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
engine.generate([[5, 9, 33]], params)  # warm
for number in range(16):
    engine.add_request([3 + number] * 20, params)

with cProfile.Profile() as profile:
    while engine.has_unfinished_requests():
        engine.step()

steps = pstats.Stats(profile).stats  # type: ignore[attr-defined]
ours = [(figures, at) for at, figures in steps.items() if at[0].startswith(ROOT)]
ours.sort(key=lambda each: -each[0][3])
whole = ours[0][0][3]
print("cumulative   calls  function")
for (_, calls, _, cumulative, _), (file, _, name) in ours[:20]:
    print(f"{cumulative / whole:9.1%}{calls:9,}  {Path(file).relative_to(ROOT)}: {name}")
