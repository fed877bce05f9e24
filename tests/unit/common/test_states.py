from orchard.sandbox.v1 import sandbox_pb2

from services.common.states import Reason, State


def test_states_have_the_numbers_of_the_proto() -> None:
    assert {f"SANDBOX_STATE_{state.name}": state.value for state in State} == dict(sandbox_pb2.SandboxState.items())
    assert {f"SANDBOX_REASON_{reason.name}": reason.value for reason in Reason} == dict(
        sandbox_pb2.SandboxReason.items()
    )


def test_terminal_states() -> None:
    assert {state for state in State if state.terminal} == {State.DELETED, State.FAILED}
