"""Linear layers for the row counts that continuous batching lives on, on a CPU.

A step of decode rows multiplies `[num_tokens, in]` by a weight `[out, in]` with some ten tokens.
For so few rows the BLAS behind `F.linear` can take longer than for 24 of them.

    x @ W.T        few rows, many columns: slow
    (W @ x.T).T    the same numbers, long side first: faster on most CPUs, not on all

The second form is used while a step runs; the model is Hugging Face's own again afterwards.
`python -m m2_batching.cpu_linear` measures both.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

FEW_ROWS = range(8, 21)
"""Numbers of tokens for which the weight comes first."""
NUM_LAYERS = 30
"""Of SmolLM2-135M, for the measurement."""


@contextlib.contextmanager
def fast_for_few_rows(device: torch.device) -> Iterator[None]:
    """Let `nn.Linear` take the faster form on a CPU; elsewhere change nothing."""
    if device.type != "cpu":
        yield
        return
    before = torch.nn.Linear.forward
    torch.nn.Linear.forward = _linear  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Linear.forward = before  # type: ignore[method-assign]


def _linear(module: torch.nn.Linear, tokens: torch.Tensor) -> torch.Tensor:
    """`nn.Linear.forward` for `[..., in]`."""
    if tokens.numel() // tokens.shape[-1] not in FEW_ROWS:
        return F.linear(tokens, module.weight, module.bias)
    output = torch.mm(module.weight, tokens.flatten(0, -2).t()).t()
    if module.bias is not None:
        output = output + module.bias
    return output.unflatten(0, tokens.shape[:-1])


def main() -> None:
    """Print how long both forms take for the layers of SmolLM2-135M."""
    torch.set_num_threads(1)
    shapes = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    weights = [torch.randn(shape) for _ in range(NUM_LAYERS) for shape in shapes]

    def milliseconds(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        times = []
        for _ in range(5):
            start = time.process_time()
            for weight in weights:
                product(inputs[weight.shape[1]], weight)
            times.append(time.process_time() - start)
        return min(times) * 1e3

    print("tokens   x @ W.T   (W @ x.T).T   ms for the linear layers of SmolLM2-135M, one thread")
    for num_tokens in (1, 2, 4, 8, 12, 15, 16, 20, 24, 32, 64):
        inputs = {size: torch.randn(num_tokens, size) for size in (576, 1536)}
        plain = milliseconds(F.linear)
        weight_first = milliseconds(lambda x, weight: torch.mm(weight, x.t()).t())
        print(f"{num_tokens:6d}  {plain:8.0f}  {weight_first:12.0f}")


if __name__ == "__main__":
    main()
