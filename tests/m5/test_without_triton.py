"""Where triton can't be installed the kernels are still there, as their torch twins."""

from __future__ import annotations

import textwrap
from pathlib import Path

from helpers.forked import run_python


def test_launchers_run_their_twins_without_triton(tmp_path: Path) -> None:
    text = """
        import sys
        import torch
        for name in list(sys.modules):  # of the process from which this one was forked
            if name.split(".")[0] in ("m5_kernels", "triton"):
                del sys.modules[name]
        sys.modules["triton"] = None  # an import of it raises ImportError from here on
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
    program = tmp_path / "without_triton.py"
    program.write_text(textwrap.dedent(text))
    result = run_python(program)
    assert result.returncode == 0, result.stderr
    assert "triton is not installed" in result.stdout
