"""`python -m ruvmlx`."""

from .apps.cli import main  # type: ignore[import-untyped]  # apps/ joins the package when it is built

main()
