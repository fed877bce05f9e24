import sys
from pathlib import Path

sys.path.insert(0, "/app")
from calc import add

assert add(2, 3) == 5
assert Path("/app/greeting.txt").read_text() == "hello\n"
