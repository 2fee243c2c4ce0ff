"""A LangGraph agent with two tools: the ensemble writes the calls, Python computes, and the text streams.

The graph decides when a tool is called. `create_agent(llm, tools)` from `langchain.agents` leaves this to the ensemble,
but small members may repeat a call.
"""

from __future__ import annotations

from datetime import date

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from langchain_specfuse import ChatSpecFuse


@tool
def days_between(start: date, end: date) -> str:
    """Counts the days from one date to another, both as YYYY-MM-DD."""
    return f"{(end - start).days} days"


@tool
def multiply(a: int, b: int) -> str:
    """Multiplies two whole numbers."""
    return f"{a} times {b} is {a * b}"


llm = ChatSpecFuse(members="demo", max_tokens=60)
caller = llm.bind_tools([multiply, days_between], tool_choice="any")


def call(state: MessagesState) -> dict[str, list[AIMessage]]:
    return {"messages": [caller.invoke(state["messages"])]}


def answer(state: MessagesState) -> dict[str, list[AIMessage]]:
    question, result = state["messages"][0].text, state["messages"][-1].text
    prompt = f"Question: {question}\nA tool found: {result}.\nAnswer in one sentence."
    return {"messages": [llm.invoke(prompt, max_tokens=30, stop=["\n"])]}


graph = StateGraph(MessagesState)
graph.add_node("call", call)
graph.add_node("tools", ToolNode([multiply, days_between]))
graph.add_node("answer", answer)
graph.add_edge(START, "call")
graph.add_edge("call", "tools")
graph.add_edge("tools", "answer")
graph.add_edge("answer", END)
agent = graph.compile()

if __name__ == "__main__":
    question = HumanMessage("What is 17 times 25? Use multiply with a=17 and b=25.")
    for message, metadata in agent.stream({"messages": [question]}, stream_mode="messages"):
        if isinstance(message, AIMessageChunk) and message.tool_call_chunks:
            print(message.tool_call_chunks[0]["args"] or "", end="", flush=True)
        elif metadata["langgraph_node"] == "tools":
            print(f"\n[tool] {message.text}")
        else:
            print(message.text, end="", flush=True)
    print()
