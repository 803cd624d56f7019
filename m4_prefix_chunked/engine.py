"""M4's engine: M3's runner under a scheduler that caches prefixes and cuts prompts into chunks."""

from __future__ import annotations

from functools import partial

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from m2_batching.runner import sample_rows
from m3_paged.block_cache import BlockCache
from m3_paged.kv_memory import fit_kv_memory, with_swap_space
from m3_paged.runner import ModelRunner
from milestone_llm.core.engine_core import ModelRunner as AnyRunner
from milestone_llm.core.plan import StepPlan
from milestone_llm.frontend.custom_scheduler import scheduler_class
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.models.checkpoint import DEFAULT_MODEL, at_revision, load_model, max_position
from milestone_llm.models.support import check_flat
from milestone_llm.trace.tracer import Tracer

from .config import EngineConfig
from .hybrid.layer_groups import LayerGroups
from .scheduler import Scheduler
from .verification import sample_and_verify

USEFUL_KV = 16
"""KV memory worth having, in full batches: what running requests do not use keeps prefixes."""


class LLMEngine(BaseEngine):
    """Prefix caching and chunked prefill over KV blocks. Arguments and errors as in `m1_single`."""

    milestone = "m4_prefix_chunked"
    config: EngineConfig
    scheduler: Scheduler

    def __init__(
        self,
        model: str | PreTrainedModel = DEFAULT_MODEL,
        *,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        runner: AnyRunner | None = None,
        **fields: object,
    ) -> None:
        config = EngineConfig.from_fields(**fields)
        model = at_revision(model, config.revision)
        loaded = load_model(model, tokenizer, dtype=config.dtype, device=config.device)
        check_flat(loaded.model)
        config = config.on_device(loaded.model.device.type, fields)

        def run_once(cache: BlockCache, plan: StepPlan) -> None:
            ModelRunner(loaded.model, cache).launch(plan)

        wanted_len = config.resolve_max_model_len(max_position(loaded.model))
        make_scheduler = scheduler_class(config.scheduler, Scheduler)
        groups = LayerGroups.of_config(loaded.model.config)
        groups = groups.usable(config, wanted_len, make_scheduler)
        num_blocks, max_model_len = fit_kv_memory(
            loaded.model, config, wanted_len, run_once, USEFUL_KV,
            num_blocks_for=partial(groups.num_whole_blocks_for, config),
        )  # fmt: skip
        config = with_swap_space(config, loaded.model, num_blocks)
        sample = sample_and_verify if config.speculation else sample_rows
        if groups.has_windows and groups.fits(config, max_model_len, num_blocks):
            from .hybrid.hybrid_cache import grouped_scheduler
            from .hybrid.hybrid_runner import HybridBlockCache, HybridModelRunner

            num_blocks = groups.num_blocks(num_blocks)
            scheduler = grouped_scheduler(make_scheduler, config, max_model_len, num_blocks, groups)
            if runner is None:
                own = HybridBlockCache(
                    loaded.model, num_blocks, config.block_size, groups, scheduler.num_host_blocks
                )
                runner = HybridModelRunner(loaded.model, own, sample)
        else:
            scheduler = make_scheduler(config, max_model_len, num_blocks)
        if runner is None:
            num_host_blocks = scheduler.num_host_blocks
            cache = BlockCache(loaded.model, num_blocks, config.block_size, num_host_blocks)
            runner = ModelRunner(loaded.model, cache, sample)
        tracer = Tracer.from_option(config.trace, loaded.decode)
        super().__init__(
            config,
            loaded,
            max_model_len,
            scheduler,
            runner,
            tracer,
            aging_seconds=config.aging_seconds,
            block_size=config.block_size,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV, for instance after the weights changed.

        Returns:
            False, with nothing done, while blocks are in use, on the device or by swapped requests
            in host memory: finish or abort the requests first.
        """
        return self.driver.run(self.scheduler.kv.reset_prefix_cache)
