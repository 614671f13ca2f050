"""`ruvmlx bench`: measured speeds, beside this machine's limits and other runtimes on it."""
