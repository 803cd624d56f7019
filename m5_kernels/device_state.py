"""All that a step needs to know of the requests, kept on the device. The host sends only changes.

Every array is a view of one int32 arena. So all changes of a step are one list of (index, value)
pairs, which needs one transfer and one scatter:

    arena | seeds | token_ids | block_table | num_computed | ... | temperature | ... | step rows |

Each transfer starts from new pinned memory. The caching host allocator uses such memory again only
when the copy is done, so nothing in flight is overwritten.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch

from m5_kernels.kernels.step_metadata import RowState
from m5_kernels.kernels.triton_or_twin import ceil_div
from milestone_llm.core.errors import InputError
from milestone_llm.core.request import Request
from milestone_llm.models.machine import check_memory

MAX_DEVICE_STOP_IDS = 16
"""Most stop tokens of a request that the device knows."""
MAX_DEVICE_BIASES = 16
"""Most entries of a request's `logit_bias` that the device knows."""
MAX_GPU_ROWS = 8192
"""`expand_step` compares each row with 128 tokens; Triton's tensors have 2**20 elements at most."""
BYTES_OF_A_ROW = 640
"""Memory of a row without its tokens and blocks: parameters, workspace, the host's record of it."""

STEP = ("step_rows", "step_new_tokens", "step_samples")
"""Arrays that describe the sequences of a step: the fields of `StepSeq`, in this order."""


class StepSeq(NamedTuple):
    """A sequence of a step: the next tokens of a row."""

    row: int
    num_new_tokens: int
    samples: bool
    """Whether a token is sampled after them."""


IDLE = StepSeq(-1, 0, False)


class DeviceState:
    """State of up to `num_rows` requests, a row each, and the sequences of the current step.

    views: each array by its name. Those of requests are `[num_rows]` or `[num_rows, width]`, but
    `block_table` has the rows of one group of layers after those of another; a seed has the bits of
    a uint64, and stop_ids and the pairs of bias_ids and biases repeat, to fill a row. Those of
    `STEP` are `[num_seqs]`, in the order of the step.

    Args:
        num_seqs: most sequences of a step, if a row may have several; else num_rows.
        num_groups: groups of layers, each with a block table for every row.
        more: shapes of further int32 arrays, by name, which `set` changes like the others.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        num_seqs: int = 0,
        num_groups: int = 1,
        more: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.device = device
        self.num_seqs = max(num_seqs, num_rows)
        self.vocab_size = vocab_size
        # A multiple of 16: Triton computes faster addresses for rows that begin at multiples.
        self.max_blocks = 16 * ceil_div(max_model_len, 16 * block_size)
        int32, fp32, one_number = torch.int32, torch.float32, (num_rows,)
        biases = (num_rows, MAX_DEVICE_BIASES)
        arrays: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "seeds": (torch.int64, one_number),  # first: 64-bit numbers need an even index
            "token_ids": (int32, (num_rows, max_model_len)),
            "block_table": (int32, (num_groups * num_rows, self.max_blocks)),
            "stop_ids": (int32, (num_rows, MAX_DEVICE_STOP_IDS)),
            **dict.fromkeys(("num_computed_tokens", "prompt_lens"), (int32, one_number)),
            **dict.fromkeys(("top_k", "min_tokens"), (int32, one_number)),
            "bias_ids": (int32, biases),
            "biases": (fp32, biases),
            **dict.fromkeys(("temperature", "top_p", "min_p"), (fp32, one_number)),
            **dict.fromkeys(
                ("repetition_penalty", "frequency_penalty", "presence_penalty"), (fp32, one_number)
            ),
            **dict.fromkeys(STEP, (int32, (self.num_seqs,))),
            **{name: (int32, shape) for name, shape in (more or {}).items()},
        }
        sizes = [math.prod(shape) * dtype.itemsize // 4 for dtype, shape in arrays.values()]
        self._arena = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.views: dict[str, torch.Tensor] = {}
        self._first_and_width: dict[str, tuple[int, int]] = {}
        """Index in the arena of each array's first row, and length of a row, in int32 numbers."""
        parts = self._arena.split(sizes)
        for (name, (dtype, shape)), part in zip(arrays.items(), parts, strict=True):
            self.views[name] = part.view(dtype).view(shape)
            self._first_and_width[name] = part.storage_offset(), len(part) // shape[0]
        self.block_tables = self.views["block_table"].unflatten(0, (num_groups, num_rows))
        """Block tables by group of layers and row: int32 `[num_groups, num_rows, max_blocks]`."""
        self.rows = RowState(
            self.views["token_ids"],
            self.block_tables[0],
            self.views["num_computed_tokens"],
            self.views["prompt_lens"],
            block_size,
        )
        self.step_rows = self.views["step_rows"]
        self.reset()

    def reset(self) -> None:
        """Take all requests out of the step, and drop the changes that were not sent."""
        self.step_rows.fill_(-1)
        # The step that was sent to the device, in its order.
        self._step: list[StepSeq] = [IDLE] * self.num_seqs
        self._num_seqs = 0
        self._places: list[range] = []
        """Indices of the changes in the arena."""
        self._values: list[list[int]] = []

    def set(self, name: str, row: int, values: list[int], column: int = 0) -> None:
        """Note a change: `values` go to `name[row, column:]` with the next `flush`."""
        first, width = self._first_and_width[name]
        place = first + row * width + column
        self._places.append(range(place, place + len(values)))
        self._values.append(values)

    def set_table(self, group: int, row: int, blocks: list[int], column: int) -> None:
        """Note a change of the block table of a row in a group of layers."""
        self.set("block_table", group * self.num_rows + row, blocks, column)

    def add_request(self, row: int, request: Request, num_computed_tokens: int) -> None:
        """Note all of a request, except its block table."""
        params = request.sampling_params
        biases = list(params.logit_bias.items()) or [(0, 0.0)]
        biases = (biases * MAX_DEVICE_BIASES)[:MAX_DEVICE_BIASES]
        # Stop ids outside the vocabulary can be ignored: they are never sampled.
        stops = [token for token in request.stop_token_ids if token < self.vocab_size]
        min_tokens = min(params.min_tokens, request.max_num_tokens)  # the limit has 32 bits
        values: dict[str, list[Any]] = {
            "token_ids": request.token_ids,
            "num_computed_tokens": [num_computed_tokens],
            "prompt_lens": [request.num_prompt_tokens],
            "top_k": [params.top_k],
            "temperature": [params.temperature],
            "top_p": [params.top_p],
            "min_p": [params.min_p],
            "repetition_penalty": [params.repetition_penalty],
            "frequency_penalty": [params.frequency_penalty],
            "presence_penalty": [params.presence_penalty],
            "bias_ids": [token for token, _ in biases],
            "biases": [bias for _, bias in biases],
            "min_tokens": [min_tokens if stops else 0],
            "stop_ids": ((stops or [0]) * MAX_DEVICE_STOP_IDS)[:MAX_DEVICE_STOP_IDS],
            "seeds": [request.seed],
        }
        for name, numbers in values.items():
            self.set(name, row, _int32_words(numbers, self.views[name].dtype))

    def set_step(self, step: list[StepSeq]) -> None:
        """Note which sequences are in the step."""
        idle = [IDLE] * max(0, self._num_seqs - len(step))
        for seq, (old, new) in enumerate(zip(self._step, step + idle, strict=False)):
            if old != new:
                for name, value in zip(STEP, new, strict=True):
                    self.set(name, seq, [value])
                self._step[seq] = new
        self._num_seqs = len(step)

    def step(self, num_seqs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, numbers of new tokens, and which sample, of the first sequences."""
        rows, num_new_tokens, samples = (self.views[name][:num_seqs] for name in STEP)
        return rows, num_new_tokens, samples

    def flush(self) -> None:
        """Send all changes to the device, in one transfer and one scatter."""
        if not self._places:
            return
        places, values, self._places, self._values = self._places, self._values, [], []
        pairs = torch.tensor(
            [list(chain.from_iterable(places)), list(chain.from_iterable(values))],
            dtype=torch.int64,
            pin_memory=self._arena.is_cuda,
        ).to(self._arena.device, non_blocking=True)
        self._arena[pairs[0]] = pairs[1].int()


def check_rows(
    num_rows: int, max_model_len: int, block_size: int, device: torch.device, num_groups: int = 1
) -> None:
    """Check that memory holds so many rows, with token ids and two block tables a group each.

    Raises:
        InputError: it does not, or there are more rows than a GPU's kernels can read together.
    """
    if device.type == "cuda" and num_rows > MAX_GPU_ROWS:
        raise InputError(f"max_num_seqs={num_rows}, but a GPU's step has {MAX_GPU_ROWS:,} at most")
    width = max_model_len + 2 * num_groups * 16 * ceil_div(max_model_len, 16 * block_size)
    what = f"the state of max_num_seqs={num_rows} requests of max_model_len={max_model_len} tokens"
    num_bytes = num_rows * (4 * width + BYTES_OF_A_ROW)
    check_memory(num_bytes, device, what, "lower one of them")


def _int32_words(values: list[Any], dtype: torch.dtype) -> list[int]:
    """Return numbers of a dtype as the int32 numbers with the same bits. A seed is a uint64."""
    if dtype == torch.int32:
        return values
    kind = {torch.float32: "f", torch.int64: "Q"}[dtype]
    data = struct.pack(f"<{len(values)}{kind}", *values)
    return list(struct.unpack(f"<{len(data) // 4}i", data))
