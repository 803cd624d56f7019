"""Three steps of M1, drawn from their trace: what plan, launch and settle do. `-o PATH.png`"""

import argparse

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from m1_single import LLMEngine, SamplingParams
from milestone_llm.lab.plots.picture import set_titles, write_picture
from milestone_llm.trace.records import StepRecord

COLUMNS = {  # title: the call, fill
    "plan": ("scheduler.schedule()", "#ffffff"),
    "launch": ("runner.launch(plan)", "#74b3e0"),
    "settle": ("scheduler.update(plan, sampled)", "#e3eef6"),
}
WIDTH, HEIGHT, GAP = 3.2, 0.8, 0.8


def texts(record: StepRecord, width: int) -> tuple[str, str, str]:
    """What the three parts of a step did; `width` is that of the batch's tensor."""
    plans, tokens = [], []
    ended = {each["request_id"]: each["reason"] for each in record.finished}
    for row in record.batch:
        name = row.request_id
        if row.phase == "padding":
            plans.append(f"{name}: done, still a row")
            tokens.append(f"{name}: thrown away")
        else:
            plans.append(f"{name}: +{row.num_new_tokens} from position {row.start}")
            end = f", finished: {ended[name]}" if name in ended else ""
            tokens.append(f"{name}: token {row.sampled_token}{end}")
    rows = len(record.batch)
    launch = f"{rows} x {width} tokens in, their KV kept\n{rows} tokens sampled"
    return "\n".join(plans), launch, "\n".join(tokens)


def draw(records: list[StepRecord]) -> Figure:
    """A line for each step, a box for each part."""
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    axes = figure.subplots()
    arrow = {
        "arrowstyle": "-|>",
        "mutation_scale": 10,
        "color": "#333333",
        "shrinkA": 0,
        "shrinkB": 0,
    }
    for line, record in enumerate(records):
        y = -1.5 * line
        axes.text(-0.25, y, f"step {record.step}", ha="right", va="center", fontweight="bold")
        width = max(row.num_new_tokens for row in record.batch)
        parts = zip(COLUMNS.values(), texts(record, width), strict=True)
        for column, ((_, fill), text) in enumerate(parts):
            x = column * (WIDTH + GAP)
            box = Rectangle((x, y - HEIGHT / 2), WIDTH, HEIGHT, facecolor=fill, edgecolor="#333333")
            axes.add_patch(box)
            axes.text(x + WIDTH / 2, y, text, ha="center", va="center", fontsize=9)
            if column:
                axes.add_patch(FancyArrowPatch((x - GAP, y), (x, y), **arrow))
                passed = "StepPlan" if column == 1 else "sampled"
                axes.text(x - GAP / 2, y + 0.08, passed, ha="center", va="bottom", fontsize=7)
        if line:  # from settle back to plan
            last, top = 2 * (WIDTH + GAP) + WIDTH / 2, y + 1.5 - HEIGHT / 2
            axes.plot([last, last, WIDTH / 2], [top, top - 0.35, top - 0.35], color="#333333", lw=1)
            axes.add_patch(
                FancyArrowPatch((WIDTH / 2, top - 0.35), (WIDTH / 2, y + HEIGHT / 2), **arrow)
            )
    for column, (name, (call, _)) in enumerate(COLUMNS.items()):
        middle = column * (WIDTH + GAP) + WIDTH / 2
        axes.text(middle, 0.85, name, ha="center", va="bottom", fontweight="bold")
        axes.text(middle, 0.8, call, ha="center", va="top", fontsize=8, family="monospace")
    about = (
        "two requests, 3 and 5 tokens in, 2 and 4 out; a step is settled before the next is planned"
    )
    set_titles(axes, "Three steps of M1: plan, launch, settle", about)
    axes.set(xlim=(-1.2, 3 * WIDTH + 2 * GAP + 0.1), ylim=(-3.5, 1.2))
    axes.axis("off")
    return figure


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png", required=True)
options = parser.parse_args()
engine = LLMEngine("tiny-llama", device="cpu", trace="memory")
lengths = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (2, 4)]
engine.generate([[5, 9, 33], [7, 12, 80, 114, 24]], lengths)
print("wrote", write_picture(options.output, "picture", lambda: draw(engine.tracer.records[:3])))
