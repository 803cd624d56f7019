"""The fused decoder against Hugging Face's modules: fp32 logits, paged cache, mixed steps."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from m1_single.tiny_models import build_tiny_model
from m5_kernels.attention import AttentionMetadata
from m5_kernels.decoder import DecoderConfig, FusedDecoder

BLOCK_SIZE = 4
VARIANTS = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2-some-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
}


def step(decoder, caches, tables, computed, chunks):
    """Logits of all tokens of a step; `chunks` maps a sequence to its new token ids."""
    order = sorted(chunks, key=lambda seq: len(chunks[seq]) > 1)  # decode rows first
    positions = [range(computed[seq], computed[seq] + len(chunks[seq])) for seq in order]
    slots = [
        int(tables[seq, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for seq, row in zip(order, positions, strict=True)
        for position in row
    ]
    lens = [len(chunks[seq]) for seq in order]
    device = decoder.embedding.device
    metadata = AttentionMetadata(
        positions=torch.tensor([x for row in positions for x in row], device=device),
        slot_mapping=torch.tensor(slots, device=device),
        block_table=tables[order].to(device),
        context_lens=torch.tensor([row.stop for row in positions]).int().to(device),
        query_start_loc=torch.tensor([0, *lens]).cumsum(0).int().to(device),
        num_decode_seqs=sum(length == 1 for length in lens),
    )
    ids = torch.cat([chunks[seq] for seq in order]).to(device)
    logits = decoder.logits(decoder.forward(ids, metadata, caches))
    for seq in order:
        computed[seq] += len(chunks[seq])
    return dict(zip(order, logits.cpu().split(lens), strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_equal_hugging_face_in_prefill_chunks_decode_and_mixed_steps(
    variant: str, device: str
) -> None:
    family, overrides = VARIANTS[variant]
    model = build_tiny_model(family, **overrides)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # zeros and ones would hide a missing one
            parameter.copy_(torch.randn_like(parameter) * 0.1 + 0.5)
    decoder = FusedDecoder.from_hf(model, max_positions=64, device=device)
    caches = decoder.allocate_caches(40, BLOCK_SIZE)
    tables = torch.randperm(40).int()[:30].view(2, 15)
    ids = torch.randint(3, 199, (2, 40))
    expected = [
        model(row[None], attention_mask=torch.ones(1, 40, dtype=torch.long)).logits[0]
        for row in ids
    ]
    computed, seen = [0, 0], [[], []]
    for lens in [(17, 0), (1, 6), (1, 1), (5, 1), (3, 20), (1, 1), (1, 0), (11, 11)]:
        chunks = {
            seq: ids[seq, computed[seq] : computed[seq] + length]
            for seq, length in enumerate(lens)
            if length
        }
        for seq, logits in step(decoder, caches, tables, computed, chunks).items():
            seen[seq].append(logits)
    for seq in range(2):
        logits = torch.cat(seen[seq])
        torch.testing.assert_close(logits, expected[seq][: len(logits)], rtol=1e-4, atol=1e-4)
    assert computed == [40, 40]


def test_folder_of_shards_gives_the_same_weights(tmp_path) -> None:
    model = build_tiny_model("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    first, second = FusedDecoder.from_hf(model), FusedDecoder.from_hf(tmp_path)
    for name, place in first._places().items():
        assert torch.equal(place, second._places()[name]), name
    assert torch.equal(first.cos_sin, second.cos_sin)


def test_a_consumed_model_gives_its_memory_back() -> None:
    model = build_tiny_model("llama")
    decoder = FusedDecoder.from_hf(model, consume=True)
    assert not any(parameter.numel() for parameter in model.parameters())
    assert decoder.embedding.isfinite().all()


@pytest.mark.parametrize(
    ("family", "overrides", "named"),
    [
        ("gemma3_text", {}, "gemma3_text"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
    ],
)
def test_unknown_features_are_refused_by_name(family: str, overrides: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DecoderConfig.from_hf(AutoConfig.for_model(family, **overrides))


def test_missing_and_unknown_weights_are_named() -> None:
    model = build_tiny_model("llama")
    decoder = FusedDecoder.from_hf(model)
    weights = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"no place for the weight model\.extra"):
        decoder.load([("model.extra", torch.ones(1))])
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        decoder.load(weights.items())
