"""The simulator: real code on a virtual loop, faults from a seed, promises at every step.

Its public names are those of `stillfresh.testing`.

How a run works:

1. `faults.planned` draws a plan from the seed: which requests meet trouble, when a process is
   killed or paused, how wrong the clocks are. Nothing about faults is decided later, so a run can
   be repeated with fewer faults (`simulate.shrunk`).
2. A `World` has one `VirtualLoop` (`stillfresh.virtual_loop`). It is an event loop of one thread
   whose clock jumps to the next timer when nothing is ready. Dice choose which of the ready
   callbacks runs next. Every callback has an owner, the simulated process in whose name it was
   scheduled; the loop holds back the callbacks of a paused owner, and drops those of a killed one.
3. Each `Process` runs real caches. Their store is a `StoreWire`, which turns each step into
   messages that are late, lost or doubled, and does it in one shared `MemoryStore`.
4. The `Ledger` notes what the store does and what callers are served, and compares the two. After
   every callback the world checks all promises, and ends the run with the first broken one.

All chance comes from dice made from the plan, one for each purpose (`Plan.dice`), so that an
additional draw for one purpose does not change the others. The order of the draws is part of a run:
code that draws earlier, later or once more gives the same seed another history.
"""

__all__: list[str] = []
