"""What slash commands do with the runtime, for the app and the plain mode alike (state.Step)."""
