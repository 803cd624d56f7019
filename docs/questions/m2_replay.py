"""The sixteen requests of `m2_same_work` on the page that replays them: `--page PATH.html`

With `-o PATH.gif` Chromium opens that page, moves its cursor from step to step, and takes pictures.
"""

import argparse
import io
import tempfile
from pathlib import Path
from typing import Any

import m1_single
import m2_batching
from milestone_llm.lab.bench.workloads import mixed, serve
from milestone_llm.lab.trace.explore import Run, write_page

SIZE = {"width": 1180, "height": 572}
EVERY = 4
"""Steps between two pictures."""
FIRST = 40
"""The step that is seen where nothing moves: some rows have finished, others have taken them."""

WITHOUT_SECONDS = """() => document.querySelectorAll("[data-panel=facts]").forEach(
  (facts) => (facts.textContent = facts.textContent.replace(/ in [\\d.,]+ s/, "")))"""
"""A tiny model's seconds are those of Python; steps are what a large one would take, too."""


def write(path: Path) -> Path:
    """The page of both runs."""
    runs = []
    for package, label in ((m1_single, "static batching"), (m2_batching, "continuous batching")):
        engine = package.LLMEngine("tiny-llama", device="cpu", max_num_seqs=8, trace="memory")
        serve(engine, mixed(engine.vocab_size))
        runs.append(Run.of(label, engine))
    return write_page(runs, path)


def pictures(page_path: Path) -> list[Any]:
    """What the page shows at each of these steps."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    frames = []
    with sync_playwright() as api:
        browser = api.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(page_path.absolute().as_uri())
        page.wait_for_selector("body[data-ready]")
        num_steps = int(page.evaluate("lastTime()")) + 1
        for step in [*range(FIRST, num_steps, EVERY), *range(0, FIRST, EVERY)]:
            page.evaluate("step => moveTo(step)", step)
            page.evaluate(WITHOUT_SECONDS)
            frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
        browser.close()
    return frames


def write_gif(frames: list[Any], path: Path) -> None:
    """One palette for all pictures, so that only what changes is stored."""
    from PIL import Image

    palette = frames[0].quantize(256, dither=Image.Dither.NONE)
    flat = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [2500] + [180] * (len(flat) - 1)
    flat[0].save(path, save_all=True, append_images=flat[1:], duration=times, loop=0, optimize=True)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--page", type=Path, metavar="PATH.html", help="write the page there")
parser.add_argument(
    "-o", "--output", type=Path, metavar="PATH.gif", help="write the pictures there"
)
options = parser.parse_args()
with tempfile.TemporaryDirectory() as folder:
    page_path = write(options.page or Path(folder) / "page.html")
    if options.output:
        write_gif(pictures(page_path), options.output)
        print(f"wrote {options.output}, {options.output.stat().st_size / 1000:.0f} kB")
