"""Measurements: every number in the docs comes from a command here."""
