"""Measurements for the reports and studies of the simulated users, which no installed package needs.

Each file is a command: `python -m tests.research.launches`. Nothing in `ruvmlx` or `apps` may import from
here. Start with docs/not-proven.md, docs/evidence.md and docs/studies.md, which quote what they print.
"""
