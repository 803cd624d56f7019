"""How many operators is a decode step, in Hugging Face's modules (M4) and in the fused decoder?

On a GPU an operator is a launch or more. Those that only look at memory otherwise are left out.
"""

from collections import Counter
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


def decode_step(package, watch) -> None:
    """Four requests, prefilled; then one step of four rows, watched."""
    engine = package.LLMEngine("tiny-qwen3", device="cpu", max_model_len=64)
    for first in range(4):
        params = SamplingParams(temperature=0.7, seed=first, max_tokens=4, ignore_eos=True)
        engine.add_request(list(range(5 + first, 20)), params)
    engine.step()
    with watch(engine):
        engine.step()


count = Count()
decode_step(m4_prefix_chunked, lambda engine: count)
print(f"M4  {count.num_operators} operators for {NUM_LAYERS} layers, embedding, head and sampling")

calls: Counter[str] = Counter()


class Calls:
    """Counts calls of the fused decoder's launchers."""

    def __init__(self, engine) -> None:
        self.decoder = engine.decoder

    def __enter__(self) -> None:
        places = [(one_gpu, name) for name in ("embed_rms_norm", "add_rms_norm")]
        places += [(self.decoder, "rope_kv_write"), (attention, "flash_decode")]
        places += [(products.F, "linear"), (products, "silu_mul")]
        places += [
            (device_step, "expand_step"),
            (sampler, "sample"),
            (device_step, "append_sampled"),
        ]
        self.patches = [patch.object(*place, self.counted(*place)) for place in places]
        for each in self.patches:
            each.start()

    def __exit__(self, *error) -> None:
        for each in self.patches:
            each.stop()

    @staticmethod
    def counted(module, name):
        """The launcher, counting."""
        launcher = getattr(module, name)

        def call(*args, **kwargs):
            calls[name] += 1
            return launcher(*args, **kwargs)

        return call


with patch("m5_kernels.engine.runs_no_kernels", return_value=False):  # the objects of a GPU
    decode_step(m5_kernels, Calls)
print(f"M5  {calls.total()} launchers, with graphs one launch:")
for name, number in calls.most_common():
    print(f"      {number:2d} x {name}")
