"""The KV tensors of layout SLOT: per layer one `[num_regions, num_kv_heads, max_model_len,
dim]` pair. A region is one request's, whole and contiguous, from its first token to its last.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from milestone_llm.models.kv_shape import KVShape
from milestone_llm.models.machine import check_memory


class RegionCache:
    """Keys and values of all layers, written token by token, read region by region.

    Raises:
        InputError: the tensors would not fit into memory.
    """

    def __init__(self, model: PreTrainedModel, num_regions: int, max_model_len: int) -> None:
        shape = KVShape.of(model)
        check_memory(
            num_regions * max_model_len * shape.bytes_per_token,
            model.device,
            f"KV memory of max_num_seqs={num_regions} regions of max_model_len={max_model_len} "
            f"tokens ({shape.bytes_per_token} bytes each)",
            "lower one of them",
        )
        # Zeros, not `empty`: a masked position still enters as 0 * value, and 0 * NaN is NaN.
        self.keys, self.values = (
            [
                torch.zeros(
                    (num_regions, shape.num_kv_heads, max_model_len, dim),
                    dtype=shape.dtype,
                    device=model.device,
                )
                for _ in range(shape.num_layers)
            ]
            for dim in (shape.head_dim, shape.value_dim)
        )
        self._num_written = [0] * num_regions

    def begin(self, region: int, num_tokens: int) -> None:
        """Begin a request in a region with its first `num_tokens` tokens.

        Values of an earlier request after these tokens become zeros: they may hold a NaN.
        """
        stale = slice(num_tokens, self._num_written[region])
        if stale.start < stale.stop:
            for tensor in (*self.keys, *self.values):
                tensor[region, :, stale] = 0
        self._num_written[region] = 0

    def extend(self, region: int, num_tokens: int) -> None:
        """Note that the first `num_tokens` places of a region are being written."""
        self._num_written[region] = max(self._num_written[region], num_tokens)

    def write(
        self,
        layer: int,
        regions: torch.Tensor,
        positions: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Store new tokens.

        Args:
            regions: region of each token, `[num_tokens]`.
            positions: position of each token in its request, `[num_tokens]`.
            key: `[num_tokens, num_kv_heads, head_dim]`; `value` likewise, with its `value_dim`.
        """
        self.keys[layer][regions, :, positions] = key
        self.values[layer][regions, :, positions] = value
