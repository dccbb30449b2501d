"""The simulator: real code on a virtual loop, faults from a seed, promises at every step (T).

Its public names are those of `stillfresh.testing`.
"""

__all__: list[str] = []
