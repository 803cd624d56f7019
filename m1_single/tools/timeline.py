"""Draw the timeline of traces: `python -m m1_single.timeline trace.jsonl -o timeline.png`."""

from milestone_llm.plots.timeline import main

if __name__ == "__main__":
    main()
