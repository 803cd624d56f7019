"""The decoder of a model: the fused one with its weights, or Hugging Face's modules.

Weights that change when they are loaded - quantized, or cut for tensor parallelism - are never in
memory as a whole. Such a model is loaded without weights, which are then read from its files.

A ready model may do what neither its config nor its weights say, by hooks or modules of its own. So
the decoder's logits are compared with the model's, for prompts of a few tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from transformers import PreTrainedModel

from m5_kernels.kernels.cuda_graph import GraphMemory
from m5_kernels.kernels.launch import Launch
from m5_kernels.kernels.step_metadata import StepMetadata
from m5_kernels.kernels.triton_or_twin import next_power_of_2
from milestone_llm.core.errors import InputError
from milestone_llm.models.checkpoint import locate
from milestone_llm.models.hub_files import safetensors_files
from milestone_llm.models.loading_info import check_files, check_unread, is_passed_over
from milestone_llm.models.pretrained import has_bar, has_weights
from milestone_llm.models.shapes import PREFIX
from milestone_llm.models.support import known_logits, relative_error

from .attention import Attention
from .config import DecoderConfig, is_fusible, rope_tables
from .decoder import FusedDecoder, KVCaches
from .hf_decoder import HFDecoder
from .module_weights import ModuleWeights
from .ops import DecoderOps
from .shard import Shard
from .weights import read_model, read_safetensors

Decoder = FusedDecoder | HFDecoder

_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.03}
"""How far logits of the same weights may be apart (`relative_error`). The most that was seen is
0.08 in bf16. Another activation in one of two layers makes 0.12, a hook 0.3 to 2."""

log = logging.getLogger(__name__)


def load_decoder(
    source: str | PreTrainedModel,
    model: PreTrainedModel,
    max_model_len: int,
    device: torch.device,
    ops: DecoderOps,
    shard: Shard | None = None,
    weights: Iterable[tuple[str, Any]] | None = None,
    decoder_class: type[Decoder] = FusedDecoder,
    *,
    is_whole: bool = True,
    graphs: Launch | None = None,
) -> Decoder:
    """Return the fused decoder of `model`, or, with a warning, Hugging Face's modules as a decoder.

    Args:
        is_whole: weights are neither cut nor rounded, so that Hugging Face's modules could compute.
        graphs: how the steps are launched that CUDA graphs will hold; None: there are no graphs.
        others: as `load_fused_decoder` takes them.

    Raises:
        InputError: the fused decoder knows the model and lacks one of its weights, or it does not
            know the model and the weights are not whole.
    """
    reason = "so it was chosen"
    if not issubclass(decoder_class, HFDecoder):
        try:
            return load_fused_decoder(
                source, model, max_model_len, device, ops, shard, weights, decoder_class
            )
        except InputError as error:
            is_known = model is not source and is_fusible(model.config)
            if is_known or not is_whole:
                raise
            reason = str(error)
    decoder = HFDecoder(model, ops)
    check_logits(decoder, model, 0.2)
    if graphs is not None:
        try:
            check_graph(decoder, model, graphs)
            decoder = decoder.in_graphs()
        except InputError as error:
            reason += f"; no CUDA graph holds them: {error}"
    log.warning("%s compute this model, more slowly: %s", decoder.name, reason)
    return decoder


def load_fused_decoder(
    source: str | PreTrainedModel,
    model: PreTrainedModel,
    max_model_len: int,
    device: torch.device,
    ops: DecoderOps,
    shard: Shard | None = None,
    weights: Iterable[tuple[str, Any]] | None = None,
    decoder_class: type[FusedDecoder] = FusedDecoder,
) -> FusedDecoder:
    """Return the fused decoder of `model`, with its weights.

    Args:
        source: what `model` was loaded from, or `model` itself if the caller passed it in. The
            weights of a model that the caller owns are copied; others are moved.
        model: with weights, or without any.
        weights: loaded instead of those of `source`, in the form that `FusedDecoder.load` takes.
        decoder_class: computes the model's family.

    Raises:
        InputError: the decoder does not know the model or one of its weights, or lacks one, or
            `model` is the caller's and computes something else.
    """
    is_there = has_weights(model)
    config = DecoderConfig.of_model(model) if is_there else DecoderConfig.from_hf(model.config)
    cos_sin = rope_tables(model.config, max_model_len)
    decoder = decoder_class(config, cos_sin, model.dtype, device, ops, shard)
    if weights is not None:
        decoder.load(weights)
        if _logits_of(decoder, [torch.tensor([0])])[0].isnan().all():
            raise InputError(f"cannot load {source}: its weights give only NaN for logits")
    elif is_there:
        decoder.load(read_model(model, consume=model is not source))
        if model is source:
            of_dtype = _TOLERANCE.get(decoder.dtype, 2e-3)
            check_logits(decoder, model, decoder.ops.linear.most_error or of_dtype)
    else:
        _read_files(decoder, str(source), model)
    return decoder


def check_logits(decoder: Decoder, model: PreTrainedModel, tolerance: float) -> None:
    """Compare a decoder's logits with those of the model whose weights it has.

    Raises:
        InputError: the logits differ by more than the tolerance.
    """
    known = known_logits(model)
    max_positions = decoder.max_positions if isinstance(decoder, FusedDecoder) else None
    logits, metadata = _logits_of(decoder, [prompt[:max_positions] for prompt, _ in known])
    error = _error(logits, metadata, known)
    if not error <= tolerance:
        raise InputError(
            "the decoder knows a model's config and weights, and this one computes "
            f"something else: a hook, or a module of its own (relative error {error:.2g})"
        )


def _logits_of(decoder: Decoder, prompts: list[torch.Tensor]) -> tuple[torch.Tensor, StepMetadata]:
    """Return a decoder's logits `[num_tokens, vocab_size]` of new requests, and their step."""
    metadata, caches = _step_of_prompts(decoder, prompts)
    no_gpu = torch.device("cpu")  # twins need no workspace
    attend = Attention(decoder.attention_shape, len(prompts), decoder.dtype, no_gpu)
    twins = Launch(uses_twins=True)  # nothing waits for a compiler
    hidden = decoder.forward(metadata.input_ids, metadata, caches, attend, twins)
    return decoder.logits(hidden, twins), metadata


@torch.inference_mode()
def check_graph(decoder: HFDecoder, model: PreTrainedModel, launch: Launch) -> None:
    """Check that a step of a decoder, captured with other tokens, gives the model's logits.

    Raises:
        InputError: it does not, or cannot be captured; the message has the reason.
    """
    known = known_logits(model)
    metadata, caches = _step_of_prompts(decoder, [prompt for prompt, _ in known])
    attend = Attention(decoder.attention_shape, len(known), decoder.dtype, decoder.device)

    def compute() -> torch.Tensor:
        hidden = decoder.forward(metadata.input_ids, metadata, caches, attend, launch)
        return decoder.logits(hidden, launch)

    input_ids = metadata.input_ids.clone()
    metadata.input_ids.copy_(input_ids.flip(0))
    compute()  # kernels are compiled, and the library allocates what it needs
    try:
        graph, logits = GraphMemory().capture(compute)
    except RuntimeError as error:
        raise InputError(str(error).splitlines()[0]) from error
    metadata.input_ids.copy_(input_ids)
    graph.replay()
    distance = _error(logits, metadata, known)
    if not distance <= 0.2:
        raise InputError(f"it gave other logits than the modules (relative error {distance:.2g})")


def _error(
    logits: torch.Tensor, metadata: StepMetadata, known: list[tuple[torch.Tensor, torch.Tensor]]
) -> float:
    """Return how far logits of prompts are from the known ones, for the worst prompt."""
    computed = logits.split(metadata.context_lens.tolist())
    errors = [
        relative_error(own.to(expected.device), expected[: len(own)])
        for own, (_, expected) in zip(computed, known, strict=True)
    ]
    return float(torch.tensor(errors).max())  # NaN, if any is NaN


def _step_of_prompts(
    decoder: Decoder, prompts: list[torch.Tensor]
) -> tuple[StepMetadata, KVCaches]:
    """Return a step of new requests, and the caches that it fills: a KV block for each prompt."""
    device, lens = decoder.device, [len(prompt) for prompt in prompts]
    block_size = next_power_of_2(max(lens))
    caches = decoder.allocate_caches(len(prompts), block_size)

    def tensor(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    places = [(seq, position) for seq, num in enumerate(lens) for position in range(num)]
    none = tensor([0] * len(prompts))
    metadata = StepMetadata(
        input_ids=tensor([token for prompt in prompts for token in prompt.tolist()]),
        positions=tensor([position for _, position in places]),
        slot_mapping=tensor([seq * block_size + place for seq, place in places], torch.int64),
        context_lens=tensor(lens),
        query_start_loc=tensor([sum(lens[:seq]) for seq in range(len(lens) + 1)]),
        output_positions=none,
        decode_lens=none,
        block_table=tensor(list(range(len(prompts))))[:, None],
        first_chunk=tensor([0]),
        num_chunks=len(prompts),
    )
    return metadata, caches


def _read_files(decoder: FusedDecoder, source: str, model: PreTrainedModel) -> None:
    """Read the weights that `source` names, each with the part that is kept here.

    Weights that the decoder does not know are treated as Hugging Face's loader treats them.

    model: of Hugging Face, without weights.
    """
    place, _ = locate(source)
    if place.startswith(PREFIX) and not Path(place).is_dir():
        decoder.load_randomly()
        return
    files = safetensors_files(place)
    known = {*decoder.slices(), "lm_head.weight"}

    def full_name(name: str) -> str:
        """Return a name with its prefix, which some files, those of GPT-2 for one, leave out."""
        full = f"{model.base_model_prefix}.{name}"
        return full if decoder.name_of(full) in known else name

    def read() -> Iterable[tuple[str, Any]]:
        return decoder.ops.linear.joined(read_safetensors(files))

    try:
        modules = ModuleWeights(model, [name for name, _ in read()])
        names = {full_name(name) for name in modules.names}
        check_files(source, files, model.config)
    except SafetensorError as error:
        raise InputError(
            f"cannot load {source}: a safetensors file is damaged ({error})"
        ) from error
    names_there = model.state_dict().keys()  # the decoder refuses what it alone does not know
    unread = {name for name in names - names_there if decoder.name_of(name) not in known}
    check_unread(source, {name for name in unread if not is_passed_over(name, model)}, model)
    named = ((full_name(name), weight) for name, weight in modules.read(read()))
    wanted: Iterable[tuple[str, Any]] = (each for each in named if each[0] not in unread)
    if has_bar(files):
        wanted = track(wanted, f"Loading {place}", console=Console(stderr=True), total=len(names))
    decoder.load(wanted)
