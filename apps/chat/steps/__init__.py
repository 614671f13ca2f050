"""What slash commands do with the runtime, for the app and plain mode (state.Step)."""
