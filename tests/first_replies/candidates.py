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
REPETITION = {"repetition_penalty": 1.1}  # what most runtimes offer, in the whole reply
FREQUENCY = {"frequency_penalty": 0.3}
CANDIDATES = (
    Candidate("", MAKERS),
    Candidate("", MAKERS | REPETITION),
    Candidate("", MAKERS | FREQUENCY),
    Candidate(TEMPLATE, MAKERS),
    Candidate(SHORT, MAKERS),
    Candidate(SHORT, MAKERS | REPETITION),
    Candidate("You answer in English.", MAKERS | REPETITION),
    Candidate("", {"temperature": 0.7, "top_p": 0.9} | REPETITION),
    Candidate("", MAKERS | {"repetition_penalty": 1.2}),
    Candidate("", MAKERS | {"min_p": 0.5} | REPETITION),
)
