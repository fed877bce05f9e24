"""Runs an agent of the OpenHands SDK with scripted answers; it keeps its conversation in the folder that is named."""

import sys

from openhands.sdk import Agent, Conversation
from openhands.sdk.event import ActionEvent, Condensation, ObservationEvent, TokenEvent
from openhands.sdk.llm import Message, MessageToolCall, TextContent
from openhands.sdk.testing import TestLLM


def call(call_id: str, name: str, arguments: str) -> MessageToolCall:
    return MessageToolCall(id=call_id, name=name, arguments=arguments, origin="completion")


ANSWERS = [
    Message(
        role="assistant",
        content=[TextContent(text="I think first.")],
        reasoning_content="Plan the work.",
        tool_calls=[
            call("c1", "think", '{"thought": "look at calc.py"}'),
            call("c2", "think", '{"thought": "then fix it"}'),
        ],
    ),
    Message(role="assistant", content=[TextContent(text="")], tool_calls=[call("c3", "nonsense", "{}")]),
    Message(
        role="assistant",
        content=[TextContent(text="Done.")],
        tool_calls=[call("c4", "finish", '{"message": "Fixed the sum."}')],
    ),
    Message(role="assistant", content=[TextContent(text="Nothing is wrong with the product.")]),
]

folder, workspace = sys.argv[1:]
agent = Agent(llm=TestLLM.from_messages(ANSWERS), tools=[], system_prompt="You fix bugs.")
conversation = Conversation(agent=agent, workspace=workspace, persistence_dir=folder, visualizer=None)
conversation.send_message("Fix the sum in calc.py.")
conversation.run()

# What a condenser does: the first response and what it gave are forgotten.
forgotten = {
    event.id
    for event in conversation.state.events
    if isinstance(event, (ActionEvent, ObservationEvent)) and event.tool_name == "think"
}
conversation.state.append_event(
    Condensation(
        forgotten_event_ids=forgotten, summary="It thought first.", summary_offset=2, llm_response_id="summary-1"
    )
)
conversation.send_message("And the product?")
conversation.run()
conversation.state.append_event(TokenEvent(source="agent", prompt_token_ids=[1, 2, 3], response_token_ids=[4, 5]))
