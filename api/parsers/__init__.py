"""A model's text as the parts of a message: what it thinks, what it says, which tools it calls."""
