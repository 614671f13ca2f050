"""This module finds the recommended sampling settings of a model: from the model's files, or, if the files
have none, from a table of the makers' recommendations."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...settings import SAMPLING, SPECS

# The sampling options that ruvmlx takes from a model's files only if ADVICE has them for this model. The
# makers' values are for a repetition penalty that also applies to the prompt's tokens, but ruvmlx's penalty
# applies only to the reply's tokens. A repetition penalty also makes the draw of a token slower. ADVICE has a
# repetition penalty only for models that loop without it: of 10 replies of Qwen2.5-0.5B-Instruct, 4 had loops
# without it, and 1 with 1.1.
NOT_ADVISED = ("repetition_penalty",)


@dataclass(frozen=True)
class Advice:
    """The makers' recommended sampling settings for the models with one name pattern or of one family.

    name: a pattern that matches a part of the model's name; "": the settings are for the family `model_type`
    """

    sampling: Mapping[str, float]
    name: str = ""
    model_type: str = ""

    def is_for(self, model_type: str, names: Sequence[str]) -> bool:
        """Return True if the settings are for a model of this family (`model_type`) with these names."""
        if self.name:
            return any(re.search(self.name, name, re.IGNORECASE) for name in names)
        return self.model_type == model_type


QWEN2 = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}

# The values come from generation_config.json and the model cards in the makers' repositories. The first row
# that matches the model applies. Rows with a name pattern come before rows with a family, because GGUF files
# of Mistral, SmolLM2 and other models also have the architecture of Llama.
ADVICE = (
    Advice({"temperature": 0.6, "top_p": 0.95}, name=r"deepseek.?r1"),
    Advice({"temperature": 0.2, "top_p": 0.9}, name=r"smollm(?!3)"),
    Advice({"temperature": 0.7, "top_p": 0.95}, name=r"magistral|ministral.?3.*reasoning"),
    Advice({"temperature": 0.1}, name=r"ministral.?3\b"),
    Advice({"temperature": 0.15}, name=r"devstral|mistral.?small.*(2501|2503|2506|3\.[12])"),
    Advice({"temperature": 0.3}, name=r"mistral.?nemo"),
    Advice({"temperature": 0.7}, name=r"mistral|mixtral"),
    Advice({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, name=r"qwen3.*instruct"),
    # generation_config.json of QwQ-32B
    Advice({"temperature": 0.6, "top_p": 0.95, "top_k": 40}, name=r"qwq(?!.*preview)"),
    # generation_config.json of Qwen2-0.5B-Instruct, Qwen2-1.5B-Instruct, and the same sizes of Qwen2.5
    Advice(QWEN2 | {"repetition_penalty": 1.1}, name=r"qwen2(?!.*(math|vl|coder)).*\b[01][._]5b.*instruct"),
    # generation_config.json of Qwen2-7B-Instruct, Qwen2.5-3B-Instruct, and the larger sizes of both
    Advice(QWEN2 | {"repetition_penalty": 1.05}, name=r"qwen2(?!.*(math|vl|coder)).*\b\d+b.*instruct"),
    Advice({"temperature": 0.6, "top_p": 0.9}, model_type="llama"),
    Advice({"temperature": 0.7}, model_type="mistral"),
    Advice({"temperature": 0.1}, model_type="ministral3"),
    Advice(QWEN2, model_type="qwen2"),
    Advice({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, model_type="qwen3"),
    Advice({"temperature": 0.6, "top_p": 0.95}, model_type="smollm3"),
    Advice({"temperature": 0.7}, model_type="stablelm"),
    Advice({"temperature": 0.7}, model_type="mpt"),
)


def sampling_defaults(
    values: Mapping[str, Any], model_type: str = "", names: Sequence[str] = ()
) -> dict[str, float]:
    """Return the sampling settings in `values` (from the model's files) that are allowed numbers. If
    `values` has none, return the settings of the first matching row of ADVICE, or {} if no row matches. The
    settings in NOT_ADVISED are taken from `values` only if this row has them."""
    advised = _family_advice(model_type, names)
    found = {name: values.get(name) for name in SAMPLING if name not in NOT_ADVISED or name in advised}
    usable = {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and SPECS[name].allows(value)
    }
    return usable or advised


def _family_advice(model_type: str, names: Sequence[str]) -> dict[str, float]:
    return next((dict(a.sampling) for a in ADVICE if a.is_for(model_type, names)), {})
