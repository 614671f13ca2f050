"""This package gives the chat tools from servers that speak MCP. The model can call a tool if the user
agrees."""
