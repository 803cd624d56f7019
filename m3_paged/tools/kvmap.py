"""Draw the KV memory of a trace: `python -m m3_paged.kvmap trace.jsonl -o kvmap.png`."""

from milestone_llm.plots.kvmap import main

if __name__ == "__main__":
    main()
