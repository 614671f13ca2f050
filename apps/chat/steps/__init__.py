"""This package has the steps: the functions that do the work of slash commands with the runtime, for the app
and plain mode (`state.Step`)."""
