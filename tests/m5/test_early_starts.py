"""When kernels may start: who says it. Whether they wait: `test_other_gpus.py`, and on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from m5_kernels.kernels.early_start import EARLY, LATE, NEVER, launch_options, next_starts


def test_who_launches_is_told_what_is_said_around_it() -> None:
    assert launch_options() == {"PDL": NEVER}
    with next_starts(EARLY):
        assert launch_options() == {"PDL": EARLY, "launch_pdl": True}
        assert launch_options(most=LATE) == {"PDL": LATE, "launch_pdl": True}
        assert launch_options(waits_for_launch=True) == {"PDL": EARLY}
        with next_starts(LATE):
            assert launch_options() == {"PDL": LATE, "launch_pdl": True}
        assert launch_options()["PDL"] == EARLY
        with ThreadPoolExecutor() as pool:  # launches the kernels of another engine
            assert pool.submit(launch_options).result() == {"PDL": NEVER}
    with pytest.raises(KeyboardInterrupt), next_starts(LATE):
        raise KeyboardInterrupt
    assert launch_options() == {"PDL": NEVER}
