"""Is it quicker to fetch the KV of a prompt, or to compute it again?

The playground's formula, for two models on an H100 (its shares of the data sheet are assumed).
"""

from milestone_llm.lab.playground.gpus import MODELS, gpu_machine

PLACES = {"host, PCIe 5": 50e9, "100 Gbit net": 12.5e9, "one SSD": 7e9}  # bytes a second

print("ms                       tokens   compute" + "".join(f"{name:>15}" for name in PLACES))
for model in ("qwen3-0.6b", "qwen3-8b"):
    machine = gpu_machine("h100", model)
    for length in (512, 4096, 32_768):
        compute = machine.step_seconds(length, 1, length**2 / 2, length)
        fetch = [machine.kv_bytes * length / rate for rate in PLACES.values()]
        line = "".join(f"{1e3 * each:15.1f}" for each in fetch)
        print(f"{MODELS[model].title:22}{length:9,}{1e3 * compute:10.1f}{line}")
