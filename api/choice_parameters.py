"""How many choices a client wants, and out of how many."""

from api.errors import invalid
from api.parameter_checks import Values, read_flag, read_integer

MAX_NUM_CHOICES = 128
MAX_BEST_OF = 20


def read_choices(values: Values, max_num_seqs: int) -> tuple[int, int]:
    """Return how many choices to show and how many to generate.

    They run together, so no worker can take more than it has places for.
    """
    num_shown = read_integer(values, "n", low=1, high=MAX_NUM_CHOICES) or 1
    best_of = read_integer(values, "best_of", low=0, high=MAX_BEST_OF)
    num_choices = num_shown if best_of is None else best_of
    if num_choices < num_shown:
        raise invalid(f"best_of must be at least n, {num_shown}, got {best_of}", "best_of")
    if num_choices > num_shown and read_flag(values, "stream"):
        raise invalid(
            f"best_of must be n, {num_shown}, in a stream: the best are known at its end only",
            "best_of",
        )
    if num_choices > max_num_seqs:
        name = "n" if best_of is None else "best_of"
        raise invalid(
            f"{name} must be at most {max_num_seqs}, the choices that can run together here, "
            f"got {num_choices}",
            name,
        )
    return num_shown, num_choices
