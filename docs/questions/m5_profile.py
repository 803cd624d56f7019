"""Where does a step's time go, on the host and in kernels? From runs recorded on an H200."""

import json
from pathlib import Path

RECORDS = {"256 requests": "m5_nano.json", "1 request": "m5_single.json"}
NUM_SHOWN = 6

for what, name in RECORDS.items():
    path = Path(__file__).parents[1] / "measurements" / name
    profile = json.loads(path.read_text(encoding="utf-8"))["profile"]
    host, kernels = profile["host_us"], profile["kernels"]
    print(f"{what}: a step with {profile['num_rows']:.0f} rows, {sum(host.values()):,.0f} us")
    print("  host: " + ", ".join(f"{part} {us:,.0f}" for part, us in host.items()))
    print("  kernel                    launches     us")
    others = [sum(each[place] for each in kernels[NUM_SHOWN:]) for place in (1, 2)]
    for kernel, count, us in [*kernels[:NUM_SHOWN], ("others", *others)]:
        print(f"  {kernel[:24]:24}{count:10,.0f}{us:7,.0f}")
    print(f"  all {sum(count for _, count, _ in kernels):30,.0f}")
