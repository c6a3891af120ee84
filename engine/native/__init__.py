"""C++ for CPUs: what torch's own operations, and hashlib's, do too slowly.

`make setup` builds it where there is a compiler; without it everything runs through those alone.
"""
