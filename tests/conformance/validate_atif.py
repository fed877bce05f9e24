"""Harbor's own validator on every document of a folder; says what it does not accept."""

import sys
from pathlib import Path

from harbor.utils.trajectory_validator import TrajectoryValidator

documents = sorted(Path(sys.argv[1]).glob("*.json"))
failed = []
for path in documents:
    validator = TrajectoryValidator()
    if not validator.validate(path):
        failed.append(f"{path.name}: {'; '.join(validator.errors)}")
print(len(documents))
if failed:
    raise SystemExit("\n".join(failed))
