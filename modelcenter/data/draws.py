"""Random numbers for many rows at once, each a pure function of the row and the position.

A row's numbers are a stream of SplitMix64 (Steele et al., 2014, "Fast Splittable Pseudorandom Number Generators") whose seed is a
hash of the row's names. Creating a numpy generator for each row would take longer than making the row.
"""

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
STEP = np.uint64(0x9E3779B97F4A7C15)


def keys_of(*names: int | NDArray[np.int64]) -> Keys:
    """(n): a seed for each row, of its names: arrays of n, or numbers that all rows share."""
    found = np.zeros(1, np.uint64)
    for name in names:
        number = np.uint64(name % 2**64) if isinstance(name, int) else name.astype(np.uint64)
        found = mixed((found ^ number) + STEP)
    return found


def uniform(keys: Keys, places: NDArray[np.int64]) -> NDArray[np.float64]:
    """The numbers, in [0, 1), at `places` of the streams of `keys`; the two are broadcast."""
    bits = mixed(keys + (places.astype(np.uint64) + np.uint64(1)) * STEP)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mixed(x: Keys) -> Keys:
    """SplitMix64's finalizer."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
