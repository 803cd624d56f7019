"""Names that programs written for vLLM use and no engine here has, each with what to use instead.

An argument whose value asks for nothing (`enable_lora=False`) is dropped. Any other value is
refused: a program that runs without what it asked for would be worse than an error.
"""

from __future__ import annotations

from typing import Any

from milestone_llm.core.unknown_names import refuse_unknown

ENGINE_INSTEAD = {
    "trust_remote_code": "code from a model's repository is never run",
    "enable_lora": "there are no adapters: merge the adapter into the model "
    "(peft's merge_and_unload) and give the folder",
    "lora_modules": "there are no adapters: merge the adapter into the model",
    "tensor_parallel_size": "m5_kernels cuts layers over several GPUs; m1 to m4 compute on one",
    "pipeline_parallel_size": "layers are cut over GPUs with tensor_parallel_size of m5_kernels",
    "data_parallel_size": "`python -m m5_kernels.serve --replicas N` starts several engines",
    "distributed_executor_backend": "start the program with torchrun (m5_kernels)",
    "enforce_eager": "only m5_kernels captures CUDA graphs",
    "quantization": 'm5_kernels has quantization="int8", "fp8" and "gguf"',
    "kv_cache_dtype": 'm5_kernels has kv_cache_dtype="fp8"; in m1 to m4 KV has the model\'s dtype',
    "speculative_config": 'speculation="ngram" and num_speculative_tokens=, from '
    "m4_prefix_chunked on",
    "num_speculative_tokens": "guesses are made from m4_prefix_chunked on",
    "enable_prefix_caching": "prefixes are cached from m4_prefix_chunked on",
    "enable_chunked_prefill": "prompts are computed in chunks from m4_prefix_chunked on",
    "gpu_memory_utilization": "KV memory is fitted to the GPU from m3_paged on",
    "block_size": "KV has blocks from m3_paged on",
    "swap_space": "swap_space_tokens, in tokens, from m3_paged on",
    "cpu_offload_gb": 'weights are not moved; quantization="int8" of m5_kernels halves them',
    "tokenizer_mode": "give a tokenizer, or its folder, as tokenizer=",
    "skip_tokenizer_init": "a model without tokenizer is served by token ids",
    "served_model_name": "an option of the server: --served-model-name",
    "chat_template": "the tokenizer's own is used: engine.tokenizer.chat_template",
    "download_dir": "the variable HF_HOME says where downloads are kept",
    "load_format": "safetensors, or a .gguf file as the model",
    "hf_overrides": "change config.json, or give a ready model",
    "rope_scaling": "change rope_parameters in config.json",
    "rope_theta": "change rope_parameters in config.json",
    "generation_config": "SamplingParams(...) alone says how tokens are sampled; the model's file "
    "says which end a text",
    "override_generation_config": "SamplingParams(...) alone says how tokens are sampled",
    "logits_processors": "SamplingParams has logit_bias, allowed_token_ids, bad_words and "
    "structured_outputs",
    "num_gpu_blocks_override": "kv_cache_tokens, in tokens, from m3_paged on",
    "kv_cache_memory_bytes": "kv_cache_tokens, in tokens, from m3_paged on",
    "kv_transfer_config": "keys and values stay in one engine; docs/disaggregation.md",
    "attention_backend": "m5_kernels chooses by the GPU",
    "enable_expert_parallel": "experts are computed on one GPU",
    "tokenizer_revision": "give the tokenizer as tokenizer=, also org/name@revision",
    "max_lora_rank": "there are no adapters: merge the adapter into the model",
    "max_loras": "there are no adapters: merge the adapter into the model",
    "enable_prompt_embeds": "a prompt is text or token ids",
    "tool_call_parser": "the server reads calls in the form of the model's chat template",
    "enable_sleep_mode": "drop the engine: its memory is freed",
    "hf_token": "the variable HF_TOKEN, or `hf auth login`",
    "max_seq_len_to_capture": "m5_kernels captures a decode step of every length",
    "compilation_config": "m5_kernels compiles its kernels when it is built",
    "disable_log_stats": "engine.stats() is asked; nothing is logged",
    "scheduling_policy": "policy, from m2_batching on",
    "max_logprobs": "all log-probabilities may be asked for",
    "task": "models generate text; there is no other task",
    "runner": "models generate text; a runner takes the place of the engine's own ModelRunner",
    "limit_mm_per_prompt": "models take text alone",
    "mm_processor_kwargs": "models take text alone",
    "reasoning_parser": "the text comes as the model writes it",
    "structured_outputs_config": "llguidance is the only backend",
    "guided_decoding_backend": "llguidance is the only backend",
    "async_scheduling": "m5_kernels runs ahead; m1 to m4 settle each step",
}
"""Arguments of vLLM's `LLM`. Those that a later milestone has are refused in the earlier ones."""

ENGINE_ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "trust_remote_code": (False,),
    "enable_lora": (False,),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "enforce_eager": (True, False),  # m1 to m4 are eager; nothing is captured either way
    "kv_cache_dtype": ("auto",),
    "generation_config": ("vllm",),
    "enable_expert_parallel": (False,),
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (False,),
    "enable_prefix_caching": (False,),
    "enable_chunked_prefill": (False,),
    "swap_space": (0,),
    "cpu_offload_gb": (0,),
    "tokenizer_mode": ("auto",),
    "skip_tokenizer_init": (False,),
    "load_format": ("auto", "safetensors"),
    "disable_log_stats": (True, False),
    "async_scheduling": (False,),
    "task": ("auto", "generate"),
}
"""Values, besides None, with which arguments of vLLM's `LLM` change nothing."""

ARGUMENTS_INSTEAD = {
    "lora_request": "there are no adapters: merge the adapter into the model",
    "prompt_token_ids": 'prompts: [5, 6] or {"prompt_token_ids": [5, 6]}',
    "priority": "add_request(prompt, sampling_params, priority=0), one by one",
    "params": "sampling_params",
    "tokenization_kwargs": "give the prompt as token ids",
    "mm_processor_kwargs": "models take text alone",
    "chat_template": "the tokenizer's own is used: set engine.tokenizer.chat_template",
    "chat_template_content_format": "a content is a text or a list of parts",
    "add_generation_prompt": "a chat is always a prompt for the next answer",
    "continue_final_message": "render the beginning of the answer yourself, and generate from text",
    "guided_options_request": "structured_outputs of SamplingParams",
}
"""Arguments of the methods `generate`, `chat` and `add_request` of vLLM's engines."""

ARGUMENTS_ASK_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "chat_template_content_format": ("auto", "string", "openai"),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Values, besides None, with which these arguments change nothing."""

METHODS_INSTEAD = {
    "get_tokenizer": "engine.tokenizer",
    "get_default_sampling_params": "SamplingParams(...)",
    "beam_search": "n completions with temperature above 0",
    "encode": "models generate text; there are no embeddings",
    "embed": "models generate text; there are no embeddings",
    "classify": "models generate text; there are no classes",
    "score": "prompt_logprobs of SamplingParams",
    "reward": "models generate text; there are no rewards",
    "sleep": "drop the engine: its memory is freed",
    "wake_up": "build the engine again",
    "shutdown": "drop the engine: its memory is freed",
    "abort_request": "engine.abort(request_id)",
    "get_metrics": "engine.stats()",
    "start_profile": "trace= and torch.profiler",
    "stop_profile": "trace= and torch.profiler",
    "collective_rpc": "engine.runner",
    "apply_model": "engine.model",
    "llm_engine": "LLM is LLMEngine: the engine itself",
    "get_num_unfinished_requests": "len(engine.requests)",
}
"""Names of vLLM's `LLM` and `LLMEngine` that the engine lacks, with what to use."""


def asks_for_nothing(
    name: str,
    value: Any,
    names: dict[str, str] = ENGINE_INSTEAD,
    empty: dict[str, tuple[Any, ...]] = ENGINE_ASKS_FOR_NOTHING,
) -> bool:
    """Return whether an argument of vLLM's has a value with which it changes nothing. The defaults
    are for arguments of `LLM`."""
    return name in names and (value is None or value in empty.get(name, ()))


def refuse_arguments(method: str, given: dict[str, Any], *known: str) -> None:
    """Refuse arguments of a method that vLLM's has, unless their values ask for nothing.

    Raises:
        InputError: names the argument, and what to use instead.
    """
    asking = [
        name
        for name, value in given.items()
        if not asks_for_nothing(name, value, ARGUMENTS_INSTEAD, ARGUMENTS_ASK_FOR_NOTHING)
    ]
    refuse_unknown(asking, known, ARGUMENTS_INSTEAD, method, "argument")
