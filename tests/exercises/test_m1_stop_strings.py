"""Checks exercises/m1_stop_strings.py."""

import random

EXERCISE = ("m1_stop_strings.py", "num_shown")

CASES = [
    ("Hello", ["###"], "Hello"),
    ("Hello #", ["###"], "Hello "),
    ("Hello ##", ["###"], "Hello "),
    ("Hello #1", ["###"], "Hello #1"),
    ("Hello ###", ["###"], "Hello "),
    ("Hello ### and more", ["###"], "Hello "),
    ("", ["###"], ""),
    ("no stop strings", [], "no stop strings"),
    ("baaaa", ["aaab"], "ba"),
    ("a\nUs", ["User:", "\nUser:"], "a"),
    ("abcd", ["bcd", "abcdef"], "a"),
    ("abcd", ["cd", "bcd"], "a"),
    ("xabcd", ["bc", "abcd"], "xa"),
    ("xx stop END", ["END", "stop"], "xx "),
]


def streams():
    """Random texts of few letters, so that beginnings of stop strings are everywhere."""
    rng = random.Random(0)
    for _ in range(300):
        stop = ["".join(rng.choices("ab#", k=rng.randint(2, 5))) for _ in range(rng.randint(1, 3))]
        yield "".join(rng.choices("ab#", k=40)), stop


def final_length(text, stop):
    """Where the first complete stop string begins; all of the text if there is none."""
    for end in range(len(text) + 1):
        starts = [end - len(each) for each in stop if text[:end].endswith(each)]
        if starts:
            return min(starts)
    return len(text)


WRONG, TOLD = final_length, "to be shown is 'Hello ', yours is 'Hello #'"  # until it is complete


def num_taken_back(num_shown):
    """Characters shown of streams that later turned out to belong to a stop string."""
    count = 0
    for text, stop in streams():
        shown = max(num_shown(text[:end], stop) for end in range(len(text) + 1))
        count += max(0, shown - final_length(text, stop))
    return count


def test_cases(exercise):
    for text, stop, wanted in CASES:
        count = exercise(text, stop)
        assert count == len(wanted), (
            f"text so far {text!r}, stop strings {stop}: to be shown is {wanted!r}, "
            f"yours is {text[:count]!r}"
        )


def test_no_character_of_a_stop_string_is_shown(exercise, figure):
    count, before = num_taken_back(exercise), num_taken_back(final_length)
    figure("characters of stop strings shown", str(count), str(before))
    assert count == 0, f"{count} characters of stop strings have been shown"


def test_nothing_waits_that_cannot_become_a_stop_string(exercise):
    for text, stop in streams():
        for end in range(final_length(text, stop)):
            so_far = text[:end]
            waiting = so_far[exercise(so_far, stop) :]
            assert not waiting or any(each.startswith(waiting) for each in stop), (
                f"text so far {so_far!r}, stop strings {stop}: {waiting!r} waits, and no stop "
                "string begins so"
            )
