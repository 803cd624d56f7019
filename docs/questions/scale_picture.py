"""Sixteen prompts on three replicas, by prefix and by round robin, drawn: `-o PATH.png`.

The real router decides. Of a replica there is only a cache, which keeps all, and a count of tokens.
"""

import argparse

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from milestone_llm.frontend.block_hashes import hash_blocks
from milestone_llm.lab.plots.picture import set_titles, write_picture
from milestone_llm.serving.replicas.router import Router

BLOCK_SIZE, COMMON, OWN = 16, 6, 2
"""Tokens of a block; blocks that prompts of one kind have in common, and of each prompt alone."""
PROMPTS = "AABACABDABACADAB"
"""Kinds of prompts, in order of arrival. A few are popular."""
AT_A_TIME = 5
"""A prompt has ended when so many more have come."""
COMPUTED, CACHED, EDGE = "#3f454b", "#ffffff", "#333333"


def routed(policy: str) -> list[tuple[int, int]]:
    """For each prompt its replica, and how many of its blocks are in the cache there."""
    router, found, running = Router(policy), [], []
    caches: list[set[bytes]] = [set(), set(), set()]
    for number in range(len(caches)):
        router.add(str(number))
    for number, kind in enumerate(PROMPTS):
        if len(running) == AT_A_TIME:
            router.note_finished(*running.pop(0))
        token_ids = [ord(kind)] * COMMON * BLOCK_SIZE + [1000 + number] * OWN * BLOCK_SIZE
        hashes = hash_blocks(token_ids, BLOCK_SIZE, "")
        replica = router.choose(hashes, len(token_ids))
        running.append((replica, len(token_ids)))
        cache = caches[int(replica)]
        found.append((int(replica), sum(each in cache for each in hashes)))
        cache.update(hashes)
    return found


def draw_policy(axes: Axes, policy: str) -> None:
    """A line for each replica, a column for each prompt: dark blocks are computed."""
    found = routed(policy)
    size = COMMON + OWN
    for column, (kind, (replica, num_cached)) in enumerate(zip(PROMPTS, found, strict=True)):
        for block in range(size):
            fill = CACHED if block < num_cached else COMPUTED
            place = (column + 0.1, -replica * 1.5 + block / size)
            axes.add_patch(Rectangle(place, 0.8, 1 / size, facecolor=fill, edgecolor=EDGE, lw=0.5))
        axes.text(column + 0.5, 1.12, kind, ha="center", fontsize=10)
    for replica in range(3):
        axes.text(-0.2, 0.5 - replica * 1.5, f"r{replica}", ha="right", va="center")
    num_blocks, num_cached = size * len(PROMPTS), sum(cached for _, cached in found)
    about = (
        f"{num_blocks - num_cached} of {num_blocks} blocks computed; a prompt begins at the bottom"
    )
    set_titles(axes, f"policy {policy}", about)
    axes.set(xlim=(-0.9, len(PROMPTS)), ylim=(-3.1, 1.6))
    axes.axis("off")


def draw() -> Figure:
    """Both policies."""
    figure = Figure(figsize=(10.4, 3.4), layout="constrained")
    for axes, policy in zip(figure.subplots(1, 2), ("prefix", "round-robin"), strict=True):
        draw_policy(axes, policy)
    signs = [Patch(facecolor=COMPUTED, edgecolor=EDGE, label="block computed")]
    signs.append(
        Patch(facecolor=CACHED, edgecolor=EDGE, label="block found in the replica's cache")
    )
    figure.legend(handles=signs, loc="outside lower center", ncols=2, frameon=False)
    return figure


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png", required=True)
options = parser.parse_args()
print("wrote", write_picture(options.output, "picture", draw))
