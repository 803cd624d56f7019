"""An agent with SmolLM2 behind M4: what each turn finds in the prefix cache, and what is lost if
the system prompt changes."""

import urllib.request

from milestone_llm.lab import agent
from milestone_llm.lab.bench.running_server import running_server

with running_server(["m4_prefix_chunked.serve", "--max-model-len", "1024"]) as url:
    agent.main(["--url", url])
    urllib.request.urlopen(f"{url}/reset_prefix_cache", data=b"")
    print("\nwith --stamp:")
    agent.main(["--url", url, "--stamp"])
