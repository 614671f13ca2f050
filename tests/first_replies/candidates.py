"""Ways to ask the starter model: what `__main__.py` compares."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Candidate:
    """A system prompt ("": an empty one, in place of the template's own) and a way to draw tokens."""

    system: str
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """As the table shows it."""
        drawn = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())
        return f"“{self.system}”; {drawn}"


TEMPLATE = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # the chat template's own
MAKERS = {"temperature": 0.2, "top_p": 0.9}
SHORT = "You are a helpful AI assistant. Give short, correct answers in English."
CANDIDATES = (
    Candidate(TEMPLATE, MAKERS),
    Candidate("", MAKERS),
    Candidate(SHORT, MAKERS),
    Candidate("", MAKERS | {"frequency_penalty": 0.3}),
    Candidate(SHORT, MAKERS | {"frequency_penalty": 0.3}),
    Candidate("You answer in English.", MAKERS),
    Candidate("Answer in English with complete sentences.", MAKERS),
    Candidate("Answer the question in plain English.", MAKERS),
    Candidate("You are a friendly assistant who answers in the language of the question.", MAKERS),
)
