"""Checks exercises/compute_shift_keys.py."""

import torch

from docs.questions.m0_transformer import rotate

EXERCISE = ("compute_shift_keys.py", "shift_keys")
THETA, HEAD_DIM, NUM_TOKENS, NUM_DROPPED = 10_000.0, 16, 9, 3


def unchanged(keys, by, theta):
    return keys


WRONG, TOLD = unchanged, "yours are where they were"


def raw(num_tokens, seed=0):
    """Queries or keys that no position has turned, `[2, num_tokens, HEAD_DIM]`."""
    return torch.randn(2, num_tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def error_of_scores(shift_keys, by=-NUM_DROPPED):
    """The largest error of the next query's scores, after keys from position 3 on have moved."""
    keys, query = raw(NUM_TOKENS), raw(1, seed=1)
    moved = shift_keys(rotate(keys, 0, THETA)[:, NUM_DROPPED:], by, THETA)
    assert moved is not None, "shift_keys returns the moved keys, yours returns nothing"
    wanted = rotate(keys[:, NUM_DROPPED:], NUM_DROPPED + by, THETA)
    assert moved.shape == wanted.shape, (
        f"keys of shape {list(wanted.shape)} should keep it, yours are {list(moved.shape)}"
    )
    query = rotate(query, NUM_TOKENS + by, THETA)
    scores, wanted_scores = (query @ each.transpose(1, 2) for each in (moved, wanted))
    return float((scores - wanted_scores).abs().max())


def test_scores_are_those_of_keys_made_at_their_places(exercise, figure):
    error, before = error_of_scores(exercise), error_of_scores(unchanged)
    figure("largest error of a score", f"{error:.1e}", f"{before:.1f} (keys as they were)")
    for by in (-NUM_DROPPED, 4, 500):
        error = error_of_scores(exercise, by)
        words = "turn each pair by `by` times its frequency"
        keys = raw(NUM_TOKENS)
        moved = exercise(keys, by, THETA)
        if error_of_scores(lambda keys, n, theta: exercise(keys, -n, theta), by) < 1e-3:
            words = "yours turns the other way: moved by -3, a key's angles become smaller"
        elif torch.equal(moved, keys):
            words = "yours are where they were"
        elif torch.allclose(moved, rotate(keys, by, THETA)):
            words = "all tokens move equally far, so all are turned by the same angles"
        assert error < 1e-3, f"keys moved by {by}: a score is wrong by {error:.3f}; {words}"


def test_the_keys_given_are_kept(exercise):
    keys = raw(4)
    before = keys.clone()
    exercise(keys, -2, THETA)
    assert torch.equal(keys, before), "the keys that were given have changed: return new ones"
