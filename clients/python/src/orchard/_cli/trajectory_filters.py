"""Options that select trajectories, the same for every command that takes them."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from orchard._cli.option_groups import Command, add_options
from orchard._cli.output import pairs, seconds

if TYPE_CHECKING:
    from orchard import TrajectoryFilter

_REPEATED: Final = "Can be repeated."


def complete_trajectory(incomplete: str) -> list[tuple[str, str]]:
    """Ids of the newest trajectories, for the shell's completion; none if the platform does not answer at once."""
    from itertools import islice

    from orchard import OrchardError, SandboxClient

    try:
        with SandboxClient(retry_timeout=0.5) as client:
            newest = islice(client.trajectories.list(page_size=200), 200)
            return [(t.trajectory_id, t.task.instance_id) for t in newest if t.trajectory_id.startswith(incomplete)]
    except OrchardError:
        return []


TrajectoryId = Annotated[str, typer.Argument(help="The trajectory's id.", autocompletion=complete_trajectory)]


def _several(option: str, what: str) -> Any:
    return Annotated[list[str] | None, typer.Option(option, help=f"Only this {what}. {_REPEATED}")]


_OPTIONS: Final[dict[str, Any]] = {
    "datasets": _several("--dataset", "dataset"),
    "instance_ids": _several("--instance", "instance"),
    "repos": _several("--repo", "repository"),
    "websites": _several("--website", "website"),
    "splits": _several("--split", "split"),
    "harnesses": _several("--harness", "harness"),
    "models": _several("--model", "model"),
    "policy_versions": _several("--policy-version", "policy version"),
    "teachers": _several("--teacher", "teacher"),
    "group_ids": _several("--group", "group"),
    "rollout_ids": _several("--rollout", "rollout"),
    "statuses": Annotated[
        list[str] | None, typer.Option("--status", help=f"Only open, completed, failed or aborted ones. {_REPEATED}")
    ],
    "labels": Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="KEY=VALUE", help=f"Only with this label. {_REPEATED}")
    ],
    "outcome_state": Annotated[
        str | None, typer.Option("--outcome", help="Only those whose outcome is scored, excluded or abstained.")
    ],
    "outcome_least": Annotated[float | None, typer.Option("--outcome-least", help="Only with at least this outcome.")],
    "outcome_most": Annotated[float | None, typer.Option("--outcome-most", help="Only with at most this outcome.")],
    "turns_least": Annotated[int | None, typer.Option("--turns-least", help="Only with at least so many turns.")],
    "turns_most": Annotated[int | None, typer.Option("--turns-most", help="Only with at most so many turns.")],
    "tokens_most": Annotated[
        int | None, typer.Option("--tokens-most", help="Only with at most so many tokens in their longest turn.")
    ],
    "since": Annotated[str | None, typer.Option("--since", help="Only those created in the last 24h, 7d, ...")],
}


def with_filters(command: Command) -> Command:
    """Give a command the options that select trajectories; it gets what was given as `filters`, for the SDK."""
    return add_options(command, "filters", _OPTIONS, {}, _filters)


def _filters(given: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in given.items() if value not in (None, [])}
    if "labels" in found:
        found["labels"] = pairs("--label", found["labels"])
    if "since" in found:
        period = seconds("--since", found.pop("since")) or 0.0
        found["created_from"] = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=period)
    if found:
        from orchard._client.trajectories.options import filter_message

        # What cannot be meant is told here, before anything is written or asked.
        filter_message("filters", cast("TrajectoryFilter", found))
    return found
