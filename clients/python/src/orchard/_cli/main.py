"""Entry point: the commands of this package and those of plugins, and what their errors look like."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ImportError:  # an installation without the extra
    sys.exit("orchard: the command line needs its extra: pip install 'orchard-platform[cli]'")
except KeyboardInterrupt:
    sys.exit(130)

try:
    from orchard._cli import (
        admin,
        audit,
        commands,
        copying,
        execution,
        groups,
        judge,
        judge_quality,
        judge_rubrics,
        plugins,
        ports,
        processes,
        tenants,
        trajectory_files,
        trajectory_rewards,
    )
    from orchard._cli.output import FAILURE, USAGE, fail
    from orchard._cli.usage import explained
except KeyboardInterrupt:  # all this takes most of the time until the program is there, seconds on a busy machine
    sys.exit(130)


class OrchardGroup(TyperGroup):
    """Adds the commands of plugins, each loaded when it is needed, and turns errors into one sentence and an exit
    code.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Own commands in their order, then those of plugins."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in plugins.names() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by its name."""
        return super().get_command(ctx, cmd_name) or plugins.load(cmd_name)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; exit with 2 where what was typed is wrong, 1 on any other error, 130 on Ctrl-C."""
        try:
            with explained():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # Whoever read our output has gone; nothing can be said to them.
            sys.stderr.close()
            raise typer.Exit(1) from None
        except Exception as error:
            from orchard._client.errors import InvalidArgument, OrchardError

            if not isinstance(error, (OrchardError, OSError)):
                raise
            fail(error, code=USAGE if isinstance(error, InvalidArgument) else FAILURE)


app = typer.Typer(
    name="orchard",
    cls=OrchardGroup,
    help="Isolated sandboxes for agentic modelling: create them, run commands in them, move files.",
    epilog="Exit codes: 0 done, 1 it failed, 2 what was typed is wrong and nothing was done, 130 Ctrl-C. "
    "exec, shell and logs --follow pass on the command's.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Help by rich looks alike and takes 0.2 s longer; its boxes break the paths in errors over lines.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Send the API key in the clear to another machine too.")
    ] = False,
) -> None:
    """Options of every command."""
    if insecure:
        os.environ["ORCHARD_INSECURE"] = "1"


app.command()(commands.create)
app.command("list")(commands.list_sandboxes)
app.command()(commands.get)
app.command(
    "exec",
    # Everything behind the sandbox's id belongs to the command.
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)(execution.exec_command)
app.command("shell")(execution.shell_command)
app.command()(processes.ps)
app.command()(processes.logs)
app.command()(processes.kill)
app.command("cp")(copying.copy)
app.command()(ports.forward)
app.command()(ports.expose)
app.command("rm")(commands.remove)
app.command()(commands.wait)
app.command()(admin.usage)
app.command()(audit.audit)
app.add_typer(admin.keys, name="keys")
app.add_typer(tenants.tenants, name="tenants")
trajectory_files.trajectories.command("process-reward")(trajectory_rewards.process_reward)
trajectory_files.trajectories.command("credit")(trajectory_rewards.credit)
app.add_typer(trajectory_files.trajectories, name="trajectories")
app.add_typer(groups.groups, name="groups")
judge.judge.command("calibrate")(judge_quality.calibrate)
judge.judge.command("drift")(judge_quality.drift)
judge.judge.add_typer(judge_rubrics.rubrics, name="rubrics")
app.add_typer(judge.judge, name="judge")
app.command()(admin.version)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except KeyboardInterrupt:  # before or after the command's own part
        sys.exit(130)


if __name__ == "__main__":
    main()
