"""What is clearly busier? The router's constant, what it finds, and how even the load is."""

import argparse

from docs.questions.scale_simulation import simulate
from milestone_llm.serving.replicas import router

args = argparse.Namespace(replicas=64, prompts=12_800, cache_tokens=65_536, stride=8, seed=0)
print("            prompt tokens  load of one replica")
print("times mean     cached      sent, all  at a time")
for router.BUSIER in (1.0, 1.1, 1.25, 1.5, 2.0, float("inf")):
    report = simulate(["prefix"], args)["prefix"]
    loads = f"{report['sent_max']:13.2f}{report['outstanding_max']:11.2f}"
    print(f"{router.BUSIER:10}{report['hit_rate']:10.1%}{loads}")
