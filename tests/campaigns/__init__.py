"""Campaigns against the whole program, each a command. The tests beside them run a small sample.

python -m tests.campaigns.crashes               each writing verb killed, failed and crashed at each call
python -m tests.campaigns.many_processes        16 raters, a trainer, a deleter and a server on one store
python -m tests.campaigns.two_years             a store as after two years: times and sizes
python -m tests.campaigns.fuzz TARGET           inputs that coverage guides, for each kind of file
python -m tests.campaigns.fuzz_c                the same for the C library
"""
