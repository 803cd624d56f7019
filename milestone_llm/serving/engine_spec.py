"""Which engine is to be served: what another process has to know to build it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from milestone_llm.frontend.garbage import freeze_garbage, nothing_collected
from milestone_llm.trace.tracer import Tracer

if TYPE_CHECKING:
    from milestone_llm.frontend.engine import BaseEngine


@dataclass(frozen=True)
class EngineSpec:
    """An engine that has not been built yet. Can be pickled."""

    milestone: str
    """The package whose `LLMEngine` it is."""
    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Of its EngineConfig."""
    num_threads: int | None = None
    """CPU threads; None leaves them to torch."""
    prepare: Callable[[BaseEngine], object] | None = None
    """Called with the engine once it is built, in its process."""

    def build(self) -> BaseEngine:
        """The engine, with everything done that a first request would have to wait for.

        Raises:
            InputError: there is no such model, or the fields do not go together.
        """
        with nothing_collected():
            engine: BaseEngine = importlib.import_module(self.milestone).LLMEngine(
                self.model, **self.fields
            )
            if self.prepare is not None:
                self.prepare(engine)
            engine.warm_up()
        if isinstance(engine.tracer, Tracer):
            engine.tracer.keeps_records = False  # a server runs for long
        freeze_garbage()
        return engine
