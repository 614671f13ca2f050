"""Tools in the chat: programs that speak MCP, which the model may call after the user agrees."""
