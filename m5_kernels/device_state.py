"""All that a step needs to know of the requests, kept on the device; the host sends changes only.

Everything is a view of one int32 arena, so that all changes of a step, whatever they are, travel as
one list of (place, value) pairs in one transfer and one scatter:

    arena | seeds | token_ids | block_table | num_computed | ... | temperature | ... | step rows |

Transfers start from fresh pinned memory each time. The caching host allocator hands such memory out
again only when the copy has been made, so nothing in flight is overwritten.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

import torch

from m5_kernels.kernels.backend import ceil_div
from m5_kernels.kernels.step_metadata import RowState
from milestone_llm.core.errors import InputError
from milestone_llm.core.request import Request
from milestone_llm.models.machine import check_memory

MAX_DEVICE_STOP_IDS = 16
"""Stop tokens of a request that the device knows."""
MAX_DEVICE_BIASES = 16
"""Entries of a request's `logit_bias` that the device knows."""
MAX_GPU_ROWS = 8192
"""`expand_step` compares each with 128 tokens, and Triton's tensors have 2**20 elements at most."""
BYTES_OF_A_ROW = 640
"""Beside its tokens and blocks: parameters, workspace, what the host knows of it."""


STEP = ("step_rows", "step_new_tokens", "step_samples")
"""What a step says of its sequences: the fields of `StepSeq`, in their order."""


class StepSeq(NamedTuple):
    """A sequence of a step: a row's next tokens."""

    row: int
    num_new_tokens: int
    samples: bool
    """Whether a token is sampled after them."""


IDLE = StepSeq(-1, 0, False)


class DeviceState:
    """State of up to `num_rows` requests, a row each, and the sequences of the current step.

    temperature, top_p, min_p and the three penalties: fp32 `[num_rows]`; top_k, min_tokens: int32;
    seeds: int64 (the bits of uint64); stop_ids: int32
    `[num_rows, MAX_DEVICE_STOP_IDS]`, some repeated; bias_ids, biases: int32 and fp32
    `[num_rows, MAX_DEVICE_BIASES]`, some pairs repeated. step_rows, step_new_tokens, step_samples:
    int32 `[num_seqs]`, in the order of the step.

    Args:
        num_seqs: most sequences of a step, where a row may have several; else num_rows.
        more: shapes of further int32 arrays, by name: `views` has them, and `set` changes them.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        num_seqs: int = 0,
        more: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.device = device
        self.num_seqs = max(num_seqs, num_rows)
        self.vocab_size = vocab_size
        # Whole groups of 16: Triton makes faster addresses for rows that begin at such places.
        self.max_blocks = 16 * ceil_div(max_model_len, 16 * block_size)
        shapes: dict[str, tuple[int, ...]] = {
            "seeds": (num_rows, 2),  # first: 64-bit numbers need an even place
            "token_ids": (num_rows, max_model_len),
            "block_table": (num_rows, self.max_blocks),
            "stop_ids": (num_rows, MAX_DEVICE_STOP_IDS),
            **dict.fromkeys(("num_computed_tokens", "prompt_lens"), (num_rows,)),
            **dict.fromkeys(("top_k", "min_tokens"), (num_rows,)),
            **dict.fromkeys(("bias_ids", "biases"), (num_rows, MAX_DEVICE_BIASES)),
            **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (num_rows,)),
            **dict.fromkeys(("frequency_penalty", "presence_penalty"), (num_rows,)),
            **dict.fromkeys(STEP, (self.num_seqs,)),
            **(more or {}),
        }
        sizes = [math.prod(shape) for shape in shapes.values()]
        self._arena = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.views = views = {
            name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), self._arena.split(sizes), strict=True)
        }
        self._first_and_width = {
            name: (view.storage_offset(), view.stride(0)) for name, view in views.items()
        }
        self.rows = RowState(
            views["token_ids"],
            views["block_table"],
            views["num_computed_tokens"],
            views["prompt_lens"],
            block_size,
        )
        self.seeds = views["seeds"].view(torch.int64)[:, 0]
        self.top_k = views["top_k"]
        self.temperature = views["temperature"].view(torch.float32)
        self.top_p = views["top_p"].view(torch.float32)
        self.min_p = views["min_p"].view(torch.float32)
        self.repetition_penalty = views["repetition_penalty"].view(torch.float32)
        self.frequency_penalty = views["frequency_penalty"].view(torch.float32)
        self.presence_penalty = views["presence_penalty"].view(torch.float32)
        self.bias_ids = views["bias_ids"]
        self.biases = views["biases"].view(torch.float32)
        self.min_tokens = views["min_tokens"]
        self.stop_ids = views["stop_ids"]
        self.step_rows = views["step_rows"]
        self.step_new_tokens = views["step_new_tokens"]
        self.step_samples = views["step_samples"]
        self.reset()

    def reset(self) -> None:
        """No request is in the step, and there is no change to send."""
        self.step_rows.fill_(-1)
        # What the device has been told of the step, in its order.
        self._step: list[StepSeq] = [IDLE] * self.num_seqs
        self._num_seqs = 0
        self._places: list[range] = []
        """Where changes go in the arena."""
        self._values: list[list[int]] = []

    def set(self, name: str, row: int, values: list[int], column: int = 0) -> None:
        """Note a change: `values` go to `name[row, column:]` with the next `flush`."""
        first, width = self._first_and_width[name]
        place = first + row * width + column
        self._places.append(range(place, place + len(values)))
        self._values.append(values)

    def add_request(self, row: int, request: Request, num_computed_tokens: int) -> None:
        """Note all of a request, except its block table."""
        params = request.sampling_params
        self.set("token_ids", row, request.token_ids)
        self.set("num_computed_tokens", row, [num_computed_tokens])
        self.set("prompt_lens", row, [request.num_prompt_tokens])
        self.set("top_k", row, [params.top_k])
        self.set("temperature", row, [_bits(params.temperature)])
        self.set("top_p", row, [_bits(params.top_p)])
        self.set("min_p", row, [_bits(params.min_p)])
        self.set("repetition_penalty", row, [_bits(params.repetition_penalty)])
        self.set("frequency_penalty", row, [_bits(params.frequency_penalty)])
        self.set("presence_penalty", row, [_bits(params.presence_penalty)])
        biases = list(params.logit_bias.items()) or [(0, 0.0)]
        biases = (biases * MAX_DEVICE_BIASES)[:MAX_DEVICE_BIASES]
        self.set("bias_ids", row, [token for token, _ in biases])
        self.set("biases", row, [_bits(bias) for _, bias in biases])
        # Tokens outside the vocabulary stop nobody, and neither is anybody kept from them.
        stops = [token for token in request.stop_token_ids if token < self.vocab_size]
        stops = (stops * MAX_DEVICE_STOP_IDS)[:MAX_DEVICE_STOP_IDS]
        min_tokens = min(params.min_tokens, request.max_num_tokens)  # which has 32 bits
        self.set("min_tokens", row, [min_tokens if stops else 0])
        self.set("stop_ids", row, stops or [0] * MAX_DEVICE_STOP_IDS)
        self.set("seeds", row, list(struct.unpack("<2i", struct.pack("<Q", request.seed))))

    def set_step(self, step: list[StepSeq]) -> None:
        """Note who is in the step."""
        idle = [IDLE] * max(0, self._num_seqs - len(step))
        for seq, (old, new) in enumerate(zip(self._step, step + idle, strict=False)):
            if old != new:
                for name, value in zip(STEP, new, strict=True):
                    self.set(name, seq, [value])
                self._step[seq] = new
        self._num_seqs = len(step)

    def step(self, num_seqs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the first sequences of the step: rows, new tokens, and which sample."""
        return (
            self.step_rows[:num_seqs],
            self.step_new_tokens[:num_seqs],
            self.step_samples[:num_seqs],
        )

    def flush(self) -> None:
        """Send all changes: one transfer, one scatter."""
        if not self._places:
            return
        places, values, self._places, self._values = self._places, self._values, [], []
        pairs = torch.tensor(
            [list(chain.from_iterable(places)), list(chain.from_iterable(values))],
            dtype=torch.int64,
            pin_memory=self._arena.is_cuda,
        ).to(self._arena.device, non_blocking=True)
        self._arena[pairs[0]] = pairs[1].int()


def check_rows(num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
    """Refuse so many rows if memory does not hold them: token ids and two block tables each.

    Raises:
        InputError: it does not, or they are more than a GPU's kernels look at together.
    """
    if device.type == "cuda" and num_rows > MAX_GPU_ROWS:
        raise InputError(f"max_num_seqs={num_rows}, but a GPU's step has {MAX_GPU_ROWS:,} at most")
    width = max_model_len + 2 * 16 * ceil_div(max_model_len, 16 * block_size)
    what = f"the state of max_num_seqs={num_rows} requests of max_model_len={max_model_len} tokens"
    num_bytes = num_rows * (4 * width + BYTES_OF_A_ROW)
    check_memory(num_bytes, device, what, "lower one of them")


def _bits(number: float) -> int:
    """An fp32 number as the int32 of the same bits."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])
