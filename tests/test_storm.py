"""A quick part of `make storm`: the same few seeds in every run."""

from collections import Counter

import pytest

from helpers.engines import PACKAGES
from storm import main, serve

NUM_SEEDS = 16
HAPPENS = {
    "m1": ["stop", "length", "abort", "error", "raised", "interrupted"],
    "m3": ["preemptions", "copied_blocks"],
    "m4": ["saved_tokens", "evictions", "resets", "accepted", "rejected"],
    # preempted while a token of theirs was on its way; planned, and launched once it had come
    "m5": ["late", "awaited"],
}


@pytest.mark.parametrize("milestone", [package.__name__ for package in PACKAGES])
def test_random_traffic_loses_nothing_and_gives_everybody_the_right_tokens(milestone):
    counts = Counter[str]()
    for seed in range(NUM_SEEDS):
        counts += serve(milestone, seed, num_steps=150)
    # The road led through what it was built for.
    for first, kinds in HAPPENS.items():
        if milestone >= first:
            assert min(counts[kind] for kind in kinds) > 5, counts


@pytest.mark.parametrize("milestone", ["m4_prefix_chunked", "m5_kernels"])
def test_random_traffic_on_layers_with_windows_gives_back_blocks_and_loses_nothing(milestone):
    counts = Counter[str]()
    for seed in range(8):
        counts += serve(milestone, seed, num_steps=100, has_groups=True)
    kinds = ["given_back", "preemptions", "copied_blocks", "saved_tokens", "accepted", "rejected"]
    assert min(counts[kind] for kind in kinds) > 5, counts
    assert counts["hybrid"] > 5, counts


def test_storms_with_windows_leave_out_milestones_without_groups(monkeypatch):
    monkeypatch.setattr("sys.argv", ["storm.py", "--groups", "--seed", "1", "--steps", "9"])
    assert main() == 0


def test_storms_with_windows_on_a_milestone_without_groups_say_so(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["storm.py", "--groups", "--milestone", "m3_paged"])
    with pytest.raises(SystemExit):
        main()
    assert "m3_paged has no groups" in capsys.readouterr().err


def test_what_a_draft_that_failed_left_in_host_memory_is_not_looked_for_in_shorter_tables():
    serve("m5_kernels", 296, num_steps=60, has_groups=True)
