"""Layers in groups: those of a group need the KV of a token for the same time.

    gpt-oss     w f w f w f      group 0 | f f f |      a block of group 0: 16 tokens, three layers
                                 group 1 | w w w |      a block of group 1: 16 tokens, three layers

    Gemma 3     w w w w w f w w w w w f         group 0 | f f |     five groups with a window,
                                            groups 1..5 | w w |     two layers each

    Mistral 7B  w w w w w w w w                 group 0 | w w w w w w w w |

All groups have equally many layers, so that all blocks have equally many bytes and any group can
take any free block. The last group of a kind may have fewer layers: its blocks are partly empty.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from m4_prefix_chunked.scheduler import Scheduler

if TYPE_CHECKING:
    from m4_prefix_chunked.config import EngineConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerGroups:
    """The groups of a model's layers. A single group without a window keeps every block."""

    windows: tuple[int | None, ...]
    """Window of each group, in tokens; None: its layers see all tokens."""
    layers: tuple[tuple[int, ...], ...]
    """Layers of each group."""

    @classmethod
    def of_windows(cls, windows: Sequence[int | None]) -> LayerGroups:
        """Put layers into groups, given the window of each layer. Groups without a window come
        first."""
        kinds: dict[int | None, list[int]] = {
            kind: [] for kind in sorted(set(windows), key=lambda each: each or 0)
        }
        for layer, kind in enumerate(windows):
            kinds[kind].append(layer)
        size = min(map(len, kinds.values()))
        groups = [
            (kind, tuple(own[first : first + size]))
            for kind, own in kinds.items()
            for first in range(0, len(own), size)
        ]
        return cls(tuple(kind for kind, _ in groups), tuple(own for _, own in groups))

    @classmethod
    def of_config(cls, config: Any) -> LayerGroups:
        """Return the groups of a Hugging Face config. A window without `layer_types` is that of all
        layers, as it is for Hugging Face's own KV cache."""
        config = config.get_text_config()
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        kinds = kinds or ["sliding_attention"] * config.num_hidden_layers
        if not window or not set(kinds) <= {"full_attention", "sliding_attention"}:
            kinds = ["full_attention"] * config.num_hidden_layers
        return cls.of_windows([window if kind == "sliding_attention" else None for kind in kinds])

    def usable(self, config: EngineConfig, max_model_len: int, scheduler: type) -> LayerGroups:
        """Return these groups, or a single one that keeps every block.

        It is a single one if no request outgrows a window, or if groups are turned off; and, with a
        warning, for a scheduler of one's own that is no subclass of M4's.

        Args:
            scheduler: its class.
        """
        single = LayerGroups.of_windows([None] * self.num_layers)
        has_use = any(window and window < max_model_len for window in self.windows)
        if not has_use or config.disable_hybrid_kv_cache_manager:
            return single
        if issubclass(scheduler, Scheduler):
            return self
        text = "Every KV block is kept, also those before a layer's window: %s is no subclass of %s"
        log.warning(text, scheduler, Scheduler)
        return single

    @property
    def has_windows(self) -> bool:
        """Whether some group gives blocks back before their request ends."""
        return any(self.windows)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def size(self) -> int:
        """Most layers of a group."""
        return len(self.layers[0])

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(map(len, self.layers))

    def group_of_layers(self) -> list[int]:
        """Return the group of each layer."""
        return self._by_layer(lambda group, place: group)

    def place_of_layers(self) -> list[int]:
        """Return the place of each layer in its group."""
        return self._by_layer(lambda group, place: place)

    def _by_layer(self, number: Any) -> list[int]:
        places = {
            layer: number(group, place)
            for group, own in enumerate(self.layers)
            for place, layer in enumerate(own)
        }
        return [places[layer] for layer in range(self.num_layers)]

    def num_blocks_for(self, config: EngineConfig, num_tokens: int) -> int:
        """Return how many blocks, each of one group, a request of so many tokens takes."""
        num_all, reach = config.num_blocks_for(num_tokens), longest_reach(config)
        return sum(
            min(num_all, most_entries(window, reach, config.block_size)) if window else num_all
            for window in self.windows
        )

    def num_whole_blocks_for(self, config: EngineConfig, num_tokens: int) -> int:
        """Return how many blocks of all layers are enough for so many tokens, in these groups or in
        one: padding of groups may take more than windows save."""
        num_shared = -(-self.num_blocks_for(config, num_tokens) * self.size // self.num_layers)
        return min(num_shared, config.num_blocks_for(num_tokens))

    def fits(self, config: EngineConfig, num_tokens: int, num_whole_blocks: int) -> bool:
        """Whether so many blocks of all layers hold a request of so many tokens in groups."""
        return self.num_blocks_for(config, num_tokens) <= self.num_blocks(num_whole_blocks)

    def num_host_blocks(self, config: EngineConfig, num_blocks: int) -> int:
        """Return the blocks of a group in host memory, given those on the device."""
        num_host_blocks = config.num_host_blocks(num_blocks)
        is_as_on_device = config.swap_space_tokens is None
        return num_host_blocks if is_as_on_device else self.num_blocks(num_host_blocks)

    def num_blocks(self, num_whole_blocks: int) -> int:
        """Return how many blocks of a group take the memory of so many blocks of all layers."""
        return num_whole_blocks * self.num_layers // self.size


def most_entries(window: int, max_tokens: int, block_size: int) -> int:
    """Return the most blocks that a table holds at once: a window, and the longest row after it."""
    return -(-(window - 1 + max_tokens) // block_size) + 1


def longest_reach(config: EngineConfig) -> int:
    """Return the most tokens from the first that is not certain to the end of a row."""
    chunk = config.max_num_batched_tokens
    if config.enable_chunked_prefill and config.long_prefill_token_threshold:
        chunk = min(chunk, config.long_prefill_token_threshold)
    return chunk + 1 + (config.num_speculative_tokens if config.speculation else 0)
