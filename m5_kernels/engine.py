"""M5's engine: M4's scheduler over a decoder of its own, one step ahead of the tokens.

    host   | plan n+1 | launch n+1 | tokens of n: settle n | plan n+2 | launch n+2 | ...
    device |    step n ............|  step n+1 ...................................

The schedule is M4's: a request knows that a token of a launched step is on its way. When a request
turns out to have finished (EOS, a stop string), it may already have a row in the next step, which
runs by then. What that row computes is dropped. That a request reaches its length is known before
the next step is planned, so it gets no such row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from m3_paged.block_cache import BlockCache
from m3_paged.kv_memory import fit_kv_memory, with_swap_space
from m4_prefix_chunked.engine import USEFUL_KV
from m4_prefix_chunked.hybrid.layer_groups import LayerGroups
from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.core.engine_core import ModelRunner as AnyRunner
from milestone_llm.core.plan import StepPlan
from milestone_llm.frontend.custom_scheduler import scheduler_class
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.models.checkpoint import (
    DEFAULT_MODEL,
    at_revision,
    device_of,
    is_read_in_parts,
    load_model,
    max_position,
    stop_token_ids,
)
from milestone_llm.models.support import check_flat
from milestone_llm.structured.grammars import Grammars
from milestone_llm.trace.tracer import Tracer

from .backends import Backend, choose_backend, is_pipelined, join_group
from .config import EngineConfig
from .decoder.decoder import FusedDecoder
from .decoder.load import load_decoder
from .device_state import check_rows
from .group import Group
from .kernels.cuda_graph import own_stream
from .pipeline import Pipeline
from .runner import ModelRunner


class LLMEngine(BaseEngine):
    """Run Triton kernels, CUDA graphs and pipelined steps under M4's schedule.

    Arguments and errors are those of `m1_single`. The fused decoder takes over the weights of a
    model that the engine loads itself. A ready model that is passed in keeps its weights, and the
    decoder gets a copy; on a GPU one request is then some 4 % slower (`own_stream`). Hugging Face's
    modules run the model, with a warning, if its family is not known to the decoder, or if it does
    what its config does not say (hooks, modules of its own). Such a model is refused if its weights
    are to be cut or rounded. With `tensor_parallel_size` there are several processes, and each has
    an engine with its part of the weights. All of them make the same calls, or the ranks other than
    0 call `Ranks.follow`.

    adapt_backend: changes the backend that computes a step, before anything is built. For benches
    and tests.
    """

    milestone = "m5_kernels"
    config: EngineConfig
    scheduler: Scheduler
    warm_up_sizes = (1, 17)  # steps with prompts have kernels for up to 16 requests, and for more

    def __init__(
        self,
        model: str | PreTrainedModel = DEFAULT_MODEL,
        *,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        runner: AnyRunner | None = None,
        adapt_backend: Callable[[Backend], Backend] = lambda chosen: chosen,
        **fields: Any,
    ) -> None:
        config = EngineConfig.from_fields(**fields)
        model = at_revision(model, config.revision)
        group = join_group(config, model, fields)
        with own_stream(group.device or device_of(model, config.device)):
            self._create(config, model, tokenizer, runner, adapt_backend, group, fields)

    def _create(
        self,
        config: EngineConfig,
        model: str | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | str | None,
        runner: AnyRunner | None,
        adapt_backend: Callable[[Backend], Backend],
        group: Group,
        fields: Mapping[str, Any],
    ) -> None:
        """Load the model and create what computes it, all on the current stream."""
        # A model that is cut, rounded or too large is never in the host's memory as a whole.
        dtype = default_dtype(config, model)
        is_whole = config.quantization is None and group.size == 1
        is_whole = is_whole and not is_read_in_parts(model, dtype, config.device)
        device_name = config.device
        if group.device is not None:
            device_name = None if isinstance(model, PreTrainedModel) else str(group.device)
        loaded = load_model(model, tokenizer, dtype, device_name, weights=is_whole)
        whole = loaded.model
        if is_whole:
            check_flat(whole)
        device = group.device or whole.device
        config = config.on_device(device.type, fields)
        loaded = replace(loaded, model=group.part_of(whole))
        wanted_len = config.resolve_max_model_len(max_position(loaded.model))

        # The decoder comes first: KV memory gets what its weights leave free.
        backend = adapt_backend(choose_backend(config, model, whole, device, group))
        decoder = load_decoder(
            model, whole, wanted_len, device, backend.ops, group.shard, backend.weights,
            backend.decoder, is_whole=is_whole and backend.may_use_modules,
            graphs=None if config.enforce_eager or device.type != "cuda" else backend.launch,
        )  # fmt: skip
        check_rows(config.max_num_seqs, wanted_len, config.block_size, device)

        def runner_over(cache: BlockCache, max_model_len: int) -> Any:
            own = backend.runner(
                decoder, cache, config, max_model_len, group, backend.launch, backend.copy
            )
            own.compile_kernels()
            return own

        def run_once(cache: BlockCache, plan: StepPlan) -> None:
            runner_over(cache, wanted_len).launch(plan).wait()

        if isinstance(decoder, FusedDecoder):  # a file may name a window that its family has not
            layers = LayerGroups.of_windows(decoder.config.windows)
        else:
            layers = LayerGroups.of_config(loaded.model.config)
        make_scheduler = scheduler_class(config.scheduler, Scheduler)
        layers = layers.usable(config, wanted_len, make_scheduler)
        memory = fit_kv_memory(
            loaded.model, config, wanted_len, run_once, USEFUL_KV,
            num_blocks_for=partial(layers.num_whole_blocks_for, config),
        )  # fmt: skip
        num_blocks, max_model_len = map(group.smallest, memory)
        config = with_swap_space(config, loaded.model, num_blocks)
        parts, groups = backend.scheduler_parts or {}, None
        if layers.has_windows and layers.fits(config, max_model_len, num_blocks):
            from m4_prefix_chunked.hybrid.hybrid_cache import grouped_scheduler
            from m4_prefix_chunked.hybrid.hybrid_runner import HybridBlockCache

            groups = layers
            num_blocks = groups.num_blocks(num_blocks)
            check_rows(config.max_num_seqs, max_model_len, config.block_size, device, len(groups))
            scheduler = grouped_scheduler(
                make_scheduler, config, max_model_len, num_blocks, groups, **parts
            )
        else:
            scheduler = make_scheduler(config, max_model_len, num_blocks, **parts)
        own_runner = None
        if runner is None:
            size, num_host_blocks = config.block_size, scheduler.num_host_blocks
            cache: BlockCache
            if groups is not None:
                cache = HybridBlockCache(
                    loaded.model, num_blocks, size, groups, num_host_blocks, config.kv_dtype
                )
            else:
                cache = BlockCache(loaded.model, num_blocks, size, num_host_blocks, config.kv_dtype)
            runner = own_runner = runner_over(cache, max_model_len)

        tracer = Tracer.from_option(config.trace, loaded.decode)
        pipeline = None
        if is_pipelined(config):
            pipeline = partial(Pipeline, can_run_ahead=ModelRunner.can_run_ahead)
        vocab_size = loaded.model.config.get_text_config().vocab_size
        grammars = Grammars(
            loaded.tokenizer, vocab_size, stop_token_ids(loaded.model), before=group.compile
        )
        super().__init__(
            config,
            loaded,
            max_model_len,
            scheduler,
            runner,
            tracer,
            pipeline=pipeline,
            grammars=grammars,
            peers=group.peers(grammars),
            aging_seconds=config.aging_seconds,
            block_size=config.block_size,
        )
        if isinstance(decoder, FusedDecoder):
            self.step_log.begin_figures = backend.begin_figures
        self.decoder, self.decoder_name, self._own_runner = decoder, decoder.name, own_runner
        group.register(self)

    def warm_up(self) -> None:
        """Compile kernels and capture CUDA graphs before the first request."""
        super().warm_up()
        self.capture_graphs()

    def capture_graphs(self) -> None:
        """Capture the CUDA graphs that most decode steps replay; on all ranks together."""
        self.driver.run(self.driver.agree, "capture_graphs")
        if self._own_runner is not None:
            self._own_runner.capture_graphs()

    def release_graphs(self) -> None:
        """Release the captured graphs, and with them the communicator that they call."""
        if self._own_runner is not None:
            self._own_runner.release_graphs()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV. Returns False, and does nothing, while blocks are in use."""
        self.driver.run(self.driver.agree, "reset_prefix_cache")
        return self.driver.run(self.scheduler.kv.reset_prefix_cache)

    def follow(self, call: str) -> None:
        """Make the same call that this engine has begun on rank 0."""
        calls: dict[str, Callable[[], object]] = {
            "step": partial(self.driver.run, self.driver.step),
            "capture_graphs": self.capture_graphs,
            "reset_prefix_cache": self.reset_prefix_cache,
        }
        calls[call]()


def default_dtype(config: EngineConfig, model: object) -> str | None:
    """Return the dtype to load with. Quantized weights go with bfloat16, on CPUs as well."""
    is_ready, is_tiny = isinstance(model, PreTrainedModel), str(model).startswith("tiny-")
    if config.dtype is None and config.quantization and not is_ready and not is_tiny:
        return "bfloat16"  # but not for tiny models: they are for comparing tokens, not speed
    return config.dtype
