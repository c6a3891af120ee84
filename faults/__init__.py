"""Fault points: places where a test plan may break the running system."""
