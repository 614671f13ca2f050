"""This package gives the chat tools from servers that speak MCP (Model Context Protocol). The model can call
a tool if the user agrees."""
