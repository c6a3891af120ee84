"""C++ for CPUs: what torch's own operations do too slowly.

`make setup` builds it where there is a compiler; without it everything runs through torch alone.
"""
