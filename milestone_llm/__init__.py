"""The ground floor: what no milestone changes."""

import sys

__version__ = "0.1.0"
MILESTONES = ("m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked", "m5_kernels")
"""The packages that build on this one, each on those before it."""

_LIBRARIES = (
    *("torch", "transformers", "huggingface_hub", "safetensors", "numpy"),
    *("filelock", "pydantic", "pydantic_core", "typing_extensions", "rich"),
)
_EXTRAS = {
    "serve": ("fastapi", "starlette", "uvicorn", "httptools", "prometheus_client"),
    "plots": ("matplotlib",),
    "gguf": ("gguf", "accelerate"),
    "structured": ("llguidance",),
    "ray": ("ray",),
}


def how_to_install(error: ModuleNotFoundError) -> str:
    """Return a line that says how to install a library of the project that cannot be imported.

    Raises:
        ModuleNotFoundError: the error itself, if the library is not one of the project's.
    """
    library = (error.name or "").partition(".")[0]
    if library in _LIBRARIES:
        return (
            f"{library} is not installed for {sys.executable}: in a checkout, `make setup` once, "
            "then `. .venv/bin/activate` in each new terminal; elsewhere, `pip install "
            "milestone-llm`"
        )
    for extra, libraries in _EXTRAS.items():
        if library in libraries:
            return f"{library} is not installed: pip install 'milestone-llm[{extra}]'"
    raise error
