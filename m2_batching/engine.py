"""M2's engine: continuous batching over one contiguous KV region a request."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from milestone_llm.core.engine_core import ModelRunner as AnyRunner
from milestone_llm.frontend.custom_scheduler import scheduler_class
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.models.checkpoint import DEFAULT_MODEL, at_revision, load_model, max_position
from milestone_llm.models.support import check_flat
from milestone_llm.trace.tracer import Tracer

from .config import EngineConfig
from .region_cache import RegionCache
from .runner import ModelRunner
from .scheduler import Scheduler


class LLMEngine(BaseEngine):
    """Continuous batching. Arguments and errors as in `m1_single`."""

    milestone = "m2_batching"
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
        max_model_len = config.resolve_max_model_len(max_position(loaded.model))
        cache = RegionCache(loaded.model, config.max_num_seqs, max_model_len)
        scheduler = scheduler_class(config.scheduler, Scheduler)(config, max_model_len)
        tracer = Tracer.from_option(config.trace, loaded.decode)
        super().__init__(
            config,
            loaded,
            max_model_len,
            scheduler,
            runner or ModelRunner(loaded.model, cache),
            tracer,
            aging_seconds=config.aging_seconds,
        )
