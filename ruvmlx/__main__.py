"""Run the program when the user types `python -m ruvmlx`."""

from .apps.main import main  # type: ignore[import-untyped]  # apps/ joins the package when it is built

main()
