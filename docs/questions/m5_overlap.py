"""Who computes what when in prefill: parts that take turns, and parts that overlap. `-o` draws it.

A simulation with made-up lengths: a product of 64 rows takes 1, softmax 2, a load 0.6.
What waits for what is as in `paged_prefill` and `hopper_prefill`.
"""

import argparse
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from docs.questions.m5_pictures import LOOKS, bar
from milestone_llm.lab.plots.picture import set_titles, write_picture

PRODUCT, SOFTMAX, LOAD, TILES, STAGES, END = 1.0, 2.0, 0.6, 12, 3, 25


@dataclass
class Task:
    """Something that one unit does for one tile, when all that it waits for is done."""

    name: str
    unit: str
    length: float
    after: list[str] = field(default_factory=list)
    begin: float = 0.0

    @property
    def end(self) -> float:
        """When it is done."""
        return self.begin + self.length


def simulate(tasks: list[Task]) -> list[Task]:
    """Each unit does one task at a time: of those that can begin, the one that could first."""
    known, done, free = {task.name for task in tasks}, {}, {}

    def start(task: Task) -> float:
        return max([free.get(task.unit, 0.0), *(done[name].end for name in task.after)])

    waiting = list(tasks)
    for task in waiting:
        task.after = [name for name in task.after if name in known]  # there is no tile -1
    while waiting:
        ready = [task for task in waiting if all(name in done for name in task.after)]
        task = min(ready, key=start)
        task.begin = start(task)
        free[task.unit], done[task.name] = task.end, task
        waiting.remove(task)
    return list(done.values())


def in_turn() -> list[Task]:
    """All warps do the same: 128 rows, a product, softmax, a product."""
    tasks = []
    for j in range(TILES):
        tasks += [
            Task(f"K{j}", "copies", LOAD, [f"PV{j - 2}"]),
            Task(f"V{j}", "copies", LOAD, [f"PV{j - 2}"]),
            Task(f"QK{j}", "tensor cores", 2 * PRODUCT, [f"K{j}", f"PV{j - 1}"]),
            Task(f"softmax {j}", "softmax", SOFTMAX, [f"QK{j}"]),
            Task(f"PV{j}", "tensor cores", 2 * PRODUCT, [f"softmax {j}", f"V{j}"]),
        ]
    return tasks


def specialised() -> list[Task]:
    """A producer, and two consumers of 64 rows each, a and b."""
    tasks = []
    for j in range(TILES):
        for what, reader in (("K", "QK"), ("V", "PV")):
            read = [f"{reader}{j - STAGES}{c}" for c in "ab"]
            tasks.append(Task(f"{what}{j}", "copies", LOAD, read))
        for c in "ab":
            asked = [f"K{j}", f"QK{j - 1}{c}", f"PV{j - 2}{c}"]  # when softmax j - 1 begins
            tasks.append(Task(f"QK{j}{c}", "tensor cores", PRODUCT, asked))
            before = [f"QK{j}{c}", f"PV{j - 1}{c}"]
            tasks.append(Task(f"softmax {j}{c}", f"softmax {c}", SOFTMAX, before))
            needs = [f"softmax {j}{c}", f"V{j}"]
            tasks.append(Task(f"PV{j}{c}", "tensor cores", PRODUCT, needs))
    return tasks


def busy(done: list[Task]) -> float:
    """Share of the time in which the tensor cores compute, once the first tiles are done."""
    begin, end = (min(t.begin for t in done if t.name.startswith(f"QK{j}")) for j in (2, TILES - 2))
    works = [t for t in done if t.unit == "tensor cores" and begin <= t.begin < end]
    return sum(task.length for task in works) / (end - begin)


WAYS = {"In turn (paged_prefill)": in_turn, "At the same time (hopper_prefill)": specialised}


def draw() -> Figure:
    """A panel for each way, a line for each unit."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=(3, 4), sharex=True)
    for axes, (title, way) in zip(panels, WAYS.items(), strict=True):
        done = simulate(way())
        units = list(dict.fromkeys(task.unit for task in done))
        units.sort(key=["copies", "tensor cores", "softmax", "softmax a", "softmax b"].index)
        for task in done:
            if task.end <= END:
                look = LOOKS[1] if task.name.endswith("b") else LOOKS[0]
                look = ("#eeeeee", "") if task.unit == "copies" else look
                text = task.name.rstrip("ab")
                bar(axes, task.begin, -0.9 * units.index(task.unit), task.length, text, look)
        for number, unit in enumerate(units):
            axes.text(-0.2, -0.9 * number, unit, ha="right", va="center", fontsize=9)
        about = f"simulated: tensor cores busy for {busy(done):.0%} of the time"
        if way is specialised:
            about += "; blue: consumer a, hatched: consumer b; a ring of three tiles"
        set_titles(axes, title, about, above=2)
        axes.set(xlim=(-2.4, END), ylim=(-0.9 * len(units) + 0.4, 0.5))
        axes.axis("off")
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", metavar="PATH.png", required=True)
    options = parser.parse_args()
    print("wrote", write_picture(options.output, "picture", draw))
