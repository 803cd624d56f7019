from __future__ import annotations


def num_shown(text: str, stop: list[str]) -> int:
    starts = [(text.find(each), each) for each in stop if each in text]
    if starts:
        _, start = min((start + len(each), start) for start, each in starts)
        return start
    return next(
        place
        for place in range(len(text) + 1)  # at the end, nothing is left: every string begins so
        if any(each.startswith(text[place:]) for each in stop) or place == len(text)
    )
