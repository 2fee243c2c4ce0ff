"""An agent of the demo members: its tools, its task, and the expected outcome."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatMessage, TextBlock, ToolCallBlock
from llama_index.core.tools import FunctionTool

QUESTION = "When is it open on Friday, and what does a child pay?"
ANSWER = "On Friday it is open from 19 to 23, and a child pays 4 euros."
EXAMPLES = (
    ("Monday", "18 to 22", "student", "6 euros"),
    ("Sunday", "20 to 24", "pensioner", "7 euros"),
    ("Tuesday", "17 to 21", "teacher", "8 euros"),
)
TASK = "Call the tools that the question needs, then answer in one sentence."


def opening_hours(day: str) -> str:
    """The opening hours on a day."""
    return f"On {day} it is open from 19 to 23."


def ticket_price(visitor: str) -> str:
    """The price of a visit."""
    return {"child": "4 euros"}.get(visitor, "9 euros")


HOURS, PRICE = FunctionTool.from_defaults(opening_hours), FunctionTool.from_defaults(ticket_price)


def called(id_: str, tool: str, **arguments: Any) -> ChatMessage:
    call = ToolCallBlock(tool_call_id=id_, tool_name=tool, tool_kwargs=arguments)
    return ChatMessage(role="assistant", blocks=[TextBlock(text=""), call])


def result(id_: str, text: str) -> ChatMessage:
    return ChatMessage(text, role="tool", additional_kwargs={"tool_call_id": id_})


def worked(day: str, hours: str, visitor: str, price: str, handoff: bool = False) -> list[ChatMessage]:
    """A conversation in which the task was done."""
    passed = "Agent prices is now handling the request due to the following reason: the price.\n"
    passed += "Please continue with the current request."
    handed = [called(f"h{day}", "handoff", to_agent="prices", reason="the price"), result(f"h{day}", passed)]
    return [
        ChatMessage(f"When is it open on {day}, and what does a {visitor} pay?"),
        called(f"o{day}", "opening_hours", day=day),
        result(f"o{day}", f"On {day} it is open from {hours}."),
        *(handed if handoff else []),
        called(f"t{day}", "ticket_price", visitor=visitor),
        result(f"t{day}", price),
        ChatMessage(f"On {day} it is open from {hours}, and a {visitor} pays {price}.", role="assistant"),
    ]
