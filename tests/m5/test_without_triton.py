"""Where triton can't be installed the kernels are still there, as their torch twins."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_launchers_run_their_twins_without_triton() -> None:
    program = """
        import sys
        sys.modules["triton"] = None  # an import of it raises ImportError from here on
        import torch
        import m5_kernels.engine
        from m5_kernels.kernels import flash_decode, triton_or_twin
        from m5_kernels.tools.measure import PagedBatch
        assert not triton_or_twin.HAS_TRITON
        batch = PagedBatch.random([5, 9], [1, 1], 2, 1, 16, 4, torch.float32, "cpu")
        output = flash_decode.flash_decode(
            batch.query, batch.key_cache, batch.value_cache, batch.block_table, batch.context_lens
        )
        assert output.isfinite().all()
        try:
            flash_decode._flash_decode_kernel[(1,)]()
        except RuntimeError as error:
            print(error)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "triton is not installed" in result.stdout
