"""A quick part of `make storm`: the same few seeds in every run."""

import pytest
from storm import Storm

from engine_helpers import PACKAGES


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("milestone", [package.__name__ for package in PACKAGES])
def test_random_traffic_loses_nothing_and_gives_everybody_the_right_tokens(milestone, seed):
    counts = Storm(milestone, seed).run(num_steps=150)
    assert counts["read"] > 1000
    assert min(counts["stop"], counts["length"], counts["aborted"]) > 0
