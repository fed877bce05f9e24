"""`python -m services.local.node`."""

import sys

from services.common.process import run_service
from services.local.node.app import node
from services.local.node.settings import NodeSettings

if __name__ == "__main__":
    sys.exit(run_service("node", NodeSettings, node))
