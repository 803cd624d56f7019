"""Helpers for tests of M5: unusual tiny models, work for engines, graphs on a CPU."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from m5_kernels import EngineConfig
from m5_kernels.backends import Backend
from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.decoder.load import load_fused_decoder
from m5_kernels.decoder.ops import DecoderOps
from m5_kernels.device_state import DeviceState, StepSeq
from m5_kernels.device_step import DeviceStep
from m5_kernels.extras.devices.few_rows_linear import FewRowsLinear
from m5_kernels.extras.families.family_decoder import FamilyDecoder
from m5_kernels.extras.quantization.int8_method import Int8Linear
from m5_kernels.extras.spec_decode.spec_decode_runner import SpecDecodeRunner, SpecDecodeStep
from m5_kernels.group import Group
from m5_kernels.kernels.step_metadata import RowState, StepMetadata
from m5_kernels.sampler import SamplingFeatures
from m5_kernels.step_graphs import StepGraphs, StepShape
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.models.tiny_models import VOCAB_SIZE, build_tiny_model


def with_biases(family: str, **overrides: Any) -> Any:
    """Return a tiny model whose biases are not zero."""
    model = build_tiny_model(family, **overrides)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.linspace(-0.5, 0.5, len(parameter))
    return model


def rounded(model: Any) -> Any:
    """Return a copy whose matrices are rounded to eight bits, by arithmetic only."""
    model = copy.deepcopy(model)
    head = model.lm_head.weight.data.clone()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.data
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).to(weight.dtype)
            scale[scale == 0] = 1  # the row of a padding token
            module.weight.data = (weight.float() / scale.float()).round().to(weight.dtype) * scale
    return model


BLOCK_SIZE = 4


def fused(model, device="cpu", max_positions=64, ops=None):
    """Return the fused decoder of a ready model, which keeps its weights."""
    is_lesson = DecoderConfig.from_hf(model.config).is_lesson
    return load_fused_decoder(
        model, model, max_positions, torch.device(device), ops or DecoderOps(),
        decoder_class=FusedDecoder if is_lesson else FamilyDecoder,
    )  # fmt: skip


def ops_of(device, is_int8):
    """What the engine gives a decoder on this device."""
    linear = Int8Linear() if is_int8 else FewRowsLinear.on(torch.device(device))
    return DecoderOps(linear=linear)


def logits_of_steps(model, ids, device, is_int8):
    """Logits of two sequences, computed in steps of every kind: prefill, chunks, decode, mixed."""
    model = copy.deepcopy(model).to(device)
    decoder = fused(model, device, ops=ops_of(device, is_int8))
    keys, values = zip(*decoder.allocate_caches(40, BLOCK_SIZE), strict=True)
    shape = SimpleNamespace(dtype=keys[0].dtype)
    cache = SimpleNamespace(
        group_of_layers=(), keys=keys, values=values, block_size=BLOCK_SIZE, shape=shape
    )
    state = DeviceState(2, 64, BLOCK_SIZE, decoder.config.vocab_size, torch.device(device))
    device_step = DeviceStep(decoder, cache, state, EngineConfig(max_num_seqs=2), 64)
    for seq, blocks in enumerate(torch.randperm(40)[:32].view(2, 16).tolist()):
        state.set("token_ids", seq, ids[seq].tolist())
        state.set("block_table", seq, blocks)
    computed, seen = [0, 0], [[], []]
    for lens in [(17, 0), (1, 6), (1, 1), (5, 1), (3, 20), (1, 1), (1, 0), (11, 11)]:
        order = sorted((seq for seq in (0, 1) if lens[seq]), key=lambda seq: lens[seq] > 1)
        for seq in order:
            state.set("num_computed_tokens", seq, [computed[seq]])
            computed[seq] += lens[seq]
        state.set_step([StepSeq(seq, lens[seq], False) for seq in order])
        state.flush()
        num_new = [lens[seq] for seq in order]
        num_decodes = num_new.count(1)
        shape = StepShape(sum(num_new), len(order), num_decodes, len(order) - num_decodes)
        hidden, _ = device_step.hidden(shape)
        logits = decoder.logits(hidden, device_step.launch).cpu().split(num_new)
        for seq, own in zip(order, logits, strict=True):
            seen[seq].append(own)
    assert computed == [40, 40]
    return [torch.cat(logits) for logits in seen]


def hf_logits(model, ids):
    """Hugging Face's logits of whole sequences, on the model's device."""
    mask = torch.ones_like(ids)
    return model(ids.to(model.device), attention_mask=mask.to(model.device)).logits


def circling(family: str = "llama", **overrides: Any) -> Any:
    """Return a tiny model that depends mostly on the last token, so that its texts repeat
    themselves."""
    model = build_tiny_model(family, **overrides)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.003
    return model


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.8,
    "presence_penalty": -1.1,
}
PENALTIES |= {"logit_bias": {7: 2.5, 30: -100, 31: 0.5}, "logprobs": 2}


def workload(
    seed: int = 1, vocab_size: int = VOCAB_SIZE, longest: int = 12
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return ten requests: shared prefixes, equal prompts, every kind of sampling and of
    stopping."""
    rng = random.Random(seed)
    base = [rng.randrange(vocab_size) for _ in range(48)]
    prompts, params = [], []
    for i in range(10):
        own = [rng.randrange(vocab_size) for _ in range(rng.choice([1, 5, 16, 30]))]
        prompts.append(base[: rng.choice([0, 8, 16, 32, 48])] + own)
        max_tokens = rng.randint(1, longest)
        special = {**PENALTIES, "min_tokens": min(3, max_tokens)} if i in (4, 7) else {}
        params.append(
            SamplingParams(
                temperature=0.8 if i % 2 else 0.0,
                seed=i * (2**40 + 1),  # all 64 bits of a seed count
                max_tokens=max_tokens,
                ignore_eos=i % 3 == 0,
                top_k=5 if i % 4 == 1 else 0,
                top_p=0.9 if i % 5 == 1 else 1.0,
                min_p=0.05 if i % 7 == 3 else 0.0,
                stop_token_ids=list(range(3, min(60, vocab_size), 8)) if i % 2 else [],
                prompt_logprobs=1 if i == 2 else None,
                n=2 if i in (5, 9) else 1,
                **special,
            )
        )
    prompts[3] = prompts[4] = base[:32]
    return prompts, params


def facts(output: Any) -> list[tuple[list[int], str, list[float]]]:
    """Return for each completion its tokens, finish reason and log-probabilities."""
    return [
        (
            each.token_ids,
            each.finish_reason,
            [p.logprob for step in each.logprobs or [] for _, p in sorted(step.items())],
        )
        for each in output.outputs
    ]


def nearly(found: list[tuple[list[int], str, list[float]]]) -> list[Any]:
    """Return the same facts, rounded."""
    return [(tokens, reason, pytest.approx(p, abs=1e-3)) for tokens, reason, p in found]


def same_metadata(
    kernel: Callable[..., None],
    twin: Callable[..., None],
    state: RowState,
    *arguments: torch.Tensor,
    num_tokens: int,
) -> StepMetadata:
    """Compute a step's metadata, as a kernel or its twin does. Memory is full of garbage before."""
    rows = arguments[-1]
    outputs = [
        StepMetadata.allocate(num_tokens, len(rows), state.block_table.shape[1], rows.device)
        for _ in range(2)
    ]
    names = [name for name, value in vars(outputs[0]).items() if torch.is_tensor(value)]
    for function, output in zip((kernel, twin), outputs, strict=True):
        for name in names:
            getattr(output, name).fill_(-77)
        function(state, *arguments, output)
    for name in names:
        assert torch.equal(*(getattr(output, name) for output in outputs)), name
    return outputs[0]


class RecomputedGraphs(StepGraphs):
    """No graphs: a replay computes the step, in buffers of garbage, so that padding shows.

    Args:
        capacity: number of graphs that fit into memory.
    """

    def __init__(
        self, step: DeviceStep | SpecDecodeStep, capacity: int = 1000, must: bool = True
    ) -> None:
        plain = step.plain if isinstance(step, SpecDecodeStep) else step
        super().__init__(plain.state.step_rows, step.compute, Group(), must=must)
        self.metadata, self.capacity = plain.metadata, capacity
        self.tried: list[tuple[StepShape, SamplingFeatures]] = []
        self.replayed: list[StepShape] = []

    def _capture(self, bucket: StepShape, needs: SamplingFeatures) -> Any:
        self.tried.append((bucket, needs))
        if len(self.tried) > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        tokens = torch.zeros(bucket.num_seqs, dtype=torch.int32)

        def replay() -> None:
            self.replayed.append(bucket)
            for name, value in vars(self.metadata).items():
                if torch.is_tensor(value) and name != "block_table":
                    value.fill_(2**20)
            # the tokens of the step before are still being read
            tokens.copy_(self.compute(bucket, needs))

        return SimpleNamespace(replay=replay), tokens


def with_recomputed_graphs(
    chosen: Backend, graphs: Callable[..., RecomputedGraphs] = RecomputedGraphs
) -> Backend:
    """Return a backend whose steps have such graphs, also on a CPU.

    Args:
        graphs: makes those of a step.
    """

    runner_class: Any = chosen.runner

    class Runner(runner_class):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if isinstance(self, SpecDecodeRunner):
                self.graphs = graphs(self.step)
                self.runner.graphs = graphs(self.runner.device_step)
            else:
                self.graphs = graphs(self.device_step)

    return replace(chosen, runner=Runner)
