"""The ground floor: what no milestone changes."""

import importlib
import os
import sys

MILESTONES = ("m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked", "m5_kernels")
"""The packages that stand on this one, each on those before it."""

NUM_SPINS = 10_000
"""How often a thread of torch's looks before it sleeps. GNU's OpenMP has 300,000, milliseconds in
which other programs miss the core; with 1,000 it sleeps between two products of a layer, and to
wake it takes longer than a small product. torch must be told before it is imported. Whoever has
chosen how threads wait is obeyed."""
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", str(NUM_SPINS))

_EXTRAS = {
    "serve": ("fastapi", "starlette", "uvicorn", "httptools", "prometheus_client"),
    "plots": ("matplotlib",),
    "gguf": ("gguf", "accelerate"),
    "ray": ("ray",),
}


def how_to_install(error: ModuleNotFoundError) -> str:
    """What to do where a library of the project cannot be imported.

    Raises:
        ModuleNotFoundError: the error itself, if the library is not one of the project's.
    """
    library = (error.name or "").partition(".")[0]
    if library in ("rich", "torch", "transformers"):
        how = "`make setup` once, then `. .venv/bin/activate` in each new terminal"
        return f"{library} is not installed for {sys.executable}: {how}"
    for extra, libraries in _EXTRAS.items():
        if library in libraries:
            return f"{library} is not installed: pip install -e '.[{extra}]'"
    raise error


try:
    importlib.import_module("rich")  # every program shows what it has to say with rich
except ModuleNotFoundError as missing:
    sys.exit(how_to_install(missing))
