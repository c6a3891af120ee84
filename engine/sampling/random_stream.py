"""Stateless random numbers: the same place in the same request always draws the same one."""

from enum import IntEnum

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a number is drawn for; streams of different purposes are independent."""

    SAMPLE = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4


def uniform(*, seed: int, position: int, purpose: Purpose, choice_index: int = 0) -> float:
    """A number in [0, 1) with 53 random bits, from where it is drawn and nothing else."""
    state = seed & _MASK
    for word in (choice_index, position, purpose):
        state = _mix((state + 0x9E3779B97F4A7C15 * (word + 1)) & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """Finalizer of splitmix64: each input bit flips each output bit half the time."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
