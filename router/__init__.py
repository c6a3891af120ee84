"""Chooses the workers of each request and follows it to its end."""
