"""Layers in groups: those of a group need the KV of a token for the same time.

    gpt-oss     w f w f w f      group 0 | f f f |      a block of group 0: 16 tokens, three layers
                                 group 1 | w w w |      a block of group 1: 16 tokens, three layers

    Gemma 3     w w w w w f w w w w w f         group 0 | f f |     five groups with a window,
                                            groups 1..5 | w w |     two layers each

All groups have equally many layers, so that all blocks have equally many bytes and any group can
take any free block. The last group of a kind may have fewer layers: its blocks are partly empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerGroups:
    """The groups of a model's layers. A single group stands for a model with one lifetime."""

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
        """Return the groups of a Hugging Face config: several if some layers have a window."""
        config = config.get_text_config()
        kinds, window = (
            getattr(config, "layer_types", None),
            getattr(config, "sliding_window", None),
        )
        if not kinds or not window or set(kinds) != {"full_attention", "sliding_attention"}:
            return cls((None,), (tuple(range(config.num_hidden_layers)),))
        return cls.of_windows([window if kind == "sliding_attention" else None for kind in kinds])

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

    def num_blocks(self, num_whole_blocks: int) -> int:
        """Return how many blocks of a group take the memory of so many blocks of all layers."""
        return num_whole_blocks * self.num_layers // self.size
