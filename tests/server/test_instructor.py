"""instructor: a class back from a JSON schema, from a tool, and from Responses.

Its group holds back other packages, so it has an environment of its own; pyproject.toml says how.
"""

from typing import Literal

import pytest

instructor = pytest.importorskip("instructor", reason="the dependency group `old-clients` is not installed")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Answer(pydantic.BaseModel, extra="forbid"):  # a random model would never end an open object
    """An answer."""

    sure: bool
    unit: Literal["C", "F"]


MODES = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"]


@pytest.mark.parametrize("name", MODES)
def test_a_class(roomy, name):
    """In every mode that forces the reply: no second try is needed."""
    with openai.OpenAI(base_url=roomy.url, api_key="x", max_retries=0, timeout=600) as inner:
        client = instructor.from_openai(inner, mode=instructor.Mode[name])
        limit = {"max_output_tokens": 400} if "RESPONSES" in name else {"max_tokens": 400}
        found = client.chat.completions.create(
            model=roomy.model, response_model=Answer, max_retries=0, temperature=0, **limit,
            messages=[{"role": "user", "content": "Is it?"}],
        )  # fmt: skip
    assert isinstance(found, Answer)
