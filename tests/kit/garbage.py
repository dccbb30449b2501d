"""What only the garbage collector can free."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_off", "unreachable"]


@contextmanager
def collector_off() -> Iterator[None]:
    """Inside the block nothing is collected by itself; what was there before has been."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def unreachable() -> list[str]:
    """The objects that nothing leads to, but one another: the type and the text of each."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [f"{type(thing).__name__} {str(thing)[:200]}" for thing in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
