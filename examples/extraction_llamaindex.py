"""Two small models fill in a form from a note to an observatory. A grammar makes every value valid.

python examples/extraction_llamaindex.py
"""

from __future__ import annotations

from typing import Literal

import _corpus
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, Field

from llamaindex_specfuse import SpecFuseLLM

NOTE = "2 adults and 1 child come on Saturday. They arrive by train and need a room for one night."
PROMPT = PromptTemplate("Fill in the booking from the note.\n\nNote: {note}")


class Booking(BaseModel):
    """A visit to the observatory."""

    adults: int = Field(ge=0, le=9)
    children: int = Field(ge=0, le=9)
    day: Literal["Thursday", "Friday", "Saturday", "Sunday"]
    arrival: Literal["car", "train", "bus"]
    room: bool


def main() -> None:
    _corpus.quiet()
    llm = SpecFuseLLM(members="demo", max_tokens=80)
    for partial in llm.stream_structured_predict(Booking, PROMPT, note=NOTE):
        print(partial.model_dump_json(exclude_unset=True))


if __name__ == "__main__":
    main()
