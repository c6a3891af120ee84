"""Modules of a model, each as a few operations of our compiled library.

A module is replaced only where it was asked and gives what ours gives (see `fuse.py`).
"""
