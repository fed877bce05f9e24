#!/usr/bin/env python3
"""Check the example tasks: every candidate must get the verdict it is expected to get.

Usage: python3 examples/tasks/check.py [instance_id ...]

Each repository is built with ``git fast-import`` in a temporary folder, and the
tests run on this machine with this Python, without a sandbox. Prints one line
per task and candidate, and exits with 1 when something is not as expected.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set

TASKS = Path(__file__).resolve().parent
VERDICTS = ("resolved", "unresolved", "patch_failed")
TEXT_FIELDS = ("instance_id", "repo", "version", "base_commit", "created_at",
               "environment_setup_commit", "problem_statement", "hints_text",
               "patch", "test_patch")
LIST_FIELDS = ("FAIL_TO_PASS", "PASS_TO_PASS", "test_command")

# What unittest -v writes on stderr, up to Python 3.10 and since 3.11:
#   test_touching (tests.test_merge.MergeTests) ... ok
#   test_touching (tests.test_merge.MergeTests.test_touching) ... ok
STARTED = re.compile(r"^(\w+) \(([\w.]+)\) \.\.\. ")
ENDED = re.compile(r"(ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$")
FAILED = re.compile(r"^(?:FAIL|ERROR): (\w+) \(([\w.]+)\)")


class Run(NamedTuple):
    """One run of the tests."""

    passed: Set[str]
    timed_out: bool
    seconds: float


class Result(NamedTuple):
    """The verdict on one candidate, and what is wrong with the task or the verdict."""

    verdict: str
    detail: str
    problems: List[str]


def environment(home: Path) -> Dict[str, str]:
    """The variables for git and the tests: nothing from the user's configuration."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHON_COLORS": "0",
    }


def git(repo: Path, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run git in the repository; the caller looks at the return code."""
    return subprocess.run(["git", *args], cwd=repo, env=environment(repo.parent), input=stdin,
                          capture_output=True, encoding="utf-8")


def build_repository(task: Dict[str, Any], folder: Path, into: Path) -> None:
    """Load the history and check out base_commit."""
    into.mkdir()
    stream = (folder / "history.fast-import").read_text(encoding="utf-8")
    base = task["base_commit"]
    for args, stdin in ((["init", "-q", "--object-format=sha1", "-b", "main"], ""),
                        (["fast-import", "--quiet"], stream),
                        (["checkout", "-q", "-f", "main"], "")):
        done = git(into, *args, stdin=stdin)
        if done.returncode:
            raise ValueError(f"git {args[0]}: {done.stderr.strip()}")
    tip = git(into, "rev-parse", "refs/heads/main").stdout.strip()
    if tip != base:
        raise ValueError(f"the history ends in {tip}, but base_commit is {base}")


def restore_tests(repo: Path, task: Dict[str, Any]) -> None:
    """Bring the files that test_patch touches back to base_commit, whatever a candidate did."""
    listed = git(repo, "apply", "--numstat", "-z", "-", stdin=task["test_patch"])
    for line in filter(None, listed.stdout.split("\0")):
        name = line.split("\t")[2]
        if git(repo, "checkout", "-q", task["base_commit"], "--", name).returncode:
            (repo / name).unlink(missing_ok=True)


def run_tests(repo: Path, task: Dict[str, Any]) -> Run:
    """Run the test command in its own process group, which is killed afterwards."""
    command = list(task["test_command"])
    if command[0] == "python3":
        command[0] = sys.executable
    began = time.monotonic()
    timed_out = False
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, cwd=repo, env=environment(repo.parent),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=errors, start_new_session=True)
        try:
            # Wait for the process and not for the end of its output, which a
            # process in the background may keep open.
            process.wait(task["test_timeout_seconds"])
        except subprocess.TimeoutExpired:
            timed_out = True
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        seconds = time.monotonic() - began
        errors.seek(0)
        text = errors.read().decode("utf-8", "replace")
    return Run(passed_tests(text), timed_out, seconds)


def passed_tests(text: str) -> Set[str]:
    """Read the ids of the tests that passed; a test that failed once has failed."""
    passed: Set[str] = set()
    failed: Set[str] = set()
    current: Optional[str] = None
    for line in text.split("\n"):
        header = FAILED.match(line)
        if header:
            failed.add(test_id(header))
            continue
        header = STARTED.match(line)
        if header:
            current = test_id(header)
        end = ENDED.search(line)
        if current and end:
            (passed if end[1] == "ok" else failed).add(current)
            current = None
    return passed - failed


def test_id(match: re.Match[str]) -> str:
    """The dotted id, which older versions of Python write without the method."""
    name, place = match[1], match[2]
    return place if place.endswith("." + name) else f"{place}.{name}"


def check_fields(task: Dict[str, Any], folder: Path, candidates: List[Dict[str, Any]]) -> List[str]:
    """Check the form of instance.json and candidates.json."""
    problems = [f"{name} is not a text" for name in TEXT_FIELDS
                if not isinstance(task.get(name), str)]
    problems += [f"{name} is not a list of texts" for name in LIST_FIELDS
                 if not isinstance(task.get(name), list)
                 or not task[name] or not all(isinstance(item, str) for item in task[name])]
    if problems:
        return problems
    names = [candidate["name"] for candidate in candidates]
    files = {candidate["file"] for candidate in candidates} - {None}
    there = {f"candidates/{path.name}" for path in (folder / "candidates").iterdir()}
    checks = {
        "instance_id is not the name of the folder": task["instance_id"] == folder.name,
        "base_commit is not a full hash": re.fullmatch("[0-9a-f]{40}", task["base_commit"]),
        "environment_setup_commit is not base_commit":
            task["environment_setup_commit"] == task["base_commit"],
        "a test is in FAIL_TO_PASS and in PASS_TO_PASS":
            not set(task["FAIL_TO_PASS"]) & set(task["PASS_TO_PASS"]),
        "test_timeout_seconds is not a number above 0":
            isinstance(task.get("test_timeout_seconds"), int) and task["test_timeout_seconds"] > 0,
        "a candidate is listed twice": len(set(names)) == len(names),
        "gold or none is missing": {"gold", "none"} <= set(names),
        "the files in candidates/ are not those in candidates.json": files == there,
        "an expected verdict is unknown":
            all(candidate["expected"] in VERDICTS for candidate in candidates),
    }
    return [problem for problem, good in checks.items() if not good]


def check_candidate(task: Dict[str, Any], folder: Path, built: Path,
                    candidate: Dict[str, Any], repo: Path) -> Result:
    """Judge one candidate in its own copy of the repository."""
    shutil.copytree(built, repo, symlinks=True)
    problems: List[str] = []
    if candidate["file"] is not None:
        patch = (folder / candidate["file"]).read_text(encoding="utf-8")
        if candidate["name"] == "gold" and patch != task["patch"]:
            problems.append("gold is not the patch in instance.json")
        if git(repo, "apply", "--whitespace=nowarn", "-", stdin=patch).returncode:
            return Result("patch_failed", "", problems)
    restore_tests(repo, task)
    applied = git(repo, "apply", "--whitespace=nowarn", "-", stdin=task["test_patch"])
    if applied.returncode:
        problems.append(f"test_patch does not apply: {applied.stderr.strip()}")

    run = run_tests(repo, task)
    fix, keep = set(task["FAIL_TO_PASS"]), set(task["PASS_TO_PASS"])
    good = fix | keep <= run.passed and not run.timed_out
    if candidate["name"] == "gold" and run.passed != fix | keep:
        problems.append(f"not as listed with gold: {sorted(run.passed ^ (fix | keep))}")
    if candidate["name"] == "none" and run.passed != keep:
        problems.append(f"not as listed with none: {sorted(run.passed ^ keep)}")
    detail = (f"fail-to-pass {len(fix & run.passed)}/{len(fix)}, "
              f"pass-to-pass {len(keep & run.passed)}/{len(keep)}, {run.seconds:.1f} s"
              + (", timed out" if run.timed_out else ""))
    return Result("resolved" if good else "unresolved", detail, problems)


def check_task(folder: Path, pool: ThreadPoolExecutor) -> bool:
    """Check one task, print its lines and return whether all is well."""
    task = json.loads((folder / "instance.json").read_text(encoding="utf-8"))
    candidates = json.loads((folder / "candidates.json").read_text(encoding="utf-8"))
    problems = check_fields(task, folder, candidates)
    results: List[Result] = []
    if not problems:
        with tempfile.TemporaryDirectory(prefix="orchard-tasks-") as temporary:
            work = Path(temporary)
            try:
                build_repository(task, folder, work / "built")
            except ValueError as error:
                problems.append(str(error))
            else:
                results = list(pool.map(
                    lambda one: check_candidate(task, folder, work / "built", one,
                                                work / f"repo-{one['name']}"), candidates))
    for problem in problems:
        print(f"WRONG {folder.name}: {problem}")
    fine = not problems
    for candidate, result in zip(candidates, results):
        wrong = list(result.problems)
        if result.verdict != candidate["expected"]:
            wrong.append(f"expected {candidate['expected']}")
        fine = fine and not wrong
        print(f"{'WRONG' if wrong else 'ok   '} {folder.name:<32} {candidate['name']:<32} "
              f"{result.verdict:<12} {'; '.join([result.detail, *wrong]).strip('; ')}".rstrip())
    sys.stdout.flush()
    return fine


def main(arguments: Sequence[str]) -> int:
    """Check the named tasks, or all of them."""
    known = {path.parent.name: path.parent for path in sorted(TASKS.glob("*/instance.json"))}
    unknown = [name for name in arguments if name not in known]
    if unknown or not known:
        print(f"no such task: {', '.join(unknown) or 'there are none'}", file=sys.stderr)
        return 2
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=4) as pool:
        fine = [check_task(known[name], pool) for name in arguments or known]
    print(f"{sum(fine)} of {len(fine)} tasks are as expected, "
          f"Python {sys.version.split()[0]}, {time.monotonic() - began:.0f} s")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
