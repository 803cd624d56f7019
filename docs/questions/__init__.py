"""One small program a question: run it, change it, run it again."""

import sys

if sys.argv[0] == "-m":  # one of them is starting: `python -m docs.questions.NAME`
    print("Starting. If it needs torch, that takes some seconds.", file=sys.stderr)
