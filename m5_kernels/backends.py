"""What computes a step: the lesson's objects, or an extra's in their place.

    lesson            Triton kernels; linear layers by the library, one row by `skinny_linear`
    devices           on a CPU, torch's own kernels; on a GPU, linear layers of few rows, prefill of
                      long chunks, tokens to the host
    families          norms, activations and ropes that llama has not
    quantization      weights of 8 or 4 bits                       `quantization`
    experts           an MLP of many, of which a token meets some   the model
    tensor_parallel   a part of each layer, sums over all GPUs     `tensor_parallel_size`
    spec_decode       a runner that verifies draft tokens          `speculation`
    batch_invariant   sums in an order that no other request changes  `batch_invariant`

This is the only file that names an extra, and an extra is imported when it is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from milestone_llm.core.errors import InputError
from milestone_llm.frontend.step_log import BeginFigures

from .config import EngineConfig
from .decoder.attention import AttentionShape
from .decoder.config import DecoderConfig, has_experts, is_fusible
from .decoder.decoder import FusedDecoder
from .decoder.load import Decoder
from .decoder.ops import LESSON, DecoderOps
from .group import Group
from .kernels.launch import PLAIN, Launch
from .kernels.triton_or_twin import runs_no_kernels
from .runner import ModelRunner
from .to_host import CopyToHost, copy_to_host


@dataclass(frozen=True)
class Backend:
    """The parts of a decoder, its steps and its runner. The defaults are the lesson's."""

    ops: DecoderOps = LESSON
    launch: Launch = PLAIN
    copy: CopyToHost = copy_to_host
    runner: Any = ModelRunner
    """A class with the arguments of `ModelRunner`."""
    decoder: type[Decoder] = FusedDecoder
    may_use_modules: bool = True
    """Whether Hugging Face's modules may compute a model that `decoder` does not know."""
    weights: Iterable[tuple[str, Any]] | None = None
    """Loaded instead of the model's own weights, in the form that `FusedDecoder.load` takes."""
    begin_figures: BeginFigures | None = None
    """Reads figures of a step of the fused decoder, for its record."""
    scheduler_parts: Mapping[str, Any] | None = None
    """Arguments of M4's scheduler, in addition to those that it has in M4."""


def join_group(config: EngineConfig, model: object, fields: Mapping[str, object]) -> Group:
    """Return the group of processes that compute the model: this one, or one for each GPU.

    model, fields: the arguments of the engine, which must be the same in all processes.

    Raises:
        InputError: there are not as many processes as `tensor_parallel_size`.
    """
    if config.tensor_parallel_size == 1:
        return Group()
    from .extras.tensor_parallel.rank_group import RankGroup

    return RankGroup.join(config.tensor_parallel_size, config.device, model, fields)


def follow_rank_0(engine_class: Any, size: int, device: str | None) -> None:
    """Build the engines that rank 0 builds, and do with them what it does, until it leaves.

    size: of the tensor-parallel group; device: "cpu" keeps this rank from GPUs.
    """
    from .extras.tensor_parallel.ranks import Ranks

    Ranks.join(size, device).follow(engine_class)


def choose_backend(
    config: EngineConfig, source: object, model: PreTrainedModel, device: torch.device, group: Group
) -> Backend:
    """Return the backend for a configuration on this device.

    source: what `model` was loaded from. model: with or without its weights.

    Raises:
        InputError: the model or the device does not support the quantization that is asked for.
    """
    chosen = Backend(launch=Launch.on(device))
    if "fp8" in (config.quantization, config.kv_cache_dtype):
        _check_fp8(device)
    stored = None
    if config.quantization == "fp8":
        from .extras.quantization.fp8_checkpoint import take_scales

        stored = take_scales(source, model)
    if not runs_no_kernels(device):
        chosen = _gpu(chosen, config, model, device, group)
    elif group.size == 1:
        chosen = _cpu(chosen, config)
    if is_fusible(model.config):
        if has_experts(model.config):
            chosen = _experts(chosen, config, model, device)
        if not DecoderConfig.from_hf(model.config).is_lesson:
            chosen = _family(chosen, config, model, group)
    if config.batch_invariant:
        chosen = _batch_invariant(chosen, model, device)
    if config.quantization == "int8":
        chosen = _int8(chosen, model, device, group)
    elif config.quantization == "fp8":
        chosen = _fp8(chosen, model, device, stored)
    elif config.quantization == "gguf":
        chosen = _gguf(chosen, source, model, device)
    if group.size > 1:
        chosen = _tensor_parallel(chosen, config, model, device, group)
    if config.speculation:
        chosen = _spec_decode(chosen, config)
    return chosen


def is_pipelined(config: EngineConfig) -> bool:
    """Return whether a step is launched before the tokens of the one before are known."""
    return bool(config.async_scheduling) and not config.enforce_eager


def _cpu(lesson: Backend, config: EngineConfig) -> Backend:
    from .extras.devices.cpu_attention import CPUAttention
    from .extras.devices.cpu_linear import CPULinear
    from .extras.devices.cpu_ops import RopeAndWrite, add_norm, embed_norm

    ops = DecoderOps(
        linear=CPULinear(),
        embed_norm=embed_norm,
        rope_kv_write=RopeAndWrite(),
        attention=CPUAttention,
        add_norm=add_norm,
        last_norm=add_norm,
    )
    if config.kv_dtype is not None:  # only the twins read keys and values in other bits
        ops = replace(ops, rope_kv_write=lesson.ops.rope_kv_write, attention=lesson.ops.attention)
    return replace(lesson, ops=ops)


def _gpu(
    lesson: Backend,
    config: EngineConfig,
    model: PreTrainedModel,
    device: torch.device,
    group: Group,
) -> Backend:
    """Replace the parts for which this GPU has something faster."""
    from .extras.devices.few_rows_linear import FewRowsLinear
    from .extras.devices.hopper_chunks import hopper_attention
    from .extras.devices.hopper_prefill_tiles import runs_on_hopper
    from .extras.devices.write_to_host import write_to_host

    ops = replace(lesson.ops, linear=FewRowsLinear.on(device, may_start_early=group.size == 1))
    head_dim = AttentionShape.of(model).head_dim
    is_plain = config.kv_dtype is None
    if is_plain and runs_on_hopper(device, model.dtype, head_dim, config.block_size):
        ops = replace(ops, attention=hopper_attention)
    return replace(lesson, ops=ops, copy=write_to_host)


def _family(chosen: Backend, config: EngineConfig, model: PreTrainedModel, group: Group) -> Backend:
    from .extras.families.family_decoder import FamilyDecoder

    name = model.config.model_type
    if group.size > 1:
        raise InputError(f"tensor_parallel_size={group.size}: layers of {name} are not cut")
    if config.quantization == "gguf":
        raise InputError(f'quantization="gguf": matrices of {name} are not kept as in the file')
    return replace(chosen, decoder=FamilyDecoder)


def _experts(
    chosen: Backend, config: EngineConfig, model: PreTrainedModel, device: torch.device
) -> Backend:
    from .extras.experts.config import experts_config
    from .extras.experts.expert_load import RoutedExperts
    from .extras.experts.moe_mlp import CreateMLP

    if config.quantization is not None:
        name = f'quantization="{config.quantization}"'
        raise InputError(f"{name} knows no weights of experts, and {model.config.model_type} has")
    if config.tensor_parallel_size > 1:
        raise InputError(
            f"tensor_parallel_size={config.tensor_parallel_size}: the experts of "
            f"{model.config.model_type} are not cut"
        )
    experts = experts_config(model.config)
    guessed = config.num_rows_that_guess * (1 + config.num_speculative_tokens)
    max_tokens = max(config.max_num_batched_tokens, config.max_num_seqs, guessed)
    routing = experts.routing
    routed = RoutedExperts(
        experts.sparse_layers, max_tokens, routing.num_experts, routing.top_k, device
    )
    create = CreateMLP(experts, routed=routed)
    ops = chosen.ops
    if runs_no_kernels(device):
        from .extras.experts.cpu_experts import cpu_experts

        create = replace(create, compute=cpu_experts)
    elif DecoderConfig.from_hf(model.config).is_lesson:
        from .extras.experts.combine_norm import add_norm_of_pairs

        create = replace(create, returns_pairs=True)
        ops = replace(
            ops,
            add_norm=partial(add_norm_of_pairs, ops.add_norm),
            last_norm=partial(add_norm_of_pairs, ops.last_norm),
        )
    ops = replace(ops, mlp=create)
    return replace(chosen, ops=ops, begin_figures=routed.begin)


def _batch_invariant(chosen: Backend, model: PreTrainedModel, device: torch.device) -> Backend:
    _check_fusible(model, "batch_invariant=True")
    if has_experts(model.config):
        name = model.config.model_type
        raise InputError(f"batch_invariant=True: sums of the experts of {name} depend on the batch")
    if runs_no_kernels(device):
        from .extras.batch_invariant.cpu_invariant import CPU_INVARIANT

        return replace(chosen, ops=CPU_INVARIANT, may_use_modules=False)
    from .extras.batch_invariant.invariant_linear import InvariantLinear
    from .extras.batch_invariant.split_attention import SplitAttention

    ops = replace(chosen.ops, linear=InvariantLinear.on(device), attention=SplitAttention)
    return replace(chosen, ops=ops, may_use_modules=False)


def _int8(chosen: Backend, model: PreTrainedModel, device: torch.device, group: Group) -> Backend:
    from .extras.quantization.int8_method import Int8Linear

    _check_fusible(model, 'quantization="int8"')
    linear = Int8Linear()
    if runs_no_kernels(device) and group.size == 1:
        from .extras.quantization.cpu_int8 import CPU_INT8

        linear = CPU_INT8
    return replace(chosen, ops=replace(chosen.ops, linear=linear))


def _check_fp8(device: torch.device) -> None:
    """Refuse a GPU that has no numbers in e4m3."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise InputError(f'fp8 needs an Ada or Hopper GPU, this is {name}: quantization="int8"')


def _fp8(chosen: Backend, model: PreTrainedModel, device: torch.device, stored: Any) -> Backend:
    from .extras.quantization.fp8_linear import Fp8Linear, fp8_ops

    _check_fusible(model, 'quantization="fp8"')
    if model.dtype == torch.float16:
        raise InputError('quantization="fp8" returns products that float16 cannot hold: bfloat16')
    if runs_no_kernels(device) or not DecoderConfig.from_hf(model.config).is_lesson:
        linear = Fp8Linear(exact=chosen.ops.linear, stored=stored)
        return replace(chosen, ops=replace(chosen.ops, linear=linear))
    return replace(chosen, ops=fp8_ops(chosen.ops, stored))


def _gguf(chosen: Backend, source: object, model: PreTrainedModel, device: torch.device) -> Backend:
    from .extras.quantization.gguf_file import open_gguf
    from .extras.quantization.gguf_linear import GGUFLinear

    _check_fusible(model, 'quantization="gguf"')
    file = open_gguf(source, device)
    return replace(chosen, ops=replace(chosen.ops, linear=GGUFLinear(file=file)), weights=file)


def _check_fusible(model: PreTrainedModel, setting: str) -> None:
    """Refuse a setting for a model that Hugging Face's modules would compute."""
    try:
        DecoderConfig.from_hf(model.config)
    except InputError as error:
        raise InputError(f"{setting}: {error}") from None


def _tensor_parallel(
    chosen: Backend,
    config: EngineConfig,
    model: PreTrainedModel,
    device: torch.device,
    group: Group,
) -> Backend:
    from .extras.tensor_parallel.collectives import Collectives

    sums = Collectives(
        group.rank, group.size, model.config.hidden_size, config.max_num_seqs, model.dtype, device
    )
    ops = replace(
        chosen.ops,
        embed_norm=sums.embed_norm,
        add_norm=sums.add_norm,
        last_norm=sums.add_norm,
        all_logits=sums.all_logits,
    )
    return replace(chosen, ops=ops)


def _spec_decode(chosen: Backend, config: EngineConfig) -> Backend:
    from .extras.spec_decode.proposer import DeviceProposer
    from .extras.spec_decode.spec_decode_runner import SpecDecodeRunner

    parts: dict[str, Any] = {"can_guess": ModelRunner.can_run_ahead}
    if is_pipelined(config):  # the host does not know the tokens before a draft
        parts["proposer"] = DeviceProposer()
    return replace(chosen, runner=SpecDecodeRunner, scheduler_parts=parts)
