"""M5's engine: M4's scheduler over the fused decoder, one step ahead of the tokens.

    host   | plan n+1 | launch n+1 | tokens of n: settle n | plan n+2 | launch n+2 | ...
    device |    step n ............|  step n+1 ...................................

The schedule is M4's: a request knows that a token of a launched step is on its way. One that turns
out to have finished (EOS, a stop string) may have a row in the step that runs by then; what that
row computes is dropped. One that reaches its length is known beforehand and gets no such row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from m3_paged.block_cache import BlockCache
from m3_paged.kv_memory import fit_kv_memory, with_swap_space
from m4_prefix_chunked.engine import USEFUL_KV
from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.core.engine_core import EngineCore
from milestone_llm.core.errors import InputError
from milestone_llm.core.plan import StepPlan
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.frontend.engine_driver import Peers
from milestone_llm.frontend.scheduler_file import scheduler_class
from milestone_llm.frontend.step_log import StepLog
from milestone_llm.models.checkpoint import DEFAULT_MODEL, load_model, max_position
from milestone_llm.models.support import check_flat
from milestone_llm.trace.tracer import Tracer

from .config import EngineConfig
from .decoder.config import is_fusible
from .decoder.decoder import Attends, FusedDecoder
from .decoder.load import load_decoder
from .decoder.one_gpu import OneGPU
from .decoder.products import Products
from .decoder.weights import Matrices
from .device_state import check_rows
from .extras.cpu.attention import CPUAttention
from .extras.cpu.int8 import CPUInt8Weight
from .extras.cpu.layers import OneCPU, RopeAndWrite
from .extras.cpu.products import OwnProduct, PlainProduct
from .extras.gguf.file import open_gguf
from .extras.gguf.matrices import GGUFMatrices
from .extras.gguf.packed import PackedMatrix
from .extras.guesses.proposer import DeviceProposer
from .extras.guesses.runner import GuessingRunner
from .extras.hopper.chunks import attention_of_chunks
from .extras.hopper.products import EarlyStarts, products_of_few_rows
from .extras.hopper.write_to_host import write_to_host
from .extras.int8.products import Int8Matrices, check_quantization, int8_products
from .extras.tensor_parallel.model_part import model_part
from .extras.tensor_parallel.parallel import TensorParallel
from .extras.tensor_parallel.rank_peers import RankPeers
from .extras.tensor_parallel.ranks import Ranks
from .hf_runner import HFRunner
from .kernels.backend import runs_no_kernels
from .kernels.early_start import Starts
from .kernels.rope_kv_write import rope_kv_write
from .runner import FusedRunner


class LLMEngine(BaseEngine):
    """Triton kernels, CUDA graphs and pipelined steps under M4's schedule.

    Arguments and errors as in `m1_single`. A fused decoder takes over the weights of a model that
    the engine loads itself; a ready model passed in keeps its own, and the decoder a copy. One that
    does what its config does not say (hooks, modules of its own) is run by Hugging Face's modules,
    with a warning; where its weights are cut or rounded, it is refused. With
    `tensor_parallel_size` each of several processes has an engine with its part of the weights; all
    of them make the same calls, or those other than rank 0 call `Ranks.follow`.
    """

    milestone = "m5_kernels"
    warm_up_sizes = (1, 17)  # steps with prompts have kernels for up to 16 requests, and for more
    _fused_runner: FusedRunner | GuessingRunner | None = None
    """None also of an engine that was refused while it was built: ranks take leave of all."""

    def __init__(
        self,
        model: str | PreTrainedModel = DEFAULT_MODEL,
        *,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        **fields: Any,
    ) -> None:
        config = EngineConfig.from_fields(**fields)
        ranks, device = None, config.device
        peers = Peers()
        if config.tensor_parallel_size > 1:
            ranks = Ranks.join(config.tensor_parallel_size, config.device)
            config = config.on_device(ranks.device.type, fields)
            number = ranks.enter(self, model, fields)
            peers = RankPeers(
                ranks, number, lambda each: self.input_processor.grammars.rule_of(each)
            )
            device = None if isinstance(model, PreTrainedModel) else str(ranks.device)

        # A model that is cut, or rounded, is never there as a whole.
        is_whole = ranks is None and config.quantization is None
        dtype = config.dtype
        is_tiny = str(model).startswith("tiny-")  # there to compare tokens, not speed
        if dtype is None and config.quantization is not None and not is_tiny:
            dtype = None if isinstance(model, PreTrainedModel) else "bfloat16"  # on CPUs as well
        loaded = load_model(model, tokenizer, dtype, device, weights=is_whole)
        whole = loaded.model
        if is_whole:
            check_flat(whole)
        here = whole.device if ranks is None else ranks.device
        config = config.on_device(here.type, fields)
        if ranks is not None:
            loaded = replace(loaded, model=model_part(whole, ranks.shard, here))
        wanted_len = config.resolve_max_model_len(max_position(loaded.model))

        # The lesson's objects, or what takes their place. The decoder comes before KV memory, which
        # gets what its weights leave.
        products, matrices = Products(products_of_few_rows(here)), Matrices()
        starts: Starts = EarlyStarts(here)
        gpus, rope_and_write, weights = OneGPU(), rope_kv_write, None
        attention: Attends | None = None
        if ranks is None and runs_no_kernels(here):
            products, gpus = Products([PlainProduct()]), OneCPU()
            rope_and_write, attention = RopeAndWrite(), CPUAttention()
        if config.quantization is not None:
            check_quantization(whole.config, config.quantization)
            starts = Starts(here)
        if config.quantization == "int8" and attention is not None:
            products, matrices = Products([OwnProduct(CPUInt8Weight)]), Int8Matrices(CPUInt8Weight)
        elif config.quantization == "int8":
            products, matrices = Products(int8_products(here)), Int8Matrices()
        elif config.quantization == "gguf":
            weights = open_gguf(model, here)
            products, matrices = Products([OwnProduct(PackedMatrix)]), GGUFMatrices(weights)
        if ranks is not None:
            gpus = TensorParallel(
                ranks.shard, whole.config.hidden_size, config.max_num_seqs, whole.dtype, here,
                ranks.smallest,
            )  # fmt: skip
            starts = Starts(here)
        decoder: FusedDecoder | None = None
        if not is_whole or is_fusible(whole.config):
            try:
                decoder = load_decoder(
                    model, whole, wanted_len, here,
                    products=products, matrices=matrices, gpus=gpus, starts=starts,
                    rope_and_write=rope_and_write, weights=weights,
                )  # fmt: skip
            except InputError as error:
                if not is_whole or whole is not model:
                    raise
                logging.getLogger(__name__).warning(
                    "Hugging Face's modules compute this model, more slowly: %s", error
                )
        if decoder is not None:
            check_rows(config.max_num_seqs, wanted_len, config.block_size, here)
            if isinstance(matrices, GGUFMatrices):
                matrices.pack()
        runner_class = GuessingRunner if config.speculation else FusedRunner

        def runner_over(
            cache: BlockCache, max_model_len: int
        ) -> FusedRunner | GuessingRunner | HFRunner:
            if decoder is None:  # Hugging Face's modules with our attention
                return HFRunner(loaded.model, cache)
            chunks = attention_of_chunks(
                here, whole.dtype, decoder.config.head_dim, config.block_size
            )
            runner = runner_class(
                decoder,
                cache,
                config,
                max_model_len,
                chunks=chunks,
                copy=write_to_host,
                attention=attention,
            )
            runner.compile_kernels()
            return runner

        def run_once(cache: BlockCache, plan: StepPlan) -> None:
            runner_over(cache, wanted_len).launch(plan).wait()

        num_blocks, max_model_len = fit_kv_memory(
            loaded.model, config, wanted_len, run_once, USEFUL_KV
        )
        num_blocks, max_model_len = gpus.smallest(num_blocks), gpus.smallest(max_model_len)
        config = with_swap_space(config, loaded.model, num_blocks)
        is_pipelined = decoder is not None and config.async_scheduling and not config.enforce_eager
        more: dict[str, Any] = {}
        if config.speculation and decoder is not None:
            more = {"can_guess": FusedRunner.can_run_ahead}
            if is_pipelined:  # the host does not know the tokens that a guess follows
                more["proposer"] = DeviceProposer()
        make_scheduler = scheduler_class(config.scheduler, Scheduler)
        scheduler = make_scheduler(config.for_scheduler(), max_model_len, num_blocks, **more)
        cache = BlockCache(loaded.model, num_blocks, config.block_size, scheduler.num_host_blocks)
        runner = runner_over(cache, max_model_len)
        log = StepLog(
            self.milestone,
            scheduler,
            Tracer.from_option(config.trace, loaded.decode),
            config.check_invariants,
        )
        core = EngineCore(
            scheduler, runner, FusedRunner.can_run_ahead if is_pipelined else None, log
        )
        super().__init__(
            config,
            loaded,
            max_model_len,
            core,
            log,
            peers=peers,
            aging_seconds=config.aging_seconds,
            block_size=config.block_size,
        )
        self.decoder = decoder
        self._fused_runner = None if isinstance(runner, HFRunner) else runner
        self._reset_prefix_cache = scheduler.reset_prefix_cache

    def warm_up(self) -> None:
        """Compile kernels and capture CUDA graphs before anybody waits for them."""
        super().warm_up()
        self.capture_graphs()

    def capture_graphs(self) -> None:
        """Capture the CUDA graphs that most decode steps replay; on all ranks together."""
        self.driver.run(self.driver.agree, "capture_graphs")
        if self._fused_runner is not None:
            self._fused_runner.capture_graphs()

    def release_graphs(self) -> None:
        """Let go of captured graphs, and of the communicator that they call."""
        if self._fused_runner is not None:
            self._fused_runner.release_graphs()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV. False, with nothing done, while blocks are in use."""
        self.driver.run(self.driver.agree, "reset_prefix_cache")
        return self.driver.run(self._reset_prefix_cache)

    def follow(self, call: str) -> None:
        """Do what this engine on rank 0 is doing."""
        calls: dict[str, Callable[[], object]] = {
            "step": self.driver.step,
            "capture_graphs": self.capture_graphs,
            "reset_prefix_cache": self.reset_prefix_cache,
        }
        calls[call]()
