"""What does each part of M5 gain? The recorded runs in which one of them was switched off."""

import json
from pathlib import Path

RECORDS = ("m5_nano.json", "m5_single.json")


def factors(name: str) -> dict[str, str]:
    """Return by contestant how many times as long it took as M5 with all its parts; and M5's
    speed."""
    path = Path(__file__).parents[1] / "measurements" / name
    data = json.loads(path.read_text(encoding="utf-8"))
    tok_s = data["contestants"]["m5_kernels"]["median"]["tok_s"]
    times = {who: f"{speedup['median']:.2f}x" for who, speedup in data["speedups"].items()}
    return {"m5_kernels": f"{tok_s:,.0f} tok/s", **times}


nano, single = (factors(name) for name in RECORDS)
print("                    256 requests     1 request")
for name in dict.fromkeys([*nano, *single]):
    print(f"{name:17}{nano.get(name, ''):>15}{single.get(name, ''):>14}".rstrip())
