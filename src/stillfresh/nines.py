"""How many nines a number of judged reads supports. Pure.

Reads that were judged are a sample. Of a thousand reads without a fault, the share of faults may
still be three in a thousand: with 95 % confidence, it is no more than that. The *supported nines*
are the digits of that statement: -log10 of the 95 % upper bound of the share. Without a fault this
is log10(N / 3), the rule of three: 3,000 clean reads support three nines, 300,000 support five.
"""

import math
from typing import Final

RULE_OF_THREE: Final = 3.0
"""The 95 % upper bound of the number of faults, if there was none."""
QUANTILE: Final = 1.6449  # of the normal distribution, 95 %


def most_faults(faults: int) -> float:
    """The 95 % upper bound of the faults to expect, if this many were seen.

    The bound of a Poisson distribution, by Wilson and Hilferty's approximation; it is exact within
    half a percent.
    """
    if faults == 0:
        return RULE_OF_THREE
    degrees = faults + 1
    root = 1 - 1 / (9 * degrees) + QUANTILE / (3 * math.sqrt(degrees))
    return degrees * root**3


def supported_nines(faults: int, judged: int) -> float | None:
    """-log10 of the 95 % upper bound of faults / judged, at least 0; None: nothing was judged."""
    if judged <= 0:
        return None
    return max(0.0, math.log10(judged / most_faults(faults)))


def shown_nines(faults: int, judged: int) -> str:
    """The supported nines with one digit, rounded down, for people."""
    nines = supported_nines(faults, judged)
    return "none yet" if nines is None else f"{math.floor(10 * nines) / 10:.1f}"
