"""M3's engine: continuous batching over paged KV memory, with several completions of a prompt."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from milestone_llm.core.engine_core import ModelRunner as AnyRunner
from milestone_llm.core.plan import StepPlan
from milestone_llm.frontend.custom_scheduler import scheduler_class
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.models.checkpoint import DEFAULT_MODEL, at_revision, load_model, max_position
from milestone_llm.models.support import check_flat
from milestone_llm.trace.tracer import Tracer

from .block_cache import BlockCache
from .config import EngineConfig
from .kv_memory import fit_kv_memory, with_swap_space
from .runner import ModelRunner
from .scheduler import Scheduler


class LLMEngine(BaseEngine):
    """Continuous batching over KV blocks. Arguments and errors as in `m1_single`."""

    milestone = "m3_paged"
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
        num_blocks, max_model_len = fit_kv_memory(loaded.model, config, wanted_len, run_once)
        config = with_swap_space(config, loaded.model, num_blocks)
        scheduler = scheduler_class(config.scheduler, Scheduler)(config, max_model_len, num_blocks)
        if runner is None:
            num_host_blocks = scheduler.num_host_blocks
            cache = BlockCache(loaded.model, num_blocks, config.block_size, num_host_blocks)
            runner = ModelRunner(loaded.model, cache)
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
