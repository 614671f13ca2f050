"""`ruvmlx bench`: measures speeds, and compares them with this machine's limits and with other runtimes on
it."""
