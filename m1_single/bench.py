"""How fast is static batching? `python -m m1_single.bench --baseline hf`"""

import sys

from milestone_llm.bench.command import main

from . import LLMEngine

if __name__ == "__main__":
    sys.exit(main(LLMEngine))
