"""Experts of all families against Hugging Face's modules, and what an engine makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import m4_prefix_chunked
import m5_kernels
from helpers.engines import greedy, hf_generate, make_engine, random_prompts
from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.decoder.linear import LinearMethod
from m5_kernels.decoder.shard import Shard
from m5_kernels.decoder.weights import read_model, slices_of_weights
from m5_kernels.extras.experts.config import FAMILIES, experts_config
from m5_kernels.extras.experts.cpu_experts import cpu_experts
from m5_kernels.extras.experts.grouped import experts_torch
from m5_kernels.extras.experts.moe_mlp import MoEMLP
from m5_kernels.extras.experts.routing import route_torch
from m5_kernels.extras.experts.swiglu import ClampedSwiGLU
from m5_kernels.kernels.launch import PLAIN
from milestone_llm.core.errors import InputError
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.models.tiny_models import TINY_FAMILIES, VOCAB_SIZE, build_tiny_model
from milestone_llm.trace.tracer import Tracer

FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 11, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 11},
}
FIELDS["dots1"] = FIELDS["glm4_moe"]


def small_model(family: str) -> Any:
    """A model of three layers with random weights, biases and corrections of scores included."""
    fields = {**TINY_FAMILIES["llama"], "num_hidden_layers": 3, "initializer_range": 0.25}
    config = AutoConfig.for_model(family, **fields, **FIELDS[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in (*model.named_buffers(), *model.named_parameters()):
        if "bias" in name:  # gates and ups beyond their limits
            weight.data.normal_(std=4.0 if "gate_up_proj" in name else 0.3)
    return model.requires_grad_(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_computes_what_hugging_faces_module_does(family: str) -> None:
    model = small_model(family)
    experts = experts_config(model.config)
    layers = [getattr(each, experts.block) for each in model.model.layers]
    sparse = {index for index, layer in enumerate(layers) if hasattr(layer, "experts")}
    assert sparse == experts.sparse_layers
    index, config = (
        max(sparse),
        replace(DecoderConfig.from_hf(build_tiny_model("llama").config), intermediate_size=0),
    )
    mlp = MoEMLP.create(index, experts, config, LinearMethod(), torch.float32, "cpu")
    prefix = f"model.layers.{index}.mlp"
    slices = slices_of_weights(mlp.stored(prefix, config), config, Shard())
    stored = dict(read_model(model, consume=False))
    for name, own in slices.items():
        assert own.shape == tuple(stored[name].shape), name
        own.target.copy_(own.convert(stored[name]) if own.convert else stored[name])
    ours = f"model.layers.{index}.{experts.block}."
    assert {name for name in stored if name.startswith(ours)} == slices.keys()
    hidden = torch.randn(9, config.hidden_size)
    expected = layers[index](hidden[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(
        mlp(hidden, LinearMethod(), PLAIN), expected[0], atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(("size", "dtype"), [(24, "float32"), (33, "float32"), (24, "bfloat16")])
@pytest.mark.parametrize("num_tokens", [1, 30])
def test_torchs_grouped_product_is_its_twin(num_tokens: int, size: int, dtype: str) -> None:
    torch.manual_seed(1)
    gate_up, down = torch.randn(7, 2 * size, 40) / 6, torch.randn(7, 40, size) / 5
    hidden, shared = torch.randn(2, num_tokens, 40)
    topk_ids = torch.rand(num_tokens, 6).topk(2, -1)[1].int()  # the last expert is not met
    topk_weights = torch.rand(num_tokens, 2)
    kind = getattr(torch, dtype)
    biases = (torch.randn(7, 2 * size) * 2).to(kind), torch.randn(7, 40).to(kind)
    swiglu = ClampedSwiGLU(1.702, 1.5)  # some gates and ups are beyond the limit
    cases: list[tuple[Any, ...]] = [(None,), (shared,), (None, *biases, swiglu)]
    for extra, *more in cases:
        inputs = hidden.to(kind), gate_up.to(kind), down.to(kind)
        added = None if extra is None else extra.to(kind)
        expected = experts_torch(*inputs, topk_ids, topk_weights, added, *more)
        clone = None if added is None else added.clone()
        found = cpu_experts(*inputs, topk_ids, topk_weights, clone, *more)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_gives_the_tokens_of_hugging_faces_modules(family: str) -> None:
    model, prompts = small_model(family), random_prompts([5, 17, 40, 9])
    params = [SamplingParams(max_tokens=8, temperature=t, seed=1, n=n) for t, n in SAMPLING]
    fields: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 20}
    m4 = make_engine(m4_prefix_chunked, model, **fields, max_num_seqs=2)
    expected = [[each.token_ids for each in out.outputs] for out in m4.generate(prompts, params)]
    for speculation in (None, "ngram"):
        fields |= {"kv_cache_tokens": 160, "block_size": 4, "speculation": speculation}
        engine = make_engine(m5_kernels, model, **fields, device="cpu")
        assert any(isinstance(layer.mlp, MoEMLP) for layer in engine.decoder.layers)
        for _ in range(2):  # the second time from the prefix cache
            found = engine.generate(prompts, params)
            assert [[each.token_ids for each in out.outputs] for out in found] == expected


def test_gpt_oss_where_each_layer_keeps_its_blocks() -> None:
    """Chunks, preemption, cache hits. `tests/m4/test_hybrid.py` has the same with groups."""
    model, prompts = small_model("gpt_oss"), random_prompts([12, 10, 3, 61, 17, 80])
    prompts.append([*prompts[3][:50], 7, 7])
    expected = [hf_generate(model, each, 8, eos_token_id=VOCAB_SIZE) for each in prompts]
    engine = make_engine(
        m5_kernels, model, max_model_len=100, block_size=4, kv_cache_tokens=136,
        max_num_batched_tokens=12, max_num_seqs=9, disable_hybrid_kv_cache_manager=True,
    )  # fmt: skip
    for _ in range(2):
        found = engine.generate(prompts, greedy(8))
        assert [each.token_ids for each in found] == expected
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert stats["prefix_cache"]["saved_tokens"] > 0


@pytest.mark.parametrize(
    ("family", "speculation"),
    [("qwen3_moe", None), ("qwen3_moe", "ngram"), ("ernie4_5_moe", None)],  # the last: layers 1, 2
)
def test_a_trace_tells_which_experts_a_step_met(
    family: str, speculation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[torch.Tensor] = []

    plain = MoEMLP.__call__

    def watched(mlp: MoEMLP, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        logits = hidden.float() @ mlp.router.float().T
        met.append(route_torch(logits, mlp.config.routing, mlp.bias)[0])
        return plain(mlp, hidden, *rest)

    monkeypatch.setattr(MoEMLP, "__call__", watched)
    engine = make_engine(
        m5_kernels, small_model(family), device="cpu", max_num_batched_tokens=20, block_size=4,
        max_model_len=64, speculation=speculation, trace="memory",
    )  # fmt: skip
    met.clear()
    params = [SamplingParams(max_tokens=n, temperature=0) for n in (15, 12, 12, 12)]
    engine.generate([[5, 6] * 4, *random_prompts([17, 40, 9])], params)
    num_layers = len(experts_config(engine.model.config).sparse_layers)
    steps = [met[first : first + num_layers] for first in range(0, len(met), num_layers)]
    guessed = 0
    for record, layers in zip(engine.tracer.records, steps, strict=True):
        guessed += sum(row.num_draft_tokens for row in record.batch)
        load, num_met = record.expert_load, [len(ids.unique()) for ids in layers]
        assert load["num_experts"] == 8
        assert load["num_met"] == pytest.approx(sum(num_met) / num_layers, abs=0.01)
        largest = max(int(ids.flatten().bincount().max()) for ids in layers)
        assert load["largest_share"] == pytest.approx(largest / layers[0].numel(), abs=1e-4)
    assert bool(guessed) == bool(speculation)


def test_only_recorded_steps_are_counted() -> None:
    engine = make_engine(m5_kernels, small_model("qwen3_moe"), device="cpu")
    counted: list[Any] = []
    engine.step_log.begin_figures = counted.append
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0))
    assert counted == []


@pytest.mark.gpu
def test_graphs_leave_the_experts_that_were_met() -> None:
    """The rows fill no bucket, and the tracer is added after graphs were captured."""
    loads = []
    for enforce_eager in (True, False):
        model, fields = small_model("qwen3_moe").cuda(), {"enforce_eager": enforce_eager}
        engine = make_engine(m5_kernels, model, max_num_batched_tokens=80, **fields)
        engine.warm_up()
        tracer = Tracer()
        engine.step_log.watch(tracer)
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        engine.generate(random_prompts([50, 17, 40, 60]), params)
        loads.append({record.step: record.expert_load for record in tracer.records})
    assert all(loads[0].values())
    assert loads[0] == loads[1]


SAMPLING = [(0.0, 1), (0.8, 1), (0.0, 1), (0.8, 2)]


def test_a_checkpoint_names_experts_one_by_one_or_all_together(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    model, params = small_model("qwen3_moe"), SamplingParams(max_tokens=5, temperature=0)
    expected = make_engine(m5_kernels, model).generate([[5, 6, 7]], params)[0].token_ids
    model.save_pretrained(tmp_path / "each")
    names = load_file(tmp_path / "each" / "model.safetensors")
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in names
    together = dict(model.state_dict())
    model.config.save_pretrained(tmp_path / "all")
    save_file(together, tmp_path / "all" / "model.safetensors", {"format": "pt"})
    for form in ("each", "all"):
        engine = make_engine(m5_kernels, str(tmp_path / form))
        assert engine.generate([[5, 6, 7]], params)[0].token_ids == expected, form


@pytest.mark.parametrize("family", FAMILIES)
def test_files_that_are_read_in_parts_may_name_experts_one_by_one(
    family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a model that is larger than the host's memory. Experts of a layer are in many files."""
    model, params = small_model(family), SamplingParams(max_tokens=5, temperature=0)
    expected = make_engine(m5_kernels, model).generate([[5, 6, 7]], params)[0].token_ids
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 3
    monkeypatch.setattr("m5_kernels.engine.is_read_in_parts", lambda *given: True)
    engine = make_engine(m5_kernels, str(tmp_path))
    assert engine.generate([[5, 6, 7]], params)[0].token_ids == expected


def test_a_missing_expert_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file, save_file

    small_model("qwen3_moe").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    monkeypatch.setattr("m5_kernels.engine.is_read_in_parts", lambda *given: True)
    for part in ("up_proj", "down_proj"):
        left = {
            name: each for name, each in weights.items() if f"1.mlp.experts.7.{part}" not in name
        }
        save_file(left, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(InputError, match=r"layers.1.mlp.experts.*(do not fit|has shape)"):
            make_engine(m5_kernels, str(tmp_path))


@pytest.mark.parametrize("quantization", ["int8", "gguf"])
def test_weights_of_experts_are_not_quantized(quantization: str) -> None:
    with pytest.raises(InputError, match=f"{quantization}.*qwen3_moe"):
        m5_kernels.LLMEngine(build_tiny_model("qwen3-moe"), device="cpu", quantization=quantization)
