"""Write one file with all that the computation of directions on a GPU needs besides the starter's weights:

    python -m tests.research.gpu.inputs DATA

prompts, prose: token ids; movable: the tokens whose logits ratings may change; first: the first column of the
calibrated lora_a of the output head; lora_a: the inputs of the style basis; bytes: the bytes of each token.
The inputs of the style basis come from replies that the starter writes here, which takes some minutes.
"""

import pickle
import sys
from pathlib import Path

import numpy as np

from ruvmlx.backends.base import original_model
from ruvmlx.backends.select import open_backend
from ruvmlx.models.config.model import Message
from ruvmlx.models.find.starter import starter_path
from ruvmlx.models.load import load_model
from ruvmlx.sona import calibration, measure_directions
from ruvmlx.sona.optional.style_bank import BasisBuilder, StyleBank, texts
from ruvmlx.training.trainer import Trainer

QUESTIONS = 8  # the inputs of the style basis come from the replies to these first questions
PROSE_TOKENS = 160  # the maximum number of tokens of a text of prose


def main() -> None:
    model = load_model(str(starter_path()))
    backend, tokenizer = open_backend("native", model), model.tokenizer
    probe = calibration.measure(backend, tokenizer, 2, model.shape.max_context)
    bank = StyleBank()
    builder = BasisBuilder(model, backend, bank, texts("style_questions")[:QUESTIONS], texts("style_prose"))
    builder._sample(lambda *_: None, lambda: None)
    with original_model(backend):
        trainer = Trainer(model, backend=backend)
        lora_a = builder._directions(trainer, lambda: None)
        trainer.close()

    def prompts(questions: list[str]) -> list[list[int]]:
        return [tokenizer.encode_chat([Message("user", question)]) for question in questions]

    data = {
        "prompts": prompts(measure_directions.questions()),
        "left_out": prompts(texts("style_questions")),
        "prose": [tokenizer.encode(text)[:PROSE_TOKENS] for text in texts("style_prose")],
        "movable": np.asarray(probe.tokens),
        "first": np.ascontiguousarray(probe.directions[:, 0]),
        "lora_a": lora_a,
        "eos": sorted(tokenizer.eos_ids),
        "bytes": [tokenizer.token_bytes(token) for token in range(model.shape.vocab_size)],
    }
    Path(sys.argv[1]).write_bytes(pickle.dumps(data))


if __name__ == "__main__":
    main()
