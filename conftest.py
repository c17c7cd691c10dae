"""The collector's pauses: the suite's heap is large, and little of it is garbage."""

import gc

gc.set_threshold(100_000, 50, 100)
