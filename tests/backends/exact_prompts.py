"""A native backend for tests of single values: prompts have activations of 16 bits, too."""

from ruvmlx.backends.native.backend import NativeBackend


class ExactPrompts(NativeBackend):
    """A native backend whose `prefill` calls rvm_decoder_forward in place of rvm_decoder_prefill.
    test_gguf_formats.py compares the logits of the two."""

    def _run(self, *args, prompt=False, **kwargs):
        return super()._run(*args, prompt=False, **kwargs)
