"""When kernels may start: what a launch says. Whether they wait: `test_other_gpus.py`, a GPU."""

from __future__ import annotations

import pytest
import torch

from m5_kernels.decoder.load import load_fused_decoder
from m5_kernels.decoder.ops import DecoderOps
from m5_kernels.extras.devices.few_rows_linear import FewRowsLinear
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import EARLY, LATE, NEVER
from milestone_llm.models.tiny_models import build_tiny_model

EARLY_LAUNCH = Launch(pdl=EARLY)


def test_a_kernel_starts_as_early_as_the_step_wants_and_as_it_knows() -> None:
    assert PLAIN.pdl_options() == {"PDL": NEVER}
    assert EARLY_LAUNCH.pdl_options() == {"PDL": EARLY, "launch_pdl": True}
    assert EARLY_LAUNCH.pdl_options(most=LATE) == {"PDL": LATE, "launch_pdl": True}
    assert EARLY_LAUNCH.pdl_options(waits_for_launch=True) == {"PDL": EARLY}


def test_layers_start_early_where_their_products_are_short() -> None:
    small, large = (torch.empty(n, 1024, dtype=torch.bfloat16, device="meta") for n in (6144, 9000))
    linear = FewRowsLinear(has_register=True)
    assert linear.starts_early(16, small)
    assert not linear.starts_early(17, small)
    assert not linear.starts_early(16, large)
    assert linear.starts_early(1, large)
    assert not FewRowsLinear(has_register=True, may_start_early=False).starts_early(16, small)


@pytest.mark.parametrize("pdl", [NEVER, LATE])
def test_a_decoder_launches_early_where_that_pays_and_the_gpu_can(pdl: int) -> None:
    linear = FewRowsLinear(has_register=True)
    model = build_tiny_model("llama").bfloat16()
    ops = DecoderOps(linear=linear)
    decoder = load_fused_decoder(model, model, 16, torch.device("cpu"), ops)
    assert decoder.timed(Launch(pdl), 1).pdl == (EARLY if pdl else NEVER)
    assert decoder.timed(Launch(pdl), 17).pdl == pdl
