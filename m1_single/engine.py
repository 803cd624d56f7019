"""M1's engine: static batches on a Hugging Face model with its own attention."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from milestone_llm.core.engine_core import ModelRunner as AnyRunner
from milestone_llm.frontend.config import EngineConfig
from milestone_llm.frontend.custom_scheduler import scheduler_class
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.models.checkpoint import DEFAULT_MODEL, at_revision, load_model, max_position
from milestone_llm.models.support import check_padded
from milestone_llm.trace.tracer import Tracer

from .runner import ModelRunner
from .scheduler import Scheduler


class LLMEngine(BaseEngine):
    """Static batching on an unchanged Hugging Face model.

    Args:
        model: Hugging Face id or local folder, GGUF file, "smollm2-135m", "tiny-llama" (random
            weights; also other families), or a ready `PreTrainedModel`.
        tokenizer: for a ready model; without one prompts are token ids and `text` stays empty.
        runner: computes the steps in place of the milestone's own runner, without a model for
            instance.
        fields: fields of `EngineConfig`.

    Raises:
        InputError: an unknown field, or limits that do not go together.
    """

    milestone = "m1_single"

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
        check_padded(loaded.model)
        max_model_len = config.resolve_max_model_len(max_position(loaded.model))
        scheduler = scheduler_class(config.scheduler, Scheduler)(config, max_model_len)
        tracer = Tracer.from_option(config.trace, loaded.decode)
        super().__init__(
            config, loaded, max_model_len, scheduler, runner or ModelRunner(loaded.model), tracer
        )
