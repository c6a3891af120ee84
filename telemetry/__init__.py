"""Metrics, traces and logs; knows nothing of the rest."""
