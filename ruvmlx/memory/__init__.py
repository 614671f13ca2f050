"""Whether a model fits this machine, what each part of the process may take, and which models to propose.

The plan is known before weights are read. Nothing here may load a model or download one. Start with
`load_plan.py`, then `memory_plan.py` (the open process).
"""
