"""Steps of one request with and without draft tokens, and why equal tokens may be accepted.

A tiny model with few words soon repeats itself, so that there is much to predict.
"""

import torch

import m4_prefix_chunked
from m1_single import SamplingParams
from milestone_llm.core.philox import gumbel_noise, seeds_to_tensor
from milestone_llm.models.tiny_models import build_tiny_model

model = build_tiny_model("gemma3", vocab_size=12)
params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
tokens = {}
for speculation in (None, "ngram"):
    engine = m4_prefix_chunked.LLMEngine(
        model, speculation=speculation, max_model_len=64, trace="memory"
    )
    (output,) = engine.generate([[1, 2, 3]], params)
    tokens[speculation] = output.token_ids
    stats = engine.stats()
    print(f"speculation={speculation!r}: {stats['steps']} steps")
    if speculation:
        for record in engine.tracer.records:
            (row,) = record.batch
            if row.num_draft_tokens:
                got = output.token_ids[row.start - 2 : row.end - 2]
                came = f"{row.num_accepted_tokens} of {row.num_draft_tokens} guesses came true"
                print(f"    step {record.step}: {came}, tokens {got}")
print(f"same tokens: {tokens[None] == tokens['ngram']}\n")

# Draft token x is proposed; p is the target's distribution. Both rules accept it with probability
# p[x].
words, p = ("her", "on", "a", "the"), torch.tensor([0.5, 0.3, 0.15, 0.05])
draws, guess = 20_000, 1
seeds, positions = seeds_to_tensor([7]).expand(draws), torch.arange(draws)
noise = gumbel_noise(seeds, positions, len(p))
scores = p.log() + noise
sampled = scores.argmax(-1)

first = int((sampled == guess).nonzero()[0])
shown = (first, first + 1)
print("seed 7" + "".join(f"{'':8}position {place:<6}" for place in shown).rstrip())
print("       log p" + "  noise  log p + noise" * len(shown))
for token, word in enumerate(words):
    sums = (f"{noise[i, token]:5.2f}{scores[i, token]:12.2f}{'':6}" for i in shown)
    print(f"{word:6} {p[token].log():5.2f}  {''.join(sums)}".rstrip())
print(f"the largest   {''.join(f'{words[sampled[i]]:23}' for i in shown)}".rstrip())
ends = ("kept" if sampled[i] == guess else f"{words[sampled[i]]!r} instead" for i in shown)
print(f"guess {words[guess]!r}    {''.join(f'{end:23}' for end in ends)}".rstrip() + "\n")

uniform = torch.rand(draws, generator=torch.Generator().manual_seed(7))
is_accepted = uniform < p[guess]  # q[guess] is 1: an n-gram always proposes the same
left = p.clone()
left[guess] = 0
other = torch.multinomial(left, draws, True, generator=torch.Generator().manual_seed(8))
drawn = torch.where(is_accepted, guess, other)
wrong = torch.where(is_accepted, guess, sampled)
print(f"{'':38s}accepted   what comes out, in %")
for name, accepted, result in (
    ("accept if equal", sampled == guess, sampled),
    ("u < p/q, else from what q left of p", is_accepted, drawn),
    ("u < p/q, else the keyed sample", is_accepted, wrong),
):
    shares = torch.bincount(result, minlength=len(p)) / draws
    numbers = "  ".join(f"{100 * share:4.1f}" for share in shares.tolist())
    print(f"{name:38s}{accepted.float().mean():8.1%}   {numbers}")
numbers = "  ".join(f"{100 * share:4.1f}" for share in p.tolist())
print(f"{'p':38s}           {numbers}")
