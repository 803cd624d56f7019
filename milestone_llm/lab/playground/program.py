"""A setting as a Python program: the engine itself, on a tiny model, plans the same steps."""

from __future__ import annotations

from dataclasses import replace

from milestone_llm.core.errors import InputError

from .own import NO_OWN, Own
from .setting import MAX_MODEL_LEN, Setting, defaults_of
from .simulate import assemble, run_setting

PROGRAM = '''"""{question}

A run of the playground: the engine itself, on a tiny model with random weights, plans the same
steps. A request comes before a step here, and not at a time: this machine takes another time.
"""

from {package} import LLMEngine
from milestone_llm.lab.bench.workloads import serve
from milestone_llm.lab.playground.setting import RequestSpec
from milestone_llm.trace.console import ConsoleSink, print_changes
from milestone_llm.models.tiny_models import build_tiny_model

REQUESTS = [  # each with its step
{requests}
]
FIELDS = {fields}

items = [request.item(index, step) for index, (request, step) in enumerate(REQUESTS)]
model = build_tiny_model("llama", max_position_embeddings={positions})
engine = LLMEngine(model, device="cpu", trace="memory", **FIELDS)
serve(engine, items)
if __name__ == "__main__":
    print_changes(engine.tracer.records, ConsoleSink(show_times=False))
'''


def program_of(setting: Setting, own: Own = NO_OWN) -> str:
    """The program for the first side; an InputError if its run has a problem."""
    side = setting.sides[0]
    (outcome,) = run_setting(replace(setting, sides=[side]), own)
    if outcome.problem:
        raise InputError(f"a run with a problem is no program: {outcome.problem}")
    steps = {name: each.step for each in outcome.records for name in each.arrived}
    requests = enumerate(setting.in_order())
    defaults, mine = defaults_of(outcome.milestone), own.get(side.engine)
    scheduler, config, num_blocks = assemble(side.fields, outcome.milestone)
    chosen = {name: getattr(config, name) for name in defaults}
    fields = {name: value for name, value in chosen.items() if value != defaults[name]}
    fields["max_model_len"] = scheduler.max_model_len
    if num_blocks:
        fields["kv_cache_tokens"] = num_blocks * config.block_size
    if mine:
        fields["scheduler"] = str(mine.path)
    return PROGRAM.format(
        question=(setting.question or outcome.label).replace("\\", "/").replace('"', "'"),
        package=outcome.milestone,
        requests="\n".join(f"    ({each}, {steps[f'r{index}']})," for index, each in requests),
        fields=fields,
        positions=MAX_MODEL_LEN,
    )
