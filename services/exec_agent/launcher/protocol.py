"""What agent and launcher say to each other. The structs are those of launcher.h and reaper.c."""

from __future__ import annotations

import struct
from typing import Final

SPEC: Final = struct.Struct("=7I")
"""size, flags, uid, gid, ngroups, argc, envc; then the groups, and NUL-terminated cwd, arguments and variables."""
EVENT: Final = struct.Struct("=IiiIQQQ")
"""kind, a, b, flags, user_us, system_us, peak_kb."""
ORDER: Final = struct.Struct("=Ii")
"""target, signal."""
INLINE_LIMIT: Final = 60_000
"""A larger spec comes in memory, its header alone in the message."""

SPEC_USER, SPEC_MEMFD, SPEC_BIG, SPEC_TTY = 1, 2, 4, 8
STARTED, FAILED, EXITED, EMPTY = 1, 2, 3, 4
TREE_EMPTY, CHILD_KILLED = 1, 2
STAGE_FORK, STAGE_SPEC, STAGE_USER, STAGE_CWD, STAGE_EXEC, STAGE_INTERPRETER, STAGE_TTY = range(1, 8)
TARGET_TREE, TARGET_LEADER = 1, 2
FDS_LEAST, FDS_MOST = 4, 5
"""Descriptors that come with a spec: stdin, stdout, stderr, control, and the spec itself if it is a large one."""
