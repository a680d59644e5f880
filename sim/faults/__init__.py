"""Random faults on the virtual clock: drawn by seed, run, and judged.

`python -m sim.faults --seed 7` runs one seed and prints its trace.
"""
