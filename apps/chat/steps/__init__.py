"""This package has the steps of the slash commands. A step (`state.Step`) is a function that does the work of
a slash command with the runtime, for the app and for plain mode."""
