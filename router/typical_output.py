"""How many tokens a request will probably generate: what those before it did."""

FIRST_MEAN_TOKENS = 128.0
LEARNING_SHARE = 0.1  # of the newest request


class TypicalOutput:
    """Remembers a mean."""

    def __init__(self) -> None:
        self._mean_tokens = FIRST_MEAN_TOKENS

    def learn(self, num_tokens: int) -> None:
        """A request generated this many."""
        self._mean_tokens += LEARNING_SHARE * (num_tokens - self._mean_tokens)

    def expected_tokens(self, max_tokens: int) -> int:
        """What to expect of one that may generate so many."""
        return max(min(max_tokens, round(self._mean_tokens)), 1)
