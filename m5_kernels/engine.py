"""M5's engine: M4's scheduler over the fused decoder, one step ahead of the tokens.

    host   | plan n+1 | launch n+1 | tokens of n: settle n | plan n+2 | launch n+2 | ...
    device |    step n ............|  step n+1 ...................................

The schedule is M4's: a request knows that a token of a launched step is on its way. One that turns
out to have finished (EOS, a stop string) may have a row in the step that runs by then; what that
row computes is dropped. One that reaches its length is known beforehand and gets no such row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedModel

from m3_paged.block_cache import BlockCache
from m3_paged.kv_memory import num_kv_blocks, with_swap_space
from m4_prefix_chunked.engine import USEFUL_KV
from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.frontend.output_queue import Reader
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.models.checkpoint import DEFAULT_MODEL, LoadedModel, load_model
from milestone_llm.models.pretrained import is_hollow
from milestone_llm.models.support import check_flat
from milestone_llm.lab.trace.tracer import Tracer

from .config import EngineConfig
from .decoder import FusedDecoder
from .decoder_config import is_fusible
from .hf_runner import HFRunner
from .model_part import decoder_part, model_part
from .peers import Order, Peers
from .ranks import Ranks
from .runner import FusedRunner
from .sampler import is_host_paced


class LLMEngine(BaseEngine):
    """Triton kernels, CUDA graphs and pipelined steps under M4's schedule.

    A fused decoder takes over the weights of a model that the engine loads itself; a ready model
    passed in keeps its own, and the decoder a copy. With `tensor_parallel_size` each of several
    processes has an engine with its part of the weights; all of them make the same calls, or those
    other than rank 0 call `follow_rank_0` (see `ranks`).
    """

    milestone = "m5_kernels"
    config_class = EngineConfig
    warm_up_sizes = (1, 17)  # steps with prompts have kernels for up to 16 requests, and for more
    open_trace = staticmethod(Tracer.from_option)
    config: EngineConfig
    scheduler: Scheduler

    def __init__(self, model: str | PreTrainedModel = DEFAULT_MODEL, **options: Any) -> None:
        self._owns_model = not isinstance(model, PreTrainedModel)
        self._host_paced: set[str] = set()  # requests whose tokens the host must know at once
        self.ranks: Ranks | None = None
        if (size := options.get("tensor_parallel_size", 1)) != 1:
            self.config_class(tensor_parallel_size=size)  # refuses what is no number of GPUs
            self.ranks = Ranks.join(size, options.get("device"))
            self._number = self.ranks.enter(self, model, options)
        self._model = model
        super().__init__(model, **options)
        if self.ranks is not None:
            self._loop.peers = Peers(self.ranks, self._number, self._make_ordered)

    def load(self, model: Any, tokenizer: Any) -> LoadedModel:
        """The model; of one that is cut, config and modules without the weights."""
        if self.ranks is None:
            return super().load(model, tokenizer)
        device = None if isinstance(model, PreTrainedModel) else self.ranks.device
        loaded = load_model(model, tokenizer, self.config.dtype, device, weights=False)
        self._whole = loaded.model
        part = model_part(loaded.model, self.ranks.shard, self.ranks.device)
        return dataclasses.replace(loaded, model=part)

    @staticmethod
    def check_model(model: PreTrainedModel) -> None:
        """Refuse what would come out wrong. A model that is cut is none but the fused decoder's."""
        if not is_hollow(model):
            check_flat(model)

    def build_scheduler(self) -> Scheduler:
        """M4's schedule. The decoder comes first: KV memory gets what its weights leave."""
        self.decoder: FusedDecoder | None = None
        if self.ranks is not None:
            source = self._model if isinstance(self._model, str) else None
            self.decoder = decoder_part(
                self._whole,
                source,
                self.ranks.shard,
                self.ranks.device,
                self.max_model_len,
                self.config.max_num_seqs,
            )
            del self._whole, self._model
        elif is_fusible(self.model.config):
            self.decoder = FusedDecoder.from_hf(
                self.model, max_positions=self.max_model_len, consume=self._owns_model
            )
        num_blocks = num_kv_blocks(
            self.model, self.config, self.max_model_len, self._run_once, USEFUL_KV
        )
        if self.ranks is not None:
            num_blocks = self.ranks.smallest(num_blocks)
        self.config = with_swap_space(self.config, self.model, num_blocks)
        return Scheduler(self.config, self.max_model_len, num_blocks)

    def build_runner(self) -> FusedRunner | HFRunner:
        """The fused decoder's runner, or Hugging Face's modules with our attention."""
        num_blocks, num_host_blocks = self.scheduler.num_blocks, self.scheduler.num_host_blocks
        cache = BlockCache(self.model, num_blocks, self.config.block_size, num_host_blocks)
        return self._runner_over(cache)

    def _runner_over(self, cache: BlockCache) -> FusedRunner | HFRunner:
        if self.decoder is None:
            return HFRunner(self.model, cache)
        return FusedRunner(self.decoder, cache, self.config, self.max_model_len)

    def _run_once(self, cache: BlockCache, plan: StepPlan) -> None:
        runner = self._runner_over(cache)
        runner.collect(runner.launch(plan))

    @property
    def num_steps_ahead(self) -> int:
        """1 where the next step may be launched before the tokens of the last are known."""
        self._host_paced = {
            request_id
            for request_id in self._host_paced & self.requests.keys()
            if is_host_paced(self.requests[request_id])
        }
        is_pipelined = (
            self.decoder is not None
            and self.config.async_scheduling
            and not self.config.enforce_eager
            and not self._host_paced
        )
        return int(is_pipelined)

    def _enqueue(self, requests: list[Request], reader: Reader | None) -> None:
        self._host_paced |= {each.request_id for each in requests if is_host_paced(each)}
        super()._enqueue(requests, reader)

    def warm_up(self) -> None:
        """Compile kernels and capture CUDA graphs before anybody waits for them."""
        super().warm_up()
        self.capture_graphs()

    def capture_graphs(self) -> None:
        """Capture the CUDA graphs that most decode steps replay; on all ranks together."""
        self._loop.agree("capture_graphs")
        if isinstance(self.runner, FusedRunner):
            self.runner.capture_graphs()

    def release_graphs(self) -> None:
        """Let go of captured graphs, and of the communicator that they call."""
        if isinstance(self.runner, FusedRunner):
            self.runner.graphs = None

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV. False, with nothing done, while blocks are in use."""
        self._loop.agree("reset_prefix_cache")
        return self.scheduler.reset_prefix_cache()

    # -- several ranks -----------------------------------------------------------------------

    def follow(self, call: str) -> None:
        """Do what this engine on rank 0 is doing."""
        if call == "step":
            self._loop.step()
            self.take_outputs()
        else:
            getattr(self, call)()

    def _make_ordered(self, order: Order) -> Request:
        """The request that rank 0 was asked for, the same in number and seed."""
        self._intake.num_arrivals = order.arrival
        request = self._intake.make(
            list(order.prompt_token_ids or ()),
            order.params or SamplingParams(),
            order.request_id,
            order.priority,
            chat=False,
        )
        if is_host_paced(request):
            self._host_paced.add(request.request_id)
        return request
