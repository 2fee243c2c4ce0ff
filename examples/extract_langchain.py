"""Structured extraction: a grammar makes every value match the Pydantic class."""

from __future__ import annotations

from typing import Literal

from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel, Field

from langchain_specfuse import ChatSpecFuse


class Booking(BaseModel):
    """A booking at the guest house."""

    guest: str = Field(description="name of the guest")
    nights: int = Field(description="number of nights")
    room: Literal["single", "double", "dormitory"]
    wishes: list[str] = Field(max_length=2)


llm = ChatSpecFuse(members="demo", max_tokens=80)
chain = ChatPromptTemplate.from_template("Read the booking: {text}") | llm.with_structured_output(Booking)

if __name__ == "__main__":
    for text in (
        "Zoë Müller books a double room for 3 nights and would like a quiet room.",
        "A dormitory bed for Li Wei, 1 night, please.",
    ):
        print(chain.invoke({"text": text}))
