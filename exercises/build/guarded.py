"""Run the reader's kernels on tensors in guarded memory, and find what is wrong with the results.

Tensors are in the middle of larger memory. Around input there is NaN; around output there is a
number that no kernel computes. So a kernel that reads or writes outside its part is found.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .check import Parts, Wrong

GUARD = 256
"""Elements of foreign memory before and after a tensor."""
Causes = Sequence[tuple[Callable[[torch.Tensor], bool], str]]
"""Possible causes: a condition on a result, and words. The first cause that holds is told."""
UNWRITTEN = -7777.0
"""The value of output before a kernel writes it, and of the memory around it."""


def device() -> str:
    """Return where kernels run: "cpu" under the interpreter, which `python -m exercises.build`
    chose, or else "cuda".

    Raises:
        Wrong: kernels cannot run here.
    """
    if importlib.util.find_spec("triton") is None:
        raise Wrong("Triton is not installed. It exists for Linux; try a container or WSL.")
    if importlib.import_module("triton").knobs.runtime.interpret:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    raise Wrong("Without a GPU kernels run under Triton's interpreter: set TRITON_INTERPRET=1.")


def guarded(values: torch.Tensor, around: float = float("nan")) -> torch.Tensor:
    """Return a contiguous copy in the middle of larger memory that is filled with `around`."""
    memory = torch.full((values.numel() + 2 * GUARD,), around, dtype=values.dtype, device=device())
    copy = memory[GUARD:-GUARD].view(values.shape)
    copy.copy_(values)
    return copy


def output_of(*shape: int) -> torch.Tensor:
    """Return guarded memory of this shape, for a kernel to write."""
    return guarded(torch.full(shape, UNWRITTEN), UNWRITTEN)


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return numbers from a normal distribution."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def undefined_elements() -> Iterator[None]:
    """Make masked-out elements of a load NaN inside the block, if the load has no `other`.

    On a GPU these elements are undefined. The interpreter takes 0, and a kernel that relies on 0
    would pass.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    load = interpreter.InterpreterBuilder.create_masked_load

    def create_masked_load(
        builder: Any, pointers: Any, mask: Any, other: Any, *options: Any
    ) -> Any:
        element_type = pointers.get_element_ty()
        if other is None and element_type.is_floating():
            other = interpreter.TensorHandle(
                np.full(pointers.data.shape, np.nan, interpreter._get_np_dtype(element_type)),
                element_type,
            )
        return load(builder, pointers, mask, other, *options)

    interpreter.InterpreterBuilder.create_masked_load = create_masked_load
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_masked_load = load


def call(parts: Parts, name: str, *arguments: Any) -> None:
    """Call one of the reader's functions. `name` is `file.function`, or one name for both.

    An error in a kernel keeps the line where it happened.
    """
    file, _, function_name = name.rpartition(".")
    module = importlib.import_module(f"{parts.package}.{file or name}")
    function = getattr(module, function_name)
    try:
        with warnings.catch_warnings(), undefined_elements():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of masked elements
            function(*arguments)
    except Exception as error:
        if type(error).__name__ == "InterpreterError" and isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise


def check(
    parts: Parts,
    name: str,
    given: Sequence[torch.Tensor],
    wanted: torch.Tensor,
    case: str,
    causes: Causes,
    *options: Any,
    tolerance: float = 1e-4,
) -> None:
    """Call a reader's function on guarded tensors, an output and options; compare the output.

    Raises:
        Wrong: as `compare` raises it.
    """
    output = output_of(*wanted.shape)
    call(parts, name, *given, output, *options)
    compare(case, output, wanted, causes, tolerance)


def compare(
    case: str,
    output: torch.Tensor,
    wanted: torch.Tensor,
    causes: Causes,
    tolerance: float = 1e-4,
) -> None:
    """Compare all numbers of a guarded result. First check whether too much was written.

    Raises:
        Wrong: as `compare_numbers` raises it, or the kernel has written outside of output.
    """
    memory = output._base if output._base is not None else output
    if not ((memory[:GUARD] == UNWRITTEN).all() and (memory[-GUARD:] == UNWRITTEN).all()):
        raise Wrong(
            f"{case}\nThe kernel has written outside of output: before its beginning or behind its "
            "end. On a GPU that memory belongs to something else. Has the store a mask, and the "
            "right pointer?"
        )
    compare_numbers(case, output, wanted, causes, tolerance)


def compare_numbers(
    case: str,
    output: torch.Tensor,
    wanted: torch.Tensor,
    causes: Causes,
    tolerance: float = 1e-4,
) -> None:
    """Compare all numbers of a result.

    Raises:
        Wrong: the first wrong number, how many there are, and the cause.
    """
    output, wanted = output.cpu().float(), wanted.cpu().float()
    is_wrong = ~torch.isclose(output, wanted, rtol=tolerance, atol=tolerance)
    if not is_wrong.any():
        return
    place = tuple(is_wrong.nonzero()[0].tolist())
    got, expected = output[place].item(), wanted[place].item()
    told = (
        f"{case}\noutput{list(place)} is {got:.6g}, expected {expected:.6g} "
        f"({int(is_wrong.sum())} of {is_wrong.numel()} numbers are wrong)."
    )
    if (output == UNWRITTEN).all():
        raise Wrong(f"{case}\nNothing was written to output. Is there a tl.store?")
    if got == UNWRITTEN:
        raise Wrong(
            f"{case}\noutput{list(place)} was never written. Which elements does each program "
            "store, and does the mask leave out too many?"
        )
    because = next((words for is_so, words in causes if is_so(output)), "")
    raise Wrong(f"{told}\n{because}".rstrip())


def has_nan(output: torch.Tensor) -> bool:
    """Whether a result holds a NaN."""
    return bool(output.isnan().any())


def always(output: torch.Tensor) -> bool:
    """Return True: the condition of the last cause of a list."""
    return True


def like(other: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Return a condition: whether a result equals `other`, the result of a certain mistake."""
    return lambda output: torch.allclose(output, other.float(), 1e-3, 1e-3, equal_nan=True)


def first_row_is(wanted: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Return a condition: whether at least the first row is right."""
    return lambda output: torch.allclose(output[0], wanted[0].float(), rtol=1e-3, atol=1e-3)
