"""Sampling by Gumbel-max and by the cumulative distribution: frequencies, chunks, batches."""

import torch

from milestone_llm.core.philox import gumbel_noise, seeds_to_tensor

PROBABILITIES = torch.tensor([0.50, 0.25, 0.15, 0.07, 0.03])
LOGITS, DRAWS, SEED = PROBABILITIES.log(), 20_000, 7

positions = torch.arange(DRAWS)
noise = gumbel_noise(seeds_to_tensor([SEED]).expand(DRAWS), positions, len(LOGITS))
by_gumbel = (LOGITS + noise).argmax(-1)

uniform = torch.rand(DRAWS, generator=torch.Generator().manual_seed(SEED))
cumulative = PROBABILITIES.cumsum(0)  # softmax first, then a running sum: every number needs all
by_cumulative = torch.searchsorted(cumulative, uniform).clamp(max=len(LOGITS) - 1)

print(f"{DRAWS:,} draws          " + "".join(f"token {token}  " for token in range(5)))
print("probability            " + "".join(f"{p:<9.3f}" for p in PROBABILITIES.tolist()))
for name, tokens in (("Gumbel-max", by_gumbel), ("cumulative", by_cumulative)):
    shares = tokens.bincount(minlength=5) / DRAWS
    chi_square = float(((shares - PROBABILITIES) ** 2 / PROBABILITIES).sum() * DRAWS)
    print(f"{name:23}" + "".join(f"{s:<9.3f}" for s in shares.tolist()) + f"chi2 {chi_square:.1f}")
    assert chi_square < 18.5  # a right sampler exceeds it once in a thousand times, 4 degrees

by_exponential = (PROBABILITIES / (-noise).exp()).argmax(-1)  # exp(-noise) is exponential
print("the same tokens by argmax(p / q), q exponential:", torch.equal(by_gumbel, by_exponential))

print("\nthe vocabulary in chunks, each with a best of its own, then the best of the bests")
scores = torch.randn(1000, generator=torch.Generator().manual_seed(0))
scores += gumbel_noise(seeds_to_tensor([SEED]), positions[:1], 1000)[0]
bests = [
    (float(chunk.max()), 100 * i + int(chunk.argmax())) for i, chunk in enumerate(scores.split(100))
]
print("  whole:", int(scores.argmax()), " chunks:", max(bests)[1])

print("\nfive tokens of a request with seed 7")
alone = (LOGITS + gumbel_noise(seeds_to_tensor([7] * 5), torch.arange(5), 5)).argmax(-1)
batch = seeds_to_tensor([3, 7, 11])
company = [
    int((LOGITS + gumbel_noise(batch, torch.full((3,), at), 5)).argmax(-1)[1]) for at in range(5)
]
print("  noise = philox(seed, position):  alone", alone.tolist(), " in a batch of three", company)
generator = torch.Generator().manual_seed(7)
alone = [int(torch.multinomial(PROBABILITIES, 1, generator=generator)) for _ in range(5)]
generator = torch.Generator().manual_seed(7)
rows = PROBABILITIES.expand(3, -1)
company = [int(torch.multinomial(rows, 1, generator=generator)[1]) for _ in range(5)]
print("  one generator for all:           alone", alone, " in a batch of three", company)
