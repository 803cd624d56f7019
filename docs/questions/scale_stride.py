"""What does it cost to remember fewer names? Every block's, every 8th, every 64th."""

import argparse

from docs.questions.scale_simulation import ALL_CACHES, simulate

print("stride  tokens between names    names  megabytes  prompt tokens cached")
for stride in (1, 8, 64):
    args = argparse.Namespace(
        replicas=16, prompts=6_400, cache_tokens=65_536, stride=stride, seed=0
    )
    report = simulate(["prefix"], args)["prefix"]
    size = f"{report['names']:9,}{report['bytes'] / 1e6:11.1f}"
    print(f"{stride:6}{stride * 16:22}{size}{report['hit_rate']:22.1%}")
print(f"all caches in one engine{simulate([ALL_CACHES], args)[ALL_CACHES]['hit_rate']:46.1%}")
