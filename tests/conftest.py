"""Fixtures of all tests: no network, one thread, the real model loaded once, GPU tests skipped.

Nothing here imports torch, which takes seconds: tests of a scheduler do not need it.

`make test` runs two processes at the same time. So a test uses only what is its own: ports that the
system chooses, folders of `tmp_path`.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, so set before
os.environ["COLUMNS"] = "80"  # output is compared, and must not depend on the shell
os.environ.pop("FORCE_COLOR", None)
os.environ.pop("NO_COLOR", None)
os.environ.pop("LLM_TRACE", None)

import pytest
from hypothesis import Phase, settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from milestone_llm.models.checkpoint import LoadedModel

IS_CI = bool(os.environ.get("CI"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

# A shell makes background processes ignore Ctrl-C, and their child processes, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run; `make storm` draws others, and says how to get them again.
settings.register_profile("same", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("storm", deadline=None, derandomize=False, print_blob=True)
settings.register_profile(  # `make mutants`: that it fails is enough
    "mutants", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("storm" if os.environ.get("STORM") else "same")


gc.disable()  # until everything is imported and collected, which is not garbage


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep Python's garbage collector from scanning libraries and tests again and again."""
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests without CUDA; mark tests that use the real model `smollm2`.

    The test that takes longest comes first, then those that `helpers.forked` starts processes for
    or that use the real model. So they are all in one of the two processes of `make test`, which
    imports and loads once for them.
    """
    items.sort(key=_turn)
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.smollm2)
        if item.get_closest_marker("gpu"):
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _turn(item: Any) -> int:
    if item.path.name == "test_interpreted_kernels.py":
        return 0
    forks = not vars(item.module).keys().isdisjoint(("forked", "process", "run_python"))
    is_served = item.path.parent.name in ("clients", "serving")
    return 1 if forks or is_served or "smollm2" in getattr(item, "fixturenames", ()) else 2


def pytest_collection_finish() -> None:
    """Use one thread: tiny matrices are slower with several, and there are several workers."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line for each reason for which tests were skipped."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number} skipped: {reason}")


@pytest.fixture(autouse=True)
def on_a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep messages about a busy machine out of the tests."""
    monkeypatch.setattr("milestone_llm.models.threads.product_times", lambda: (1.0, 1.0))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Seed the generators, so that a test does not depend on the tests before it."""
    if torch := sys.modules.get("torch"):
        # `torch.manual_seed` writes down for each GPU, also where there is none, who called it.
        has_gpu = torch.cuda.is_initialized()
        (torch.manual_seed if has_gpu else torch.default_generator.manual_seed)(0)


@pytest.fixture
def no_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw pictures without rendering them, which takes longest."""

    def save(figure: Figure, path: Path, **options: object) -> None:
        path.write_bytes(b"\x89PNG\r\n")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32 on the CPU. Do not change it.

    Skipped if the model package is missing, except in CI, where that is a failure.
    """
    from milestone_llm.models.checkpoint import DEFAULT_MODEL, load_model
    from milestone_llm.models.gguf_cache import packaged_gguf

    try:
        packaged_gguf()
    except ValueError as error:
        if IS_CI:
            raise
        pytest.skip(str(error))
    return load_model(DEFAULT_MODEL, dtype="float32", device="cpu")


@pytest.fixture(scope="module")  # no longer: its event loop runs, and others could not have theirs
def browser() -> Iterator[Any]:
    """Start headless Chromium. Without it these tests are skipped with a hint what to install."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the page's tests want `pip install playwright`"
    )
    if CHROMIUM is None:
        pytest.skip("the page's tests want Chromium: `apt-get install chromium`")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as api:
        chromium = api.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()
