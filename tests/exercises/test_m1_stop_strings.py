"""Checks exercises/m1_stop_strings.py."""

import random

import pytest

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
    ("ab", ["abc", "bx"], ""),
    ("aab", ["aaab"], "aab"),
    ("baaaa", ["aaab"], "ba"),
    ("a\nUs", ["User:", "\nUser:"], "a"),
    ("abcd", ["bcd", "abcdef"], "a"),
    ("abcd", ["cd", "bcd"], "a"),
    ("xabcd", ["bc", "abcd"], "xa"),
    ("xx stop END", ["END", "stop"], "xx "),
]


def check_cases(num_shown):
    for text, stop, wanted in CASES:
        count = num_shown(text, stop)
        assert count == len(wanted), (
            f"text so far {text!r}, stop strings {stop}: to be shown is {wanted!r}, "
            f"yours is {text[:count]!r}"
        )


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


def num_taken_back(num_shown):
    """Characters shown of streams that later turned out to belong to a stop string."""
    count = 0
    for text, stop in streams():
        shown = max(num_shown(text[:end], stop) for end in range(len(text) + 1))
        count += max(0, shown - final_length(text, stop))
    return count


def check_nothing_is_taken_back(num_shown):
    count = num_taken_back(num_shown)
    assert count == 0, f"{count} characters of stop strings have been shown"


def check_nothing_waits_for_nothing(num_shown):
    for text, stop in streams():
        for end in range(final_length(text, stop)):
            so_far = text[:end]
            waiting = so_far[num_shown(so_far, stop) :]
            assert not waiting or any(each.startswith(waiting) for each in stop), (
                f"text so far {so_far!r}, stop strings {stop}: {waiting!r} waits, and no stop "
                "string begins so"
            )


def shows_until_it_is_complete(text, stop):
    return final_length(text, stop)


def test_cases(exercise):
    check_cases(exercise)


def test_no_character_of_a_stop_string_is_shown(exercise, figure):
    before = num_taken_back(shows_until_it_is_complete)
    figure("characters of stop strings shown", str(num_taken_back(exercise)), str(before))
    check_nothing_is_taken_back(exercise)


def test_nothing_waits_that_cannot_become_a_stop_string(exercise):
    check_nothing_waits_for_nothing(exercise)


def test_showing_all_until_a_stop_string_is_complete_is_caught():
    with pytest.raises(AssertionError, match="to be shown is 'Hello ', yours is 'Hello #'"):
        check_cases(shows_until_it_is_complete)
    with pytest.raises(AssertionError, match="characters of stop strings have been shown"):
        check_nothing_is_taken_back(shows_until_it_is_complete)


def test_holding_back_a_fixed_number_is_caught():
    def holds_back_too_much(text, stop):
        longest = max(map(len, stop), default=1)
        end = final_length(text, stop)
        return end if end < len(text) else max(0, len(text) - longest + 1)

    check_nothing_is_taken_back(holds_back_too_much)
    with pytest.raises(AssertionError, match="to be shown is 'Hello', yours is 'Hel'"):
        check_cases(holds_back_too_much)
    with pytest.raises(AssertionError, match="waits, and no stop string begins so"):
        check_nothing_waits_for_nothing(holds_back_too_much)


def test_taking_the_stop_string_that_begins_first_is_caught():
    def by_start(text, stop):
        starts = [text.find(each) for each in stop if each in text]
        if starts:
            return min(starts)
        return min(
            [place for place in range(len(text)) if any(s.startswith(text[place:]) for s in stop)],
            default=len(text),
        )

    with pytest.raises(AssertionError, match="to be shown is 'xa', yours is 'x'"):
        check_cases(by_start)
