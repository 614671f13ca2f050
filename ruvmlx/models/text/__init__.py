"""This package converts text to token ids and token ids to text: tokenizers, chat templates, thoughts and
tool calls.

A chat template comes from an unknown author, so it runs in a sandbox with limits. A tokenizer file of a
safetensors folder also has an unknown author, so its tokenizer runs in a separate process with limits. This
package reads no weights and searches for no models. Start with `tokenizer_base.py`, then read
`chat_template.py`.
"""
