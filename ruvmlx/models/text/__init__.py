"""Text to token ids and back: tokenizers, chat templates, thoughts and tool calls.

A chat template comes from an unknown author, so it runs in a sandbox and a process with limits. Nothing
here may read weights or look for models. Start with `tokenizer_base.py`, then `chat_template.py`.
"""
