"""Finds where the end of a text could still become one of some words."""

from collections.abc import Iterable


def num_held(text: str, words: Iterable[str]) -> int:
    """Length of the longest end of the text that begins a word without being all of it."""
    longest = 0
    for word in words:
        for length in range(min(len(text), len(word) - 1), longest, -1):
            if text.endswith(word[:length]):
                longest = length
                break
    return longest
