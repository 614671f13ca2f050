"""`python -m ruvmlx`."""

from .apps.cli import main

main()
