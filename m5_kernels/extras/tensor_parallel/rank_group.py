"""The tensor-parallel group of several processes, in the place of the group of one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.group import Group
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.models.pretrained import build_empty_model
from milestone_llm.structured.grammars import Grammars

from .rank_peers import RankPeers
from .ranks import Ranks


class RankGroup(Group):
    """The tensor-parallel group: a process for each GPU, all of which build the same engine.

    Args:
        ranks: the processes.
        number: number of the engine, the same on all ranks.
    """

    def __init__(self, ranks: Ranks, number: int) -> None:
        self.ranks, self.number = ranks, number
        self.rank, self.size = ranks.rank, ranks.size
        self.device, self.shard = ranks.device, ranks.shard

    @classmethod
    def join(
        cls, size: int, device: str | None, model: object, fields: Mapping[str, object]
    ) -> RankGroup:
        """Find the other processes, and agree with them on the engine that is to be built.

        Raises:
            InputError: there are not `size` processes, or fewer GPUs than processes here.
            RuntimeError: they build another engine.
        """
        ranks = Ranks.join(size, device)
        return cls(ranks, ranks.begin_engine(model, fields))

    def part_of(self, whole: PreTrainedModel) -> PreTrainedModel:
        """Return config and modules of a rank's part, without weights: its own heads, and so on.

        Raises:
            InputError: the decoder does not know the model, or the model cannot be cut into such
                parts.
        """
        part = self.shard.own_config(DecoderConfig.from_hf(whole.config))
        config = copy.deepcopy(whole.config)
        config.num_attention_heads = part.num_q_heads
        config.num_key_value_heads = part.num_kv_heads
        config.head_dim = part.head_dim
        model = build_empty_model(config, whole.dtype, self.ranks.device)
        model.generation_config = whole.generation_config
        return model

    def smallest(self, number: int) -> int:
        """Return the smallest of all ranks' numbers, since a step needs all ranks."""
        return self.ranks.smallest(number)

    def oom_suppressed(self) -> contextlib.AbstractContextManager[None]:
        """Suppress nothing: the others wait for this rank's part of a sum, so all end together."""
        return contextlib.nullcontext()

    def compile(self, params: SamplingParams) -> None:
        """Let the other ranks compile the grammar of a request, too."""
        self.ranks.compile(params, self.number)

    def peers(self, grammars: Grammars) -> RankPeers:
        """Return the same engine on the other ranks."""
        return RankPeers(self.ranks, self.number, grammars)

    def register(self, engine: Any) -> None:
        """Register the engine, so that its graphs are released before the communicator."""
        self.ranks.register(self.number, engine)
