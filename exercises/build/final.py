"""The last steps of every course: random traffic, and a model whose tokens must be the same."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

from .check import Parts, Wrong, explained
from .device import Ask
from .traffic import At, compare, lines_of

NUM_TRAFFICS = 60


def check_random_traffic(
    make: Callable[[Any, random.Random], Any],
    milestone: str,
    parts: Parts,
    ask: Callable[[str, random.Random], Ask] | None = None,
) -> None:
    """Compare decisions with the milestone's scheduler, the shortest traffic first.

    Args:
        make: returns a scheduler of the given class, with random settings.
        ask: returns a random request of the given name.
    """
    reference = importlib.import_module(f"{milestone}.scheduler").Scheduler
    for seed in range(NUM_TRAFFICS):
        rng = random.Random(seed)
        arrivals: dict[int, list[Ask]] = {}
        for number in range(2 + seed // 5):
            name = f"q{number}"
            step = rng.randint(0, 2 + seed // 4) if number else 0
            arrivals.setdefault(step, []).append((ask or any_ask)(name, rng))
        arrivals = dict(sorted(arrivals.items()))
        settings = rng.random()
        lines = lines_of(make(reference, random.Random(settings)), arrivals)
        why = f"{milestone}'s own scheduler does that."
        own = make(parts.Scheduler, random.Random(settings))
        compare(own, arrivals, [At(line, why) for line in lines])


def any_ask(name: str, rng: random.Random) -> Ask:
    """Return a short request of this name."""
    return Ask(name, rng.randint(1, 8), rng.randint(1, 8), priority=rng.randint(0, 2))


def check_engine(milestone: str, parts: Parts, **fields: Any) -> None:
    """Serve prompts with an engine of the milestone, then with the reader's scheduler in it.

    Args:
        fields: fields of the EngineConfig of both engines.
    """
    from milestone_llm.cli import model_libraries

    with model_libraries(num_threads=1):  # tiny matrices lose time when spread over threads
        _check_engine(milestone, parts, fields)


def _check_engine(milestone: str, parts: Parts, fields: dict[str, Any]) -> None:
    from milestone_llm.core.sampling_params import SamplingParams
    from milestone_llm.models.tiny_models import build_tiny_model

    model, engine_of = build_tiny_model("llama"), importlib.import_module(milestone).LLMEngine
    rng = random.Random(0)
    shared = [rng.randrange(3, 100) for _ in range(20)]
    prompts = [
        shared[: 8 * (index % 3)] + [rng.randrange(3, 100) for _ in range(rng.randint(1, 12))]
        for index in range(9)
    ]
    params = [
        SamplingParams(max_tokens=rng.randint(1, 10), temperature=index % 2, seed=index)
        for index in range(len(prompts))
    ]
    fields = {"max_model_len": 48, "check_invariants": True, **fields}
    ours = engine_of(model, **fields).generate(prompts, params)
    try:
        yours = engine_of(model, scheduler=parts.scheduler_path, **fields).generate(prompts, params)
    except NotImplementedError:
        raise
    except Exception as error:
        raise Wrong(f"The engine with your scheduler:\n\n{explained(error)}") from error
    for index, (own, right) in enumerate(zip(yours, ours, strict=True)):
        if own.token_ids != right.token_ids:
            raise Wrong(
                f"Prompt {index} of {len(prompts[index])} tokens: your engine gives "
                f"{own.token_ids}, {milestone} gives {right.token_ids}. The scheduler decides who "
                "computes what in which memory; a wrong position or block changes tokens."
            )
