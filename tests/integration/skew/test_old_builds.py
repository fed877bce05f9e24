"""Commands and files where agent or gateway are of an earlier build: the client's own tests of them, run again.

Sandboxes live long, and outlive an upgrade of the gateways; while gateways are replaced, earlier ones have new agents.
What the oldest agent does not have yet is not among these.
"""

from pathlib import Path

from orchard import Sandbox

from tests.integration.client.test_commands import (  # noqa: F401 (these are the tests)
    test_a_command_longer_than_the_first_wait_is_followed,
    test_a_command_that_cannot_start_says_why,
    test_a_repeated_exec_id_runs_once,
    test_argv_is_run_without_a_shell,
    test_bytes_come_through_untouched,
    test_cancelling_a_task_ends_its_command,
    test_kill_reaches_the_whole_tree,
    test_leaving_a_stream_ends_the_command,
    test_leaving_an_async_stream_ends_the_command,
    test_list_execs_has_what_ran,
    test_many_threads_share_a_client,
    test_merged_stderr_keeps_its_order,
    test_options_reach_the_command,
    test_output_limit_ends_the_command,
    test_output_that_is_not_inline_is_complete,
    test_process_gets_signals,
    test_process_runs_beside_others_and_is_waited_for,
    test_result_has_both_streams_and_the_exit_code,
    test_stream_yields_while_the_command_runs,
    test_timeout_is_a_result_with_the_partial_output,
)
from tests.integration.client.test_files import (  # noqa: F401
    test_a_folder_goes_in_and_out_unchanged_with_progress,
    test_a_listing_of_several_pages_is_whole,
    test_directories,
    test_errors_are_python_errors_too,
    test_folders_merge_and_patterns_leave_out,
    test_patches_apply_undo_and_say_what_does_not_fit,
    test_single_files_go_where_they_are_told,
    test_write_and_read_keep_every_byte,
)
from tests.integration.skew.conftest import Pair
from tests.support.history import OLDEST, ROOT


def test_the_agent_is_the_one_that_is_meant(sandbox: Sandbox, pair: Pair, agent_tree: Path) -> None:
    """Not that of this checkout, by some path of imports."""
    maps = sandbox.exec("cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep ^PYTHONPATH=").stdout
    assert f"PYTHONPATH={agent_tree}:" in maps
    assert (agent_tree == ROOT) == (not pair.agent)
    tells_version = "AGENT_VERSION_KEY" in (agent_tree / "services/exec_agent/servicer_health.py").read_text()
    assert tells_version == (pair.agent != OLDEST)
