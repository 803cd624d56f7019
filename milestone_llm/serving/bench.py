"""`python -m milestone_llm.serving.bench`: what clients get at which rate."""

import sys

from milestone_llm.load.bench import main

if __name__ == "__main__":
    sys.exit(main())
