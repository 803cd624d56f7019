"""How many operators is a decode step, in Hugging Face's modules (M4) and in the fused decoder?

On a GPU an operator is a launch or more. Those that only look at memory otherwise are left out.
"""

from contextlib import ExitStack
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

import m4_prefix_chunked
import m5_kernels
from m1_single import SamplingParams
from m5_kernels import device_step, sampler
from m5_kernels.decoder import attention, one_gpu, products

NUM_LAYERS = 2  # of tiny-qwen3


class Count(TorchDispatchMode):
    """Counts operators that compute something."""

    num_operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Called with every operator."""
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        self.num_operators += not is_view
        return func(*args, **(kwargs or {}))


def prefilled(package):
    """An engine with four requests, whose next step decodes four rows."""
    engine = package.LLMEngine("tiny-qwen3", device="cpu", max_model_len=64)
    for first in range(4):
        params = SamplingParams(temperature=0.7, seed=first, max_tokens=4, ignore_eos=True)
        engine.add_request(list(range(5 + first, 20)), params)
    engine.step()
    return engine


engine, count = prefilled(m4_prefix_chunked), Count()
with count:
    engine.step()
print(f"M4  {count.num_operators} operators for {NUM_LAYERS} layers, embedding, head and sampling")

with patch("m5_kernels.engine.runs_no_kernels", return_value=False), ExitStack() as stack:
    engine = prefilled(m5_kernels)  # of the objects of a GPU
    calls = {
        name: stack.enter_context(patch.object(place, name, wraps=getattr(place, name)))
        for place, name in (
            (products.F, "linear"),
            (one_gpu, "add_rms_norm"),
            (engine.decoder, "rope_kv_write"),
            (attention, "flash_decode"),
            (products, "silu_mul"),
            (device_step, "expand_step"),
            (one_gpu, "embed_rms_norm"),
            (sampler, "sample"),
            (device_step, "append_sampled"),
        )
    }
    engine.step()
counts = {name: call.call_count for name, call in calls.items()}
print(f"M5  {sum(counts.values())} launchers, with graphs one launch:")
for name, number in counts.items():
    print(f"      {number:2d} x {name}")
